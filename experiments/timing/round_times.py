"""Timing of a round of decoding and of its parts.

Nothing is compiled inside a timed region.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from experiments import methods
from experiments.command import clock
from experiments.decoding import setup as setup_lib
import specsample
from specsample import cost
from specsample.choosing import loops as loops_lib
from specsample.types import DecodeState, DraftKind

_PLAIN = methods.Method(specsample.drafters.NoDraft())
# The rule is timed over this many times as many rounds, because it may take
# less time than calls differ by.
_MORE = 4


@dataclasses.dataclass(frozen=True)
class RoundTimes:
  """Milliseconds of a round and its parts, and of the prefill before it."""

  prefill_ms: float  # of all rows of the batch
  plain_prefill_ms: float  # without a drafter, like the next
  plain_ms: float  # a round of autoregressive decoding
  draft_ms: float  # noise can make it negative, like overhead_ms; see `settled`
  # By the width of the target's pass.
  verify_ms: dict[str, float]
  overhead_ms: dict[str, float]  # the rest, with the rule for so many drafts
  least_ms: float  # a whole round, in the fastest turn
  kind: DraftKind  # of the drafts


def times(
  setup: setup_lib.Setup,
  prompts: Sequence[list[int]],
  *,
  rounds: int = 4,
  repeats: int = 25,
) -> RoundTimes:
  """Times the prefill, drafting, the target's pass over a draft, and a round.

  Each is a compiled loop of `rounds` (choosing/loops.py). All loops take turns,
  `repeats` times, with the prefill and with rounds of autoregressive decoding.
  For each loop, a call of no rounds is timed too and subtracted, because an
  answer is a single call.

  The time of drafting is that of drafting and the target together, less that of
  the target alone. As in a round, the target's weights then push the drafter's
  out of the processor's caches; alone, drafting took a third less. Parts are
  medians. The rest is a whole round less the two parts timed just before it,
  when the machine was as fast or slow. The target reads the pending token and
  the N nodes of a draft that was made before, and moves a path of a tree into
  place. If `setup.stop` is that of `generate`, whole rounds run the program
  that `generate` has compiled.

  If the drafter has several widths, the target's pass and the rule are timed
  for each. The passes that are subtracted from whole rounds are then of the
  widths that these rounds had.
  """
  plain = dataclasses.replace(setup, method=_PLAIN)
  verify = setup.method.verify
  draft_and_score, score, to_judge = (
    functools.partial(loop, setup.decoder, setup.params)
    for loop in (
      loops_lib.drafted_rounds,
      loops_lib.target_rounds,
      loops_lib.to_judge,
    )
  )
  judge = functools.partial(loops_lib.judged_rounds, verify=verify)
  num_judged = _MORE * rounds
  widths = setup.decoder.widths

  def turn():
    """Calls everything once; returns times and rounds by name, and a state."""
    taken = {}

    def timed(name, function, *args, **kwargs):
      result, taken[name] = clock.seconds(function, *args, **kwargs)
      return result

    state = timed('plain prefill', plain.prefill, prompts)
    for _ in range(2):  # the first call after another program is slower
      state = timed('plain call', plain.advance, state, 0)
    state = timed('plain rounds', plain.advance, state, rounds)
    taken['plain done'] = int(loops_lib.most_rounds(state))
    state = timed('prefill', setup.prefill, prompts)
    for _ in range(2):
      state, _ = timed('drafted call', draft_and_score, state, rounds=0)
    state, draft = timed('drafted', draft_and_score, state, rounds=rounds)
    taken['drafted width'] = int(loops_lib.most_drafts(draft))
    by_width = {w: loops_lib.of_width(draft, width=w) for w in widths}
    jax.block_until_ready(by_width)
    for _ in range(2):
      state = timed('pass call', score, state, draft, rounds=0)
    for width, one in by_width.items():
      state = timed(('passes', width), score, state, one, rounds=rounds)
    for width, one in by_width.items():
      judged = to_judge(state, one, width=width)
      jax.block_until_ready(judged)
      for _ in range(2):
        timed(('rule call', width), judge, state, *judged, rounds=0)
      timed(('rule', width), judge, state, *judged, rounds=num_judged)
    for _ in range(2):
      state = timed('call', setup.advance, state, 0)
    state = timed('rounds', setup.advance, state, rounds)
    taken['done'] = int(loops_lib.most_rounds(state))
    return taken, state

  _, state = turn()  # compiles
  del state  # else its caches would be held beside the next ones
  # The widths of whole rounds are the same in every turn.
  of_rounds: Sequence[int] = widths
  if len(widths) > 1:
    decode_one = functools.partial(setup.advance, max_rounds=1)
    of_rounds = widths_of_rounds(
      decode_one, setup.prefill(prompts), rounds, widths
    )
  measured = [turn()[0] for _ in range(repeats)]
  return medians(measured, rounds, widths, of_rounds, kind=setup.draft_kind())


def widths_of_rounds(
  decode_one: Callable[[DecodeState], DecodeState],
  state: DecodeState,
  rounds: int,
  widths: Sequence[int],
) -> list[int]:
  """Decodes one round at a time, and returns the width of each.

  The row with the most drafts decides. There are fewer rounds than asked for if
  all rows are done before.
  """
  counts = [np.asarray(loops_lib.num_by_drafts(state))]
  for _ in range(rounds):
    state = decode_one(state)
    counts.append(np.asarray(loops_lib.num_by_drafts(state)))
  lengths = [np.flatnonzero(new) for new in np.diff(counts, axis=0)]
  return [cost.width_of(int(x.max()), widths) for x in lengths if x.size]


def medians(
  measured: Sequence[Mapping[Any, Any]],
  rounds: int,
  widths: Sequence[int],
  of_rounds: Sequence[int],
  *,
  kind: DraftKind,
) -> RoundTimes:
  """Returns the parts of a round that `times` describes.

  `measured` has the seconds and counts of each turn of `times`, `widths` those
  of the drafter and `of_rounds` those of the whole rounds.
  """
  median = lambda values: float(np.median(values))
  of = lambda name: np.asarray([one[name] for one in measured])
  ms = lambda name: 1e3 * of(name)
  # Subtracts the median call without rounds. With single calls, the least
  # difference would be that of the slowest call.
  less = lambda name, call: ms(name) - median(ms(call))
  plain_ms = less('plain rounds', 'plain call') / of('plain done')
  passes_ms = {w: less(('passes', w), 'pass call') / rounds for w in widths}
  draft_ms = np.zeros(len(measured))
  if widths[-1]:
    width = cost.width_of(measured[0]['drafted width'], widths)
    draft_ms = less('drafted', 'drafted call') / rounds - passes_ms[width]
  rule_ms = {
    w: less(('rule', w), ('rule call', w)) / (_MORE * rounds) for w in widths
  }
  round_ms = less('rounds', 'call') / of('done')
  mean = lambda by_width: np.mean([by_width[w] for w in of_rounds], axis=0)
  rest_ms = round_ms - draft_ms - mean(passes_ms) - mean(rule_ms)
  return RoundTimes(
    prefill_ms=median(ms('prefill')),
    plain_prefill_ms=median(ms('plain prefill')),
    plain_ms=median(plain_ms),
    draft_ms=median(draft_ms),
    verify_ms={str(w): median(passes_ms[w]) for w in widths},
    overhead_ms={str(w): median(rest_ms + rule_ms[w]) for w in widths},
    least_ms=float(np.min(round_ms)),
    kind=kind,
  )


def settled(
  draft_ms: float, overhead_ms: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
  """Sets a negative draft_ms to 0 and lowers overhead_ms by as much.

  This is for means: if noise around 0 were cut off in every single difference,
  the mean would come out too large.
  """
  hidden = min(0.0, draft_ms)
  return draft_ms - hidden, {w: ms + hidden for w, ms in overhead_ms.items()}


def by_drafts(by_width: Mapping[str, float], most_drafts: int) -> np.ndarray:
  """Returns the milliseconds [K + 1] of a part in rounds of 0, 1, ... drafts.

  For a tree, `most_drafts` is its depth: a draft of depth i is then counted at
  the first width of at least i nodes.
  """
  widths = sorted(map(int, by_width))
  return np.asarray(
    [by_width[str(cost.width_of(i, widths))] for i in range(most_drafts + 1)]
  )
