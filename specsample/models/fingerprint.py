"""A few letters for a model's weights, named by all that is made for them."""

import hashlib

import jax
from jax.experimental import multihost_utils
import numpy as np

from specsample import sharding
from specsample.types import Params

_LENGTH = 16


def of(params: Params) -> str:
  """Hexadecimal digits that differ for models that were trained apart.

  A hash of the parameters' names and shapes and of the first value of each,
  rounded to bfloat16: the same for both dtypes and on every mesh.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  with sharding.no_mesh():
    values = np.asarray([_first(leaf) for _, leaf in leaves], np.float32)
  if jax.process_count() > 1:
    values = np.nanmax(multihost_utils.process_allgather(values), axis=0)
  digest = hashlib.sha256()
  for (path, leaf), value in zip(leaves, values, strict=True):
    rounded = float(jax.numpy.bfloat16(value))
    digest.update(f'{jax.tree_util.keystr(path)}{leaf.shape}{rounded}'.encode())
  return digest.hexdigest()[:_LENGTH]


def _first(leaf: jax.Array) -> float:
  """The value at index 0, NaN where another host has it."""
  for shard in leaf.addressable_shards:
    if all(not index.start for index in shard.index):
      return float(shard.data[(0,) * leaf.ndim])
  return float('nan')
