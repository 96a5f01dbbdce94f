"""Drafters that copy what followed the same tokens earlier.

Prompt lookup (Saxena, 2023) over the longest matching suffix; no parameters.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import settings
from specsample import tree
from specsample.drafter import Drafter
from specsample.drafters import fields
from specsample.types import Array, Draft, DraftKind

# Suffixes are compared token by token in an unrolled loop.
_LONGEST = 64


_Length = Annotated[
  int,
  settings.rule(
    lambda x: settings.is_count(x) and x <= _LONGEST,
    f'an integer from 1 to {_LONGEST}',
  ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Lookup(Drafter):
  """A drafter that compares suffixes of some lengths."""

  max_ngram: _Length = 4
  min_ngram: _Length = 2

  def _check(self):
    if self.min_ngram > self.max_ngram:
      raise ValueError(
        f'min_ngram is {self.min_ngram} and max_ngram {self.max_ngram}: they '
        'must satisfy min_ngram <= max_ngram'
      )

  @property
  def widths(self) -> tuple[int, ...]:
    """See `Drafter`: most rounds draft nothing."""
    return (0, self.num_draft_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ngram(_Lookup):
  """A drafter that continues the latest match of the longest repeated suffix.

  Suffixes of at most `max_ngram` tokens are compared. Nothing is drafted unless
  one of at least `min_ngram` tokens occurred before. A copy that reaches the
  end of the sequence continues into its own draft.
  """

  num_draft_tokens: fields.DraftLength

  def propose(self, params, draw, warp, tokens, length, state):
    del params, draw, warp
    drafted = jax.vmap(self._look_up)(tokens, length)
    return Draft(tokens=drafted, probs=None, kind=DraftKind.POINT_MASS), state

  def _look_up(self, tokens, length):
    copied, longest = longest_match(
      tokens, length, self.max_ngram, self.num_draft_tokens
    )
    return jnp.where(longest >= self.min_ngram, copied, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramTree(_Lookup):
  """A drafter that continues several matches with different first tokens.

  The tree has `num_branches` chains of `depth` tokens after the pending token.
  The longest matches come first, and among equal ones the latest.
  """

  num_branches: settings.Count
  depth: settings.Count

  @property
  def num_draft_tokens(self) -> int:
    """N, the number of nodes."""
    return self.num_branches * self.depth

  @property
  def topology(self) -> tree.Topology:
    """Chains that all begin at the pending token."""
    parents: list[int] = []
    for _ in range(self.num_branches):
      first = len(parents)
      parents += [0, *range(first + 1, first + self.depth)]
    return tree.Topology(tuple(parents))

  def propose(self, params, draw, warp, tokens, length, state):
    del params, draw, warp
    draft = Draft(
      tokens=jax.vmap(self._look_up)(tokens, length),
      probs=None,
      kind=DraftKind.POINT_MASS,
      parents=drafts.of_all_rows(self.topology.parents, tokens.shape[0]),
      depth=self.depth,
      num_children=self.topology.num_children,
    )
    return draft, state

  def _look_up(self, tokens, length):
    matched = _matches(tokens, length, self.max_ngram)
    branches = []
    for _ in range(self.num_branches):
      start, longest = _latest_of_longest(matched)
      copied = _copy_from(tokens, length, start, self.depth)
      branches.append(jnp.where(longest >= self.min_ngram, copied, -1))
      matched = jnp.where(tokens == tokens[start], 0, matched)
    return jnp.concatenate(branches)


def longest_match(
  tokens: Array, length: Array, max_ngram: int, count: int
) -> tuple[Array, Array]:
  """Continues the latest match of the longest repeated suffix.

  Args:
    tokens: [S] int32, one sequence.
    length: [] int32, how many of them are in use.
    max_ngram: how many tokens of the suffix are compared.
    count: how many tokens to return.

  Returns:
    The tokens [count], and the length of the match, [] int32; if it is 0, the
    tokens are meaningless.
  """
  start, longest = _latest_of_longest(_matches(tokens, length, max_ngram))
  return _copy_from(tokens, length, start, count), longest


def _matches(tokens: Array, length: Array, max_ngram: int) -> Array:
  """Counts the tokens before each position that equal the suffix, [S]."""
  positions = jnp.arange(tokens.size)
  matched = jnp.zeros(tokens.size, jnp.int32)
  agrees = (positions > 0) & (positions < length)
  for back in range(1, max_ngram + 1):
    earlier = jnp.roll(tokens, back)
    agrees &= (positions >= back) & (earlier == tokens[length - back])
    agrees &= length > back
    matched += agrees
  return matched


def _latest_of_longest(matched: Array) -> tuple[Array, Array]:
  """Returns the latest position [] of the longest match, and its length."""
  longest = jnp.max(matched)
  positions = jnp.arange(matched.size)
  return jnp.max(jnp.where(matched == longest, positions, 0)), longest


def _copy_from(tokens: Array, length: Array, start: Array, count: int) -> Array:
  """Repeats the tokens from `start` to `length` until there are [count]."""
  period = jnp.maximum(length - start, 1)
  return tokens[start + jnp.arange(count) % period]
