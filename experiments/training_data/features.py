"""The target's vectors of all dialogues, kept beside them.

Its last hidden vectors, and for drafters that read more of it the outputs of
some layers.

They are the same in every epoch and for every drafter that reads them. The
target had them when it wrote the dialogues; a pass that finds them again costs
more than a step of training small heads.
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

from experiments.command import progress
from experiments.reporting import files as reporting_files
from experiments.training_data import batches
from experiments.training_data import data_folder
from experiments.training_data.dialogues import Dialogue
import specsample
from specsample import files
from specsample import sharding

_BATCH_SIZE = 16
_WIDTH_MULTIPLE = 64
_AXES = ('batch', None)
_ITEM_BYTES = 2  # of bfloat16

# Of a dialogue: 'hidden' [n, D] and, of L layers, 'features' [n, L * D], one
# behind the other; bfloat16.
Vectors = Mapping[str, np.ndarray]


def fit(
  data: Sequence[data_folder.Data],
  target: specsample.Loaded,
  layers: tuple[int, ...] = (),
) -> tuple[bool, str]:
  """Says whether the vectors of some data should be kept on the disk.

  They should if what is not there yet needs at most half of the free space, and
  never in a bucket. Nothing is written, and nothing but the data's sizes read.

  Args:
    data: of all folders.
    target: the target that wrote them.
    layers: as for `read`.

  Returns:
    Whether to keep them, and a line that says why, with the bytes needed and
    free.

  Raises:
    ValueError: a folder cannot be looked at.
  """
  remote = [part.folder for part in data if files.is_remote(part.folder)]
  if remote:
    return False, (
      f'{remote[0]} is in a bucket: the vectors of the target are computed in '
      'each step'
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
  fits = needed <= free / 2
  done = 'kept beside the data' if fits else 'computed in each step'
  return fits, (
    f'the vectors of the target are {done}: they need '
    f'{needed / 1e9:.3g} GB more, at most half of the {free / 1e9:.3g} GB free '
    'are used'
  )


def read(
  data: data_folder.Data,
  target: specsample.Loaded,
  layers: tuple[int, ...] = (),
) -> tuple[list[list[Vectors]], int]:
  """The vectors of each dialogue of each shard.

  Those of a shard are found once, and kept beside it, whole or not at all; they
  are read from there as they are needed.

  Args:
    data: of a folder here and not in a bucket.
    target: which wrote it.
    layers: whose outputs are read too, as `types.Model.apply` numbers them.

  Returns:
    The vectors, and of how many tokens they had to be found.

  Raises:
    ValueError: a file there is damaged, or cannot be written.
  """
  files_of = [
    _paths(data.folder, number, layers) for number in range(len(data.shards))
  ]
  missing = {
    i: [name for name, file in names.items() if not file.exists()]
    for i, (names, shard) in enumerate(zip(files_of, data.shards, strict=True))
    if shard
  }
  missing = {i: names for i, names in missing.items() if names}
  sizes = [sum(d.tokens.size for d in shard) for shard in data.shards]
  done = 0
  total = sum(sizes[i] for i in missing)
  with progress.meter(total, 0, 'tokens') as meter:
    for i, names in missing.items():
      watch = functools.partial(_show, meter, done, i)
      watch(0)
      found = _of_shard(data.shards[i], target, layers, names, watch)
      for name, vectors in found.items():
        _write(files_of[i][name], vectors)
      done += sizes[i]
  widths = _widths(target.model, layers)
  return [
    _read(names, shard, widths) if shard else []
    for names, shard in zip(files_of, data.shards, strict=True)
  ], total


def write(
  folder: pathlib.PurePath, number: int, shard: Sequence[Dialogue]
) -> None:
  """Keeps the hidden vectors of dialogues that have just been made.

  Raises:
    ValueError: they cannot be written, or the folder is in a bucket.
  """
  vectors = [d.hidden for d in shard if d.hidden is not None]
  _write(path(folder, number), np.concatenate(vectors))


def path(
  folder: pathlib.PurePath | str, number: int, kind: str = 'hidden'
) -> epath.Path:
  """The file of a shard's vectors; ValueError in a bucket."""
  shard = data_folder.shard_path(files.at(folder), number)
  if files.is_remote(shard):
    raise ValueError(
      f'{folder} is in a bucket, and hidden vectors are kept on a local disk: '
      'copy the data there, or set Training.cache_hidden = False and '
      'Synthesis.keep_hidden = False'
    )
  return shard.with_name(f'{shard.stem}-{kind}.npy')


def _paths(folder, number, layers) -> dict[str, epath.Path]:
  kinds = {'hidden': 'hidden'}
  if layers:
    kinds['features'] = '-'.join(['layers', *map(str, layers)])
  return {name: path(folder, number, kind) for name, kind in kinds.items()}


def _widths(model, layers) -> dict[str, int]:
  return {'hidden': model.dim, 'features': len(layers) * model.dim}


def _of_shard(shard, target, layers, names, watch) -> dict[str, np.ndarray]:
  """Those of the names, one dialogue behind the other."""
  model = target.model
  starts = np.cumsum([0, *(dialogue.tokens.size for dialogue in shard)])
  widths = _widths(model, layers)
  vectors = {
    name: np.empty((starts[-1], widths[name]), jnp.bfloat16) for name in names
  }
  order = np.argsort([d.tokens.size for d in shard], kind='stable')
  done = 0
  for first in range(0, len(order), _BATCH_SIZE):
    rows = order[first : first + _BATCH_SIZE]
    tokens = batches.pad(
      [shard[i].tokens for i in rows], _BATCH_SIZE, _WIDTH_MULTIPLE
    )
    tokens = sharding.place(tokens, _AXES)
    found = _vectors(target.params, tokens, model=model, layers=layers)
    for name in names:
      for i, row in zip(rows, np.asarray(found[name]), strict=False):
        vectors[name][starts[i] : starts[i + 1]] = row[: shard[i].tokens.size]
    done += sum(shard[i].tokens.size for i in rows)
    watch(done)
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


def _show(meter, before, number, count):
  meter(before + count, f'hidden vectors of shard {number}')


def _write(file, vectors):
  content = io.BytesIO()
  # numpy has no bfloat16 of its own.
  np.save(content, vectors.view(np.uint16), allow_pickle=False)
  reporting_files.write(file, content.getvalue())


def _read(
  names: Mapping[str, epath.Path],
  shard: Sequence[Dialogue],
  widths: Mapping[str, int],
) -> list[Vectors]:
  sizes = [dialogue.tokens.size for dialogue in shard]
  columns = {
    name: np.split(
      _load(file, (sum(sizes), widths[name])), np.cumsum(sizes)[:-1]
    )
    for name, file in names.items()
  }
  return [
    dict(zip(columns, row, strict=True))
    for row in zip(*columns.values(), strict=True)
  ]


def _load(file, shape) -> np.ndarray:
  try:
    vectors = np.load(file, mmap_mode='r', allow_pickle=False)
  except (OSError, ValueError, EOFError) as error:
    raise ValueError(
      f'{file} is damaged ({error}): delete it, and the same command makes it '
      'anew'
    ) from error
  if vectors.shape != shape or vectors.dtype != np.uint16:
    raise ValueError(
      f'{file} has vectors {vectors.dtype} {vectors.shape}, and its shard '
      f'{shape}: delete it, and the same command makes it anew'
    )
  return vectors.view(jnp.bfloat16)
