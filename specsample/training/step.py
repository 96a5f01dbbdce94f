"""A training step for any objective: float32 weights, any compute dtype.

Parameters are the whole tree {'target': ..., 'drafter': ...}. The trained ones
are in the state; the others, `frozen`, are passed to every step. Each of the
two trees has None in place of the parameters that the other one holds.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specsample import sharding
from specsample import types
from specsample.models import matrices
from specsample.models import packed
from specsample.models import tensors
from specsample.types import Array, Params

# batch: arrays with the batch axis first, {'tokens': [B, T], ...}.
Batch = Mapping[str, Array]
# objective(params, batch) -> the loss [] and a report of the batch.
LossFunction = Callable[[Params, Batch], tuple[Array, dict[str, Array]]]


def num_tokens(batch: Batch) -> Array:
  """Returns the number [] of tokens that are learned."""
  return jnp.sum(batch['mask'])


@types.pytree
class TrainState:
  """The state that a step changes: all that a run's checkpoint has to hold."""

  step: Array  # [] int32, steps taken
  trained: Params  # float32, None where a parameter is frozen
  optimizer: Any  # the optimizer's own state


def init(
  params: Params,
  is_trained: Params,
  optimizer: optax.GradientTransformation,
  dtype: str = 'float32',
) -> tuple[TrainState, Params]:
  """Returns the state before the first step, and the frozen parameters.

  Args:
    params: the whole tree. Trained parameters are copied to float32 with their
      sharding; frozen ones are cast to `dtype`, and no step donates them.
    is_trained: a bool for each parameter, in the same tree.
    optimizer: an optax optimizer.
    dtype: the dtype of the computation, the target's own: 'float32' or
      'bfloat16'.

  Raises:
    ValueError: nothing is trained.
  """
  master = lambda x: jnp.array(matrices.dense(x, jnp.float32), copy=True)
  # A packed matrix is one parameter: a single None replaces it too.
  is_leaf = packed.is_packed
  is_trained = jax.tree.map(
    lambda own: own.values if is_leaf(own) else own, is_trained, is_leaf=is_leaf
  )
  trained = jax.tree.map(
    lambda x, own: master(x) if own else None,
    params,
    is_trained,
    is_leaf=is_leaf,
  )
  frozen = freeze(
    jax.tree.map(
      lambda x, own: None if own else x, params, is_trained, is_leaf=is_leaf
    ),
    dtype,
  )
  if not jax.tree.leaves(trained):
    raise ValueError(
      'is_trained is False for every parameter: say which parameters to train'
    )
  state = TrainState(
    step=jnp.zeros((), jnp.int32),
    trained=trained,
    optimizer=optimizer.init(trained),
  )
  return state, frozen


def freeze(params: Params, dtype: str) -> Params:
  """Returns parameters as `frozen` holds them: floats are cast to `dtype`."""

  def cast(path, x):
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    if not is_float or _keeps_dtype(path) or x.dtype == dtype:
      return x
    return matrices.dense(x, dtype)

  return jax.tree_util.tree_map_with_path(
    cast, params, is_leaf=packed.is_packed
  )


def join(trained: Params, frozen: Params, dtype: Any = None) -> Params:
  """Returns the whole tree; the trained part is cast to `dtype` if given."""
  keep = lambda path: dtype is None or _keeps_dtype(path)
  cast = lambda path, x: x if keep(path) else x.astype(dtype)
  return jax.tree_util.tree_map_with_path(
    lambda path, x, y: y if x is None else cast(path, x),
    trained,
    frozen,
    is_leaf=lambda x: x is None,
  )


def _keeps_dtype(path):
  """Returns whether a parameter stays float32 in any compute dtype."""
  if not all(isinstance(entry, jax.tree_util.DictKey) for entry in path):
    return True  # the scale of an int8 matrix
  return tensors.is_of_router(tensors.key(path))


@functools.partial(
  jax.jit,
  static_argnames=(
    'objective',
    'optimizer',
    'dtype',
    'num_parts',
    'num_learned',
  ),
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
  num_parts: int = 1,
  num_learned: Callable[[Batch], Array] = num_tokens,
) -> tuple[TrainState, dict[str, Array]]:
  """Takes one step down the gradient of `objective`.

  A step whose loss, gradient or update is NaN or infinite changes only the step
  count.

  Args:
    state: from `init` or the previous step. Its buffers are donated.
    frozen: from `init`.
    batch: the input of the objective.
    objective, optimizer: static; the same objects in every step.
    dtype: as in `init`.
    num_parts: the number of parts of the rows over which the gradient is
      accumulated, which takes less memory. It must divide the rows, and on a
      mesh those of each device.
    num_learned: what a part counts by: `num_learned` of an `Objective`. This is
      exact for a mean over them. For a mean over some of them, such as those in
      a draft vocabulary, it is close.

  Raises:
    ValueError: `num_parts` does not divide the rows of each device.

  Returns:
    The state, and the objective's report with `loss`, `gradient_norm` and
    `is_finite`, whether the step was taken.
  """

  def loss_of(trained, batch):
    return objective(join(trained, frozen, dtype), batch)

  (loss, report), gradient = _accumulated(
    jax.value_and_grad(loss_of, has_aux=True),
    state.trained,
    batch,
    num_parts,
    num_learned,
  )
  squares = (jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradient))
  norm = jnp.sqrt(sum(squares))
  updates, optimizer_state = optimizer.update(
    gradient, state.optimizer, state.trained
  )
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


def _accumulated(function, trained, batch, num_parts, num_learned):
  """Returns function(trained, batch), as the mean over parts of the rows."""
  if num_parts == 1:
    return function(trained, batch)
  num_rows, num_devices = len(batch['mask']), sharding.batch_parts()
  if num_rows % (num_parts * num_devices):
    raise ValueError(
      f'num_parts is {num_parts}, but the batch has {num_rows} rows on '
      f'{num_devices} devices: give a divisor of the rows of each'
    )
  # Row i is in part i % num_parts: on a mesh, no row changes its device.
  shape = (num_rows // num_parts, num_parts)
  part = lambda x: jnp.moveaxis(
    sharding.reshape(x, (*shape, *x.shape[1:]), 'batch', *[None] * x.ndim),
    1,
    0,
  )
  parts = jax.tree.map(part, dict(batch))
  weights = jax.lax.map(num_learned, parts).astype(jnp.float32)
  shares = weights / jnp.maximum(jnp.sum(weights), 1e-9)

  def add(sums, given):
    part, share = given
    found = function(trained, part)
    return jax.tree.map(lambda x, new: x + share * new, sums, found), None

  first = jax.tree.map(lambda x: x[0], parts)
  loss, _ = jax.eval_shape(function, trained, first)
  nothing = lambda x: jnp.zeros(x.shape, jnp.result_type(x, jnp.float32))
  sums = jax.tree.map(nothing, loss), jax.tree.map(jnp.zeros_like, trained)
  return jax.lax.scan(add, sums, (parts, shares))[0]
