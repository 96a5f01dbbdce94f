"""Timed generations, and the rows of a table that are made of them."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from specsample import stats

OVERALL = 'overall'  # the category of a row over all prompts


@dataclasses.dataclass(frozen=True)
class Generation:
  """One prompt, decoded by one method.

  Prompts of a batch are decoded at once: its seconds are shared out by their
  tokens, so that each of its tokens costs the same.
  """

  batch: int  # which one, from 0; with batch size 1 the prompt's number
  category: str
  prompt_tokens: int
  tokens: list[int]
  log_probs: list[float]
  seconds: float
  stats: stats.Stats
  sample: int = 0  # which one of the prompt
  # Of each token; empty where only times were asked for.
  origins: list[int] = dataclasses.field(default_factory=list)  # types.Origin
  emit_rounds: list[int] = dataclasses.field(default_factory=list)

  def to_json(self) -> dict[str, Any]:
    """As the journal keeps it."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, record: dict[str, Any]) -> 'Generation':
    """The inverse of `to_json`."""
    counts = dict(record['stats'])
    for name in ('proposed', 'accepted'):
      counts[name] = tuple(counts[name])
    return cls(**record | {'stats': stats.Stats(**counts)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One line of result.json: a method over the prompts of a category.

  Times are milliseconds; what was not measured is None. Of batches, the time a
  token is the seconds of the batches over all of their tokens (throughput, not
  what one prompt waits), the speedup is a ratio of two of those, its interval
  is over batches (with all samples of their prompts), and the parts of a
  round are those of a whole batch.
  """

  method: str
  drafter: str
  verifier: str
  law: str  # of the drafts: types.DraftLaw
  lossless: bool
  benchmark: str
  category: str  # or OVERALL
  num_draft_tokens: int
  temperature: float
  batch_size: int
  prompts: int
  samples: int  # of each prompt
  tokens: int
  rounds: int
  tokens_per_round: float
  tokens_per_round_ci95: list[float] | None
  plain_rounds: float | None  # the share without a draft; None where K is 0
  acceptance: float | None  # of the drafts whose turn came, the share kept
  acceptance_ci95: list[float] | None
  acceptance_by_position: list[float | None]  # [K], None where never drafted
  ms_per_token: float | None  # prefill included; None without tokens
  ms_per_token_ci95: list[float] | None
  speedup: float | None
  speedup_ci95: list[float] | None
  mean_speedup: float | None  # as Spec-Bench counts: `ratios`
  mean_speedup_ci95: list[float] | None
  leviathan_speedup: float | None  # of acceptance and cost_ratio: `cost`
  predicted_speedup: float | None  # by the times below, which were apart
  prefill_ms: float | None  # of a batch of typical prompts
  draft_ms: float | None  # of a round, as are the next two; None if they differ
  verify_ms: float | None  # as the rest, a mean over rounds of any width
  verify_ms_by_width: dict[str, float] | None  # if there are several widths
  overhead_ms: float | None
  cost_ratio: float | None  # of a draft token to a round of the baseline
  percent_of_roofline: float | None  # of one pass of the target a round
  part: str = ''  # of a table of several settings
  scores: dict[str, Any] = dataclasses.field(default_factory=dict)  # by name
  # Greedy outputs that must be the baseline's and are not: at ties of floats,
  # and elsewhere. None where nothing must be equal.
  outputs_tied: int | None = None
  outputs_differing: int | None = None


@dataclasses.dataclass(frozen=True)
class Mismatches:
  """Outputs of a lossless greedy method that are not the baseline's."""

  ties: int  # both tokens were equally likely where they part
  errors: int
  unaudited: int = 0  # nothing is known of where they part

  @property
  def not_ties(self) -> int:
    """What has to be looked into."""
    return self.errors + self.unaudited


def first_difference(
  tokens: Sequence[int], baseline: Sequence[int]
) -> int | None:
  """The first index at which they differ, None where they are equal.

  It is the length of the shorter one where that is a part of the other.
  """
  pairs = zip(tokens, baseline, strict=False)
  shorter = min(len(tokens), len(baseline))
  parting = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
  longer = max(len(tokens), len(baseline))
  return None if parting == longer else parting


def title(row: Mapping[str, Any]) -> str:
  """What was decoded: of a row over all prompts, as result.json has it."""
  benchmark = row['benchmark']
  setting = row.get('part') or benchmark
  of_benchmark = f' ({benchmark})' if setting != benchmark else ''
  samples = row.get('samples', 1)
  each = f' of {samples} samples each' if samples > 1 else ''
  return (
    f'{setting}{of_benchmark}: {row["prompts"]} prompts{each}, '
    f'{row["tokens"]} tokens, batch {row["batch_size"]}, '
    f'temperature {row["temperature"]:g}'
  )
