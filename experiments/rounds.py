"""Times of a round of decoding and of its parts.

Nothing is compiled inside a timed region.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments import measure
import specsample
from specsample import sharding
from specsample import step
from specsample.types import (
  ArrayLike,
  Draft,
  Drafter,
  DraftLaw,
  Model,
  Params,
  Verifier,
)

_PLAIN = specsample.drafters.NoDraft()
# The rule is timed over so many times the rounds: it may take less than calls
# differ by.
_MORE = 4


@dataclasses.dataclass(frozen=True)
class RoundTimes:
  """Milliseconds of a round and its parts, and of what comes before them."""

  prefill_ms: float  # of all rows of the batch
  plain_prefill_ms: float  # without a drafter, as is the next
  plain_ms: float  # a round of autoregressive decoding
  draft_ms: float
  verify_ms: float  # the target's pass
  overhead_ms: float  # the rest, which noise can make negative
  judge_ms: float  # of the rest, the rule that decides what is kept
  least_ms: float  # of whole rounds, the fastest that was seen
  law: DraftLaw  # of the drafts


def times(
  params: Params,
  prompts: ArrayLike,
  lengths: ArrayLike,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  sampling: specsample.Sampling,
  max_new_tokens: int,
  stop: specsample.Stop = specsample.Stop(),
  rounds: int = 4,
  repeats: int = 25,
) -> RoundTimes:
  """Times the prefill, drafting, the target over a draft, a whole round.

  Drafting is what drafting and the target take together less the target, whose
  weights push the drafter's out of the processor's caches, as in a round: alone
  it took a third less. Each of these is a compiled loop of `rounds`;
  all take turns, `repeats` times, with prefill and rounds of autoregressive
  decoding. Of each a call of no rounds is timed too and taken off: an answer is
  one call. Parts are medians; the rest is that of the whole less the two parts
  just before it, when the machine was as fast or slow. The target reads the
  pending token and the N nodes of a draft that was made before, and moves a
  path of a tree into place. With the `stop` of `generate` whole rounds run what
  that has compiled.
  """
  prefill = functools.partial(
    specsample.prefill,
    prompts=prompts,
    lengths=lengths,
    key=jax.random.key(0),
    model=model,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
  )
  start = functools.partial(prefill, params, drafter=drafter)
  start_plain = functools.partial(
    prefill, {'target': params['target']}, drafter=_PLAIN
  )
  draft_and_score = functools.partial(
    _drafted_rounds, params, model=model, drafter=drafter, verify=verify
  )
  score = functools.partial(
    _target_rounds, params, model=model, drafter=drafter
  )
  # Of the type that `generate` gives, whose executables these are then.
  most, none = (jax.device_put(np.int32(count)) for count in (rounds, 0))
  decode = functools.partial(
    specsample.advance,
    params,
    model=model,
    drafter=drafter,
    verify=verify,
    stop=stop,
  )
  decode_plain = functools.partial(
    specsample.advance,
    {'target': params['target']},
    model=model,
    drafter=_PLAIN,
    verify=specsample.verify.chain,
    stop=stop,
  )
  to_judge = functools.partial(
    _to_judge, params, model=model, drafter=drafter, verify=verify
  )
  judge = functools.partial(_judge, verify=verify)
  num_judged = _MORE * rounds
  measured = []
  for repeat in range(repeats + 1):
    taken: dict[str, float] = {}

    def timed(name, function, *args, taken=taken, **kwargs):
      result, taken[name] = measure.seconds(function, *args, **kwargs)
      return result

    state = timed('plain prefill', start_plain)
    for _ in range(2):  # the first call behind another program is slower
      state = timed('plain call', decode_plain, state, max_rounds=none)
    state = timed('plain rounds', decode_plain, state, max_rounds=most)
    plain_done = int(_most_rounds(state))
    state = timed('prefill', start)
    for _ in range(2):
      state, _ = timed('drafted call', draft_and_score, state, rounds=0)
    state, draft = timed('drafted', draft_and_score, state, rounds=rounds)
    for _ in range(2):
      state = timed('pass call', score, state, draft, rounds=0)
    state = timed('passes', score, state, draft, rounds=rounds)
    judged = jax.block_until_ready(to_judge(state, draft))
    for _ in range(2):
      timed('rule call', judge, state, *judged, rounds=0)
    timed('rule', judge, state, *judged, rounds=num_judged)
    for _ in range(2):
      state = timed('call', decode, state, max_rounds=none)
    state = timed('rounds', decode, state, max_rounds=most)
    if repeat:  # the first one compiles
      done = int(_most_rounds(state))
      measured.append(taken | {'plain done': plain_done, 'done': done})
  median = lambda values: float(np.median(values))
  of = lambda name: np.asarray([one[name] for one in measured])
  ms = lambda name: 1e3 * of(name)
  # Less the typical call: the least of differences is of the slowest calls.
  less = lambda name, call: ms(name) - median(ms(call))
  plain_ms = less('plain rounds', 'plain call') / of('plain done')
  drafted_ms = less('drafted', 'drafted call') / rounds
  verify_ms = less('passes', 'pass call') / rounds
  judge_ms = less('rule', 'rule call') / num_judged
  round_ms = less('rounds', 'call') / of('done')
  return RoundTimes(
    prefill_ms=median(ms('prefill')),
    plain_prefill_ms=median(ms('plain prefill')),
    plain_ms=median(plain_ms),
    draft_ms=max(0.0, median(drafted_ms - verify_ms)),
    verify_ms=median(verify_ms),
    overhead_ms=median(round_ms - drafted_ms),
    judge_ms=max(0.0, median(judge_ms)),
    least_ms=float(np.min(round_ms)),
    law=_abstract_draft(
      params, state, model=model, drafter=drafter, verify=verify
    ).law,
  )


def draft_ms(
  params: Params,
  prompts: ArrayLike,
  lengths: ArrayLike,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  sampling: specsample.Sampling,
  max_new_tokens: int,
  rounds: int = 4,
  repeats: int = 25,
) -> float:
  """Milliseconds of drafting alone, measured as `times` does."""
  state = specsample.prefill(
    params,
    prompts,
    lengths,
    jax.random.key(0),
    model=model,
    drafter=drafter,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
  )
  draft_and_score = functools.partial(
    _drafted_rounds, params, model=model, drafter=drafter, verify=verify
  )
  score = functools.partial(
    _target_rounds, params, model=model, drafter=drafter
  )
  measured = []
  for repeat in range(repeats + 1):
    (state, draft), both = measure.seconds(
      draft_and_score, state, rounds=rounds
    )
    state, alone = measure.seconds(score, state, draft, rounds=rounds)
    if repeat:  # the first one compiles
      measured.append(1e3 * (both - alone) / rounds)
  return max(0.0, float(np.median(measured)))


def _abstract_draft(params, state, **components) -> Draft:
  """What a draft is made of; nothing is computed."""
  propose = functools.partial(step.propose, **components)
  return jax.eval_shape(propose, params, state)[0]


@jax.jit
def _most_rounds(state):
  return sharding.replicate(jnp.max(state.round))


@functools.partial(
  jax.jit,
  static_argnames=('model', 'drafter', 'verify'),
  donate_argnames=('state',),
)
def _drafted_rounds(params, state, *, model, drafter, verify, rounds):
  """Drafts and passes over them: the state, and the last draft's shape."""
  components = {'model': model, 'drafter': drafter, 'verify': verify}
  abstract = _abstract_draft(params, state, **components)
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
def _target_rounds(params, state, draft, *, model, drafter, rounds):
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
  scored, cache = step.score(params, now, draft, model=model, drafter=drafter)
  moved = jnp.any(scored.output.logits == jnp.inf, axis=(1, 2))
  return model.commit(cache, *kept), moved


@functools.partial(jax.jit, static_argnames=('model', 'drafter', 'verify'))
def _to_judge(params, state, draft, *, model, drafter, verify):
  """What a rule decides over: a draft, and distributions that are uniform."""
  abstract = _abstract_draft(
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
  return dataclasses.replace(draft, probs=own, law=abstract.law), probs


@functools.partial(jax.jit, static_argnames=('verify',))
def _judge(state, draft, target_probs, *, verify, rounds):
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
