"""The bytes of arrays, or of the shapes and dtypes that stand for them."""

import math
from typing import Any

import jax


def total(tree: Any) -> int:
  """Returns the bytes of all arrays of a tree; a mesh's copies count once."""
  return sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def per_device(tree: Any) -> int:
  """Returns the bytes that one device holds, given leaves with a sharding."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )
