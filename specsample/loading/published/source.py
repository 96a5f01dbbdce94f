"""The contents of a published folder: a configuration and tensors."""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
from typing import Any

from etils import epath
import jax
import numpy as np

from specsample import files
from specsample import sharding
from specsample.drafters import trainable
from specsample.loading import load
from specsample.models import config as config_lib
from specsample.models import huggingface
from specsample.models import packed
from specsample.models import safetensors_file
from specsample.models import tensors
from specsample.models import torch_file
from specsample.types import Params

_CONFIG_NAME = 'config.json'
# Suffixes of head files, and names of other weight files, the best first.
_HEADS = ('_lm_head.safetensors', '_lm_head.pt')
_INDICES = ('model.safetensors.index.json', 'pytorch_model.bin.index.json')
_FILES = (
  *('model.safetensors', _INDICES[0]),
  *('pytorch_model.bin', _INDICES[1]),
)
UNEMBEDDING = 'lm_head.weight'
# How many rows of an embedding are compared, and how far they may be from the
# target's, relative to their norm: a 4-bit target is 0.05 from the exact one.
_NUM_ROWS = 64
_TOLERANCE = 0.1
# The same, for an embedding that was trained: only what a division rounds.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Source:
  """A folder's configuration, empty if there is none, and its tensors.

  Tensor names are without the prefix 'model.'.
  """

  folder: epath.Path
  config: config_lib.Config
  tensors: dict[str, safetensors_file.Tensor]

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


def open_folder(folder: epath.Path) -> Source | None:
  """Opens a folder without reading its weights; returns None if it has none."""
  present = {path.name for path in folder.iterdir()}
  names = weight_files(folder)
  absent = [name for name in names if name not in present]
  if absent:
    raise ValueError(
      f'{folder} lacks {", ".join(absent)}, which its index names: download '
      'what is missing'
    )
  if not names:
    return None
  path = folder / _CONFIG_NAME
  config = files.read_json(path) if path.name in present else {}
  found: dict[str, safetensors_file.Tensor] = {}
  for name in names:
    header = read_header(folder / name)
    safetensors_file.check_kinds(folder, header, safetensors_file.DTYPES)
    for key, tensor in header.items():
      found[key.removeprefix('model.')] = tensor
  return Source(folder, config_lib.Config(config, str(path)), found)


def read_header(path: epath.Path) -> dict[str, safetensors_file.Tensor]:
  """Returns the tensors of a safetensors file, or of one that torch saved."""
  if path.suffix == '.safetensors':
    return safetensors_file.read_header(path)
  return torch_file.read_header(path)


def weight_files(folder: epath.Path) -> list[str]:
  """Returns a folder's weight files; one that an index names may be missing."""
  present = {path.name for path in folder.iterdir()}
  heads = [name for name in present if name.endswith(_HEADS)]
  # If there are two files of heads, safetensors comes first.
  for name in (*sorted(heads, reverse=True), *_FILES):
    if name not in present:
      continue
    if name in _INDICES:
      return huggingface.files_of_index(folder / name)
    return [name]
  return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """A drafter, and where each of its parameters is.

  Attributes:
    drafter: describes the parameters.
    source: holds their values.
    names: the tensor's name for each parameter, as in `tensors.fill`.
    made: values of parameters that no file holds in their final form, by the
      parameter's name; matrices are [out, in].
    ignored: tensors that are not read.
  """

  drafter: Any
  source: Source
  names: Mapping[str, str]
  made: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  ignored: Collection[str] = ()


def fill(
  plan: Plan, convert: tensors.Convert | None = tensors.as_read
) -> Params:
  """Reads a drafter's parameters in its target's dtype, indices as they are.

  See `tensors.fill` for `convert`.
  """
  source = plan.source
  # Under names that no tensor has.
  values = {f'(made) {name}': value for name, value in plan.made.items()}
  names = dict(plan.names) | {name: f'(made) {name}' for name in plan.made}
  shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
  shapes |= {name: value.shape for name, value in values.items()}
  found = tensors.TensorFile(
    origin=str(source.folder),
    shapes=shapes,
    open=lambda name: (values if name in values else source.tensors)[name],
  )
  return tensors.fill(
    trainable.InDtype(plan.drafter), found, names, plan.ignored, convert
  )


def numbers(config: config_lib.Config, key: str) -> tuple[int, ...]:
  """Returns the integers at a key of a configuration, () if there are none."""
  return tuple(config.get(key, []))


def check_embedding(source: Source, name: str, target: load.Loaded) -> set[str]:
  """Checks a copy of the embedding; returns its name, if any, to be ignored.

  The drafter's copy is not kept beside the target's embedding. Some rows are
  compared, unless the target has no parameters.
  """
  if name not in source.tensors:
    return set()
  expected = (target.model.vocab_size, target.model.dim)
  if source.shape(name) != expected:
    raise ValueError(
      f'{source.folder}: tensor {name} has shape {source.shape(name)}, but the '
      f"target's embedding has {expected}: the drafter was made for another "
      'target'
    )
  if target.params is None:
    return {name}
  step = -(-expected[0] // _NUM_ROWS)
  ids = np.arange(0, expected[0], step)
  stored = np.concatenate(
    [source.tensors[name][slice(i, i + 1), slice(None)] for i in ids]
  ).astype(np.float32)
  rows = embed(target, ids)
  # Files hold the rows without the factor by which Gemma multiplies them.
  factor = getattr(target.model, 'embedding_scale', None) or 1.0
  distance = min(np.linalg.norm(x - stored) for x in (rows, rows / factor))
  is_trained = source.config.flag('embed_requires_grad')
  tolerance = _ROUNDING if is_trained else _TOLERANCE
  if not distance <= tolerance * np.linalg.norm(stored):
    raise ValueError(
      f"{source.folder}: tensor {name} is not the target's embedding: the "
      'drafter was made for another target, or was trained with an embedding '
      'of its own, which is not supported'
    )
  return {name}


def has_own_unembedding(source: Source, target: load.Loaded) -> bool:
  """Returns whether there is an unembedding that is not the target's.

  Many drafters are published with a copy of the target's, so that they can be
  run alone. If the target's cannot be read (there are no parameters, or they
  are int8 or on other hosts), any counts as the drafter's own.
  """
  if UNEMBEDDING not in source.tensors or target.params is None:
    return UNEMBEDDING in source.tensors
  is_tied = 'unembedding' not in target.params
  of_target = target.params['embedding' if is_tied else 'unembedding']
  is_plain = packed.is_packed(of_target) or (
    isinstance(of_target, jax.Array) and of_target.is_fully_addressable
  )
  if not is_plain or source.shape(UNEMBEDDING) != of_target.shape[::-1]:
    return True
  expected = np.asarray(of_target).T
  return not tensors.are_equal(
    source.tensors[UNEMBEDDING], expected, len(expected)
  )


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
  config: config_lib.Config,
  target: load.Loaded,
  names: Sequence[str] = ('mask_token_id',),
) -> int:
  """Returns the token of the masks, given the names that it may have."""
  found, size = config.of_one(*names), target.model.vocab_size
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
    key = next((x for x in names if config.get(x) is not None), 'mask_token')
    raise ValueError(
      f'{config.origin}: {key} is {found!r}, but the target has tokens 0 to '
      f'{size - 1}: the drafter was made for another target'
    )
  return found
