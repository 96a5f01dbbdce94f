"""Timed generations, and the rows of a table that are computed from them."""

from collections.abc import Iterable, Sequence
import dataclasses
from typing import Any

from experiments.reporting import tables
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One row of result.json: a method over the prompts of a category.

  Times are in milliseconds, and values that were not measured are None. With
  batches, the time per token is the seconds of the batches over all of their
  tokens (throughput, not the latency of one prompt), the speedup is a ratio of
  two such times, its interval is over batches (with all samples of their
  prompts), and the parts of a round are those of a whole batch.
  """

  method: str = tables.shown('method', 'as the configuration calls it')
  num_draft_tokens: int = tables.shown(
    'K', 'the most tokens that are drafted per round (for a tree, its nodes)'
  )
  tokens_per_round: float = tables.shown(
    'tokens per round',
    'emitted tokens divided by rounds; autoregressive decoding has 1',
    '.2f',
  )
  tokens_per_round_ci95: list[float] | None
  plain_rounds: float | None = tables.shown(
    'plain rounds',
    'the share of rounds that drafted nothing; the target then reads one token '
    'if the drafter has a pass for that; nothing if K is 0',
    '.0%',
  )
  acceptance: float | None = tables.shown(  # `stats.Stats.acceptance`
    'acceptance',
    'the share that was kept of the draft tokens that verification reached '
    '(for a tree: of the levels that a path reached); a draft token after an '
    'end of text counts as rejected, and so may one beyond the end of a short '
    'draft, if rounds draft different numbers: then it is a lower bound',
    '.3f',
  )
  acceptance_ci95: list[float] | None
  acceptance_by_position: list[float | None] = tables.shown(  # [K]
    'acceptance by position',
    'of the rounds that drafted up to this position, the share that kept the '
    'draft token there',
    '.2f',
  )
  ms_per_token: float | None = tables.shown(
    'ms per token', 'milliseconds, including the prefill', '.2f'
  )
  ms_per_token_ci95: list[float] | None
  speedup: float | None = tables.shown(
    'speedup',
    "the baseline's time per token divided by the method's, over all tokens "
    'together',
    '.2f',
    'x',
  )
  speedup_ci95: list[float] | None = tables.shown(
    '95% interval', 'of the speedup', '.2f'
  )
  mean_speedup: float | None = tables.shown(  # see `ratios`
    'mean speedup',
    'as Spec-Bench computes it: the ratio of the means over prompts of tokens '
    'per second',
    '.2f',
    'x',
  )
  mean_speedup_ci95: list[float] | None
  leviathan_speedup: float | None = tables.shown(
    "Leviathan's speedup",
    'by their theorem 3.8, from the acceptance and the cost ratio',
    '.2f',
    'x',
  )
  predicted_speedup: float | None = tables.shown(
    'predicted speedup',
    'from the times of the parts of a round, which were timed separately, and '
    'the rounds and tokens that were counted',
    '.2f',
    'x',
  )
  draft_ms: float | None = tables.shown(
    'draft ms',
    'per round: proposing; after typical prompts; not known, as all parts, if '
    'it varies',
    '.2f',
  )
  verify_ms: float | None = tables.shown(
    'verify ms',
    "per round: the target's pass; the mean if rounds differ in width",
    '.2f',
  )
  verify_ms_by_width: dict[str, float] | None = tables.shown(
    'verify ms by width',
    "the target's pass over this many draft tokens, for each number that has a "
    'pass, if there are several',
    '.2f',
  )
  overhead_ms: float | None = tables.shown(
    'rest ms',
    'per round: its time minus the two parts; if negative, noise',
    '.2f',
  )
  prefill_ms: float | None = tables.shown(
    'prefill ms', 'reading the prompts of a typical batch', '.1f'
  )
  cost_ratio: float | None = tables.shown(
    'c',
    'what drafting a token (for a tree, a level) costs, in rounds of the '
    'baseline',
    '.3f',
  )
  percent_of_roofline: float | None = tables.shown(
    'of the roofline',
    'the time to read weights and caches once per round, as fast as the memory '
    'was read or copied, divided by the time of the round',
    '.0f',
    '%',
  )
  drafter: str = tables.shown(
    'drafter', 'what proposes tokens: a file of specsample/drafters'
  )
  verifier: str = tables.shown(
    'verifier', 'the rule that keeps or rejects drafts: specsample/verify'
  )
  law: str = tables.shown(  # a types.DraftKind
    'law',
    'how draft tokens are chosen: drawn from a distribution (sampled), or '
    'determined by the tokens before them (point_mass)',
  )
  lossless: bool = tables.shown(
    'exact', "whether the output has exactly the target's distribution"
  )
  # None if no outputs have to be equal.
  outputs_differing: int | None = tables.shown(
    'differ',
    "greedy outputs that differ from the baseline's; 0 for an exact rule, "
    'apart from float ties',
    default=None,
  )
  outputs_tied: int | None = tables.shown(
    'ties',
    "greedy outputs that differ from the baseline's at a float tie",
    default=None,
  )
  prompts: int = tables.shown('prompts', 'how many were decoded')
  samples: int = tables.shown('samples', 'how often each prompt was decoded')
  tokens: int = tables.shown(
    'tokens', 'that were emitted, including ends of text'
  )
  rounds: int = tables.shown(
    'rounds', 'passes of the target over drafts, summed over prompts'
  )
  part: str = tables.shown(
    'setting', 'of this table, if there are several', default=''
  )
  benchmark: str = tables.shown('benchmark', 'the file or task of the prompts')
  category: str = tables.shown(  # or OVERALL, or a `turn_category`
    'category', 'of the prompts'
  )
  temperature: float = tables.shown('temperature', '0 is greedy decoding', 'g')
  batch_size: int = tables.shown(
    'batch', 'how many prompts are decoded at once'
  )
  # Of the same prompts in refilled rows; None if they were not decoded so.
  refilled_ms_per_token: float | None = tables.shown(
    'refilled ms per token',
    'as ms per token, in rows that are refilled with the next prompt when they '
    'are done',
    '.2f',
    default=None,
  )
  refilled_speedup: float | None = tables.shown(
    'refilled speedup',
    "the time per token of the method's static batches divided by that of its "
    'refilled rows; the interval is over the static batches',
    '.2f',
    'x',
    default=None,
  )
  refilled_speedup_ci95: list[float] | None = None
  refilled_differing: int | None = tables.shown(
    'refilled differ',
    'outputs of refilled rows that differ from those of static batches, apart '
    'from float ties',
    default=None,
  )
  refilled_tied: int | None = tables.shown(
    'refilled ties',
    'outputs of refilled rows that differ from those of static batches at a '
    'float tie',
    default=None,
  )
  scores: dict[str, Any] = dataclasses.field(default_factory=dict)  # by name

  @property
  def setting(self) -> tuple:
    """What distinguishes the tables of a run."""
    return self.part, self.benchmark, self.temperature, self.batch_size


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


def title(row: Row) -> str:
  """Returns what was decoded, from a row over all prompts."""
  setting = row.part or row.benchmark
  of_benchmark = f' ({row.benchmark})' if setting != row.benchmark else ''
  each = f' of {row.samples} samples each' if row.samples > 1 else ''
  return (
    f'{setting}{of_benchmark}: {row.prompts} prompts{each}, '
    f'{row.tokens} tokens, batch {row.batch_size}, '
    f'temperature {row.temperature:g}'
  )


def overall(rows: Sequence[Row]) -> list[Row]:
  """Returns the rows over all prompts."""
  return [row for row in rows if row.category == OVERALL]


def are_several(categories: Iterable[str]) -> bool:
  """Returns whether there are several categories; one means all prompts."""
  return len({*categories} - {OVERALL}) > 1
