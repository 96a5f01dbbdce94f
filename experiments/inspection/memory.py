"""The bytes that weights and caches take, from shapes alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from experiments.tpu import topologies
from specsample.cost import chips
from specsample.drafters import trainable
from specsample.models import int8
from specsample.models import transformer
from specsample.types import Params

# As parameters are loaded: int8 with all else of bfloat16.
KINDS = ('float32', 'bfloat16', 'int8')
# Bytes of one device.
DEVICES = {
  name: tpu.chip.hbm_bytes for name, tpu in topologies.TPUS.items()
} | {'H200': chips.CHIPS['h200'].hbm_bytes}
# Of a device's memory; the rest is for what a step computes.
_SHARE = 0.9


def num_parameters(params: Params) -> int:
  """How many numbers there are."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def of_model(model: transformer.Transformer) -> dict[str, int]:
  """Bytes of the weights by `KINDS`."""
  as_dtype = lambda dtype: dataclasses.replace(
    model, dtype=dtype
  ).abstract_params()
  return _of(as_dtype('float32'), as_dtype('bfloat16'))


def of_drafter(drafter: trainable.Trainable) -> dict[str, int]:
  """Bytes of a drafter's own weights by `KINDS`."""
  params = drafter.abstract_params()
  return _of(_cast(params, 'float32'), _cast(params, 'bfloat16'))


def of_cache(model: transformer.Transformer, num_tokens: int) -> int:
  """Bytes of the cache of one sequence in bfloat16.

  Layers with a window keep that and 64 tokens.
  """
  model = dataclasses.replace(model, dtype='bfloat16')
  return _bytes(jax.eval_shape(lambda: model.init_cache(1, num_tokens, 64)))


def num_devices(num_bytes: int) -> dict[str, int]:
  """How many of each of `DEVICES`, a power of two, hold so many bytes.

  A tenth of the memory is left for what a step computes, and all is divided
  evenly: what really fits on TPUs says `compile_tpu`.
  """
  least = lambda size: math.ceil(math.log2(max(num_bytes / (_SHARE * size), 1)))
  return {name: 2 ** least(size) for name, size in DEVICES.items()}


def _of(wide, narrow):
  of_int8 = jax.eval_shape(int8.weights, narrow)
  sizes = map(_bytes, (wide, narrow, of_int8))
  return dict(zip(KINDS, sizes, strict=True))


def _bytes(tree):
  return sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def _cast(params, dtype):
  def cast(leaf):
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    new = jnp.dtype(dtype) if is_float else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, new)

  return jax.tree.map(cast, params)
