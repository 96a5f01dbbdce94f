"""Saving and loading trained drafters.

A folder holds card.json (`loading.card`) and drafter.safetensors, in bfloat16,
whose tensors are named by their paths in the tree of parameters. Unembedding
columns that are the target's are not stored, but cut out of the target again.
"""

from collections.abc import Mapping
import dataclasses
import os
from typing import Any, Literal

import jax
import numpy as np

from specsample import checks
from specsample import files
from specsample import sharding
from specsample.drafters import trainable
from specsample.drafters import vocabulary
from specsample.loading import card as card_lib
from specsample.loading import load
from specsample.loading.published import layouts
from specsample.loading.published import mtp
from specsample.loading.published import pard
from specsample.models import int8
from specsample.models import packed
from specsample.models import safetensors_file
from specsample.models import tensors
from specsample.types import Params

# The file of weights in a folder.
NAME = 'drafter.safetensors'
_D2T = 'vocabulary.d2t'
_UNEMBEDDING = 'vocabulary.unembedding'
_NUM_LISTED = 4  # of the tensors that differ, in a message


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
  """A drafter, its parameters (params['drafter']) and its card.

  The card is empty if the library did not save the drafter.
  """

  drafter: Any  # a `Drafter`; all but PARD are `trainable.Trainable`
  params: Params = dataclasses.field(repr=False)
  card: dict[str, Any] = dataclasses.field(repr=False)


def save_drafter(
  path: str | os.PathLike[str],
  drafter: trainable.Trainable,
  params: Params,
  *,
  target: load.Loaded | str,
  card: Mapping[str, Any],
) -> None:
  """Writes a folder that `load_drafter` reads, whole or not at all.

  Several processes all call this, and the first one writes.

  Args:
    path: the folder, which must not exist; gs:// works too.
    drafter: the trained drafter.
    params: its own, of any floating dtype; all but routers become bfloat16.
    target: the model that it was trained for, or its `models.fingerprint`.
    card: anything else worth knowing, in JSON's types: the target's name as
      'target', the data, the tokens seen, the recipe, the acceptance. The
      library's own entries, such as those of a loaded card, are replaced.

  Raises:
    ValueError: `path` exists, the parameters are not the drafter's or are int8,
      or the card holds what JSON cannot.
  """
  int8.refuse(params)
  params = packed.plain(params)
  if isinstance(target, load.Loaded):
    target = target.fingerprint
  content = card_lib.make(drafter, target, card)
  checks.parameters('params', drafter, params)
  arrays = {
    name: _to_host(leaf).astype(safetensors_file.DTYPES[_kind(name)])
    for name, leaf in tensors.by_name(params).items()
    if name != _UNEMBEDDING or drafter.own_unembedding
  }
  save = lambda file: safetensors_file.write(file, arrays)
  card_lib.write(path, content, NAME, save)


def load_drafter(
  name_or_path: str | os.PathLike[str],
  target: load.Loaded,
  num_draft_tokens: int | None = None,
  weights: Literal['int8'] | None = None,
) -> LoadedDrafter:
  """Loads a trained drafter for a target, onto the mesh that is set.

  On a CPU without a mesh its matrices are packed; see `packed.of_drafter`.

  Args:
    name_or_path: the name of a drafter that the library ships, such as
      'smollm2-135m-instruct/hydra'; a folder that `save_drafter` wrote, also in
      gs://; a folder in a layout in which others publish drafters
      (`published.layouts`, `published.pard`); the target's own folder, in
      Hugging Face's layout, if it holds modules for multi-token prediction as
      those of DeepSeek-V3 and Qwen3.5 do; or, if there is no such folder, a
      repository 'organisation/name' of the Hugging Face hub with one of these.
    target: the model that it was trained for. Its dtype is used for the
      parameters.
    num_draft_tokens: K, None for the K of its training. If a folder does not
      say it, that is 5 for EAGLE, 4 for an assistant of Gemma 4 and 8 for PARD.
      If there are more heads, the first K are loaded.
    weights: 'int8' as in `loading.load`, whatever the target's are; the whole
      parameters are in memory for a moment too. None for the target's dtype.

  Raises:
    ValueError: there is no such drafter, it is damaged or for another target,
      or it has fewer heads than K.
  """
  int8.check(weights)
  checks.instance(
    'target', target, load.Loaded, 'give what specsample.load returned'
  )
  name = files.name_of(name_or_path)
  loaded = _load(name, target, num_draft_tokens, tensors.as_read)
  store = packed.of_drafter if weights is None else int8.weights
  return dataclasses.replace(loaded, params=store(loaded.params))


def describe_drafter(
  name_or_path: str | os.PathLike[str], target: load.Loaded
) -> LoadedDrafter:
  """Does all that `load_drafter` does but read weights: `params` is None.

  Args:
    name_or_path: as for `load_drafter`.
    target: what `load.describe` returned. Its weights are not there to be
      compared, so a drafter that this library saved is taken to be for it.

  """
  loaded = _load(files.name_of(name_or_path), target, None, None)
  return dataclasses.replace(loaded, params=None)


def _load(name_or_path, target, num_draft_tokens, convert) -> LoadedDrafter:
  folder = card_lib.find(name_or_path)
  if not (folder / card_lib.NAME).exists():
    published = layouts.load(folder, target, num_draft_tokens, convert)
    if published is None and (folder / 'config.json').exists():
      reads = convert is not None
      published = pard.load(folder, target, num_draft_tokens, reads)
      if published is None:
        published = mtp.load(folder, target.model, num_draft_tokens, convert)
    if published is not None:
      return LoadedDrafter(*published, card={})
  card = card_lib.read(folder)
  if convert is None:
    target = dataclasses.replace(target, exact_fingerprint=card['fingerprint'])
  trained = card_lib.drafter_of(card, folder, target)
  stored = _open(folder / NAME, trained, card['sha256'])
  if convert is None:
    return LoadedDrafter(trained, None, card)
  drafter = trained
  if num_draft_tokens is not None:
    drafter = dataclasses.replace(trained, num_draft_tokens=num_draft_tokens)
  wanted = tensors.by_name(drafter.abstract_params())
  if wanted.keys() - {_UNEMBEDDING} - stored.keys():
    raise ValueError(
      f'num_draft_tokens is {num_draft_tokens}, but {folder} has heads for '
      f'only {trained.num_draft_tokens}: give a smaller number, or train more '
      'heads'
    )
  axes = tensors.by_name(drafter.param_axes())
  dtype = target.model.dtype
  params = {}
  for name in filter(stored.__contains__, wanted):
    values = stored[name][(slice(None),) * len(stored[name].shape)]
    if name == _D2T and not drafter.own_unembedding:
      try:
        cut = vocabulary.of_target(target.model, target.params, values)
      except ValueError as error:
        raise ValueError(f'{folder / NAME}: {error}') from error
      params[_UNEMBEDDING] = sharding.move(
        cut['unembedding'].astype(dtype), axes[_UNEMBEDDING]
      )
    elif _kind(name) == 'BF16':
      values = values.astype(dtype)
    params[name] = sharding.place(values, axes[name])
  in_tree = tensors.map_named(
    lambda name, _: params[name], drafter.abstract_params()
  )
  return LoadedDrafter(drafter, in_tree, card)


def _open(path, drafter, sha256):
  """Returns the tensors of a file, checked to be those of the drafter."""
  card_lib.check_present(path)
  stored = safetensors_file.read_header(path)
  shapes = tensors.by_name(drafter.abstract_params())
  if not drafter.own_unembedding:
    shapes.pop(_UNEMBEDDING, None)
  expected = {name: f'{_kind(name)} {x.shape}' for name, x in shapes.items()}
  found = {name: f'{x.kind} {x.shape}' for name, x in stored.items()}
  different = [
    f'{name} is {found.get(name, "missing")}, expected '
    f'{expected.get(name, "no such tensor")}'
    for name in sorted(expected.keys() | found.keys())
    if found.get(name) != expected.get(name)
  ]
  if different:
    raise ValueError(
      f'{path}: {len(different)} tensors differ '
      f'({"; ".join(different[:_NUM_LISTED])}), given num_draft_tokens = '
      f'{drafter.num_draft_tokens} and the other settings in '
      f'{card_lib.NAME}: one of the two files is damaged or belongs to another '
      'drafter, so save both again'
    )
  if card_lib.sha256(path) != sha256:
    raise ValueError(
      f'{path} does not hold the weights that {card_lib.NAME} was written for: '
      'one of the two files is damaged or belongs to another drafter; save or '
      'download both again'
    )
  return stored


def _kind(name):
  if tensors.is_of_router(name):
    return 'F32'
  return 'I32' if name == _D2T else 'BF16'


def _to_host(leaf):
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    leaf = jax.jit(sharding.replicate)(leaf)
  return np.asarray(leaf)
