"""How long rows decode plainly before drafts are tried again."""

import dataclasses

import jax.numpy as jnp

from specsample import settings
from specsample import types
from specsample.policies import policy
from specsample.types import Array


@types.pytree
class Wait:
  """The wait of a row; it doubles each time that a try is in vain."""

  rounds: Array  # [] int32, until drafts are tried again
  patience: Array  # [] int32, the next wait if a try is in vain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patient(policy.Policy):
  """A policy that tries drafts again after a wait.

  Attributes:
    patience: rounds until the first new try.
    most_patience: upper bound of that wait as it doubles, in rounds.
  """

  patience: settings.Count
  most_patience: settings.Count = 256

  def _check(self):
    super()._check()
    if self.patience > self.most_patience:
      raise ValueError(
        f'patience is {self.patience} and most_patience {self.most_patience}: '
        'give a most_patience of at least patience'
      )

  def first_wait(self) -> Wait:
    """Returns the state in which drafts are tried at once."""
    return Wait(rounds=jnp.int32(0), patience=jnp.int32(self.patience))

  def wait_after(
    self, wait: Wait, *, tried: Array, in_vain: Array, is_plain: Array
  ) -> Wait:
    """Returns the state after a round.

    Args:
      wait: the state before it.
      tried: [] bool, whether something was to be drafted.
      in_vain: [] bool, whether nothing was gained by it.
      is_plain: [] bool, whether plain decoding now promises the most.
    """
    longer = jnp.minimum(2 * wait.patience, self.most_patience)
    after_try = jnp.where(in_vain & is_plain, longer, self.patience)
    wait_now = jnp.where(in_vain, wait.patience, self.patience)
    rounds = jnp.where(tried, wait_now, wait.rounds - 1)
    return Wait(
      rounds=jnp.where(is_plain, rounds, 0),
      patience=jnp.where(tried, after_try, wait.patience),
    )
