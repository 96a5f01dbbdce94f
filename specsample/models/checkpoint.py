"""Saving and restoring models in the library's own format, with orbax."""

import dataclasses
import math
import os
from typing import Any

from etils import epath
import jax

from specsample import checks
from specsample import files
from specsample import sharding
from specsample import text
from specsample.models import attention
from specsample.models import experts
from specsample.models import gated_delta
from specsample.models import int8
from specsample.models import packed
from specsample.models import rotary
from specsample.models import transformer
from specsample.text import tokenizer_files
from specsample.types import Params

# The file that marks a folder as completely written by `save`.
CONFIG_NAME = 'specsample.json'
_PARAMS_NAME = 'params'

_FAMILY = 'transformer'
# Those of a configuration that is damaged.
_ERRORS = KeyError, TypeError, ValueError, AttributeError, ArithmeticError
# Fields that are dataclasses themselves.
_PARTS = {
  'latent': attention.Latent,
  'experts': experts.Experts,
  'delta': gated_delta.Delta,
}


def save(
  path: str | os.PathLike[str],
  model: transformer.Transformer,
  params: Params,
  tokenizer: text.Tokenizer | None = None,
) -> None:
  """Writes a folder that `specsample.load` reads, completely or not at all.

  With several processes all of them call it, and each writes what its devices
  hold. In a bucket (gs://) the folder is visible from the start, but is not a
  model until it is complete.
  """
  int8.refuse(params)
  params = packed.plain(params)
  mismatch = checks.mismatch(model, params)
  if mismatch:
    raise ValueError(
      f'{mismatch} for {model}: save the parameters with their own model'
    )
  is_shared = all(
    isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    for leaf in jax.tree.leaves(params)
  )
  if jax.process_count() > 1 and not is_shared:
    raise ValueError(
      f'each of {jax.process_count()} processes has parameters of its own: '
      'divide them over a mesh with `sharding.place`'
    )
  # Imported where it is used: 25 MB that decoding does not need.
  import orbax.checkpoint as ocp  # noqa: PLC0415

  with files.new_folder(path) as folder:
    if tokenizer is not None:
      files.on_first_process(lambda: tokenizer_files.save(tokenizer, folder))
    limit = _gigabytes_in_flight(params)
    with ocp.StandardCheckpointer(save_concurrent_gb=limit) as checkpointer:
      checkpointer.save(folder / _PARAMS_NAME, params)
    # Written last, because it says that the rest is there.
    config = to_json(model)
    files.on_first_process(
      lambda: files.write_json(folder / CONFIG_NAME, config)
    )


def restore(
  path: str | os.PathLike[str], dtype: str, reads: bool = True
) -> tuple[transformer.Transformer, Params]:
  """Returns the model and parameters that `save` wrote, as `dtype`.

  Without `reads`, everything is checked, and the parameters are their shapes.
  The parameters are sharded over the current mesh, however they were sharded
  when they were saved. Each process reads what its devices hold.
  """
  import orbax.checkpoint as ocp  # noqa: PLC0415

  folder = files.absolute(path)
  model = _read_model(folder, dtype)
  place = lambda leaf, where: jax.ShapeDtypeStruct(
    leaf.shape, leaf.dtype, sharding=where
  )
  places = sharding.of_tree(model.param_axes())
  target = jax.tree.map(place, model.abstract_params(), places)
  try:
    # Compared first: orbax does not name the parameter that does not fit.
    stored = _read_shapes(folder)
    mismatch = checks.mismatch(model, stored)
    if mismatch:
      raise ValueError(mismatch)
    if not reads:
      return model, model.abstract_params()
    limit = _gigabytes_in_flight(stored)
    with ocp.StandardCheckpointer(restore_concurrent_gb=limit) as checkpointer:
      params = checkpointer.restore(folder / _PARAMS_NAME, target)
  except (OSError, KeyError, ValueError) as error:
    raise ValueError(
      f'{folder / _PARAMS_NAME} is damaged or does not fit {CONFIG_NAME} '
      f'({error}): save the model again'
    ) from error
  return model, params


def _read_model(folder: epath.Path, dtype: str) -> transformer.Transformer:
  config = folder / CONFIG_NAME
  content = files.read_json(config)
  try:
    model = from_json(content, dtype)
    model.abstract_params()
  except _ERRORS as error:
    raise ValueError(
      f'{config} does not describe a model of the family {_FAMILY!r} '
      f'({error!r}): save the model again'
    ) from error
  return model


def _read_shapes(folder: epath.Path) -> Params:
  """Returns the shape and dtype of each stored parameter; reads no values."""
  import orbax.checkpoint as ocp  # noqa: PLC0415

  try:
    with ocp.StandardCheckpointer() as checkpointer:
      stored = checkpointer.metadata(folder / _PARAMS_NAME).item_metadata
  except (TypeError, AttributeError) as error:
    raise ValueError(f'its metadata is damaged ({error})') from error
  return stored.tree if stored else {}


def _gigabytes_in_flight(params):
  # How many GB to read or write at a time; orbax's default is 96.
  largest = max(map(files.array_bytes, jax.tree.leaves(params)))
  return math.ceil(2 * largest / 1e9)


def to_json(model: transformer.Transformer) -> dict[str, Any]:
  """Returns a model's configuration, without its dtype, in JSON's types."""
  config = dataclasses.asdict(model)
  del config['dtype']
  if model.rope_scaling is not None:
    config['rope_scaling']['type'] = rotary.name_of(model.rope_scaling)
  return {'family': _FAMILY} | config


def from_json(config: dict[str, Any], dtype: str) -> transformer.Transformer:
  """Returns the model of a configuration that `to_json` made."""
  fields = dict(config)
  family = fields.pop('family')
  if family != _FAMILY:
    raise ValueError(f'family is {family!r}')
  if fields['rope_scaling'] is not None:
    scaling = dict(fields['rope_scaling'])
    fields['rope_scaling'] = rotary.SCALINGS[scaling.pop('type')](**scaling)
  for name, part in _PARTS.items():
    if fields.get(name) is not None:
      fields[name] = part(**fields[name])
  return transformer.Transformer(**fields, dtype=dtype)
