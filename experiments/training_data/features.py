"""The target's vectors of all dialogues, stored beside their shards.

These are its final hidden vectors and, for drafters that read more of the
target, the outputs of some layers. They are the same in every epoch and for
every drafter that reads them; computing them again costs more than a training
step of small heads.
"""

from collections.abc import Mapping, Sequence
import functools
import io
import pathlib
import shutil

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from experiments.command import distributed
from experiments.command import progress
from experiments.reporting import files as reporting_files
from experiments.training_data import data_folder
import specsample
from specsample import files
from specsample import sharding

_BATCH_SIZE = 16
_WIDTH_MULTIPLE = 64
_ITEM_BYTES = 2  # bfloat16

# A dialogue's bfloat16 vectors: 'hidden' [n, D] and, if L layers are read,
# 'features' [n, L * D], their outputs concatenated.
Vectors = Mapping[str, np.ndarray]


def fit(
  data: Sequence[data_folder.Data],
  target: specsample.Loaded,
  layers: tuple[int, ...] = (),
) -> tuple[bool, str]:
  """Returns whether to store the vectors on the disk, and why, in words.

  They should be if the missing ones need at most half of the free space, but
  never in a bucket. Nothing is written, and only the data's sizes are read.
  `layers` is as for `read`.
  """
  remote = [part.folder for part in data if files.is_remote(part.folder)]
  if remote:
    return False, (
      f'{remote[0]} is in a bucket: the vectors of the target will be computed '
      'in each step'
    )
  widths = _widths(target.model, layers)
  needed = sum(
    _ITEM_BYTES * widths[name] * sum(d.tokens.size for d in shard)
    for part in data
    for number, shard in enumerate(part.shards)
    for name, file in _paths(part.folder, number, layers).items()
    if not file.exists()
  )
  try:
    free = min(shutil.disk_usage(part.folder).free for part in data)
  except OSError as error:
    raise ValueError(
      f'the free space of the data folders is not known: {error}'
    ) from error
  fits = distributed.from_first(needed <= free / 2)
  done = 'kept next to the data' if fits else 'computed in each step'
  return fits, (
    f'the vectors of the target will be {done}: they need '
    f'{needed / 1e9:.3g} GB more, and at most half of the {free / 1e9:.3g} GB '
    'of free space is used'
  )


def read(
  data: data_folder.Data,
  target: specsample.Loaded,
  layers: tuple[int, ...] = (),
) -> tuple[list[list[Vectors]], int]:
  """Returns the vectors of each dialogue of each shard.

  Also returns the number of tokens for which they had to be computed. A shard's
  vectors are computed once and stored beside it, completely or not at all, in a
  local folder. Several processes share it, and the first one writes. They are
  read from there as they are needed. The outputs of `layers`, numbered as in
  `types.Model.apply`, are read too.
  """
  paths = [_paths(data.folder, i, layers) for i in range(len(data.shards))]
  missing = distributed.from_first(
    [
      (number, [name for name, path in names.items() if not path.exists()])
      for number, names in enumerate(paths)
      if data.shards[number]
    ]
  )
  sizes = [sum(d.tokens.size for d in shard) for shard in data.shards]
  total = sum(sizes[number] for number, names in missing if names)
  done = 0
  with progress.meter(total, 0, 'tokens') as meter:
    for number, names in missing:
      if not names:
        continue
      meter(done, f'vectors of shard {number}')
      found = _compute(data.shards[number], target, layers, names)
      if distributed.is_first():
        for name, vectors in found.items():
          _write(paths[number][name], vectors)
      done += sizes[number]
  # All wait until the first process has written them.
  distributed.from_first(None)
  widths = _widths(target.model, layers)
  return [
    _read(names, shard, widths) if shard else []
    for names, shard in zip(paths, data.shards, strict=True)
  ], total


def path(
  folder: pathlib.PurePath | str, number: int, kind: str = 'hidden'
) -> epath.Path:
  """Returns the file of a shard's vectors."""
  shard = data_folder.shard_path(files.at(folder), number)
  return shard.with_name(f'{shard.stem}-{kind}.npy')


def _paths(folder, number, layers) -> dict[str, epath.Path]:
  kinds = {'hidden': 'hidden'}
  if layers:
    kinds['features'] = '-'.join(['layers', *map(str, layers)])
  return {name: path(folder, number, kind) for name, kind in kinds.items()}


def _widths(model, layers) -> dict[str, int]:
  return {'hidden': model.dim, 'features': len(layers) * model.dim}


def _compute(shard, target, layers, names) -> dict[str, np.ndarray]:
  """Computes the named vectors of a shard, its dialogues concatenated."""
  model = target.model
  starts = np.cumsum([0, *(dialogue.tokens.size for dialogue in shard)])
  widths = _widths(model, layers)
  vectors = {
    name: np.empty((starts[-1], widths[name]), jnp.bfloat16) for name in names
  }
  order = np.argsort([d.tokens.size for d in shard], kind='stable')
  for first in range(0, len(order), _BATCH_SIZE):
    rows = order[first : first + _BATCH_SIZE]
    width = -(-shard[rows[-1]].tokens.size // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    tokens = np.zeros((_BATCH_SIZE, width), np.int32)
    for row, i in zip(tokens, rows, strict=False):
      row[: shard[i].tokens.size] = shard[i].tokens
    tokens = sharding.place(tokens, ('batch', None))
    found = _vectors(target.params, tokens, model=model, layers=layers)
    for name in names:
      for i, row in zip(rows, np.asarray(found[name]), strict=False):
        vectors[name][starts[i] : starts[i + 1]] = row[: shard[i].tokens.size]
  return vectors


@functools.partial(jax.jit, static_argnames=('model', 'layers'))
def _vectors(params, tokens, *, model, layers):
  empty = model.init_cache(len(tokens), 0)
  output, _ = model.apply(params, tokens, empty, layers)
  found = {'hidden': output.hidden}
  if layers:
    found['features'] = jnp.concatenate(output.features, axis=-1)
  return sharding.replicate(
    {name: x.astype(jnp.bfloat16) for name, x in found.items()}
  )


def _write(file: epath.Path, vectors: np.ndarray) -> None:
  content = io.BytesIO()
  # numpy has no bfloat16 of its own.
  np.save(content, vectors.view(np.uint16), allow_pickle=False)
  reporting_files.write(file, content.getvalue())


def _read(names, shard, widths) -> list[Vectors]:
  """Returns the vectors of each dialogue; they stay on the disk until used."""
  sizes = [dialogue.tokens.size for dialogue in shard]
  columns = {
    name: np.split(
      _load(file, (sum(sizes), widths[name])), np.cumsum(sizes)[:-1]
    )
    for name, file in names.items()
  }
  return [
    {name: rows[i] for name, rows in columns.items()} for i in range(len(shard))
  ]


def _load(file: epath.Path, shape: tuple[int, int]) -> np.ndarray:
  try:
    vectors = np.load(file, mmap_mode='r', allow_pickle=False)
    if vectors.shape != shape or vectors.dtype != np.uint16:
      raise ValueError(
        f'it has {vectors.dtype} {vectors.shape}, but its shard has {shape}'
      )
  except (OSError, ValueError, EOFError) as error:
    raise ValueError(
      f'{file} is damaged ({error}): delete it, then run the same command to '
      'make it again'
    ) from error
  return vectors.view(jnp.bfloat16)
