"""The least time of a pass of the target that memory bandwidth allows.

A pass reads the weights once on every device that holds them, except that it
reads only the experts that its tokens are sent to. It also reads the cache of
each row. The devices of a mesh read at the same time, each from its own memory;
only the CPU devices of a process share one memory.
"""

import contextlib
import dataclasses
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np

from experiments.command import clock
from specsample import files
from specsample import sharding
from specsample.cost import work
from specsample.models import experts as experts_lib
from specsample.types import Model, Params

# Far larger than any cache, so that the memory itself is read.
_STREAM_BYTES = 1 << 28
_STREAMS = 8


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
    on_devices = lambda x: (
      files.bytes_per_device(x) * len(x.sharding.device_set)
    )
    weights, of_experts = _read(params, on_devices)
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


def memory_bandwidth() -> float:
  """Returns the most bytes per second that one device's memory moves.

  It times a large sum, which reads as a pass of a model does, and a large copy,
  which reads and writes. The faster of them counts, because a roofline of the
  slower one would flatter. The device is this process's first one, also under a
  mesh. If it is the host's CPU, numpy copies too. Processes that share a
  machine measure at the same time and share its bandwidth.
  """
  one = sharding.make_mesh(devices=jax.local_devices()[:1])
  is_mesh = not jax.sharding.get_mesh().empty
  with jax.set_mesh(one) if is_mesh else contextlib.nullcontext():
    return _memory_bandwidth(repeats=5)


def _memory_bandwidth(repeats):
  host = np.ones(_STREAM_BYTES // 4, np.float32)
  source = jnp.asarray(host)
  # The output reuses the donated array, as numpy's copy does: no fresh pages.
  fill = jax.jit(lambda old, x: x + 1, donate_argnums=0, keep_unused=True)
  read = jax.jit(jnp.sum)
  target = fill(jnp.zeros_like(source), source)
  jax.block_until_ready(read(source))
  copies, reads = [], []
  for _ in range(repeats):
    # Several calls are queued, so that the device does not wait for the host.
    start = time.perf_counter()
    for _ in range(_STREAMS):
      target = fill(target, source)
    jax.block_until_ready(target)
    copies.append((time.perf_counter() - start) / _STREAMS)
    start = time.perf_counter()
    jax.block_until_ready([read(source) for _ in range(_STREAMS)])
    reads.append((time.perf_counter() - start) / _STREAMS)
  if jax.devices()[0].platform == 'cpu':
    buffer = np.empty_like(host)
    for _ in range(repeats + 1):
      _, elapsed = clock.seconds(np.copyto, buffer, host)
      copies.append(elapsed)
  return max(2 * host.nbytes / min(copies), host.nbytes / min(reads))
