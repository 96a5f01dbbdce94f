"""Where outputs of refilled rows part from those of static batches, and why."""

from collections.abc import Sequence
import dataclasses

from experiments.batching import comparison as comparison_lib
from experiments.command import journal as journal_lib
from experiments.command import units as units_lib
from experiments.evaluation import audits


def is_audited(comparison: comparison_lib.Comparison, method: str) -> bool:
  """Whether only a numerical tie excuses a difference.

  Where tokens are drawn, and where a rule that is not exact may keep what is
  not the most likely, a rounding decides elsewhere too.
  """
  evaluation = comparison.evaluation
  is_greedy = bool(evaluation.sampling.temperature == 0)
  return is_greedy and evaluation.methods[method].verify.lossless


def units(
  comparison: comparison_lib.Comparison,
  tokens: Sequence[list[int]],
  journal: journal_lib.Journal,
) -> list[units_lib.Unit]:
  """The units that look into differences, when all is decoded."""
  # Greedily decoded the other repeats are the same.
  outputs = lambda way, name: [
    one['tokens'] for one in journal[way, name, 0]['generations']
  ]
  requests = comparison.requests(tokens)
  decoded = dataclasses.replace(
    comparison.evaluation,
    batch_size=comparison.num_rows,
    max_new_tokens=max(comparison.max_new_tokens),
  )
  return [
    audits.unit(decoded, requests[parting.prompt].prompt, parting)
    for name in comparison.evaluation.methods
    if is_audited(comparison, name)
    for parting in audits.partings(
      name,
      outputs(comparison_lib.REFILLED, name),
      outputs(comparison_lib.STATIC, name),
    )
  ]
