"""The least time that the memory leaves to a pass of the target.

A pass reads the weights once on every device that holds them, and the cache of
each row. Devices of a mesh read at the same time, each from its own memory; the
CPU's devices are an exception, those of a process share one.
"""

import dataclasses
import math

import jax
from jax.sharding import AxisType

from specsample import sharding
from specsample.types import Model, Params


def weight_bytes(params: Params) -> int:
  """Bytes of the target's weights that one pass has to read.

  Without a mesh; under one each device reads its parts of them.
  """
  return _read(params, lambda leaf: leaf.nbytes)


def cache_bytes(model: Model, length: int) -> int:
  """Bytes of the cache of one sequence of `length` tokens."""
  rows = sharding.batch_parts()
  cache = jax.eval_shape(lambda: model.init_cache(rows, length))
  leaves = jax.tree.leaves(cache)
  return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // rows


@dataclasses.dataclass(frozen=True)
class Roofline:
  """What the devices of the mesh, or the one device, read and how fast."""

  weight_bytes: int  # of one pass, over all devices
  cache_copies: float  # how many devices read the same part of a cache
  bytes_per_second: float  # of all memories

  @classmethod
  def of(
    cls, params: Params, model: Model, copy_bandwidth: float
  ) -> 'Roofline':
    """Where the parameters are; `copy_bandwidth` is that of one memory."""
    return cls(
      _read(params, _bytes_on_devices),
      _cache_copies(model),
      _num_memories() * copy_bandwidth,
    )

  def seconds(self, passes: int, caches: int) -> float:
    """Of so many passes, which read so many bytes of caches altogether."""
    read = passes * self.weight_bytes + self.cache_copies * caches
    return read / self.bytes_per_second


def _read(params, size):
  target = params['target']
  total = sum(size(leaf) for leaf in jax.tree.leaves(target))
  if 'unembedding' in target:  # then of the other table a row a token is read
    total -= size(target['embedding'])
  return total


def _bytes_on_devices(leaf):
  sharding = leaf.sharding
  part = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
  return part * len(sharding.device_set)


def _cache_copies(model):
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return 1
  # Of Explicit axes JAX tells how an array is divided without computing it.
  kinds = (AxisType.Explicit,) * len(mesh.axis_names)
  with jax.set_mesh(
    jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
  ):
    cache = jax.eval_shape(lambda: model.init_cache(sharding.batch_parts(), 1))
  parts = lambda leaf: leaf.sharding.shard_shape(leaf.shape)
  leaves = jax.tree.leaves(cache)
  held = sum(math.prod(parts(x)) * x.dtype.itemsize for x in leaves)
  return mesh.size * held / sum(x.size * x.dtype.itemsize for x in leaves)


def _num_memories():
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return 1
  is_cpu = jax.devices()[0].platform == 'cpu'
  return jax.process_count() if is_cpu else mesh.size
