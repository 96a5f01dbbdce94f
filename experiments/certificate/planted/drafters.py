"""Drafters with one mistake each."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from experiments.certificate.planted import loop
from specsample import drafts
from specsample import sampling as sampling_lib
from specsample import types
from specsample.drafter import Drafter
from specsample.drafters import dflash
from specsample.drafters import dflash_network
from specsample.drafters import wrapper
from specsample.models import cache
from specsample.sampling import Sampling
from specsample.testing.hash_model import HashModel
from specsample.types import Array, Draft, DraftKind, Params, Warp

# Turns the warp that the loop gives into another one.
Rewarp = Callable[[Warp], Warp]
# A draft whose drawn tokens promise fewer kept tokens is not handed over.
_LEAST = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper(wrapper.Wrapper):
  """A drafter that forwards everything; each mistake is an override."""

  drafter: Any  # a Drafter

  def propose(self, params, draw, warp, tokens, length, state) -> Any:
    return self.drafter.propose(params, draw, warp, tokens, length, state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed(Wrapper):
  """A drafter whose draft is changed before it is handed over."""

  change: Callable[[Draft], Draft]

  def propose(self, params, draw, warp, tokens, length, state):
    draft, state = super().propose(params, draw, warp, tokens, length, state)
    return self.change(draft), state


@types.pytree
class _With:
  """The state of a wrapped drafter, with arrays of the wrapper's own."""

  inner: types.DrafterState
  own: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stateful(Wrapper):
  """A wrapper that begins with the arrays that `begin` returns."""

  def begin(self, batch_size: int, max_length: int) -> Any:
    raise NotImplementedError

  def init(self, params, batch_size, max_length):
    inner = super().init(params, batch_size, max_length)
    return _With(inner=inner, own=self.begin(batch_size, max_length))

  def observe(self, params, tokens, count, output, verdict, state):
    inner = super().observe(params, tokens, count, output, verdict, state.inner)
    return dataclasses.replace(state, inner=inner)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Misdeclared(Wrapper):
  """Draws from one distribution and tells the verifier of another."""

  drawn: Rewarp = lambda warp: warp
  declared: Rewarp = lambda warp: warp

  def propose(self, params, draw, warp, tokens, length, state):
    drawn, _ = self.drafter.propose(
      params, draw, self.drawn(warp), tokens, length, state
    )
    return self.drafter.propose(
      params,
      repeat(drawn.tokens, length),
      self.declared(warp),
      tokens,
      length,
      state,
    )


def raw(warp: Warp) -> Warp:
  """Returns a warp that is the softmax of the unprocessed logits."""
  del warp
  return _warp(Sampling(temperature=1.0))


def from_bfloat16(warp: Warp) -> Warp:
  """Returns the loop's warp, applied to logits rounded to bfloat16."""
  return lambda logits, drafted: warp(logits.astype(jnp.bfloat16), drafted)


def argmax(warp: Warp) -> Warp:
  """Returns a warp that puts all mass on the most likely token."""

  def one_hot(logits, drafted):
    probs = warp(logits, drafted)
    best = jnp.argmax(probs, axis=-1)
    return jax.nn.one_hot(best, probs.shape[-1], dtype=probs.dtype)

  return one_hot


def unnormalised(warp: Warp) -> Warp:
  """Returns a warp that takes what `LogProbs` gives, without renormalising."""
  del warp
  return lambda logits, drafted: jnp.exp(logits)


def top_two(warp: Warp) -> Warp:
  """Returns the loop's warp of the two largest logits alone."""

  def pruned(logits, drafted):
    second = jax.lax.top_k(logits, 2)[0][:, -1:]
    return warp(jnp.where(logits < second, -jnp.inf, logits), drafted)

  return pruned


def cut_without_renormalising(sampling: Sampling) -> Rewarp:
  """Returns a `Rewarp` that leaves the probabilities before `top_p` as is."""
  heat = _warp(Sampling(temperature=sampling.temperature))
  return lambda warp: (
    lambda logits, drafted: jnp.where(
      warp(logits, drafted) > 0, heat(logits, drafted), 0
    )
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogProbs(HashModel):
  """A hash model whose logits are log probabilities."""

  def unembed(self, params: Params, hidden: Array) -> Array:
    return jax.nn.log_softmax(super().unembed(params, hidden))


def top_p_first(sampling: Sampling) -> Rewarp:
  """Returns a `Rewarp` with `top_p` before the temperature, not after it."""
  cut = _warp(Sampling(temperature=1.0, top_p=sampling.top_p))
  heat = _warp(Sampling(temperature=sampling.temperature))

  def rewarp(warp):
    del warp
    return lambda logits, drafted: heat(jnp.log(cut(logits, drafted)), drafted)

  return rewarp


def _warp(sampling):
  return lambda logits, drafted: jax.vmap(
    lambda logits, drafted: sampling_lib.warp(sampling, None, logits, drafted)
  )(logits.astype(jnp.result_type(float)), drafted)


def cut_before_the_token(draft):
  """Cuts a draft at the first drawn token that was not likely enough.

  Whether token i is drafted then depends on token i.
  """
  keep = jnp.cumprod(_drawn_probs(draft) >= 0.3, axis=1) > 0
  return types.Draft(
    tokens=jnp.where(keep, draft.tokens, -1),
    probs=jnp.where(keep[..., None], draft.probs, 0),
    kind=DraftKind.SAMPLED,
  )


def drafted_if_likely(draft):
  """Drafts nothing in a row whose drawn tokens promise too little.

  How much of a draft the target reads then depends on the tokens drawn.
  """
  nothing = types.Draft(
    tokens=jnp.full_like(draft.tokens, -1),
    probs=jnp.zeros_like(draft.probs),
    kind=DraftKind.SAMPLED,
  )
  return _choose(_promised(draft) >= _LEAST, draft, nothing)


def cut_by_neighbour(draft):
  """Keeps a draft token only if the other of two rows has drawn token 0 there.

  Each row still has the target's distribution, but they depend on each other.
  """
  return drafts.cut(draft, draft.tokens[::-1] == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgetsIfLikely(Wrapper):
  """An `Either` that chooses by how likely the drawn tokens are.

  The shipped one compares with what was kept in earlier rounds.
  """

  def propose(self, params, draw, warp, tokens, length, state):
    never, always = jnp.inf, -1.0

    def propose(draw, threshold):
      kept = jnp.full_like(state.kept, threshold)
      of_threshold = dataclasses.replace(state, kept=kept)
      return self.drafter.propose(
        params, draw, warp, tokens, length, of_threshold
      )

    drawn, state_of_drawn = propose(draw, never)
    nothing = lambda probs, position: jnp.zeros_like(position)
    remembered, found = propose(nothing, always)
    forgets = ~found.is_remembered | (_promised(drawn) >= _LEAST)
    return _choose(forgets, drawn, remembered), state_of_drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeavesDrawnProbs(Wrapper):
  """An `Either` that gives remembered tokens the trained drafter's `probs`."""

  def propose(self, params, draw, warp, tokens, length, state):
    draft, new = super().propose(params, draw, warp, tokens, length, state)
    drawn, _ = self.drafter.trained.propose(
      params | {'drafter': params['drafter']['trained']},
      repeat(draft.tokens, length),
      warp,
      tokens,
      length,
      state.trained,
    )
    return dataclasses.replace(draft, probs=drawn.probs), new


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeclaredAfterOtherTokens(Wrapper):
  """Declares the distributions that follow the tokens one place earlier.

  A token's `probs` are recomputed after the drafts are known. The token before
  it is then taken from a slice that starts at the pending token.
  """

  def propose(self, params, draw, warp, tokens, length, state):
    draft, new = super().propose(params, draw, warp, tokens, length, state)
    pending = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    late = jnp.concatenate([pending, draft.tokens[:, :-1]], axis=1)
    declared, _ = super().propose(
      params, repeat(late, length), warp, tokens, length, state
    )
    return dataclasses.replace(draft, probs=declared.probs), new


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepsOldCandidates(_Stateful):
  """Writes a round's few probabilities into a buffer that is never cleared.

  The candidates of the round before are then declared too.
  """

  vocab_size: int

  def begin(self, batch_size, max_length):
    del max_length
    return jnp.zeros((batch_size, self.num_draft_tokens, self.vocab_size))

  def propose(self, params, draw, warp, tokens, length, state):
    draft, inner = super().propose(
      params, draw, warp, tokens, length, state.inner
    )
    declared = jnp.where(draft.probs > 0, draft.probs, state.own)
    declared /= jnp.sum(declared, axis=-1, keepdims=True)
    new = _With(inner=inner, own=draft.probs)
    return dataclasses.replace(draft, probs=declared), new


def missing_probs_as_uniform(draft):
  """Declares the tokens of `Ngram` to be uniformly drawn, of three."""
  is_there = (draft.tokens >= 0)[..., None]
  return types.Draft(
    tokens=draft.tokens,
    probs=jnp.where(is_there, jnp.full(3, 1 / 3), 0),
    kind=DraftKind.SAMPLED,
  )


def repeat(drafted, length):
  """Returns a `Draw` that repeats tokens [B, K] that were drawn before."""

  def drawn_before(probs, position, node=None):
    del probs, node  # a chain has one node for each position
    column = (position - length)[:, None]
    return jnp.take_along_axis(drafted, column, axis=1)[:, 0]

  return drawn_before


def _promised(draft):
  """Returns the expected number of kept tokens [B], if q(x) are the rates."""
  return jnp.sum(jnp.cumprod(_drawn_probs(draft), axis=1), axis=1)


def _drawn_probs(draft):
  """Returns the draft probability [B, K] of each drawn token."""
  index = draft.tokens[..., None]
  return jnp.take_along_axis(draft.probs, index, axis=-1)[..., 0]


def _choose(rows, draft, other):
  """Returns `draft` in rows [B] that are set, else `other`."""
  return types.Draft(
    tokens=jnp.where(rows[:, None], draft.tokens, other.tokens),
    probs=jnp.where(rows[:, None, None], draft.probs, other.probs),
    kind=DraftKind.SAMPLED,
  )


def unknown_tokens(draft):
  """Drafts 3, an id that the target lacks, whenever token 0 is drawn.

  The drafter is correct: the loop has to handle such an id.
  """
  tokens = jnp.where(draft.tokens == 0, 3, draft.tokens)
  return types.Draft(tokens=tokens, probs=None, kind=DraftKind.POINT_MASS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgetsLastAccepted(_Stateful):
  """A drafter whose cache misses the last token of a fully accepted draft.

  That token was drawn but never fed; token 0 is read in its place.
  """

  def begin(self, batch_size, max_length):
    """Returns whether the previous round accepted all drafts, [B] bool."""
    del max_length
    return jnp.zeros(batch_size, bool)

  def propose(self, params, draw, warp, tokens, length, state):
    before_pending = jnp.arange(tokens.shape[1]) == length[:, None] - 2
    seen = jnp.where(state.own[:, None] & before_pending, 0, tokens)
    draft, inner = super().propose(
      params, draw, warp, seen, length, state.inner
    )
    return draft, dataclasses.replace(state, inner=inner)

  def observe(self, params, tokens, count, output, verdict, state):
    if verdict is None:
      return super().observe(params, tokens, count, output, verdict, state)
    missing = verdict.num_accepted == self.num_draft_tokens
    return dataclasses.replace(state, own=missing)


def one_layer_off(drafter: Any) -> Drafter:
  """Returns a drafter that reads the features of the layers one below."""
  layers = tuple(layer - 1 for layer in drafter.feature_layers)
  return dataclasses.replace(drafter, feature_layers=layers)


class _SeesOneEntryMore(dflash.DFlash):
  """A block that sees one entry after its context, left by a rejected draft."""

  def vectors(self, params, first, start, context, begin=None):
    shipped = dflash_network.block_mask
    context = dataclasses.replace(context, length=context.length + 1)

    def block_mask(start, *rest, **named):
      return shipped(start + 1, *rest, **named)

    with loop.replaced(dflash_network, 'block_mask', block_mask):
      return super().vectors(params, first, start, context, begin)


def sees_one_entry_more(drafter: Any) -> Drafter:
  """Returns a `DFlash` whose block sees a token that was rejected."""
  return _SeesOneEntryMore(**vars(drafter))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepsRejected(Wrapper):
  """A drafter that takes in a round's drafts as if all had been kept."""

  def observe(self, params, tokens, count, output, verdict, state):
    if verdict is not None:
      count = jnp.where(count > 0, tokens.shape[1], 0)
    return super().observe(params, tokens, count, output, verdict, state)


@types.pytree
class _Text:
  tokens: Array  # [B, S] int32, what is looked up in
  length: Array  # [B] int32
  drafted: Array  # [B, K] int32, -1 after the last


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemembersDrafts(_Stateful):
  """A lookup in the tokens that were drafted, whether or not they stayed."""

  def begin(self, batch_size, max_length):
    size = max_length * (self.num_draft_tokens + 1)
    return _Text(
      tokens=jnp.zeros((batch_size, size), jnp.int32),
      length=jnp.zeros(batch_size, jnp.int32),
      drafted=jnp.zeros((batch_size, self.num_draft_tokens), jnp.int32),
    )

  def observe(self, params, tokens, count, output, verdict, state):
    text = state.own
    if verdict is not None:
      tokens = jnp.concatenate([tokens[:, :1], text.drafted], axis=1)
      count = jnp.where(count > 0, jnp.sum(tokens >= 0, axis=1), 0)
    text = dataclasses.replace(
      text,
      tokens=cache.write(text.tokens, tokens, text.length),
      length=text.length + count,
    )
    return dataclasses.replace(state, own=text)

  def propose(self, params, draw, warp, tokens, length, state):
    text = state.own
    pending = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    written = cache.write(text.tokens, pending, text.length)
    draft, inner = super().propose(
      params, draw, warp, written, text.length + 1, state.inner
    )
    text = dataclasses.replace(text, drafted=draft.tokens)
    return draft, _With(inner=inner, own=text)
