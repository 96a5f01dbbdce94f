"""Recording of the rounds of a decode, for `rounds.Round`.

All numbers are those with which the round itself was decoded: the distributions
after warping, from the same pass. Nothing is computed a second time.
"""

from collections.abc import Iterator
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import methods as methods_lib
from experiments.decoding import rounds
from experiments.decoding import setup as setup_lib
import specsample
from specsample import indexing
from specsample import sharding
from specsample import text as text_lib
from specsample.loop import step as step_lib
from specsample.loop import stopping
from specsample.types import DecodeState, Params, Verifier
from specsample.verify import rule

# The rules that draw a correction from the textbook's residual distribution.
_OF_RESIDUAL = ('chain', 'tree')

# The results of one round of `step`, by name; batched.
Found = dict[str, Any]


def step(
  setup: setup_lib.Setup, state: DecodeState
) -> tuple[Found, DecodeState]:
  """Runs one round; returns what `of_row` reads, and the state after it.

  The state is donated.
  """
  stop = stopping.placed(setup.stop, setup.target.model)
  return _step(setup.params, state, **setup.components, stop=stop)


@functools.partial(
  jax.jit,
  static_argnames=('model', 'drafter', 'verify'),
  donate_argnames=('state',),
)
def _step(params: Params, state: DecodeState, **components):
  number = state.round
  observed, state = step_lib.step(params, state, **components)
  of_row = functools.partial(_row, verify=components['verify'])
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
    'log_confidence': None if signals is None else signals.log_prob,
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
  setup: setup_lib.Setup, found: Found, row: int
) -> list[rounds.Round]:
  """Returns one row's round as [round], or [] if the row was done before.

  Args:
    setup: what decoded it.
    found: the first result of `step`.
    row: its index in the batch.
  """
  one = jax.tree.map(lambda x: np.asarray(x[row]), jax.device_get(found))
  if not one['has_round']:
    return []
  after = None
  if one['has_next']:
    origin = specsample.Origin(int(one['origin']))
    after = rounds.Next(
      text=_text(setup.target.tokenizer, one['next_token']),
      origin=origin.name.lower(),
      prob=None if one['is_greedy'] else float(one['next_prob']),
      source=_source(one, origin, setup.method.verify),
    )
  return [
    rounds.Round(
      number=int(one['number']) + 1,
      candidates=tuple(_candidates(one, setup.target.tokenizer)),
      next=after,
    )
  ]


def _candidates(one, tokenizer) -> Iterator[rounds.Candidate]:
  keep_probs = _keep_probs(one['stop'], one['parents'])
  fates = _fates(one)
  number = lambda name, i: None if one[name] is None else float(one[name][i])
  for i in np.flatnonzero(one['tokens'] >= 0).tolist():
    confidence = number('log_confidence', i)
    yield rounds.Candidate(
      node=i + 1,
      parent=int(one['parents'][i]),
      text=_text(tokenizer, one['tokens'][i]),
      draft_prob=number('draft_probs', i),
      confidence=None if confidence is None else float(np.exp(confidence)),
      target_prob=float(one['target_probs'][i]),
      keep_prob=keep_probs[i]
      if fates[i] in (rounds.KEPT, rounds.REJECTED)
      else None,
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
    before = fates[parent - 1] if parent else rounds.KEPT
    is_last = parent == one['node'] and not one['has_next']
    siblings = [j for j in range(i) if one['parents'][j] == parent]
    if one['is_kept'][i]:
      fate = rounds.KEPT
    elif is_last or before == rounds.PAST_THE_END:
      fate = rounds.PAST_THE_END
    elif before != rounds.KEPT:
      fate = rounds.FALLS
    elif any(one['is_kept'][j] for j in siblings):
      fate = rounds.NOT_TRIED
    else:
      fate = rounds.REJECTED
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
