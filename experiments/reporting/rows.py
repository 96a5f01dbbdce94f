"""Timed generations, and the rows of a table that are computed from them."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from specsample import stats

OVERALL = 'overall'  # the category of a row over all prompts


def turn_category(turn: int) -> str:
  """Returns the category of the rows over one turn, which counts from 0."""
  return f'turn {turn + 1}'


@dataclasses.dataclass(frozen=True)
class Generation:
  """One turn of one prompt, decoded by one method.

  The prompts of a batch are decoded together. Each gets a share of the batch's
  seconds in proportion to its tokens, so that every token costs the same.
  """

  batch: int  # its number, from 0; with batch size 1, the prompt's number
  category: str
  prompt_tokens: int
  tokens: list[int]
  log_probs: list[float]  # empty if the rule does not compute them
  seconds: float
  stats: stats.Stats
  sample: int = 0  # the number of the sample of the prompt
  prompt: int = 0  # its number, from 0
  turn: int = 0  # of the conversation, from 0
  # One value per token; empty if only times were asked for.
  origins: list[int] = dataclasses.field(default_factory=list)  # types.Origin
  emit_rounds: list[int] = dataclasses.field(default_factory=list)

  @property
  def call(self) -> tuple[int, int, int]:
    """Identifies the generations that were decoded together, in one call."""
    return self.batch, self.sample, self.turn

  def is_of(self, category: str) -> bool:
    """Returns whether the rows of this category count this generation."""
    return category in (OVERALL, self.category, turn_category(self.turn))

  def to_json(self) -> dict[str, Any]:
    """Returns the record that the journal keeps."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, record: dict[str, Any]) -> 'Generation':
    """Returns the generation of a record of `to_json`."""
    counts = dict(record['stats'])
    for name in ('proposed', 'accepted'):
      counts[name] = tuple(counts[name])
    return cls(**record | {'stats': stats.Stats(**counts)})


def listed(x: Any, row: int, length: int) -> list:
  """Returns the first values of a row of x [B, M]; none if x is None."""
  return [] if x is None else x[row, :length].tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One row of result.json: a method over the prompts of a category.

  Times are in milliseconds, and values that were not measured are None. With
  batches, the time per token is the seconds of the batches over all of their
  tokens (throughput, not the latency of one prompt), the speedup is a ratio of
  two such times, its interval is over batches (with all samples of their
  prompts), and the parts of a round are those of a whole batch.
  """

  method: str
  drafter: str
  verifier: str
  law: str  # the kind of the drafts, a types.DraftKind
  lossless: bool
  benchmark: str
  category: str  # or OVERALL, or a `turn_category`
  num_draft_tokens: int
  temperature: float
  batch_size: int
  prompts: int
  samples: int  # of each prompt
  tokens: int
  rounds: int
  tokens_per_round: float
  tokens_per_round_ci95: list[float] | None
  plain_rounds: float | None  # the share that drafts nothing; None if K is 0
  acceptance: float | None  # the acceptance rate: `stats.Stats.acceptance`
  acceptance_ci95: list[float] | None
  acceptance_by_position: list[float | None]  # [K], None if never drafted
  ms_per_token: float | None  # prefill included; None without tokens
  ms_per_token_ci95: list[float] | None
  speedup: float | None
  speedup_ci95: list[float] | None
  mean_speedup: float | None  # as in Spec-Bench: see `ratios`
  mean_speedup_ci95: list[float] | None
  leviathan_speedup: float | None  # from acceptance and cost_ratio: see `cost`
  predicted_speedup: float | None  # from the times below, measured separately
  prefill_ms: float | None  # of a batch of typical prompts
  draft_ms: float | None  # per round; None, like all parts, if it varies
  verify_ms: float | None  # like overhead_ms, a mean over rounds of any width
  verify_ms_by_width: dict[str, float] | None  # if there are several widths
  overhead_ms: float | None
  cost_ratio: float | None  # of a draft token to a round of the baseline
  percent_of_roofline: float | None  # of one pass of the target per round
  part: str = ''  # of a table of several settings
  scores: dict[str, Any] = dataclasses.field(default_factory=dict)  # by name
  # Greedy outputs that should equal the baseline's and do not: at ties of
  # floats, and elsewhere. None if no outputs have to be equal.
  outputs_tied: int | None = None
  outputs_differing: int | None = None
  # Of the same prompts in refilled rows; None if they were not decoded so.
  refilled_ms_per_token: float | None = None  # prefill included
  refilled_speedup: float | None = None  # over the method's static batches
  refilled_speedup_ci95: list[float] | None = None
  refilled_tied: int | None = None  # outputs that are not the static batches'
  refilled_differing: int | None = None


@dataclasses.dataclass(frozen=True)
class Mismatches:
  """Outputs of a lossless greedy method that differ from the baseline's."""

  ties: int  # both tokens were equally likely at the first difference
  errors: int
  unaudited: int = 0  # nothing is known about the first difference

  @property
  def not_ties(self) -> int:
    """The number of outputs that have to be looked into."""
    return self.errors + self.unaudited


def first_difference(
  tokens: Sequence[int], baseline: Sequence[int]
) -> int | None:
  """Returns the first index at which the two differ; None if they are equal.

  If one is the beginning of the other, it is the length of the shorter one.
  """
  pairs = zip(tokens, baseline, strict=False)
  shorter = min(len(tokens), len(baseline))
  parting = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
  longer = max(len(tokens), len(baseline))
  return None if parting == longer else parting


def title(row: Mapping[str, Any]) -> str:
  """Returns what was decoded, from a row over all prompts of result.json."""
  benchmark = row['benchmark']
  setting = row['part'] or benchmark
  of_benchmark = f' ({benchmark})' if setting != benchmark else ''
  samples = row['samples']
  each = f' of {samples} samples each' if samples > 1 else ''
  return (
    f'{setting}{of_benchmark}: {row["prompts"]} prompts{each}, '
    f'{row["tokens"]} tokens, batch {row["batch_size"]}, '
    f'temperature {row["temperature"]:g}'
  )
