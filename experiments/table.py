"""From the journal of an evaluation to its rows."""

import dataclasses
from typing import Any

from experiments import evaluation as evaluation_lib
from experiments import journal as journal_lib
from experiments import measure
from experiments import methods as methods_lib
from experiments import results

OVERALL = 'overall'
# What is timed over a typical prompt, not over those of a category.
_NO_PARTS = {'draft_ms': None, 'verify_ms': None, 'overhead_ms': None}


@dataclasses.dataclass(frozen=True)
class Table:
  """The finished generations of every method, prompt by prompt."""

  evaluation: evaluation_lib.Evaluation
  benchmark: str
  generations: dict[str, list[results.Generation]]
  parts: dict[str, dict[str, Any]]
  copy_bandwidth: float  # bytes a second

  @classmethod
  def of(
    cls,
    evaluation: evaluation_lib.Evaluation,
    benchmark: str,
    num_prompts: int,
    journal: journal_lib.Journal,
  ) -> 'Table':
    """The table of a finished journal."""
    return cls(
      evaluation,
      benchmark,
      generations={
        name: [
          results.Generation.from_json(journal['generation', name, i])
          for i in range(num_prompts)
        ]
        for name in evaluation.methods
      },
      parts={name: journal['parts', name] for name in evaluation.methods},
      copy_bandwidth=journal[evaluation_lib.COPY]['bytes_per_second'],
    )

  def rows(self) -> list[results.Row]:
    """Each method over all prompts, then over each category."""
    first = next(iter(self.generations.values()))
    categories = dict.fromkeys(generation.category for generation in first)
    return [
      self._row(name, category)
      for category in (OVERALL, *categories)
      for name in self.generations
    ]

  def mismatches(self) -> dict[str, results.Mismatches]:
    """By method, where greedy decoding must give the baseline's tokens."""
    baseline = self.generations.get(methods_lib.BASELINE)
    if baseline is None or self.evaluation.sampling.temperature != 0:
      return {}
    return {
      name: results.mismatches(self.generations[name], baseline)
      for name, method in self.evaluation.methods.items()
      if method.verify.lossless and name != methods_lib.BASELINE
    }

  def _row(self, name: str, category: str) -> results.Row:
    method = self.evaluation.methods[name]
    runs = self._of_category(name, category)
    baseline = None
    if methods_lib.BASELINE in self.generations:
      baseline = self._of_category(methods_lib.BASELINE, category)
    parts = self.parts[name] if category == OVERALL else _NO_PARTS
    return results.Row(
      method=name,
      drafter=methods_lib.file_name(method.drafter),
      verifier=methods_lib.file_name(method.verify),
      law=self.parts[name]['law'],
      lossless=method.verify.lossless,
      benchmark=self.benchmark,
      category=category,
      num_draft_tokens=method.drafter.num_draft_tokens,
      temperature=float(self.evaluation.sampling.temperature),
      batch_size=1,
      draft_ms=parts['draft_ms'],
      verify_ms=parts['verify_ms'],
      overhead_ms=parts['overhead_ms'],
      percent_of_roofline=self._percent_of_roofline(runs),
      **results.measured(runs, baseline),
    )

  def _of_category(self, name, category):
    return [
      run
      for run in self.generations[name]
      if category in (OVERALL, run.category)
    ]

  def _percent_of_roofline(self, runs) -> float:
    """Reading weights and cache once a round, over what a round took.

    The prefill's time is in the rounds', so this errs to the low side.
    """
    target = self.evaluation.target
    weights = measure.weight_bytes({'target': target.params})
    ideal = 0.0
    for run in runs:
      # The middle of the generation stands for all of it.
      length = run.prompt_tokens + len(run.tokens) // 2
      cache = measure.cache_bytes(target.model, length)
      ideal += run.stats.rounds * (weights + cache) / self.copy_bandwidth
    return 100 * ideal / sum(run.seconds for run in runs)
