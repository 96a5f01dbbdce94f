"""Short hashes of a model's weights, by which other files refer to them."""

from collections.abc import Mapping
import hashlib
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from specsample import sharding
from specsample.models import matrices
from specsample.models import packed
from specsample.types import Params

_LENGTH = 16


def compute(params: Params) -> str:
  """Returns hexadecimal digits that differ for separately trained models.

  They are a hash of each parameter's name, shape and first value, which is
  rounded to bfloat16. They are the same for both dtypes and on every mesh.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=packed.is_packed)
  return of_first({name(path, leaf): first(leaf) for path, leaf in leaves})


def of_first(values: Mapping[str, float]) -> str:
  """Returns the hash of each parameter's `name` and `first`, in tree order."""
  found = np.asarray(list(values.values()), np.float32)
  if jax.process_count() > 1:
    found = np.nanmax(multihost_utils.process_allgather(found), axis=0)
  digest = hashlib.sha256()
  for of_leaf, value in zip(values, found, strict=True):
    digest.update(f'{of_leaf}{float(jax.numpy.bfloat16(value))}'.encode())
  return digest.hexdigest()[:_LENGTH]


def name(path: tuple[Any, ...], leaf: matrices.Matrix) -> str:
  """Returns a parameter's path and shape."""
  return f'{jax.tree_util.keystr(path)}{leaf.shape}'


def first(leaf: matrices.Matrix) -> float:
  """Returns the value at index 0, or NaN if another host has it."""
  if isinstance(leaf, packed.Packed):
    leaf = leaf.values
  with sharding.no_mesh():
    return _first(leaf)


def _first(leaf):
  for shard in leaf.addressable_shards:
    if all(not index.start for index in shard.index):
      return float(shard.data[(0,) * leaf.ndim])
  return float('nan')
