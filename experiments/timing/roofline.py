"""The least time of a pass of the target that memory bandwidth allows.

A pass reads the weights once on every device that holds them, except that it
reads only the experts that its tokens are sent to. It also reads the cache of
each row. The devices of a mesh read at the same time, each from its own memory;
only the CPU devices of a process share one memory.
"""

import dataclasses

import jax
from jax.sharding import AxisType

from specsample import files
from specsample import sharding
from specsample.cost import work
from specsample.models import experts as experts_lib
from specsample.types import Model, Params


def weight_bytes(params: Params) -> int:
  """Returns the bytes of the target's weights that passes read.

  All experts are included. Every weight counts once, even if a mesh holds
  several copies; each device of a mesh reads its own part.
  """
  return sum(_read(params, files.array_bytes))


def cache_bytes(model: Model, length: int) -> int:
  """Returns the bytes of the cache of one sequence of `length` tokens."""
  rows = sharding.batch_parts()
  cache = jax.eval_shape(lambda: model.init_cache(rows, length))
  return files.array_bytes(cache) // rows


@dataclasses.dataclass(frozen=True)
class Roofline:
  """The reads of the mesh's devices, or of the one device, and their speed."""

  weight_bytes: int  # per pass, over all devices, without experts
  expert_bytes: int  # of all experts, likewise
  experts: experts_lib.Experts | None  # the target's, if it has any
  cache_copies: float  # how many devices read the same part of a cache
  bytes_per_second: float  # of all memories together

  @classmethod
  def of(
    cls, params: Params, model: Model, memory_bandwidth: float
  ) -> 'Roofline':
    """Returns the roofline of the devices that hold the parameters.

    `memory_bandwidth` is that of one memory, in bytes per second.
    """
    weights, of_experts = _read(params, _bytes_on_devices)
    return cls(
      weight_bytes=weights,
      expert_bytes=of_experts,
      experts=getattr(model, 'experts', None),
      cache_copies=_cache_copies(model),
      bytes_per_second=_num_memories() * memory_bandwidth,
    )

  def seconds(self, passes: float, caches: int, num_tokens: int) -> float:
    """Returns the least seconds of several passes.

    All passes together read `caches` bytes. The number of tokens of all rows
    per pass decides how many experts are read, if all are equally likely.
    """
    of_pass = float(self.weight_bytes)
    if self.experts is not None:
      of_pass += self.expert_bytes * work.share_of_experts(
        self.experts.num_experts, self.experts.num_per_token, num_tokens
      )
    read = passes * of_pass + self.cache_copies * caches
    return read / self.bytes_per_second


def _read(params, size):
  """Returns the size of all weights but the experts', and the experts' size."""
  target = params['target']
  of_experts = total = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(target):
    total += size(leaf)
    of_experts += size(leaf) * ('expert_' in jax.tree_util.keystr(path))
  if 'unembedding' in target:  # then one row of the embedding per token is read
    total -= size(target['embedding'])
  return total - of_experts, of_experts


def _bytes_on_devices(leaf):
  return files.bytes_per_device(leaf) * len(leaf.sharding.device_set)


def _cache_copies(model):
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return 1
  # For Explicit axes, JAX says how an array is divided without computing it.
  kinds = (AxisType.Explicit,) * len(mesh.axis_names)
  with jax.set_mesh(
    jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
  ):
    cache = jax.eval_shape(lambda: model.init_cache(sharding.batch_parts(), 1))
  return mesh.size * files.bytes_per_device(cache) / files.array_bytes(cache)


def _num_memories():
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return 1
  is_cpu = jax.devices()[0].platform == 'cpu'
  return jax.process_count() if is_cpu else mesh.size
