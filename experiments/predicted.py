"""The speedup that the parts of a round predict, beside the measured one.

Of what was timed as a whole nothing is used. The parts were timed apart (see
`parts`), in turns with autoregressive decoding, so that a machine that slows
down slows both; of the generations only tokens and rounds are counted.
"""

from collections.abc import Mapping, Sequence
import itertools
from typing import Any

from experiments import results
import specsample
from specsample import request


def speedup(
  runs: Sequence[results.Generation],
  baseline: Sequence[results.Generation],
  parts: Mapping[str, Any],
) -> float | None:
  """The baseline's predicted time a token over the method's.

  None where one of them emitted nothing, where the typical prompts are one
  token each, as nothing is known of what a prefill takes then, and where noise
  hid what a round takes. `parts` are the method's, as the journal has them.
  """
  if not (_num_tokens(runs) and _num_tokens(baseline)):
    return None
  if not parts['prefill_tokens'] and any(
    fed_tokens([run.prompt_tokens]) for run in runs
  ):
    return None
  own = _ms_per_token(
    runs,
    round_ms=parts['draft_ms'] + parts['verify_ms'] + parts['overhead_ms'],
    prefill_ms=parts['prefill_ms'],
    prefill_tokens=parts['prefill_tokens'],
  )
  plain = _ms_per_token(
    baseline,
    round_ms=parts['plain_ms'],
    prefill_ms=parts['plain_prefill_ms'],
    prefill_tokens=parts['prefill_tokens'],
  )
  return plain / own if min(plain, own) > 0 else None


def fed_tokens(prompt_tokens: Sequence[int]) -> int:
  """How many tokens of a row the prefill takes in, for prompts so long.

  Whole chunks, of a batch as many as its longest prompt needs.
  """
  longest = max(prompt_tokens)
  padded, _ = specsample.pad_prompts([[0] * longest])
  chunk = min(request.PREFILL_CHUNK, padded.shape[1])
  return -(-(longest - 1) // chunk) * chunk


def _ms_per_token(runs, *, round_ms, prefill_ms, prefill_tokens):
  total = 0.0
  for _, batch in itertools.groupby(runs, lambda run: (run.batch, run.sample)):
    rows = list(batch)
    fed = fed_tokens([run.prompt_tokens for run in rows])
    # Of prompts that are one token each nothing is fed.
    total += prefill_ms * fed / max(prefill_tokens, 1)
    # Rows that are done wait for the last one.
    total += round_ms * max(run.stats.rounds for run in rows)
  return total / _num_tokens(runs)


def _num_tokens(runs):
  return sum(len(run.tokens) for run in runs)
