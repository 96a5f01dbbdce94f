"""Tokens and costs of rounds: speedups, predicted before anything is decoded.

A speedup is the tokens per round divided by the cost of a round in passes of
the target. Tokens follow from the acceptance rate (Leviathan et al.,
2211.17192); times, in seconds, are measured, or the minimum that a chip needs
(work.py).
"""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from specsample import checks


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
  """Returns the tokens per round if all drafts have the same acceptance rate.

  (1 - a^(K + 1)) / (1 - a), Leviathan et al., equation 1.

  Args:
    acceptance: a, of a draft after drafts that were all kept.
    num_draft_tokens: K, drafted in every round.

  Raises:
    ValueError: the acceptance is not a probability, or K is negative.
  """
  checks.share('acceptance', acceptance)
  checks.count('num_draft_tokens', num_draft_tokens, 0)
  return float(sum(acceptance**i for i in range(num_draft_tokens + 1)))


def expected_tokens_by_position(shares: Sequence[float]) -> float:
  """Returns the tokens per round, given the share of rounds that keep draft i.

  If every round drafts all K, it is 1 plus the sum of the shares of drafts
  1, 2, ... K. These are shares of all rounds, as in
  `stats.Stats.acceptance_by_position`, not of the rounds that kept the draft
  before.

  Raises:
    ValueError: a share is not a probability.
  """
  for share in shares:
    checks.share('a share', share)
  return 1.0 + float(sum(shares))


def implied_acceptance(tokens_per_round: float, num_draft_tokens: int) -> float:
  """Returns the acceptance rate that gives these tokens per round.

  This is the inverse of `expected_tokens`.

  Raises:
    ValueError: no acceptance rate gives as many tokens with K drafts, or K is
      below 1.
  """
  checks.count('num_draft_tokens', num_draft_tokens, 1)
  if not 1 <= tokens_per_round <= num_draft_tokens + 1:
    raise ValueError(
      f'tokens_per_round is {tokens_per_round}: a round of {num_draft_tokens} '
      f'draft tokens emits 1 to {num_draft_tokens + 1} tokens'
    )
  low, high = 0.0, 1.0
  for _ in range(60):  # bisection down to the last bit
    middle = (low + high) / 2
    if expected_tokens(middle, num_draft_tokens) < tokens_per_round:
      low = middle
    else:
      high = middle
  return high


def implied_tokens(round_seconds: float, seconds_per_token: float) -> float:
  """Returns the tokens per round from two times: how many fit into a round.

  For a round of K passes of the drafter and one of the target, this is what the
  times of Chen et al., 2302.01318, table 1, imply about their acceptance rate.
  """
  return round_seconds / seconds_per_token


def speedup(
  tokens_per_round: float, *, round_seconds: float, pass_seconds: float
) -> float:
  """Returns the speedup over a pass of the target for every token.

  Args:
    tokens_per_round: tokens per round of one row.
    round_seconds: time of a round: drafting, the target's pass over the drafts
      and the rest.
    pass_seconds: time of a pass of the target over one token; both times are
      for a batch.
  """
  return tokens_per_round * pass_seconds / round_seconds


def leviathan_speedup(
  acceptance: float, num_draft_tokens: int, cost_ratio: float
) -> float:
  """Returns the speedup of Leviathan et al., theorem 3.8.

  (1 - a^(K + 1)) / ((1 - a)(Kc + 1)). The target is assumed to take as long
  over K + 1 tokens as over one.

  Args:
    acceptance: a, the acceptance rate.
    num_draft_tokens: K, their gamma.
    cost_ratio: c, the time of a drafter's pass over that of a target's pass.

  Raises:
    ValueError: a value is out of range.
  """
  return memory_bound_speedup(
    expected_tokens(acceptance, num_draft_tokens), num_draft_tokens, cost_ratio
  )


def best_num_draft_tokens(
  acceptance: float, cost_ratio: float, *, most: int = 64
) -> int:
  """Returns the K of the largest `leviathan_speedup`; 0 if no draft pays.

  K is at most `most`; see their section 3.5. Drafting pays at all if a > c
  (corollary 3.9). If the drafter costs nothing, the longest draft is best.
  """
  checks.count('most', most, 0)
  speedups = [
    leviathan_speedup(acceptance, k, cost_ratio) for k in range(most + 1)
  ]
  return int(np.argmax(speedups))


def memory_bound_speedup(
  tokens_per_round: float, num_draft_tokens: int, parameter_ratio: float
) -> float:
  """Returns MBSU, tau / (cK + 1): pass times are proportional to parameters.

  Goel et al., 2403.00858.

  Args:
    tokens_per_round: tau.
    num_draft_tokens: K, drafted one after the other.
    parameter_ratio: c, the drafter's parameters over the target's.

  Raises:
    ValueError: the ratio or K is negative.
  """
  checks.count('num_draft_tokens', num_draft_tokens, 0)
  if not 0 <= parameter_ratio < math.inf:
    raise ValueError(
      f"the drafter's cost is {parameter_ratio} times the target's: give a "
      'ratio of at least 0'
    )
  return speedup(
    tokens_per_round,
    round_seconds=num_draft_tokens * parameter_ratio + 1,
    pass_seconds=1,
  )


@dataclasses.dataclass(frozen=True)
class PassTimes:
  """The time t(n) in seconds of a pass over n tokens, measured for some n.

  `python -m experiments.benchmark` measures them.
  """

  tokens: tuple[int, ...]  # increasing
  seconds: tuple[float, ...]

  def __post_init__(self):
    """Refuses a malformed table."""
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
    """Returns t(n), interpolated linearly between measurements."""
    low, high = self.tokens[0], self.tokens[-1]
    if not low <= num_tokens <= high:
      raise ValueError(
        f'a pass over {num_tokens} tokens was asked for, but only {low} to '
        f'{high} tokens were measured: measure that many too'
      )
    return float(np.interp(num_tokens, self.tokens, self.seconds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
  """A round with a chain of drafts for every row of a batch, by its parts."""

  tokens_per_round: float  # of a row
  draft_seconds: float  # of all K drafts
  verify_seconds: float  # the target's pass over batch * (K + 1) tokens
  overhead_seconds: float = 0.0
  pass_seconds: float  # the target's pass over a token of each row

  @property
  def seconds(self) -> float:
    """The time of the whole round."""
    return self.draft_seconds + self.verify_seconds + self.overhead_seconds

  @property
  def seconds_per_token(self) -> float:
    """The mean time that a row waits for a token."""
    return self.seconds / self.tokens_per_round

  @property
  def speedup(self) -> float:
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
  """Returns the round of K drafter steps and a target pass (Chen et al.).

  Args:
    target: t(n), for at least n = batch and n = batch * (K + 1).
    tokens_per_round: tokens per round of one row.
    num_draft_tokens: K.
    draft_seconds: time of a step of the drafter, for all rows.
    overhead_seconds: time of the rest of a round.
    batch: B; rows that are done are assumed to be refilled at once.
  """
  checks.count('num_draft_tokens', num_draft_tokens, 0)
  checks.count('batch', batch, 1)
  return Round(
    tokens_per_round=tokens_per_round,
    draft_seconds=num_draft_tokens * draft_seconds,
    verify_seconds=target(batch * (num_draft_tokens + 1)),
    overhead_seconds=overhead_seconds,
    pass_seconds=target(batch),
  )


def width_of(num_drafts: int, widths: Sequence[int]) -> int:
  """Returns the width of the target's pass in a round of `num_drafts` drafts.

  Args:
    num_drafts: the drafts of the row that has the most in the batch.
    widths: increasing numbers of drafts, as in `Drafter`.

  Raises:
    ValueError: no width holds that many drafts.
  """
  for width in widths:
    if width >= num_drafts:
      return width
  raise ValueError(
    f'widths are {tuple(widths)}, but a round drafts up to {num_drafts} '
    f'tokens: make the last width at least {num_drafts}'
  )
