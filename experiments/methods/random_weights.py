"""Models with random weights, for studies of hardware and of shapes."""

from collections.abc import Callable
from typing import Literal

import gin
import jax

from specsample import checks
from specsample import sharding
from specsample.models import int8
from specsample.models import transformer
from specsample.types import Array, Params


@gin.configurable
def params(
  model: transformer.Transformer,
  seed: int = 0,
  weights: Literal['int8'] | None = None,
) -> Params:
  """Returns random parameters of the model, sharded over the mesh, if any.

  They are the same on every mesh. With `weights`, matrices have 8 bits per
  weight, as in `specsample.load`.
  """
  checks.seed('params.seed', seed)
  int8.check(weights)
  return initializer(model, weights)(jax.random.key(seed))


def initializer(
  model: transformer.Transformer, weights: Literal['int8'] | None = None
) -> Callable[[Array], Params]:
  """Returns the compiled function that makes sharded parameters from a key.

  The function also rounds them to int8, so that a device need not hold all of
  them in both forms.
  """
  init = model.init
  if weights is not None:
    init = lambda key: int8.weights(model.init(key))
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return jax.jit(init)
  axes = model.param_axes()
  if weights is not None:
    axes = int8.axes(axes, model.abstract_params())
  shardings = sharding.of_tree(axes)
  if mesh.are_all_axes_explicit:
    # With explicit axes every device would at first hold each array as a whole.
    init = jax.sharding.auto_axes(init, out_sharding=shardings)
  return jax.jit(init, out_shardings=shardings)
