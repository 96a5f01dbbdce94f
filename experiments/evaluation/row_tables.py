"""Tables of an evaluation's rows, for the terminal and for the page."""

from collections.abc import Callable, Mapping, Sequence

from experiments import methods as methods_lib
from experiments.reporting import columns
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables

# The share of rounds without drafts above which a width for them pays.
_MANY = 0.2


def scores(rows: Sequence[rows_lib.Row]) -> tables.Table:
  """Returns a table with a line per method and a column per score.

  Args:
    rows: the rows over all prompts.
  """
  names = list(dict.fromkeys(name for row in rows for name in row.scores))
  return tables.Table(
    ['method', *names],
    [
      [row.method, *(_score(row.scores.get(name)) for name in names)]
      for row in rows
    ],
    caption='Scores of the texts',
    meanings={'method': columns.column('method').meaning},
  )


def refilled(rows: Sequence[rows_lib.Row]) -> tables.Table:
  """Returns a table that compares static batches with refilled rows.

  Args:
    rows: the rows over all prompts, decoded both ways.
  """
  names = (
    *('method', 'ms_per_token'),
    *('refilled_ms_per_token', 'refilled_speedup'),
  )
  return tables.Table(
    [columns.column(name).title for name in names],
    [[columns.cell(vars(row), name) for name in names] for row in rows],
  )


def by_category(
  rows: Sequence[rows_lib.Row], cell: Callable[[rows_lib.Row], str]
) -> tables.Table:
  """Returns a table with a line per category and a column per method.

  Args:
    rows: the rows of all categories; the baseline's are left out.
    cell: returns the text for the row of a method and a category.
  """
  found = {(row.category, row.method): row for row in rows}
  prompts = {row.category: row.prompts for row in rows}
  names = dict.fromkeys(row.method for row in rows)
  names.pop(methods_lib.BASELINE, None)
  text = lambda key: cell(found[key]) if key in found else columns.NOTHING
  return tables.Table(
    ['category', 'prompts', *names],
    [
      [category, str(count), *(text((category, name)) for name in names)]
      for category, count in prompts.items()
    ],
    caption='Speedup by category, then tokens per round',
  )


def rest_notes(rows: Sequence[rows_lib.Row]) -> list[str]:
  """Returns a sentence that explains a negative rest, if there is one."""
  if all((row.overhead_ms or 0) >= 0 for row in rows):
    return []
  return [
    'A negative rest is noise: the parts of a round were timed separately from '
    'the whole.'
  ]


def width_notes(
  rows: Sequence[rows_lib.Row], widths: Mapping[str, Sequence[int]]
) -> list[str]:
  """Returns a sentence for each drafter that should have another width.

  Args:
    rows: the rows of all prompts.
    widths: those of each method's drafter, as in `types.Drafter`.
  """
  return [
    f'{row.method}: {row.plain_rounds:.0%} of the rounds drafted nothing, but '
    f'the target read {widths[row.method][-1] + 1} tokens in each: give the '
    f'drafter widths = (0, {widths[row.method][-1]})'
    for row in rows
    if (row.plain_rounds or 0) > _MANY and 0 not in widths[row.method]
  ]


def acceptance_notes(rows: Sequence[rows_lib.Row]) -> list[str]:
  """Returns a sentence if an acceptance exceeds that of every position."""
  if not any(map(_exceeds_every_position, rows)):
    return []
  return [
    'The acceptance may exceed that of every position: it counts only the '
    'draft tokens that verification reached, whereas a position counts every '
    'round that drafted a token there, also after an earlier rejection.'
  ]


def _exceeds_every_position(row) -> bool:
  shares = [x for x in row.acceptance_by_position if x is not None]
  return bool(shares) and (row.acceptance or 0) > max(shares)


def _score(score) -> str:
  if score is None:
    return columns.NOTHING
  if score['ci95'] is None:
    return f'{score["value"]:.3f}'
  low, high = score['ci95']
  return f'{score["value"]:.3f} ({low:.3f}-{high:.3f})'
