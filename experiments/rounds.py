"""Times of a round of decoding and of its parts.

Nothing is compiled inside a timed region.
"""

import dataclasses
import functools

import jax
import numpy as np

from experiments import measure
from experiments import round_programs
import specsample
from specsample.types import (
  ArrayLike,
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
  draft_ms: float  # noise can make it negative, as the rest: `settled`
  verify_ms: float  # the target's pass
  overhead_ms: float  # the rest
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
  it took a third less. Each is a compiled loop of `rounds` (round_programs.py);
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
  plain_params = {'target': params['target']}
  start = functools.partial(prefill, params, drafter=drafter)
  start_plain = functools.partial(prefill, plain_params, drafter=_PLAIN)
  components = {'model': model, 'drafter': drafter, 'verify': verify}
  draft_and_score, score = _loops(params, **components)
  decode = functools.partial(
    specsample.advance, params, stop=stop, **components
  )
  decode_plain = functools.partial(
    specsample.advance,
    plain_params,
    model=model,
    drafter=_PLAIN,
    verify=specsample.verify.chain,
    stop=stop,
  )
  judge = functools.partial(round_programs.judged_rounds, verify=verify)
  num_judged = _MORE * rounds
  # Of the type that `generate` gives, whose executables these are then.
  most, none = (jax.device_put(np.int32(count)) for count in (rounds, 0))

  def turn():
    """Calls all once: the seconds and rounds by name, and the last state."""
    taken = {}

    def timed(name, function, *args, **kwargs):
      result, taken[name] = measure.seconds(function, *args, **kwargs)
      return result

    state = timed('plain prefill', start_plain)
    for _ in range(2):  # the first call behind another program is slower
      state = timed('plain call', decode_plain, state, max_rounds=none)
    state = timed('plain rounds', decode_plain, state, max_rounds=most)
    taken['plain done'] = int(round_programs.most_rounds(state))
    state = timed('prefill', start)
    for _ in range(2):
      state, _ = timed('drafted call', draft_and_score, state, rounds=0)
    state, draft = timed('drafted', draft_and_score, state, rounds=rounds)
    for _ in range(2):
      state = timed('pass call', score, state, draft, rounds=0)
    state = timed('passes', score, state, draft, rounds=rounds)
    judged = round_programs.to_judge(params, state, draft, **components)
    jax.block_until_ready(judged)
    for _ in range(2):
      timed('rule call', judge, state, *judged, rounds=0)
    timed('rule', judge, state, *judged, rounds=num_judged)
    for _ in range(2):
      state = timed('call', decode, state, max_rounds=none)
    state = timed('rounds', decode, state, max_rounds=most)
    taken['done'] = int(round_programs.most_rounds(state))
    return taken, state

  _, state = turn()  # compiles
  law = round_programs.abstract_draft(params, state, **components).law
  del state  # its caches would be held beside the next ones
  measured = [turn()[0] for _ in range(repeats)]
  median = lambda values: float(np.median(values))
  of = lambda name: np.asarray([one[name] for one in measured])
  ms = lambda name: 1e3 * of(name)
  # Less the typical call: the least of differences is of the slowest calls.
  less = lambda name, call: ms(name) - median(ms(call))
  plain_ms = less('plain rounds', 'plain call') / of('plain done')
  verify_ms = less('passes', 'pass call') / rounds
  drafted_ms = verify_ms
  if drafter.num_draft_tokens:
    drafted_ms = less('drafted', 'drafted call') / rounds
  judge_ms = less('rule', 'rule call') / num_judged
  round_ms = less('rounds', 'call') / of('done')
  return RoundTimes(
    prefill_ms=median(ms('prefill')),
    plain_prefill_ms=median(ms('plain prefill')),
    plain_ms=median(plain_ms),
    draft_ms=median(drafted_ms - verify_ms),
    verify_ms=median(verify_ms),
    overhead_ms=median(round_ms - drafted_ms),
    judge_ms=max(0.0, median(judge_ms)),
    least_ms=float(np.min(round_ms)),
    law=law,
  )


def settled(draft_ms: float, overhead_ms: float) -> tuple[float, float]:
  """Drafting that noise made negative takes nothing, and the rest less.

  Of means: cut off one by one, differences around nothing come to more.
  """
  hidden = min(0.0, draft_ms)
  return draft_ms - hidden, overhead_ms + hidden


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
  """`RoundTimes.draft_ms` without the other parts, measured as `times` does."""
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
  draft_and_score, score = _loops(
    params, model=model, drafter=drafter, verify=verify
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


def _loops(params, *, model, drafter, verify):
  """Loops of rounds that draft, and of the target's passes over a draft."""
  components = {'model': model, 'drafter': drafter}
  draft_and_score = functools.partial(
    round_programs.drafted_rounds, params, verify=verify, **components
  )
  score = functools.partial(round_programs.target_rounds, params, **components)
  return draft_and_score, score
