"""One step of training, on any objective: float32 weights, any compute dtype.

Parameters are the whole tree {'target': ..., 'drafter': ...}. What is trained
of it is in the state; the rest, `frozen`, is given to every step. In either of
the two trees None stands for what is in the other.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specsample import types
from specsample.models import matrices
from specsample.models import tensors
from specsample.models import transposed
from specsample.types import Array, ArrayLike, Params

# batch: arrays with the batch axis first, {'tokens': [B, T], ...}.
Batch = Mapping[str, Array]
# objective(params, batch) -> the loss [] and what to report of the batch.
LossFunction = Callable[[Params, Batch], tuple[Array, dict[str, Array]]]


@types.pytree
class TrainState:
  """What a step changes; a checkpoint of it is all that a run needs."""

  step: Array  # [] int32, steps taken
  trained: Params  # float32, None where a parameter is frozen
  optimizer: Any  # the optimizer's own state


def init(
  params: Params,
  is_trained: Params,
  optimizer: optax.GradientTransformation,
  dtype: str = 'float32',
) -> tuple[TrainState, Params]:
  """The state before the first step, and what is frozen.

  Args:
    params: the whole tree. What is trained is copied to float32, divided as it
      is; what is not becomes `dtype`, and no step donates it.
    is_trained: the same tree, of bool.
    optimizer: of optax.
    dtype: that of the computation, the target's own: 'float32', 'bfloat16'.

  Raises:
    ValueError: nothing is trained.
  """
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  master = lambda x: jnp.array(matrices.dense(x, jnp.float32), copy=True)
  keep = lambda path, x: not is_float(x) or _keeps_dtype(path)
  cast = lambda path, x: (
    x if keep(path, x) or x.dtype == dtype else matrices.dense(x, dtype)
  )
  # A transposed matrix is one parameter: None stands for it as for others.
  is_leaf = transposed.is_transposed
  is_trained = jax.tree.map(
    lambda own: own.values if is_leaf(own) else own, is_trained, is_leaf=is_leaf
  )
  trained = jax.tree.map(
    lambda x, own: master(x) if own else None,
    *(params, is_trained),
    is_leaf=is_leaf,
  )
  frozen = jax.tree_util.tree_map_with_path(
    lambda path, x, own: None if own else cast(path, x),
    *(params, is_trained),
    is_leaf=is_leaf,
  )
  if not jax.tree.leaves(trained):
    raise ValueError(
      'is_trained is False for every parameter: say which ones to train'
    )
  state = TrainState(
    step=jnp.zeros((), jnp.int32),
    trained=trained,
    optimizer=optimizer.init(trained),
  )
  return state, frozen


def join(trained: Params, frozen: Params, dtype: Any = None) -> Params:
  """The whole tree again, what is trained as `dtype` (None: as it is)."""
  keep = lambda path: dtype is None or _keeps_dtype(path)
  cast = lambda path, x: x if keep(path) else x.astype(dtype)
  return jax.tree_util.tree_map_with_path(
    lambda path, x, y: y if x is None else cast(path, x),
    trained,
    frozen,
    is_leaf=lambda x: x is None,
  )


def _keeps_dtype(path):
  """Whether a parameter is float32 whatever the computation is in."""
  if not all(isinstance(entry, jax.tree_util.DictKey) for entry in path):
    return True  # the scale of one of int8
  return tensors.is_of_router(tensors.key(path))


@functools.partial(
  jax.jit,
  static_argnames=('objective', 'optimizer', 'dtype'),
  donate_argnames=('state',),
)
def train_step(
  state: TrainState,
  frozen: Params,
  batch: Batch,
  *,
  objective: LossFunction,
  optimizer: optax.GradientTransformation,
  dtype: str = 'float32',
  scales: Mapping[str, ArrayLike] | None = None,
) -> tuple[TrainState, dict[str, Array]]:
  """Takes one step down the gradient of `objective`.

  A step whose loss, gradient or update is no number changes only the count.

  Args:
    state: from `init` or the step before. Its buffers are donated.
    frozen: from `init`.
    batch: what the objective reads.
    objective, optimizer: static; the same objects in every step.
    dtype: as in `init`.
    scales: factors of the updates of 'target' and 'drafter', for learning rates
      that change from step to step without another executable. None is 1.

  Returns:
    The state, and what the objective reports with `loss`, the norm of the
    gradient `gradient_norm` and whether the step was taken, `is_finite`.
  """

  def loss_of(trained):
    return objective(join(trained, frozen, dtype), batch)

  (loss, report), gradient = jax.value_and_grad(loss_of, has_aux=True)(
    state.trained
  )
  squares = (jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradient))
  norm = jnp.sqrt(sum(squares))
  updates, optimizer_state = optimizer.update(
    gradient, state.optimizer, state.trained
  )
  if scales is not None:
    updates = {
      name: jax.tree.map(lambda x, factor=scales[name]: factor * x, tree)
      for name, tree in updates.items()
    }
  is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
  is_finite &= jnp.isfinite(optax.tree.sum(updates))
  new = (optax.apply_updates(state.trained, updates), optimizer_state)
  old = (state.trained, state.optimizer)
  keep = lambda new, old: jnp.where(is_finite, new, old)
  trained, optimizer_state = jax.tree.map(keep, new, old)
  state = TrainState(
    step=state.step + 1, trained=trained, optimizer=optimizer_state
  )
  return state, report | {
    'loss': loss,
    'gradient_norm': norm,
    'is_finite': is_finite,
  }
