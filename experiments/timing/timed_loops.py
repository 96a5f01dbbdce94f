"""The compiled loops that are timed as parts of a round of decoding.

A loop has to do as often as a round what a round does: nothing may be left out
because nobody reads it, nor moved out of the loop because nothing changes it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from experiments import methods
from specsample import drafts
from specsample import sharding
from specsample.loop import step
from specsample.types import Draft, DraftLaw


@functools.partial(jax.jit, static_argnames=('width',))
def of_width(draft, *, width) -> Draft:
  """Returns a draft of the same shape with its first `width` nodes alone."""
  is_there = jnp.arange(draft.tokens.shape[1]) < width
  tokens = jnp.where(is_there, jnp.maximum(draft.tokens, 0), -1)
  return dataclasses.replace(draft, tokens=tokens)


@jax.jit
def most_drafts(draft):
  """Returns the width of the row with the most drafts, as `drafts.width`."""
  return sharding.replicate(jnp.max(drafts.width(draft)))


@jax.jit
def most_rounds(state):
  """Of the rows the most rounds, which all of them took in one loop."""
  return sharding.replicate(jnp.max(state.round))


@jax.jit
def num_by_drafts(state):
  """Counts the rounds of all rows that had 0, 1, ... drafts, [K + 1]."""
  return sharding.replicate(jnp.sum(state.proposed, axis=0))


@functools.partial(
  jax.jit,
  static_argnames=('model', 'drafter', 'verify'),
  donate_argnames=('state',),
)
def drafted_rounds(params, state, *, model, drafter, verify, rounds):
  """Drafts and passes over them: the state, and the last draft's shape."""
  components = {'model': model, 'drafter': drafter, 'verify': verify}
  abstract = methods.abstract_draft(params, state, **components)
  rows = lambda x: sharding.zeros(x.shape, x.dtype, 'batch', None)
  nothing = jax.tree.map(rows, _shape(abstract))
  kept = _kept(state, abstract)

  def body(_, carry):
    length, cache, draft_state, _ = carry
    # Heads read what no round here changes: else they would draft once, before
    # the loop.
    length, draft_state = jax.lax.optimization_barrier((length, draft_state))
    now = dataclasses.replace(
      state, length=length, cache=cache, draft=draft_state
    )
    draft, draft_state = step.propose(params, now, **components)
    cache, moved = _scored(params, now, draft, kept, model, drafter)
    # The next round has to wait for what was drawn from, too.
    if draft.probs is not None:
      moved |= jnp.any(draft.probs < 0, axis=(1, 2))
    return length + moved, cache, draft_state, _shape(draft)

  length, cache, draft_state, draft = jax.lax.fori_loop(
    0, rounds, body, (state.length, state.cache, state.draft, nothing)
  )
  state = dataclasses.replace(
    state, length=length, cache=cache, draft=draft_state
  )
  return state, draft


def _shape(draft: Draft) -> Draft:
  """A draft without its probabilities, and what only filters read."""
  return dataclasses.replace(
    draft, probs=None, law=DraftLaw.POINT_MASS, signals=None
  )


@functools.partial(
  jax.jit, static_argnames=('model', 'drafter'), donate_argnames=('state',)
)
def target_rounds(params, state, draft, *, model, drafter, rounds):
  """Passes of the target over a draft: the state."""
  kept = _kept(state, draft)

  def body(_, carry):
    length, cache = carry
    now = dataclasses.replace(state, length=length, cache=cache)
    cache, moved = _scored(params, now, draft, kept, model, drafter)
    return length + moved, cache

  length, cache = jax.lax.fori_loop(
    0, rounds, body, (state.length, state.cache)
  )
  return dataclasses.replace(state, length=length, cache=cache)


def _kept(state, draft) -> tuple:
  """What of a pass is committed, as `types.Model.commit` takes it: nothing, and
  of a tree a path, which is moved into place."""
  if draft.parents is None:
    return state.length - 1, None
  batch = state.length.shape[0]
  path = sharding.zeros((batch, draft.depth + 1), jnp.int32, 'batch', None)
  return state.length - 1, state.length[:, None] - 1 + path


def _scored(params, now, draft, kept, model, drafter):
  """The cache behind a pass, and what [B] the next one has to wait for.

  That is never true, but not known before all logits are; also of a pass
  without drafts, whose unembedding is left out where nothing depends on it.
  """
  output, cache = step.score(params, now, draft, model=model, drafter=drafter)
  moved = jnp.any(output.logits == jnp.inf, axis=(1, 2))
  return model.commit(cache, *kept), moved


@functools.partial(
  jax.jit, static_argnames=('width', 'model', 'drafter', 'verify')
)
def to_judge(params, state, draft, *, width, model, drafter, verify):
  """What a rule decides over: a draft, and distributions that are uniform.

  After a pass over `width` drafts: no more of a chain, all nodes of a tree.
  """
  abstract = methods.abstract_draft(
    params, state, model=model, drafter=drafter, verify=verify
  )
  batch, num_drafts = draft.tokens.shape
  probs = sharding.zeros(
    (batch, num_drafts + 1, model.vocab_size),
    jnp.float32,
    *('batch', None, sharding.Axis('vocab', model.vocab_size)),
  )
  probs += 1 / model.vocab_size
  own = None if abstract.probs is None else probs[:, 1:]
  draft = dataclasses.replace(draft, probs=own, law=abstract.law)
  if draft.parents is None:
    return drafts.first(draft, width), probs[:, : width + 1]
  return draft, probs


@functools.partial(jax.jit, static_argnames=('verify',))
def judged_rounds(state, draft, target_probs, *, verify, rounds):
  """Decisions of a rule over what `to_judge` gives: nothing of use."""

  def body(_, carry):
    # Nothing of a rule may be moved out of the loop, where it would be done
    # once.
    carry, *given = jax.lax.optimization_barrier((carry, draft, target_probs))
    length, round_ = carry
    now = dataclasses.replace(state, length=length, round=round_)
    verdict = step.judge(now, *given, verify)
    # Never true, as above.
    moved = (verdict.num_accepted < 0) | (verdict.next_token < 0)
    if verdict.path is not None:
      moved |= jnp.any(verdict.path < -1, axis=1)
    return length + moved, round_ + moved

  return jax.lax.fori_loop(0, rounds, body, (state.length, state.round))
