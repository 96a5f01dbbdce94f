"""What rounds bring and what they cost: speedups before anything is decoded.

A speedup is tokens a round over what a round costs in passes of the target.
Tokens follow from acceptance (Leviathan et al., 2211.17192); times, in seconds,
are measured, or the least that a chip needs (work.py).
"""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
  """Tokens a round where each draft is kept with the same probability.

  (1 - a^(K + 1)) / (1 - a), Leviathan et al., equation 1.

  Args:
    acceptance: a, of a draft behind drafts that were kept.
    num_draft_tokens: K, drafted in every round.

  Raises:
    ValueError: no probability, or a negative K.
  """
  _check_share('acceptance', acceptance)
  _check_count('num_draft_tokens', num_draft_tokens, 0)
  return float(sum(acceptance**i for i in range(num_draft_tokens + 1)))


def expected_tokens_by_position(shares: Sequence[float]) -> float:
  """Tokens a round from the share of rounds that keep draft 1, 2, ... K.

  One more than their sum, where every round drafts all K. These are shares of
  all rounds, as in `stats.Stats.acceptance_by_position`, not of the rounds that
  kept the draft before.

  Raises:
    ValueError: one of them is no probability.
  """
  for share in shares:
    _check_share('a share', share)
  return 1.0 + float(sum(shares))


def implied_acceptance(tokens_per_round: float, num_draft_tokens: int) -> float:
  """The acceptance at which `expected_tokens` are so many: its inverse.

  Raises:
    ValueError: no acceptance gives so many tokens with K drafts, K at least 1.
  """
  _check_count('num_draft_tokens', num_draft_tokens, 1)
  if not 1 <= tokens_per_round <= num_draft_tokens + 1:
    raise ValueError(
      f'tokens_per_round is {tokens_per_round}: with {num_draft_tokens} drafts '
      f'a round brings 1 to {num_draft_tokens + 1}'
    )
  low, high = 0.0, 1.0
  for _ in range(60):  # halvings, down to the last bit
    middle = (low + high) / 2
    if expected_tokens(middle, num_draft_tokens) < tokens_per_round:
      low = middle
    else:
      high = middle
  return high


def implied_tokens(round_seconds: float, seconds_per_token: float) -> float:
  """Tokens a round from the two times: how many fit into a round.

  With a round of K passes of the drafter and one of the target this is what the
  times of Chen et al., 2302.01318, table 1, say of their acceptance.
  """
  return round_seconds / seconds_per_token


def speedup(
  tokens_per_round: float, *, round_seconds: float, pass_seconds: float
) -> float:
  """How many times as fast as a pass of the target for every token.

  Args:
    tokens_per_round: of a row.
    round_seconds: drafting, the target's pass over the drafts and the rest.
    pass_seconds: a pass of the target over one token; both of a batch.
  """
  return tokens_per_round * pass_seconds / round_seconds


def leviathan_speedup(
  acceptance: float, num_draft_tokens: int, cost_ratio: float
) -> float:
  """(1 - a^(K + 1)) / ((1 - a)(Kc + 1)): Leviathan et al., theorem 3.8.

  Its target takes as long over K + 1 tokens as over one.

  Args:
    acceptance: a. num_draft_tokens: K, their gamma.
    cost_ratio: c, a pass of the drafter over one of the target.

  Raises:
    ValueError: a value is out of range.
  """
  return memory_bound_speedup(
    expected_tokens(acceptance, num_draft_tokens), num_draft_tokens, cost_ratio
  )


def best_num_draft_tokens(
  acceptance: float, cost_ratio: float, *, most: int = 64
) -> int:
  """The K of the largest `leviathan_speedup`, up to `most`; 0 if none pays.

  Their section 3.5. It pays to draft at all where a > c (corollary 3.9). A
  drafter that costs nothing is best as long as it may be.
  """
  _check_count('most', most, 0)
  speedups = [
    leviathan_speedup(acceptance, k, cost_ratio) for k in range(most + 1)
  ]
  return int(np.argmax(speedups))


def memory_bound_speedup(
  tokens_per_round: float, num_draft_tokens: int, parameter_ratio: float
) -> float:
  """MBSU, tau / (cK + 1): a pass takes as long as its weights are many.

  Goel et al., 2403.00858.

  Args:
    tokens_per_round: tau. num_draft_tokens: K, one after the other.
    parameter_ratio: c, the drafter's parameters over the target's.

  Raises:
    ValueError: a negative ratio or K.
  """
  _check_count('num_draft_tokens', num_draft_tokens, 0)
  if not 0 <= parameter_ratio < math.inf:
    raise ValueError(
      f'the drafter costs {parameter_ratio} of the target: give a ratio of at '
      'least 0'
    )
  return speedup(
    tokens_per_round,
    round_seconds=num_draft_tokens * parameter_ratio + 1,
    pass_seconds=1,
  )


@dataclasses.dataclass(frozen=True)
class PassTimes:
  """t(n): the seconds of a pass over n tokens, measured for some n.

  `python -m experiments.benchmark` measures them.
  """

  tokens: tuple[int, ...]  # increasing
  seconds: tuple[float, ...]

  def __post_init__(self):
    """Refuses what is no table."""
    if (
      len(self.tokens) != len(self.seconds)
      or not self.tokens
      or any(b <= a for a, b in zip(self.tokens, self.tokens[1:], strict=False))
      or not all(0 < x < math.inf for x in self.seconds)
    ):
      raise ValueError(
        f'tokens are {self.tokens} and seconds {self.seconds}: give increasing '
        'numbers of tokens, and a time for each'
      )

  def __call__(self, num_tokens: int) -> float:
    """t(n), on the line between its neighbours.

    Raises:
      ValueError: n lies outside of what was measured.
    """
    low, high = self.tokens[0], self.tokens[-1]
    if not low <= num_tokens <= high:
      raise ValueError(
        f'a pass over {num_tokens} tokens is asked for, and {low} to {high} '
        'were measured: measure that many too'
      )
    return float(np.interp(num_tokens, self.tokens, self.seconds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
  """A round of a chain of drafts for every row of a batch, by its parts."""

  tokens_per_round: float  # of a row
  draft_seconds: float  # of all K drafts
  verify_seconds: float  # the target's pass over batch * (K + 1) tokens
  overhead_seconds: float = 0.0
  pass_seconds: float  # the target's pass over a token of each row

  @property
  def seconds(self) -> float:
    """Of the round."""
    return self.draft_seconds + self.verify_seconds + self.overhead_seconds

  @property
  def seconds_per_token(self) -> float:
    """What a row waits for a token."""
    return self.seconds / self.tokens_per_round

  @property
  def speedup(self) -> float:
    """See `speedup`."""
    return speedup(
      self.tokens_per_round,
      round_seconds=self.seconds,
      pass_seconds=self.pass_seconds,
    )


def chain_round(
  target: PassTimes,
  *,
  tokens_per_round: float,
  num_draft_tokens: int,
  draft_seconds: float,
  overhead_seconds: float = 0.0,
  batch: int = 1,
) -> Round:
  """K steps of a drafter, then one pass of the target, as Chen et al.'s loop.

  Args:
    target: t(n), for n = batch and n = batch * (K + 1) at least.
    tokens_per_round: of a row.
    num_draft_tokens: K.
    draft_seconds: a step of the drafter, for all rows.
    overhead_seconds: the rest of a round.
    batch: B; rows that are done are taken to be refilled at once.
  """
  _check_count('num_draft_tokens', num_draft_tokens, 0)
  _check_count('batch', batch, 1)
  return Round(
    tokens_per_round=tokens_per_round,
    draft_seconds=num_draft_tokens * draft_seconds,
    verify_seconds=target(batch * (num_draft_tokens + 1)),
    overhead_seconds=overhead_seconds,
    pass_seconds=target(batch),
  )


def width_of(num_drafts: int, widths: Sequence[int]) -> int:
  """Returns the width of the target's pass in a round of so many drafts.

  Args:
    num_drafts: of a batch, the drafts of the row that has the most.
    widths: rising numbers of drafts, as `types.Drafter` has them.

  Raises:
    ValueError: no width holds so many drafts.
  """
  for width in widths:
    if width >= num_drafts:
      return width
  raise ValueError(
    f'widths are {tuple(widths)}, and a round has {num_drafts} drafts: let the '
    'last width hold the longest draft'
  )


def mixed_round(
  target: PassTimes,
  *,
  shares: Sequence[float],
  acceptance: float,
  widths: Sequence[int],
  draft_seconds: float = 0.0,
  overhead_seconds: float = 0.0,
  batch: int = 1,
) -> Round:
  """Returns the mean round of a drafter that does not always draft K tokens.

  The target reads the first width that holds the drafts of every row. Rows are
  assumed to draft independently of each other, and a draft to be kept with the
  same probability in every round.

  Args:
    target: t(n), for n = batch and n = batch * (w + 1) for each width w.
    shares: [K + 1], the shares of a row's rounds that draft 0, 1, ... K tokens:
      `stats.Stats.proposed` over `rounds`.
    acceptance: a, as `expected_tokens` takes it.
    widths: rising numbers of drafts that end with K, as `width_of` takes them.
    draft_seconds: a step of the drafter, for all rows; a round has as many as
      the row with the most drafts.
    overhead_seconds: the rest of a round, a lookup that may find nothing too.
    batch: B.

  Raises:
    ValueError: the shares are no distribution, the widths do not rise to K, the
      acceptance is no probability, or a time was not measured.
  """
  for share in shares:
    _check_share('a share', share)
  if not math.isclose(sum(shares), 1, abs_tol=1e-6):
    raise ValueError(
      f'shares are {tuple(shares)}, with sum {sum(shares)}: give one for each '
      'number of drafts from 0 to K, with sum 1'
    )
  lengths = range(len(shares))
  if sorted({*widths} & {*lengths}) != [*widths] or lengths[-1] not in widths:
    raise ValueError(
      f'widths are {tuple(widths)}: give rising numbers of drafts from 0 to '
      f'{lengths[-1]}, the last one {lengths[-1]}'
    )
  _check_count('batch', batch, 1)
  # The chance that no row drafts more than 0, 1, ... K tokens.
  at_most = np.cumsum(shares) ** batch
  of_batch = np.diff(at_most, prepend=0)
  tokens = [expected_tokens(acceptance, length) for length in lengths]
  passes = [target(batch * (width_of(i, widths) + 1)) for i in lengths]
  return Round(
    tokens_per_round=float(np.dot(shares, tokens)),
    draft_seconds=draft_seconds * float(np.dot(of_batch, lengths)),
    verify_seconds=float(np.dot(of_batch, passes)),
    overhead_seconds=overhead_seconds,
    pass_seconds=target(batch),
  )


def _check_share(name, share):
  if not 0 <= share <= 1:
    raise ValueError(f'{name} is {share}: give a probability, 0 to 1')


def _check_count(name, count, least):
  if count < least or count != int(count):
    raise ValueError(f'{name} is {count}: give an integer of at least {least}')
