"""Models with random weights, for studies of hardware and of shapes."""

from collections.abc import Callable

import gin
import jax

from specsample import checks
from specsample import sharding
from specsample.models import transformer
from specsample.types import Array, Params


@gin.configurable
def params(model: transformer.Transformer, seed: int = 0) -> Params:
  """Returns random parameters of the model, sharded over the mesh, if any.

  They are the same on every mesh.
  """
  checks.seed('params.seed', seed)
  return initializer(model)(jax.random.key(seed))


def initializer(model: transformer.Transformer) -> Callable[[Array], Params]:
  """Returns the compiled function that makes sharded parameters from a key."""
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return jax.jit(model.init)
  shardings = sharding.of_tree(model.param_axes())
  init = model.init
  if mesh.are_all_axes_explicit:
    # With explicit axes every device would at first hold each array as a whole.
    init = jax.sharding.auto_axes(init, out_sharding=shardings)
  return jax.jit(init, out_shardings=shardings)
