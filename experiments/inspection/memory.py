"""The bytes that weights and caches take, from shapes alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from experiments.tpu import topologies
from specsample import files
from specsample.cost import chips
from specsample.drafters import trainable
from specsample.models import int8
from specsample.models import transformer
from specsample.types import Params

# The forms in which parameters are loaded; int8 leaves the rest in bfloat16.
KINDS = ('float32', 'bfloat16', 'int8')
# The memory of one device, in bytes.
DEVICES = {
  name: tpu.chip.hbm_bytes for name, tpu in topologies.TPUS.items()
} | {'H200': chips.CHIPS['h200'].hbm_bytes}
# The share of a device's memory to fill; the rest is for what a step computes.
_SHARE = 0.9


def num_parameters(params: Params) -> int:
  """Returns the number of parameters."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def of_model(model: transformer.Transformer) -> dict[str, int]:
  """Returns the bytes of the weights, by `KINDS`."""
  as_dtype = lambda dtype: dataclasses.replace(
    model, dtype=dtype
  ).abstract_params()
  return _of(as_dtype('float32'), as_dtype('bfloat16'))


def of_drafter(drafter: trainable.Trainable) -> dict[str, int]:
  """Returns the bytes of a drafter's own weights, by `KINDS`."""
  params = drafter.abstract_params()
  return _of(_cast(params, 'float32'), _cast(params, 'bfloat16'))


def of_cache(model: transformer.Transformer, num_tokens: int) -> int:
  """Returns the bytes of the cache of one sequence in bfloat16.

  Layers with a window keep the window and 64 more tokens.
  """
  model = dataclasses.replace(model, dtype='bfloat16')
  cache = jax.eval_shape(lambda: model.init_cache(1, num_tokens, 64))
  return files.array_bytes(cache)


def num_devices(num_bytes: int) -> dict[str, int]:
  """Returns how many of each of `DEVICES` hold the bytes, a power of two.

  A tenth of the memory is left for what a step computes, and the bytes are
  divided evenly. `compile_tpu` says what really fits on TPUs.
  """
  least = lambda size: math.ceil(math.log2(max(num_bytes / (_SHARE * size), 1)))
  return {name: 2 ** least(size) for name, size in DEVICES.items()}


def _of(wide, narrow):
  of_int8 = jax.eval_shape(int8.weights, narrow)
  sizes = map(files.array_bytes, (wide, narrow, of_int8))
  return dict(zip(KINDS, sizes, strict=True))


def _cast(params, dtype):
  def cast(leaf):
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    new = jnp.dtype(dtype) if is_float else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, new)

  return jax.tree.map(cast, params)
