"""The rows of a table, made from the journal of an evaluation."""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import Any

from experiments import methods as methods_lib
from experiments.evaluation import audits
from experiments.evaluation import conversations
from experiments.evaluation import decoding
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import learning
from experiments.evaluation import refilled
from experiments.evaluation import round_parts
from experiments.reporting import ratios
from experiments.reporting import rows as rows_lib
from experiments.tasks import source as source_lib
from experiments.timing import roofline as roofline_lib
import specsample
from specsample import cost
from specsample import drafters

# The fields that need the time of each prompt, and of each category.
_OF_PROMPTS = ('mean_speedup', 'mean_speedup_ci95')
_OF_TIME = (
  *('ms_per_token', 'ms_per_token_ci95', 'speedup', 'speedup_ci95'),
  *_OF_PROMPTS,
)
# Those of the parts of a round.
_OF_PARTS = (
  *('prefill_ms', 'draft_ms', 'verify_ms', 'verify_ms_by_width'),
  *('overhead_ms', 'predicted_speedup', 'cost_ratio', 'leviathan_speedup'),
)


def on_one_machine(tables: Sequence['Table']) -> list['Table']:
  """Gives the tables of one run the highest memory bandwidth of any of them."""
  fastest = max(table.memory_bandwidth for table in tables)
  return [
    dataclasses.replace(table, memory_bandwidth=fastest) for table in tables
  ]


@dataclasses.dataclass(frozen=True)
class Table:
  """The finished generations of every method, prompt by prompt."""

  evaluation: evaluation_lib.Evaluation
  benchmark: str
  generations: dict[str, list[rows_lib.Generation]]
  parts: dict[str, dict[str, Any]]  # by method, if its rounds were timed
  memory_bandwidth: float  # bytes per second, the highest that was measured
  # By method and name of the score, in the form of `task.Score`.
  scores: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  part: str = ''
  # The audits of greedy outputs that differ from the baseline's.
  divergences: Sequence[dict[str, Any]] = ()
  provenance: source_lib.Provenance | None = None  # of the task's data set
  # The values of the units of `refilled`, by method.
  refilled: dict[str, list[dict[str, Any]]] = dataclasses.field(
    default_factory=dict
  )
  # The acceptance in parts of the run, if a method learns.
  windows: Sequence[learning.Window] = ()

  @classmethod
  def of(cls, part: evaluation_lib.Part) -> 'Table':
    """Returns the table of what all methods have decoded."""
    evaluation, journal = part.evaluation, part.journal
    batches = {
      name: list(conversations.batches(journal, name).values())
      for name in evaluation.methods
    }
    return cls(
      evaluation,
      part.benchmark,
      generations={
        name: [
          rows_lib.Generation.from_json(record)
          for batch in batches[name]
          for record in batch['generations']
          if record['sample'] < evaluation.samples
        ]
        for name in evaluation.methods
      },
      parts={
        name: round_parts.means(journal, name)
        for name in evaluation.methods
        if journal.of(round_parts.KIND, name)
      },
      memory_bandwidth=max(
        once['bytes_per_second'] for once in journal.of(decoding.MEMORY)
      ),
      scores={
        name: {score['name']: score for score in journal[key]['scores']}
        for name in evaluation.methods
        if (key := decoding.score_key(evaluation, name)) in journal
      },
      part=part.name,
      divergences=journal.of(audits.KIND),
      provenance=part.provenance,
      refilled={
        name: journal.of(refilled.KIND, name)
        for name in evaluation.methods
        if evaluation.refill
      },
      windows=learning.windows(evaluation, batches),
    )

  @functools.cached_property
  def rows(self) -> list[rows_lib.Row]:
    """The rows of each method over all prompts, each category and each turn.

    There are rows of turns only if there are several turns.
    """
    first = next(iter(self.generations.values()))
    categories = list(dict.fromkeys(run.category for run in first))
    numbers = sorted({run.turn for run in first})
    if len(numbers) > 1:
      categories += map(rows_lib.turn_category, numbers)
    return [
      self._row(name, category)
      for category in (rows_lib.OVERALL, *categories)
      for name in self.generations
    ]

  @functools.cached_property
  def mismatches(self) -> dict[str, rows_lib.Mismatches]:
    """The mismatches of the methods that must give the baseline's tokens."""
    found = {}
    for name in audits.compared(self.evaluation):
      baseline = self.generations[methods_lib.BASELINE]
      pairs = zip(self.generations[name], baseline, strict=True)
      # What follows the first difference of a conversation is not compared: the
      # methods have then read different answers.
      different = {run.prompt for run, x in pairs if run.tokens != x.tokens}
      found[name] = audits.mismatches(name, len(different), self.divergences)
    return found

  @functools.cached_property
  def refilled_mismatches(self) -> dict[str, rows_lib.Mismatches]:
    """The mismatches of refilled rows with static batches, by `label`."""
    found = {}
    for name, records in self.refilled.items():
      runs = [run for run in self.generations[name] if not run.sample]
      # The second repeat has the same random streams.
      pairs = zip(records[0]['tokens'], runs, strict=True)
      different = sum(tokens != run.tokens for tokens, run in pairs)
      label = refilled.label(name)
      found[label] = audits.mismatches(label, different, self.divergences)
    return found

  def _row(self, name: str, category: str) -> rows_lib.Row:
    method = self.evaluation.methods[name]
    if name in self.parts:
      law = self.parts[name]['kind']
    else:
      law = self.evaluation.setup(method).draft_kind().value
    runs = self._of_category(name, category)
    baseline = None
    if methods_lib.BASELINE in self.generations:
      baseline = self._of_category(methods_lib.BASELINE, category)
    measured = ratios.row_fields(runs, baseline) | dict.fromkeys(_OF_PARTS)
    if self.evaluation.batch_size > 1:
      # The time of a single prompt is unknown, and so is that of a category if
      # batches mix categories.
      measured |= dict.fromkeys(_OF_PROMPTS)
      if self._are_mixed(name, category):
        measured |= dict.fromkeys(_OF_TIME)
    if category == rows_lib.OVERALL:
      measured |= self._compared(name) | self._parts_of(name, measured)
    return rows_lib.Row(
      method=name,
      drafter=methods_lib.file_name(method.drafter),
      verifier=methods_lib.file_name(method.verify),
      law=law,
      lossless=method.verify.lossless,
      benchmark=self.benchmark,
      category=category,
      num_draft_tokens=method.drafter.num_draft_tokens,
      temperature=float(self.evaluation.sampling.temperature),
      batch_size=self.evaluation.batch_size,
      percent_of_roofline=self._percent_of_roofline(name, category),
      part=self.part,
      **measured,
    )

  def _compared(self, name) -> dict[str, Any]:
    """Returns fields about all outputs: how they compare, and their scores."""
    fields: dict[str, Any] = {'scores': self.scores.get(name, {})}
    if name in self.mismatches:
      mismatches = self.mismatches[name]
      fields['outputs_tied'] = mismatches.ties
      fields['outputs_differing'] = mismatches.not_ties
    if name in self.refilled:
      fields |= refilled.fields(
        [run for run in self.generations[name] if not run.sample],
        self.refilled[name],
        self.refilled_mismatches[refilled.label(name)],
      )
    return fields

  def _parts_of(self, name, measured) -> dict[str, Any]:
    """Returns the fields that follow from the times of a round's parts.

    They were timed over typical prompts, so nothing is known of a category's.
    """
    if name not in self.parts:
      return {}
    runs, parts = self.generations[name], self.parts[name]
    fields = {'prefill_ms': parts['prefill_ms']}
    if len(parts['verify_ms']) > 1:
      fields['verify_ms_by_width'] = parts['verify_ms']
    # Drafting was timed at the beginning of an answer: later a policy drafts
    # more or less, and of two drafters one may not run. The width of the
    # target's pass may differ, because it is known.
    drafter = self.evaluation.methods[name].drafter
    if isinstance(drafter, drafters.Adaptive | drafters.Either):
      return fields
    fields['draft_ms'] = parts['draft_ms']
    for part in ('verify_ms', 'overhead_ms'):
      fields[part] = round_parts.mean_ms(runs, parts[part])
    if methods_lib.BASELINE in self.generations:
      fields['predicted_speedup'] = round_parts.speedup(
        runs,
        self.generations[methods_lib.BASELINE],
        parts,
        self.evaluation.least_width,
      )
    # A whole plain round: the drafts' time also includes drawing and warping.
    one_round = parts['plain_ms']
    depth = len(measured['acceptance_by_position'])
    # Noise may hide the time of a round.
    if methods_lib.BASELINE in self.parts and depth and one_round > 0:
      # Leviathan et al.'s c (2211.17192, section 3.3).
      ratio = parts['draft_ms'] / depth / one_round
      fields['cost_ratio'] = ratio
      # Answers of one token have no room for drafts, and so no acceptance rate.
      acceptance = measured['acceptance']
      if acceptance is not None and self._drafts_chains_of_k(name):
        fields['leviathan_speedup'] = cost.leviathan_speedup(
          acceptance, depth, ratio
        )
    return fields

  def _drafts_chains_of_k(self, name) -> bool:
    """Returns whether all rounds are as Leviathan et al.'s formula assumes.

    N-gram drafters draft only if they find a match, and trees draft siblings.
    At the end of a text there is no room for K drafts, whatever the drafter.
    """
    runs = self.generations[name]
    num_drafts = self.evaluation.methods[name].drafter.num_draft_tokens
    room = self.evaluation.target.model.max_length
    limits = self.evaluation.limits([run.prompt for run in runs])
    return all(
      run.stats.proposed
      == _of_chains(
        run.emit_rounds, num_drafts, min(limit, room - run.prompt_tokens)
      )
      for run, limit in zip(runs, limits, strict=True)
    )

  def _of_category(self, name, category):
    return [run for run in self.generations[name] if run.is_of(category)]

  def _are_mixed(self, name, category) -> bool:
    """Returns whether batches mix the category's prompts with others."""
    within = {run.call for run in self._of_category(name, category)}
    return any(
      run.call in within and not run.is_of(category)
      for run in self.generations[name]
    )

  def _percent_of_roofline(self, name, category) -> float | None:
    """Returns the time to read weights and caches once per round, in percent.

    It is relative to the time that the rounds took. The prefill's time is part
    of that, so this errs on the low side. None for rows that emitted nothing
    beside others, because they have no share of the time, and for rows that
    were decoded beside rows of another category.
    """
    if self._are_mixed(name, category):
      return None
    pairs = zip(self.generations[name], self._least_seconds[name], strict=True)
    seconds, least = zip(
      *((run.seconds, least) for run, least in pairs if run.is_of(category)),
      strict=True,
    )
    return 100 * sum(least) / sum(seconds) if any(seconds) else None

  @functools.cached_property
  def _least_seconds(self) -> dict[str, list[float]]:
    """The least possible seconds of each generation, by method.

    The generations of a batch share them in proportion to their seconds.
    """
    target = self.evaluation.target
    roofline = roofline_lib.Roofline.of(
      {'target': target.params}, target.model, self.memory_bandwidth
    )

    def of_batch(runs, widths):
      caches = 0
      for run in runs:
        # The middle of the generation stands for all of it.
        length = run.prompt_tokens + len(run.tokens) // 2
        read = roofline_lib.cache_bytes(target.model, length)
        caches += run.stats.rounds * read
      least = roofline.seconds(0, caches, 1)
      # One pass of the target serves all rows.
      for drafted, passes in enumerate(round_parts.rounds_by_drafts(runs)):
        width = cost.width_of(drafted, widths)
        least += roofline.seconds(passes, 0, len(runs) * (width + 1))
      return least / sum(run.seconds for run in runs)

    least: dict[str, list[float]] = {}
    for name, generations in self.generations.items():
      method = self.evaluation.methods[name]
      decoder = specsample.Decoder(target.model, method.drafter, method.verify)
      least[name] = []
      for runs in round_parts.batches(generations):
        ratio = of_batch(runs, decoder.widths)
        least[name] += [ratio * run.seconds for run in runs]
    return least


def _of_chains(emit_rounds, num_drafts, most) -> tuple[int, ...]:
  """Returns the rounds with i drafts, [K + 1], if each drafts all it may.

  A round emits one token more than the drafts it keeps, and a text has at most
  `most` tokens.
  """
  counts = [0] * (num_drafts + 1)
  before = itertools.pairwise([None, *emit_rounds])
  for emitted, (last, now) in enumerate(before):
    if now != last:
      counts[min(num_drafts, most - emitted - 1)] += 1
  return tuple(counts)
