"""How long rows decode plainly before drafts are tried again."""

import jax.numpy as jnp

from specsample import types
from specsample.types import Array


@types.pytree
class Wait:
  """The wait of a row; it doubles each time that a try is in vain."""

  rounds: Array  # [] int32, until drafts are tried again
  patience: Array  # [] int32, the next wait if a try is in vain


def check(patience: int, most_patience: int) -> None:
  """Raises ValueError unless patience <= most_patience."""
  if patience > most_patience:
    raise ValueError(
      f'patience is {patience} and most_patience {most_patience}: give a '
      'most_patience of at least patience'
    )


def init(patience: int) -> Wait:
  """Returns the state in which drafts are tried at once."""
  return Wait(rounds=jnp.int32(0), patience=jnp.int32(patience))


def update(
  wait: Wait,
  *,
  tried: Array,
  in_vain: Array,
  is_plain: Array,
  patience: int,
  most_patience: int,
) -> Wait:
  """Returns the state after a round.

  Args:
    wait: the state before it.
    tried: [] bool, whether something was to be drafted.
    in_vain: [] bool, whether nothing was gained by it.
    is_plain: [] bool, whether plain decoding now promises the most.
    patience: rounds until the first new try.
    most_patience: the longest wait.
  """
  longer = jnp.minimum(2 * wait.patience, most_patience)
  after_try = jnp.where(in_vain & is_plain, longer, patience)
  wait_now = jnp.where(in_vain, wait.patience, patience)
  rounds = jnp.where(tried, wait_now, wait.rounds - 1)
  return Wait(
    rounds=jnp.where(is_plain, rounds, 0),
    patience=jnp.where(tried, after_try, wait.patience),
  )
