"""The rounds of a generation: every draft token, and what became of it."""

import dataclasses
from typing import Any

KEPT = 'kept'
REJECTED = 'rejected'
FALLS = 'falls'  # a token before it was not kept
NOT_TRIED = 'not tried'  # an earlier sibling was kept
PAST_THE_END = 'past the end'
# The fates of tokens that are shown struck through.
STRUCK = (REJECTED, FALLS)
# The columns that `numbers` fills, and what a legend says of them.
COLUMNS = ('drafter', 'target', 'keep')
LEGEND = (
  'drafter, target: the probability of a draft token where it was drawn and '
  'where it is judged, after temperature and truncation; in brackets, for a '
  "token that was chosen and not drawn, the drafter's own before these; keep: "
  'the probability that the rule keeps the token once it is tried'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """One draft token.

  Attributes:
    node: its number in the draft, from 1.
    parent: the node that it follows; 0 is the text so far.
    text: the token as text.
    draft_prob: its probability in the distribution that it was drawn from; None
      for a point mass.
    confidence: its probability under the drafter before warping, which no exact
      rule reads; None if the drafter has none.
    target_prob: its probability under the target.
    keep_prob: the probability with which the rule keeps it, once it is tried;
      None if it was not, or if noise shared with the drafter decides.
    fate: one of the constants above.
  """

  node: int
  parent: int
  text: str
  draft_prob: float | None
  confidence: float | None
  target_prob: float
  keep_prob: float | None
  fate: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Next:
  """The token that the target adds to the draft tokens that are kept.

  Attributes:
    text: the token as text.
    origin: 'correction', 'bonus' or 'plain', a `specsample.Origin`.
    prob: its probability in the distribution that it was drawn from; None at
      temperature 0, where nothing is drawn.
    source: that distribution, in words.
  """

  text: str
  origin: str
  prob: float | None
  source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
  """One round of a row; `next` is None if a draft token ends the text."""

  number: int
  candidates: tuple[Candidate, ...]
  next: Next | None


def from_json(value: dict[str, Any]) -> Round:
  """Returns a round, given what `dataclasses.asdict` made of it."""
  after = value['next']
  return Round(
    number=value['number'],
    candidates=tuple(Candidate(**one) for one in value['candidates']),
    next=None if after is None else Next(**after),
  )


def place(one: Round, candidate: Candidate) -> str:
  """Returns a candidate's number; in a tree, also what it follows."""
  is_tree = any(x.parent != x.node - 1 for x in one.candidates)
  node = f'{candidate.node}'
  return f'{node} after {candidate.parent}' if is_tree else node


def numbers(candidate: Candidate) -> tuple[str, str, str]:
  """Returns a candidate's probabilities as text, one per column."""
  drafter = candidate.draft_prob
  if drafter is None and candidate.confidence is not None:
    first = f'({_text(candidate.confidence)})'
  else:
    first = _text(drafter)
  return first, _text(candidate.target_prob), _text(candidate.keep_prob)


def sentence(after: Next) -> str:
  """Returns where the token after the kept ones is from, in words."""
  drawn = ''
  if after.prob is not None:
    drawn = f'drawn with probability {_text(after.prob)} from '
  return f'{after.origin}, {drawn}{after.source}'


def _text(prob: float | None) -> str:
  """Returns a probability with three digits; none of them is a mere 0.000."""
  if prob is None:
    return '-'
  return f'{prob:.0e}' if 0 < prob < 5e-4 else f'{prob:.3f}'
