"""The rounds of a decode: every draft token, and what became of it.

All numbers are those with which the round itself was decoded: the distributions
after warping, from the same pass. Nothing is computed a second time.
"""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import methods as methods_lib
from experiments.decoding import setup as setup_lib
import specsample
from specsample import indexing
from specsample import sharding
from specsample import stopping
from specsample import text as text_lib
from specsample.loop import step as step_lib
from specsample.types import DecodeState, Verifier
from specsample.verify import rule

KEPT = 'kept'
REJECTED = 'rejected'
FALLS = 'falls'  # a token before it was not kept
NOT_TRIED = 'not tried'  # an earlier sibling was kept
PAST_THE_END = 'past the end'
# The fates of tokens that are shown struck through.
STRUCK = (REJECTED, FALLS)
# The rules that draw a correction from the textbook's residual distribution.
_OF_RESIDUAL = ('chain', 'tree')
# The columns of probabilities in `cells`, and what a legend says of them.
COLUMNS = ('drafter', 'target', 'keep')
LEGEND = (
  'drafter, target: the probability of a draft token where it was drawn and '
  'where it is judged, after temperature and truncation; in brackets, for a '
  "token that was chosen and not drawn, the drafter's own before these; keep: "
  'the probability that the rule keeps the token once it is tried'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """One draft token, with its probabilities."""

  node: int  # its number in the draft, from 1
  parent: int  # the node that it follows; 0 is the text so far
  text: str
  # In the distribution that it was drawn from; None for a point mass.
  draft_prob: float | None
  # Under the drafter before warping, which no exact rule reads, if known.
  confidence: float | None
  target_prob: float
  # That the rule keeps it, once it is tried; None if it was not, or if noise
  # shared with the drafter decides.
  keep_prob: float | None
  fate: str  # one of the constants above


@dataclasses.dataclass(frozen=True, kw_only=True)
class Next:
  """The token that the target adds to the draft tokens that are kept."""

  text: str
  origin: str  # 'correction', 'bonus' or 'plain', a `specsample.Origin`
  # In the distribution that it was drawn from; None at temperature 0, where
  # nothing is drawn.
  prob: float | None
  source: str  # that distribution, in words


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


def cells(one: Round) -> list[tuple[str, ...]]:
  """Returns the texts of each candidate: place, `COLUMNS`, and fate.

  The place is the node's number; in a tree, also what it follows.
  """
  is_tree = any(x.parent != x.node - 1 for x in one.candidates)
  found: list[tuple[str, ...]] = []
  for x in one.candidates:
    place = f'{x.node} after {x.parent}' if is_tree else f'{x.node}'
    drafter = _number(x.draft_prob)
    if x.draft_prob is None and x.confidence is not None:
      drafter = f'({_number(x.confidence)})'
    found.append(
      (place, drafter, _number(x.target_prob), _number(x.keep_prob), x.fate)
    )
  return found


def sentence(after: Next) -> str:
  """Returns where the token after the kept ones is from, in words."""
  drawn = ''
  if after.prob is not None:
    drawn = f'drawn with probability {_number(after.prob)} from '
  return f'{after.origin}, {drawn}{after.source}'


def _number(prob: float | None) -> str:
  """Returns a probability with three digits; none of them is a mere 0.000."""
  if prob is None:
    return '-'
  return f'{prob:.0e}' if 0 < prob < 5e-4 else f'{prob:.3f}'


def step(
  setup: setup_lib.Setup, state: DecodeState
) -> tuple[dict[str, Any], DecodeState]:
  """Runs one round; returns what `of_row` reads, and the state after it.

  The first result has an axis of rows. The state is donated.
  """
  stop = stopping.placed(setup.stop, setup.target.model)
  return _step(setup.decoder, setup.params, state, stop)


@functools.partial(jax.jit, static_argnames='decoder', donate_argnames='state')
def _step(decoder, params, state, stop):
  number = state.round
  observed, state = step_lib.step(decoder, params, state, stop)
  of_row = functools.partial(_row, verify=decoder.verify)
  last = (state.length - 1)[:, None]
  found = jax.vmap(of_row)(observed) | {
    'number': number,
    'origin': jnp.take_along_axis(state.origin, last, axis=1)[:, 0],
    'is_greedy': state.sampling.temperature == 0,
  }
  return sharding.replicate(found), state


def _row(observed: step_lib.Round, verify: Verifier) -> dict[str, Any]:
  """Returns what is shown of a round of one row, without a vocabulary axis."""
  draft, verdict = observed.draft, observed.verdict
  signals = draft.signals
  num_nodes = draft.tokens.size
  path = verdict.path
  if path is None:
    path = jnp.arange(num_nodes) + 1
  is_kept = jnp.arange(path.size) < verdict.num_accepted
  # Nodes come after their parents.
  node = jnp.max(jnp.where(is_kept, path, 0), initial=0)
  of_drawn = None
  if draft.probs is not None:
    of_drawn = rule.of_tokens(draft.probs, draft.tokens)
  stop, next_probs = None, observed.target_probs
  if not verify.positional:
    law = verify.law(draft, observed.target_probs)
    stop, next_probs = law.stop, law.next
  next_row = indexing.row(next_probs, node, None)
  return {
    'tokens': draft.tokens,
    'parents': rule.parents(draft),
    'draft_probs': of_drawn,
    'confidence': None if signals is None else jnp.exp(signals.log_prob),
    'target_probs': rule.of_children(observed.target_probs, draft),
    'is_kept': jnp.any(
      is_kept & (path == 1 + jnp.arange(num_nodes)[:, None]), axis=1
    ),
    'stop': stop,
    'node': node,
    'has_next': observed.num_emitted > verdict.num_accepted,
    'has_round': observed.num_emitted > 0,
    'next_token': verdict.next_token,
    'next_prob': indexing.pick(next_row, verdict.next_token),
  }


def of_row(
  setup: setup_lib.Setup, found: dict[str, Any], row: int
) -> list[Round]:
  """Returns a row's round as [round], or [] if the row was done before.

  `found` is the first result of `step`.
  """
  one = jax.tree.map(lambda x: np.asarray(x[row]), jax.device_get(found))
  if not one['has_round']:
    return []
  after = None
  if one['has_next']:
    origin = specsample.Origin(int(one['origin']))
    after = Next(
      text=_text(setup.target.tokenizer, one['next_token']),
      origin=origin.name.lower(),
      prob=None if one['is_greedy'] else float(one['next_prob']),
      source=_source(one, origin, setup.method.verify),
    )
  return [
    Round(
      number=int(one['number']) + 1,
      candidates=tuple(_candidates(one, setup.target.tokenizer)),
      next=after,
    )
  ]


def _candidates(one, tokenizer) -> Iterator[Candidate]:
  keep_probs = _keep_probs(one['stop'], one['parents'])
  fates = _fates(one)
  number = lambda name, i: None if one[name] is None else float(one[name][i])
  for i in np.flatnonzero(one['tokens'] >= 0).tolist():
    yield Candidate(
      node=i + 1,
      parent=int(one['parents'][i]),
      text=_text(tokenizer, one['tokens'][i]),
      draft_prob=number('draft_probs', i),
      confidence=number('confidence', i),
      target_prob=float(one['target_probs'][i]),
      keep_prob=keep_probs[i] if fates[i] in (KEPT, REJECTED) else None,
      fate=fates[i],
    )


def _keep_probs(stop, parents) -> list[float | None]:
  """Returns how likely each node is to be kept once it is tried.

  That is the probability to end at the node or below it, as a share of that to
  end at its parent, at the node, at later siblings, or below these.
  """
  if stop is None:
    return [None] * len(parents)
  left = stop.astype(np.float64)
  shares: list[float | None] = [None] * len(parents)
  for i in reversed(range(len(parents))):
    below = left[i + 1]
    left[parents[i]] += below
    if left[parents[i]] > 0:
      shares[i] = float(below / left[parents[i]])
  return shares


def _fates(one) -> list[str]:
  fates: list[str] = []
  for i, parent in enumerate(one['parents'].tolist()):
    before = fates[parent - 1] if parent else KEPT
    is_last = parent == one['node'] and not one['has_next']
    siblings = [j for j in range(i) if one['parents'][j] == parent]
    if one['is_kept'][i]:
      fate = KEPT
    elif is_last or before == PAST_THE_END:
      fate = PAST_THE_END
    elif before != KEPT:
      fate = FALLS
    elif any(one['is_kept'][j] for j in siblings):
      fate = NOT_TRIED
    else:
      fate = REJECTED
    fates.append(fate)
  return fates


def _source(one, origin, verify) -> str:
  """Returns in words what the token after the kept drafts was drawn from."""
  node = int(one['node'])
  target = f'the target after {node or "the text so far"}'
  if origin == specsample.Origin.PLAIN:
    target = 'the target, as nothing was drafted'
  if one['is_greedy']:
    return f'the most likely token of {target}'
  if verify.positional:
    return f'{target}, with the noise shared with the drafter'
  if origin == specsample.Origin.BONUS:
    return f'{target}, where the draft ends'
  if origin == specsample.Origin.PLAIN:
    return target
  after = f'after {node or "the text so far"}'
  name = methods_lib.file_name(verify)
  if name in _OF_RESIDUAL:
    return f'(target - draft)+, normalised, {after}'
  return f'what verify.{name} leaves of the target {after}'


def _text(tokenizer, token) -> str:
  (text,) = text_lib.pieces(tokenizer, [int(token)], skip_special=False)
  return text
