"""What a folder holds that was published: a configuration, and tensors."""

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
from specsample.models import safetensors_file
from specsample.models import tensors
from specsample.models import torch_file
from specsample.models import transposed
from specsample.types import Params

_CONFIG_NAME = 'config.json'
# How files of heads end, and what other weights are in, the best first.
_HEADS = ('_lm_head.safetensors', '_lm_head.pt')
_INDICES = ('model.safetensors.index.json', 'pytorch_model.bin.index.json')
_FILES = (
  *('model.safetensors', _INDICES[0]),
  *('pytorch_model.bin', _INDICES[1]),
)
UNEMBEDDING = 'lm_head.weight'
# Rows of it that are compared at a time.
_BLOCK_ROWS = 4096
# Rows of an embedding that are compared, and how far they may be from the
# target's, relative to these: a target of 4 bits is 0.05 from what it was.
_NUM_ROWS = 64
_TOLERANCE = 0.1


@dataclasses.dataclass(frozen=True)
class Source:
  """A folder's configuration, empty without one, and its tensors.

  Names are without 'model.' before them.
  """

  folder: epath.Path
  config: config_lib.Config
  tensors: dict[str, safetensors_file.Tensor]

  def shape(self, name: str) -> tuple[int, ...]:
    """That of a tensor; ValueError if there is none of that name."""
    if name not in self.tensors:
      raise ValueError(
        f'{self.folder} holds no tensor {name}: the checkpoint is incomplete, '
        'or of another layout'
      )
    return self.tensors[name].shape

  def read(self, name: str) -> np.ndarray:
    """A whole tensor."""
    return self.tensors[name][(slice(None),) * len(self.shape(name))]


def open_folder(folder: epath.Path) -> Source | None:
  """What is there, None without weights; none of them is read.

  Raises:
    ValueError: a file is damaged, or one that an index names is missing.
  """
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
    is_safe = name.endswith('.safetensors')
    read = safetensors_file.read_header if is_safe else torch_file.read_header
    for key, tensor in read(folder / name).items():
      if tensor.kind not in safetensors_file.READABLE:
        raise ValueError(
          f'{folder}: tensor {key} is stored as {tensor.kind}, supported are '
          f'{", ".join(safetensors_file.READABLE)}: load a version that is not '
          'quantised'
        )
      found[key.removeprefix('model.')] = tensor
  return Source(folder, config_lib.Config(config, str(path)), found)


def weight_files(folder: epath.Path) -> list[str]:
  """The files of a folder's weights; those of an index may not be there.

  Raises:
    ValueError: the index is damaged.
  """
  present = {path.name for path in folder.iterdir()}
  heads = [name for name in present if name.endswith(_HEADS)]
  # Of two files of heads that of safetensors.
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
    drafter: says which parameters there are.
    source: where their values are.
    names: the tensor's name of each parameter, as `tensors.fill`.
    made: values, by the parameter's name, of what is in no file as it is to be;
      matrices are [out, in].
    ignored: tensors that are not read.
  """

  drafter: Any
  source: Source
  names: Mapping[str, str]
  made: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  ignored: Collection[str] = ()


def fill(plan: Plan) -> Params:
  """A drafter's parameters in the dtype of its target, indices as they are.

  Raises:
    ValueError: tensors that are missing, unknown or of another shape.
  """
  found, names = _file_and_names(plan)
  return tensors.fill(
    trainable.InDtype(plan.drafter), found, names, plan.ignored
  )


def compare(plan: Plan) -> tensors.Differences:
  """What `fill` refuses; no weight is read."""
  found, names = _file_and_names(plan)
  return tensors.compare(plan.drafter, found, names, plan.ignored)


def _file_and_names(plan):
  source = plan.source
  # By names that no tensor has.
  values = {f'(made) {name}': value for name, value in plan.made.items()}
  names = dict(plan.names) | {name: f'(made) {name}' for name in plan.made}
  shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
  shapes |= {name: value.shape for name, value in values.items()}
  found = tensors.TensorFile(
    origin=str(source.folder),
    shapes=shapes,
    open=lambda name: values.get(name, source.tensors.get(name)),
  )
  return found, names


def numbers(config: config_lib.Config, key: str) -> tuple[int, ...]:
  """Integers of a configuration, () where there are none.

  Raises:
    ValueError: they are something else.
  """
  found = config.get(key, [])
  if not isinstance(found, list) or any(type(x) is not int for x in found):
    raise config.unexpected(key, 'a list of integers')
  return tuple(found)


def check_embedding(source: Source, name: str, target: load.Loaded) -> set[str]:
  """The name, if there is such a tensor, which is then to be ignored.

  A drafter's copy of the embedding is not kept twice. Some rows are compared,
  unless the target is without parameters.

  Raises:
    ValueError: it is not the target's.
  """
  if name not in source.tensors:
    return set()
  expected = (target.model.vocab_size, target.model.dim)
  if source.shape(name) != expected:
    raise ValueError(
      f'{source.folder}: tensor {name} has shape {source.shape(name)} and the '
      f"target's embedding {expected}: the drafter is of another target"
    )
  if target.params is None:
    return {name}
  step = -(-expected[0] // _NUM_ROWS)
  ids = np.arange(0, expected[0], step)
  stored = np.concatenate(
    [source.tensors[name][slice(i, i + 1), slice(None)] for i in ids]
  ).astype(np.float32)
  rows = embed(target, ids)
  distance = np.linalg.norm(rows - stored)
  if not distance <= _TOLERANCE * np.linalg.norm(stored):
    raise ValueError(
      f"{source.folder}: tensor {name} is not the target's embedding: the "
      'drafter is of another target, or was trained with an embedding of its '
      'own, which is not supported'
    )
  return {name}


def has_own_unembedding(source: Source, target: load.Loaded) -> bool:
  """Whether there is an unembedding, and it is not a copy of the target's.

  Many drafters are published with a copy, so that they can be run alone. What a
  target without parameters has is not known, and no copy.
  """
  if UNEMBEDDING not in source.tensors or target.params is None:
    return UNEMBEDDING in source.tensors
  is_tied = 'unembedding' not in target.params
  of_target = target.params['embedding' if is_tied else 'unembedding']
  is_plain = transposed.is_transposed(of_target) or (
    isinstance(of_target, jax.Array) and of_target.is_fully_addressable
  )
  if not is_plain or source.shape(UNEMBEDDING) != of_target.shape[::-1]:
    return True
  expected = np.asarray(of_target).T
  for first in range(0, len(expected), _BLOCK_ROWS):
    rows = slice(first, first + _BLOCK_ROWS)
    stored = source.tensors[UNEMBEDDING][rows, slice(None)]
    if not np.array_equal(stored.astype(expected.dtype), expected[rows]):
      return True
  return False


def embed(target: load.Loaded, ids: Sequence[int] | np.ndarray) -> np.ndarray:
  """The target's embeddings [n, D] of tokens, float32, whole on every host.

  Zeros where the target is without parameters.
  """
  if target.params is None:
    return np.zeros((len(ids), target.model.dim), np.float32)
  # As many rows as any mesh divides a batch into; all are the same.
  rows = np.tile(np.asarray(ids, np.int32), (jax.device_count(), 1))
  find: Callable[..., jax.Array] = jax.jit(
    lambda params, ids: sharding.replicate(target.model.embed(params, ids))
  )
  return np.asarray(find(target.params, rows)[0], np.float32)
