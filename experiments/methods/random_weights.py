"""Models with random weights, for studies of hardware and of shapes."""

from collections.abc import Callable

import gin
import jax

from specsample import sharding
from specsample.models import transformer
from specsample.types import Array, Params


@gin.configurable
def params(model: transformer.Transformer, seed: int = 0) -> Params:
  """Random parameters of the model, where the mesh that is set has them.

  The same on every mesh.
  """
  return initializer(model)(jax.random.key(seed))


def initializer(model: transformer.Transformer) -> Callable[[Array], Params]:
  """The compiled function from a key to parameters, made in parts."""
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return jax.jit(model.init)
  shardings = sharding.of_tree(model.param_axes())
  init = model.init
  if mesh.are_all_axes_explicit:
    # Of explicit axes a random array would be whole on every device at first.
    init = jax.sharding.auto_axes(init, out_sharding=shardings)
  return jax.jit(init, out_shardings=shardings)
