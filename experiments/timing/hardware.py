"""The memory bandwidth of the devices."""

import contextlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.command import clock
from specsample import sharding

# Far larger than any cache, so that the memory itself is read.
_STREAM_BYTES = 1 << 28
_STREAMS = 8


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
