"""Audits of outputs that differ between refilled rows and static batches."""

from collections.abc import Sequence
import dataclasses

from experiments.batching import comparison as comparison_lib
from experiments.command import journal as journal_lib
from experiments.command import units as units_lib
from experiments.evaluation import audits


def is_audited(comparison: comparison_lib.Comparison, method: str) -> bool:
  """Returns whether only a numerical tie excuses a difference.

  If tokens are sampled, or if a lossy rule may accept other tokens than the
  most likely one, rounding can change an output without a tie as well.
  """
  evaluation = comparison.evaluation
  is_greedy = bool(evaluation.sampling.temperature == 0)
  return is_greedy and evaluation.methods[method].verify.lossless


def units(
  comparison: comparison_lib.Comparison,
  tokens: Sequence[list[int]],
  journal: journal_lib.Journal,
) -> list[units_lib.Unit]:
  """Returns the units that audit differences, once everything is decoded."""
  # With greedy decoding, the other repeats have the same outputs.
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
