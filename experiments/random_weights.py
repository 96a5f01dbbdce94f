"""Models with random weights, for studies of hardware and of shapes."""

import functools

import gin
import jax

from specsample.models import llama
from specsample.types import Params


@gin.configurable
def params(model: llama.Llama, seed: int = 0) -> Params:
  """Random parameters of the model, made on the device."""
  init = jax.jit(functools.partial(type(model).init, model))
  return init(jax.random.key(seed))
