"""The target's last hidden vectors of all dialogues, kept beside them.

They are the same in every epoch and for every drafter that reads them. The
target had them when it wrote the dialogues; a pass that finds them again costs
more than a step of training small heads.
"""

from collections.abc import Sequence
import functools
import io
import pathlib

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from experiments import batches
from experiments import data_folder
from experiments import progress
from experiments import results
from experiments.dialogues import Dialogue
import specsample
from specsample import files
from specsample import sharding

_BATCH_SIZE = 16
_WIDTH_MULTIPLE = 64
_AXES = ('batch', None)


def read(
  data: data_folder.Data, target: specsample.Loaded
) -> tuple[list[list[np.ndarray]], int]:
  """Vectors [n, D] bfloat16 of each dialogue of each shard.

  Those of a shard are found once, and kept beside it, whole or not at all; they
  are read from there as they are needed.

  Args:
    data: of a folder here and not in a bucket.
    target: which wrote it.

  Returns:
    The vectors, and of how many tokens they had to be found.

  Raises:
    ValueError: a file there is damaged, or cannot be written.
  """
  paths = [path(data.folder, number) for number in range(len(data.shards))]
  missing = [
    i
    for i, (file, shard) in enumerate(zip(paths, data.shards, strict=True))
    if shard and not file.exists()
  ]
  sizes = [sum(d.tokens.size for d in shard) for shard in data.shards]
  done = 0
  total = sum(sizes[i] for i in missing)
  with progress.meter(total, 0, 'tokens') as meter:
    for i in missing:
      watch = functools.partial(_show, meter, done, i)
      watch(0)
      _write(paths[i], _of_shard(data.shards[i], target, watch))
      done += sizes[i]
  found = [
    _read(file, shard, target.model.dim) if shard else []
    for file, shard in zip(paths, data.shards, strict=True)
  ]
  return found, total


def write(
  folder: pathlib.PurePath, number: int, shard: Sequence[Dialogue]
) -> None:
  """Keeps the vectors of dialogues that have just been made.

  Raises:
    ValueError: they cannot be written, or the folder is in a bucket.
  """
  vectors = [d.hidden for d in shard if d.hidden is not None]
  _write(path(folder, number), np.concatenate(vectors))


def path(folder: pathlib.PurePath | str, number: int) -> epath.Path:
  """The file of a shard's vectors; ValueError in a bucket."""
  shard = data_folder.shard_path(files.at(folder), number)
  if files.is_remote(shard):
    raise ValueError(
      f'{folder} is in a bucket, and hidden vectors are kept on a local disk: '
      'copy the data there, or set Training.cache_hidden = False and '
      'Synthesis.keep_hidden = False'
    )
  return shard.with_name(f'{shard.stem}-hidden.npy')


def _of_shard(shard, target, watch):
  """All vectors [N, D], one dialogue behind the other."""
  model = target.model
  starts = np.cumsum([0, *(dialogue.tokens.size for dialogue in shard)])
  vectors = np.empty((starts[-1], model.dim), jnp.bfloat16)
  order = np.argsort([d.tokens.size for d in shard], kind='stable')
  done = 0
  for first in range(0, len(order), _BATCH_SIZE):
    rows = order[first : first + _BATCH_SIZE]
    tokens = batches.pad(
      [shard[i].tokens for i in rows], _BATCH_SIZE, _WIDTH_MULTIPLE
    )
    found = np.asarray(
      _hidden(target.params, sharding.place(tokens, _AXES), model=model)
    )
    for i, row in zip(rows, found, strict=False):
      size = shard[i].tokens.size
      vectors[starts[i] : starts[i + 1]] = row[:size]
      done += size
    watch(done)
  return vectors


@functools.partial(jax.jit, static_argnames=('model',))
def _hidden(params, tokens, *, model):
  output, _ = model.apply(params, tokens, model.init_cache(len(tokens), 0))
  return sharding.replicate(output.hidden.astype(jnp.bfloat16))


def _show(meter, before, number, count):
  meter(before + count, f'hidden vectors of shard {number}')


def _write(file, vectors):
  content = io.BytesIO()
  # numpy has no bfloat16 of its own.
  np.save(content, vectors.view(np.uint16), allow_pickle=False)
  results.write(file, content.getvalue())


def _read(file, shard: Sequence[Dialogue], dim):
  try:
    vectors = np.load(file, mmap_mode='r', allow_pickle=False)
  except (OSError, ValueError, EOFError) as error:
    raise ValueError(
      f'{file} is damaged ({error}): delete it, and the same command makes it '
      'anew'
    ) from error
  sizes = [dialogue.tokens.size for dialogue in shard]
  if vectors.shape != (sum(sizes), dim) or vectors.dtype != np.uint16:
    raise ValueError(
      f'{file} has vectors {vectors.dtype} {vectors.shape}, and its shard '
      f'{(sum(sizes), dim)}: delete it, and the same command makes it anew'
    )
  return np.split(vectors.view(jnp.bfloat16), np.cumsum(sizes)[:-1])
