"""A small automaton, for tests and enumeration."""

import dataclasses

import jax.numpy as jnp

from specsample.types import Array


@dataclasses.dataclass(frozen=True)
class OneForbidden:
  """An `Automaton` of three states that forbids one token in each.

  Which token depends on all tokens before it, and on their order.
  """

  vocab_size: int

  def start(self) -> int:
    return 0

  def advance(self, state: Array, token: Array) -> Array:
    return (2 * state + token) % 3

  def allowed(self, state: Array) -> Array:
    return jnp.arange(self.vocab_size) != state % self.vocab_size
