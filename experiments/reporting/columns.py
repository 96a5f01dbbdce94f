"""The meaning of each column of an evaluation, and how values are written."""

from collections.abc import Iterable
import dataclasses
from typing import Any

from experiments.reporting import rows

NOTHING = '-'  # not measured, or meaningless there


@dataclasses.dataclass(frozen=True)
class Column:
  """A field of a row; its interval, if any, is `<name>_ci95`."""

  title: str
  meaning: str
  form: str = ''


# In the order of the table. Fields that are not here are shown after these.
COLUMNS = {
  'method': Column('method', 'as the configuration calls it'),
  'num_draft_tokens': Column(
    'K', 'the most tokens that are drafted per round (for a tree, its nodes)'
  ),
  'tokens_per_round': Column(
    'tokens per round',
    'emitted tokens divided by rounds; autoregressive decoding has 1',
    '.2f',
  ),
  'plain_rounds': Column(
    'plain rounds',
    'the share of rounds that drafted nothing; the target then reads one token '
    'if the drafter has a pass for that',
    '.0%',
  ),
  'acceptance': Column(
    'acceptance',
    'the share that was kept of the draft tokens that verification reached '
    '(for a tree: of the levels that a path reached); a draft token after an '
    'end of text counts as rejected, and so may one beyond the end of a short '
    'draft, if rounds draft different numbers: then it is a lower bound',
    '.3f',
  ),
  'acceptance_by_position': Column(
    'acceptance by position',
    'of the rounds that drafted up to this position, the share that kept the '
    'draft token there',
    '.2f',
  ),
  'ms_per_token': Column(
    'ms per token', 'milliseconds, including the prefill', '.2f'
  ),
  'speedup': Column(
    'speedup',
    "the baseline's time per token divided by the method's, over all tokens "
    'together',
    '.2f',
  ),
  'mean_speedup': Column(
    'mean speedup',
    'as Spec-Bench computes it: the ratio of the means over prompts of tokens '
    'per second',
    '.2f',
  ),
  'leviathan_speedup': Column(
    "Leviathan's speedup",
    'by their theorem 3.8, from the acceptance and the cost ratio',
    '.2f',
  ),
  'predicted_speedup': Column(
    'predicted speedup',
    'from the times of the parts of a round, which were timed separately, and '
    'the rounds and tokens that were counted',
    '.2f',
  ),
  'draft_ms': Column(
    'draft ms', 'per round: proposing; after typical prompts', '.2f'
  ),
  'verify_ms': Column(
    'verify ms',
    "per round: the target's pass; the mean if rounds differ in width",
    '.2f',
  ),
  'verify_ms_by_width': Column(
    'verify ms by width',
    "the target's pass over this many draft tokens, for each number that has a "
    'pass',
    '.2f',
  ),
  'overhead_ms': Column(
    'rest ms',
    'per round: its time minus the two parts; if negative, noise',
    '.2f',
  ),
  'prefill_ms': Column(
    'prefill ms', 'reading the prompts of a typical batch', '.1f'
  ),
  'cost_ratio': Column(
    'c',
    'what drafting a token (for a tree, a level) costs, in rounds of the '
    'baseline',
    '.3f',
  ),
  'percent_of_roofline': Column(
    'of the roofline',
    'the time to read weights and caches once per round, as fast as the memory '
    'was read or copied, divided by the time of the round, in percent',
    '.0f',
  ),
  'drafter': Column(
    'drafter', 'what proposes tokens: a file of specsample/drafters'
  ),
  'verifier': Column(
    'verifier', 'the rule that keeps or rejects drafts: specsample/verify'
  ),
  'law': Column(
    'law',
    'how draft tokens are chosen: drawn from a distribution (sampled), or '
    'determined by the tokens before them (point_mass)',
  ),
  'lossless': Column(
    'exact',
    "whether the output has exactly the target's distribution",
  ),
  'outputs_differing': Column(
    'differ',
    "greedy outputs that differ from the baseline's; 0 for an exact rule, "
    'apart from float ties',
  ),
  'outputs_tied': Column(
    'ties', "greedy outputs that differ from the baseline's at a float tie"
  ),
  'refilled_ms_per_token': Column(
    'refilled ms per token',
    'as ms per token, in rows that are refilled with the next prompt when they '
    'are done',
    '.2f',
  ),
  'refilled_speedup': Column(
    'refilled speedup',
    "the time per token of the method's static batches divided by that of its "
    'refilled rows; the interval is over the static batches',
    '.2f',
  ),
  'refilled_differing': Column(
    'refilled differ',
    'outputs of refilled rows that differ from those of static batches, apart '
    'from float ties',
  ),
  'refilled_tied': Column(
    'refilled ties',
    'outputs of refilled rows that differ from those of static batches at a '
    'float tie',
  ),
  'prompts': Column('prompts', 'how many were decoded'),
  'samples': Column('samples', 'how often each prompt was decoded'),
  'tokens': Column('tokens', 'that were emitted, including ends of text'),
  'rounds': Column(
    'rounds', 'passes of the target over drafts, summed over prompts'
  ),
  # These are in the caption.
  'part': Column('setting', 'of this table, if there are several'),
  'benchmark': Column('benchmark', 'the file or task of the prompts'),
  'category': Column('category', 'of the prompts'),
  'temperature': Column('temperature', '0 is greedy decoding', 'g'),
  'batch_size': Column('batch', 'how many prompts are decoded at once'),
}
# The page's tables over all prompts; fields that no group has are in the last.
MAIN = (
  *('method', 'num_draft_tokens', 'tokens_per_round', 'acceptance'),
  *('ms_per_token', 'speedup', 'lossless', 'outputs_differing'),
)
TIMES = (
  *('draft_ms', 'verify_ms', 'verify_ms_by_width', 'overhead_ms'),
  *('prefill_ms', 'cost_ratio', 'percent_of_roofline'),
  *('predicted_speedup', 'leviathan_speedup', 'mean_speedup'),
)
# The fields that distinguish the tables of a run.
SETTING = ('part', 'benchmark', 'temperature', 'batch_size')
_INTERVAL = '_ci95'


def names(row: dict[str, Any]) -> list[str]:
  """Returns the columns of a row, without intervals, scores and its setting."""
  hidden = {*SETTING, 'category', 'scores'}
  known = [name for name in COLUMNS if name in row]
  others = [
    name for name in row if name not in COLUMNS and not is_interval(name, row)
  ]
  return [name for name in known + others if name not in hidden]


def is_interval(name: str, row: dict[str, Any]) -> bool:
  """Returns whether a field is the interval of another."""
  return name.endswith(_INTERVAL) and name.removesuffix(_INTERVAL) in row


def column(name: str) -> Column:
  """Returns a field's column; the title of an unknown field is its name."""
  return COLUMNS.get(name) or Column(name.replace('_', ' '), '')


def cell(row: dict[str, Any], name: str) -> str:
  """Returns a value as text, with its interval."""
  form = column(name).form
  return with_interval(row.get(name), row.get(name + _INTERVAL), form)


def with_interval(value: Any, interval: list[float] | None, form: str) -> str:
  """Returns a value as text, with the 95% interval in brackets."""
  shown = text(value, form)
  if not interval or interval[0] == interval[1]:
    return shown
  low, high = (text(bound, form) for bound in interval)
  return f'{shown} ({low}-{high})'


def text(value: Any, form: str = '') -> str:
  """Returns any JSON value as short text."""
  match value:
    case None | '' | []:
      shown = NOTHING
    case dict() if not value:  # the pattern {} matches any dict
      shown = NOTHING
    case bool():
      shown = 'yes' if value else 'no'
    case int():
      shown = f'{value:,}'
    case float():
      shown = format(value, form or '.4g')
    case list():
      shown = ' '.join(text(one, form) for one in value)
    case dict():
      shown = ', '.join(f'{name} {text(x, form)}' for name, x in value.items())
    case _:
      shown = str(value)
  return shown


def number(value: float | None, form: str, unit: str = '') -> str:
  """Returns a value in the given form, with its unit; '-' for None."""
  return NOTHING if value is None else f'{value:{form}}{unit}'


def are_several(categories: Iterable[str]) -> bool:
  """Returns whether there are several categories; one means all prompts."""
  return len({*categories} - {rows.OVERALL}) > 1
