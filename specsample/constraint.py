"""Constraints: which tokens may follow a text, by an automaton of your own.

`warp` applies the mask, so baseline, drafter and verifier see the same one.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sharding
from specsample import types
from specsample.types import Array


class Automaton(Protocol):
  """Says which tokens may come next, for one sequence.

  Implementations are hashable: frozen dataclasses, with eq=False if they hold
  arrays. The loop is compiled for each of them. A state is an int32 array, or a
  tree of them. Drafts may contain tokens that are not allowed, so `advance`
  must take any token in any state; what it returns then does not matter.
  """

  def start(self) -> Any:
    """Returns the state before the first new token, whatever the prompt."""

  def advance(self, state: Any, token: Array) -> Any:
    """Returns the state after one more token [] int32, of the same shapes."""

  def allowed(self, state: Any) -> Array:
    """Returns which tokens may come next, [V] bool."""


@types.pytree
class Constraint:
  """An automaton that every row's new tokens must follow."""

  automaton: Automaton = types.static()
  # The state before the first new token, one or one per row [B, ...]; None is
  # `automaton.start()`. Rows that start in different states can follow
  # different grammars.
  start: Any = None
  # The state after the tokens that a row has emitted; the loop sets it.
  state: Any = None

  def per_row(self, batch_size: int, vocab_size: int) -> 'Constraint':
    """Checks the automaton and gives each row its state: leaves [B, ...].

    Runs on the host; nothing is compiled.

    Raises:
      TypeError: the automaton is not hashable.
      ValueError: the mask does not have one bool per token, or a state does not
        have the shapes of `automaton.start()`.
    """
    try:
      hash(self.automaton)
    except TypeError as error:
      raise TypeError(
        f'{type(self.automaton).__name__} is not hashable: make it a frozen '
        'dataclass, with eq=False if it holds arrays'
      ) from error
    automaton: Any = self.automaton  # hashable, as was just seen
    own = _checked_start(automaton, vocab_size)
    given = own if self.start is None else self.start
    structure: Any = jax.tree.structure(given)
    if structure != jax.tree.structure(own):
      raise ValueError(
        f'constraint.start is {given!r}: give a state like '
        f'{jax.tree.map(np.ndarray.tolist, own)!r}, which '
        f'{type(self.automaton).__name__}.start returns, or an array of one '
        'for each row'
      )
    rows = jax.tree.map(
      lambda like, x: _broadcast(x, (batch_size, *like.shape)), own, given
    )
    return dataclasses.replace(self, start=rows, state=rows)

  def after(self, tokens: Array) -> 'Constraint':
    """Returns one row's constraint after tokens [n]; -1 is skipped."""

    def advance(state, token):
      token_id = jnp.maximum(token, 0)
      new = sharding.inferred(self.automaton.advance, state, token_id)
      pick = lambda new, old: jnp.where(token >= 0, new, old)
      return jax.tree.map(pick, _int32(new), state), None

    state, _ = jax.lax.scan(advance, self._now(), tokens)
    return dataclasses.replace(self, state=state)

  def mask(self, drafted: Array) -> Array:
    """Returns which tokens [V] may follow one row's draft tokens [n]."""
    now = self.after(drafted)._now()
    return sharding.inferred(self.automaton.allowed, now)

  def restarted(self, is_new: Array) -> 'Constraint':
    """Returns one row's constraint, at its start if is_new [] is set."""
    pick = lambda start, state: jnp.where(is_new, start, state)
    state = jax.tree.map(pick, self.start, self.state)
    return dataclasses.replace(self, state=state)

  def _now(self) -> Any:
    state = self.start if self.state is None else self.state
    return _int32(self.automaton.start() if state is None else state)


def _int32(state):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), state)


# Tracing takes a while, and jobs of a refilled batch share an automaton.
@functools.lru_cache(maxsize=64)
def _checked_start(automaton: Any, vocab_size: int) -> Any:
  """Returns the start on the host, if the mask and the states fit."""
  name = type(automaton).__name__
  with jax.ensure_compile_time_eval():
    start = jax.device_get(_int32(automaton.start()))
  mask = jax.eval_shape(automaton.allowed, start)
  if mask.shape != (vocab_size,) or mask.dtype != bool:
    raise ValueError(
      f'{name}.allowed returns {mask.dtype} of shape {mask.shape}: return bool '
      f'of shape ({vocab_size},), one per token of the vocabulary'
    )
  token = jax.ShapeDtypeStruct((), jnp.int32)
  after = jax.eval_shape(lambda *x: _int32(automaton.advance(*x)), start, token)
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  if shapes(after) != shapes(start):
    raise ValueError(
      f'{name}.advance returns a state of shapes {shapes(after)}: return the '
      f'shapes that {name}.start does, {shapes(start)}'
    )
  return start


def _broadcast(value: Any, shape: tuple[int, ...]) -> Any:
  xp = jnp if isinstance(value, jax.core.Tracer) else np
  given = xp.asarray(value)
  try:
    if given.dtype.kind not in 'iu':
      raise ValueError(given.dtype)
    return xp.broadcast_to(given, shape).astype(np.int32)
  except ValueError as error:
    raise ValueError(
      f'constraint.start is {given.dtype} of shape {given.shape}: give '
      f'integers of shape {shape[1:]}, or one state per row, {shape}'
    ) from error
