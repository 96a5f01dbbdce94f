"""A folder in a published layout, and the engine that reads a drafter from it.

A layout is a table from the paths of a drafter's parameters to the tensors that
hold them. `fill` reads a drafter by such a table; it refuses tensors that are
missing, unknown or of another shape by their names.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import functools
import re
from typing import Any

from etils import epath
import jax
import numpy as np

from specsample import files
from specsample import sharding
from specsample.drafters import trainable
from specsample.drafters import vocabulary
from specsample.loading import load
from specsample.models import config as config_lib
from specsample.models import huggingface
from specsample.models import packed
from specsample.models import safetensors_file
from specsample.models import tensors as tensors_lib
from specsample.models import torch_file
from specsample.types import Params

# Suffixes of head files, and names of other weight files, the best first.
_HEADS = ('_lm_head.safetensors', '_lm_head.pt')
_FILES = (
  'model.safetensors',
  'model.safetensors.index.json',
  'pytorch_model.bin',
  'pytorch_model.bin.index.json',
)
# How many rows of an embedding are compared, and how far they may be from the
# target's, relative to their norm: a 4-bit target is 0.05 from the exact one.
_NUM_ROWS = 64
_TOLERANCE = 0.1
# The same, for an embedding that was trained: only what a division rounds.
_ROUNDING = 1e-6
_NUMBER = re.compile(r'(?<=\.)\d+(?=\.)')


@dataclasses.dataclass(frozen=True)
class Source:
  """What a drafter is read from, and for which target.

  Attributes:
    folder: the folder, for messages and for further files.
    config: its configuration, empty if there is none.
    tensors: its tensors by name, without the prefix 'model.'.
    target: the model to draft for. If its params are None, only shapes count.
    num_draft_tokens: the wanted K, None for what the folder says.
  """

  folder: epath.Path
  config: config_lib.Config
  tensors: Mapping[str, safetensors_file.Tensor]
  target: load.Loaded
  num_draft_tokens: int | None

  @property
  def layer_config(self) -> config_lib.Config:
    """The part of the configuration that describes the drafter's layers."""
    nested = self.config.part('transformer_layer_config')
    return nested if nested.values else self.config

  def num_drafts(self, default: int) -> int:
    """Returns K: the wanted one, or else the default."""
    return default if self.num_draft_tokens is None else self.num_draft_tokens

  def shape(self, name: str) -> tuple[int, ...]:
    """Returns a tensor's shape; raises ValueError if it does not exist."""
    if name not in self.tensors:
      raise ValueError(
        f'{self.folder} has no tensor {name}: the checkpoint is incomplete or '
        'has another layout'
      )
    return self.tensors[name].shape

  def read(self, name: str) -> np.ndarray:
    """Reads a whole tensor."""
    everything = (slice(None),) * len(self.shape(name))
    return self.tensors[name][everything]

  def ids(self, name: str, values: np.ndarray) -> np.ndarray:
    """Returns ids of the target's tokens that a tensor holds, checked."""
    try:
      vocabulary.check_d2t(values, self.target.model.vocab_size)
    except ValueError as error:
      raise ValueError(f'{self.folder}, tensor {name}: {error}') from error
    return values.astype(np.int32)

  @functools.cached_property
  def draft_ids(self) -> np.ndarray | None:
    """The target's ids of the draft vocabulary; None if there is no d2t.

    Tensor d2t holds the ids, each minus its index in the draft vocabulary, and
    t2d flags them in the target's vocabulary.
    """
    wanted = self.config.get('draft_vocab_size', int)
    if 'd2t' not in self.tensors:
      size = self.target.model.vocab_size
      if wanted is not None and wanted != size:
        raise ValueError(
          f'{self.config.origin}: draft_vocab_size is {wanted}, but '
          f'{self.folder} has no tensor d2t to map these tokens to the '
          f"target's {size}: the checkpoint is incomplete, or was made for "
          'another target'
        )
      return None
    offsets = self.read('d2t')
    if wanted is not None and offsets.shape != (wanted,):
      raise ValueError(
        f'{self.config.origin}: draft_vocab_size is {wanted}, but tensor d2t '
        f'has shape {offsets.shape}: one of the two belongs to another '
        'drafter; download both again'
      )
    places = np.arange(offsets.size).reshape(offsets.shape)
    ids = self.ids('d2t', offsets + places)
    if 't2d' in self.tensors:
      flagged = np.flatnonzero(self.read('t2d').astype(bool))
      if not np.array_equal(flagged, np.sort(ids)):
        raise ValueError(
          f'{self.folder}: tensors d2t and t2d name different tokens: one of '
          'the two is damaged or belongs to another drafter; download both '
          'again'
        )
    return ids

  def has_own_unembedding(self) -> bool:
    """Returns whether there is an unembedding that is not the target's.

    Many drafters are published with a copy of the target's, so that they can be
    run alone. If the target's cannot be read (there are no parameters, or they
    are int8 or on other hosts), any counts as the drafter's own.
    """
    name, params = VOCABULARY['vocabulary.unembedding'], self.target.params
    if name not in self.tensors or params is None:
      return name in self.tensors
    of_target = params[
      'unembedding' if 'unembedding' in params else 'embedding'
    ]
    is_plain = packed.is_packed(of_target) or (
      isinstance(of_target, jax.Array) and of_target.is_fully_addressable
    )
    return not is_plain or not tensors_lib.are_equal(
      self.tensors[name], np.asarray(of_target).T
    )

  def vocabulary_settings(self) -> dict[str, Any]:
    """Returns the settings of the tokens that are drafted."""
    ids = self.draft_ids
    return {
      'draft_vocab_size': None if ids is None else len(ids),
      'own_unembedding': ids is not None or self.has_own_unembedding(),
    }

  def check_outputs(self, layers: tuple[int, ...]) -> None:
    """Raises ValueError for the last layer, whose output follows the norm."""
    last = self.target.model.num_layers - 1
    if last in layers:
      raise ValueError(
        f'{self.config.origin}: the drafter reads the output of layer {last}, '
        'the last layer, after the norm: only earlier layers are supported'
      )

  def refuse_other_target(self, what: str, found: Any, wanted: Any) -> None:
    """Raises ValueError unless a setting is as the target has it."""
    if found != wanted:
      raise ValueError(
        f"{self.config.origin}: {what} is {found}, but the target's is "
        f'{wanted}: the drafter was made for another target'
      )


# Returns a parameter's value [out, in]; takes the source and the numbers in the
# parameter's path.
Make = Callable[..., np.ndarray]
# The name of the tensor of each parameter, or what makes its value. '{}' stands
# for the numbers in a path, and in the tensor's name for the same numbers.
Table = Mapping[str, str | Make]

# What many layouts share. Where a drafter has no such parameter, the tensor is
# the target's, and `fill` leaves it out.
VOCABULARY: dict[str, Any] = {
  'embedding': 'embed_tokens.weight',
  'vocabulary.unembedding': 'lm_head.weight',
  'vocabulary.d2t': lambda source: source.draft_ids,
}


@dataclasses.dataclass(frozen=True)
class Plan:
  """A drafter, where its parameters are, and tensors that are not read."""

  drafter: Any
  table: Table
  ignored: Collection[str] = ()


def row(table: Table, path: str) -> tuple[str | Make, list[str]]:
  """Returns a parameter's row in a table, and the numbers in its path."""
  if path in table:
    return table[path], []
  return table[_NUMBER.sub('{}', path)], _NUMBER.findall(path)


def fill(
  source: Source, plan: Plan, convert: tensors_lib.Convert | None
) -> Params:
  """Reads a drafter's parameters in its target's dtype, indices as they are.

  See `tensors.fill` for `convert`.
  """
  described = trainable.InDtype(plan.drafter)
  names, made = {}, {}
  for key in tensors_lib.by_name(described.abstract_params()):
    found, numbers = row(plan.table, key)
    if isinstance(found, str):
      names[key] = found.format(*numbers)
    else:
      names[key] = f'(made) {key}'  # no tensor has such a name
      made[names[key]] = found(source, *map(int, numbers))
  shared = _not_read(source, plan, set(names.values()))
  present: dict[str, Any] = {**source.tensors, **made}
  file = tensors_lib.TensorFile(
    origin=str(source.folder),
    shapes={name: tensor.shape for name, tensor in present.items()},
    open=present.__getitem__,
  )
  ignored = shared | {*plan.ignored}
  return tensors_lib.fill(described, file, names, ignored, convert)


def _not_read(source, plan, read) -> set[str]:
  """Returns tensors whose values are known without them, checked."""
  # Frequencies are computed from the configuration; old checkpoints hold them.
  suffixes = ('.layer_scalar', '.rotary_emb.inv_freq')
  found = {x for x in source.tensors if x.endswith(suffixes)} - read
  for name in sorted(found):
    # DeepSpec stores what Gemma 4's layers have, and does not train it.
    if name.endswith('.layer_scalar') and not np.all(source.read(name) == 1):
      raise ValueError(
        f'{source.folder}: tensor {name} is {source.read(name).tolist()}, but '
        'in drafters only [1.0] is supported: give a drafter whose layers are '
        'not scaled'
      )
  if 'vocabulary.d2t' in plan.table:
    found |= (
      {'t2d'} if plan.drafter.draft_vocab_size is None else {'d2t', 't2d'}
    )
  if 'embedding' in plan.table:
    name = plan.table['embedding']
    if name in source.tensors and name not in read:
      _check_embedding(source, name)
    found |= {name, plan.table['vocabulary.unembedding']} - read
  return found


def _check_embedding(source: Source, name: str) -> None:
  """Checks a copy of the target's embedding, which is not kept beside it.

  Some rows are compared, unless the target has no parameters.
  """
  target, stored = source.target, source.tensors[name]
  expected = (target.model.vocab_size, target.model.dim)
  if stored.shape != expected:
    raise ValueError(
      f'{source.folder}: tensor {name} has shape {stored.shape}, but the '
      f"target's embedding has {expected}: the drafter was made for another "
      'target'
    )
  if target.params is None:
    return
  ids = np.arange(0, expected[0], -(-expected[0] // _NUM_ROWS))
  own = np.concatenate(
    [stored[slice(i, i + 1), slice(None)] for i in ids]
  ).astype(np.float32)
  rows = embed(target, ids)
  # Files hold the rows without the factor by which Gemma multiplies them.
  factor = target.model.embedding_scale or 1.0
  distance = min(np.linalg.norm(x - own) for x in (rows, rows / factor))
  is_trained = source.config.flag('embed_requires_grad')
  tolerance = _ROUNDING if is_trained else _TOLERANCE
  if not distance <= tolerance * np.linalg.norm(own):
    raise ValueError(
      f"{source.folder}: tensor {name} is not the target's embedding: the "
      'drafter was made for another target, or was trained with an embedding '
      'of its own, which is not supported'
    )


def open_folder(
  folder: epath.Path,
) -> tuple[config_lib.Config, dict[str, safetensors_file.Tensor]] | None:
  """Returns a folder's configuration and its tensors, which are not read yet.

  Returns None if it has no weights.
  """
  paths = huggingface.shard_paths(folder, weight_names(folder))
  if not paths:
    return None
  path = folder / 'config.json'
  config = files.read_json(path) if path.exists() else {}
  found: dict[str, safetensors_file.Tensor] = {}
  for of_weights in paths:
    is_safe = of_weights.suffix == '.safetensors'
    module = safetensors_file if is_safe else torch_file
    header = module.read_header(of_weights)
    safetensors_file.check_kinds(folder, header, safetensors_file.DTYPES)
    for key, tensor in header.items():
      found[key.removeprefix('model.')] = tensor
  return config_lib.Config(config, str(path)), found


def weight_names(folder: epath.Path) -> tuple[str, ...]:
  """Returns the names that a folder's weights may have, the best first."""
  present = {path.name for path in folder.iterdir()}
  heads = [name for name in present if name.endswith(_HEADS)]
  # If there are two files of heads, safetensors comes first.
  return *sorted(heads, reverse=True), *_FILES


def embed(target: load.Loaded, ids: Sequence[int] | np.ndarray) -> np.ndarray:
  """Returns the target's embeddings [n, D] of tokens, float32, on every host.

  They are zeros if the target has no parameters.
  """
  if target.params is None:
    return np.zeros((len(ids), target.model.dim), np.float32)
  # The ids are repeated, so that any mesh can divide the batch evenly.
  rows = np.tile(np.asarray(ids, np.int32), (jax.device_count(), 1))
  find: Callable[..., jax.Array] = jax.jit(
    lambda params, ids: sharding.replicate(target.model.embed(params, ids))
  )
  return np.asarray(find(target.params, rows)[0], np.float32)


def mask_token_id(
  config: config_lib.Config, target: load.Loaded, names: Sequence[str]
) -> int:
  """Returns the token of the masks, given the names that it may have."""
  found, size = config.of_one(int, *names), target.model.vocab_size
  if found is None:
    tokenizer = target.optional_tokenizer
    found = None if tokenizer is None else tokenizer.mask_id
  if found is None:
    raise ValueError(
      f"{config.origin} has no {names[0]}, and the target's tokenizer has no "
      f'mask token: add the key {names[0]} with the number of the token that '
      'the drafter was trained with'
    )
  if not 0 <= found < size:
    key = next(
      (x for x in names if config.values.get(x) is not None), 'mask_token'
    )
    raise ValueError(
      f'{config.origin}: {key} is {found!r}, but the target has tokens 0 to '
      f'{size - 1}: the drafter was made for another target'
    )
  return found
