"""Checkpoints: filling a model with named tensors, and orbax save and restore.

`gguf` and `huggingface` read foreign formats into a `TensorFile`; `fill` checks
it against what the model expects before any weight is read.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import math
import os
import pathlib
import re
from typing import Any

import jax
import numpy as np

from specsample import files
from specsample import text
from specsample import tokenizer_files
from specsample.models import layers
from specsample.models import llama
from specsample.types import Params

# The file that marks a folder as written by `save`.
CONFIG_NAME = 'specsample.json'
_PARAMS_NAME = 'params'

_FAMILIES = {'llama': llama.Llama}
_ROPE_SCALINGS = {
  'linear': layers.LinearRope,
  'llama3': layers.Llama3Rope,
  'factors': layers.FactorRope,
}


@dataclasses.dataclass(frozen=True)
class TensorFile:
  """Tensors by name, read one at a time; matrices are [out, in]."""

  origin: str  # the file or folder, for messages
  shapes: dict[str, tuple[int, ...]]
  read: Callable[[str], np.ndarray]


def check_dtype(dtype: str) -> None:
  """Raises ValueError unless parameters can be held in `dtype`."""
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(f"dtype is {dtype!r}: load as 'float32' or as 'bfloat16'")


def size(
  config: Mapping[str, Any],
  key: str,
  *,
  origin: str,
  default: int | None = None,
) -> int:
  """A positive integer of a configuration; ValueError if it is none."""
  value = _value(config, key, default)
  if type(value) is not int or value < 1:
    raise ValueError(
      f'{origin}: {key} is {value!r}, expected an integer of at least 1: the '
      'file is damaged, or of another architecture'
    )
  return value


def number(
  config: Mapping[str, Any],
  key: str,
  *,
  origin: str,
  default: float | None = None,
) -> float:
  """A positive number of a configuration; ValueError if it is none."""
  value = _value(config, key, default)
  if type(value) not in (int, float) or not value > 0:
    raise ValueError(
      f'{origin}: {key} is {value!r}, expected a number above 0: the file is '
      'damaged, or of another architecture'
    )
  return float(value)


def flag(config: Mapping[str, Any], key: str, *, origin: str) -> bool:
  """A truth value of a configuration, False where it has none."""
  value = _value(config, key, False)
  if type(value) is not bool:
    raise ValueError(
      f'{origin}: {key} is {value!r}, expected true or false: the file is '
      'damaged, or of another architecture'
    )
  return value


def _value(config, key, default):
  value = config.get(key)
  return default if value is None else value


def fill(
  model: llama.Llama,
  tensors: TensorFile,
  names: Mapping[str, str],
  ignored: Collection[str] = (),
) -> Params:
  """The model's parameters, read from `tensors`, the largest first.

  One tensor at a time is in host memory besides the parameters, and the
  largest while there are few of those.

  Args:
    model: says which parameters there are, their shapes and their dtype.
    tensors: where their values are.
    names: the name in the file of each parameter, '{}' for a layer's number.
    ignored: names that may be in the file and are not read.

  Raises:
    ValueError: tensors that are missing, unknown or of another shape.
  """
  expected, treedef = jax.tree_util.tree_flatten_with_path(
    model.abstract_params()
  )
  sources = [_source_name(path, names) for path, _ in expected]
  _check_names(set(sources), set(ignored), tensors)
  for source, (_, leaf) in zip(sources, expected, strict=True):
    shape = leaf.shape[::-1]
    found = tensors.shapes[source]
    if found != shape:
      raise ValueError(
        f'{tensors.origin}: tensor {source} has shape {found}, expected '
        f'{shape} from the configuration: one of them is of another model'
      )

  leaves: list[Any] = [None] * len(sources)
  by_size = lambda i: -math.prod(tensors.shapes[sources[i]])
  for i in sorted(range(len(sources)), key=by_size):
    values = tensors.read(sources[i]).astype(expected[i][1].dtype, copy=False)
    # The transfer transposes; waiting for it lets go of the file's layout.
    leaves[i] = jax.device_put(values.T).block_until_ready()
    del values
  return jax.tree_util.tree_unflatten(treedef, leaves)


def _key(path):
  return '.'.join(str(entry.key) for entry in path)


def _source_name(path, names):
  key = _key(path)
  layer = re.match(r'layers\.(\d+)\.', key)
  if layer is None:
    return names[key]
  return names[f'layers.{{}}.{key[layer.end() :]}'].format(layer[1])


def _check_names(expected, ignored, tensors):
  found, origin = set(tensors.shapes), tensors.origin
  missing, unknown = expected - found, found - expected - ignored
  if missing:
    raise ValueError(
      f'{origin}: {_enumerate(missing)} missing: the checkpoint is '
      'incomplete, or of another architecture'
    )
  if unknown:
    raise ValueError(
      f'{origin}: {_enumerate(unknown)} unknown to the model: the '
      'checkpoint is of an architecture that only resembles it'
    )


def _enumerate(names):
  shown = sorted(names)[:8]
  if len(names) > len(shown):
    shown.append(f'and {len(names) - len(shown)} more')
  return f'{len(names)} tensors ({", ".join(shown)})'


def save(
  path: str | os.PathLike[str],
  model: llama.Llama,
  params: Params,
  tokenizer: text.Tokenizer | None = None,
) -> None:
  """Writes a folder that `specsample.load` reads, whole or not at all.

  Raises:
    ValueError: `path` exists, or the parameters are not the model's.
  """
  mismatch = _mismatch(model, params)
  if mismatch:
    raise ValueError(f'{mismatch} of {model}: save it with its own model')
  # Imported where it is used: 25 MB that decoding has no need of.
  import orbax.checkpoint as ocp  # noqa: PLC0415

  with files.new_folder(path) as folder:
    files.write_json(folder / CONFIG_NAME, _to_json(model))
    if tokenizer is not None:
      tokenizer_files.save(tokenizer, folder)
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(folder / _PARAMS_NAME, params)


def restore(
  path: str | os.PathLike[str], dtype: str
) -> tuple[llama.Llama, Params]:
  """The model and parameters that `save` wrote, as `dtype`.

  Raises:
    ValueError: the folder is incomplete, damaged or of another version.
  """
  import orbax.checkpoint as ocp  # noqa: PLC0415

  check_dtype(dtype)
  path = pathlib.Path(path).absolute()
  config = path / CONFIG_NAME
  content = files.read_json(config)
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  place = lambda leaf: jax.ShapeDtypeStruct(
    leaf.shape, leaf.dtype, sharding=device
  )
  try:
    model = _from_json(content, dtype)
    target = jax.tree.map(place, model.abstract_params())
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f'{config} describes no model of {list(_FAMILIES)} ({error!r}): save '
      'the model again'
    ) from error
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      # Compared first: orbax names no parameter that does not fit.
      stored = checkpointer.metadata(path / _PARAMS_NAME).item_metadata
      mismatch = _mismatch(model, stored.tree if stored else {})
      if mismatch:
        raise ValueError(mismatch)
      params = checkpointer.restore(path / _PARAMS_NAME, target)
  except (OSError, KeyError, ValueError) as error:
    raise ValueError(
      f'{path / _PARAMS_NAME} is damaged, or does not fit {config.name}: save '
      f'the model again ({error})'
    ) from error
  return model, params


def _mismatch(model, params):
  """The first parameter that is not as the model has it, as a sentence."""
  shapes = lambda tree: {
    _key(path): tuple(leaf.shape)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }
  found, expected = shapes(params), shapes(model.abstract_params())
  for key in sorted(found.keys() | expected.keys()):
    if found.get(key) != expected.get(key):
      return (
        f'parameter {key} has shape {found.get(key)}, expected is '
        f'{expected.get(key)}'
      )
  return None


def _to_json(model):
  config = dataclasses.asdict(model)
  del config['dtype']
  if model.rope_scaling is not None:
    name = _name_of(type(model.rope_scaling), _ROPE_SCALINGS)
    config['rope_scaling'] = {'type': name} | config['rope_scaling']
  return {'family': _name_of(type(model), _FAMILIES)} | config


def _from_json(config, dtype):
  family = _FAMILIES[config.pop('family')]
  scaling = config['rope_scaling']
  if scaling is not None:
    scaling_class = _ROPE_SCALINGS[scaling.pop('type')]
    # JSON has no tuples, and the model must be hashable.
    values = {
      key: tuple(value) if isinstance(value, list) else value
      for key, value in scaling.items()
    }
    config['rope_scaling'] = scaling_class(**values)
  return family(**config, dtype=dtype)


def _name_of(cls, table):
  return next(name for name, entry in table.items() if entry is cls)
