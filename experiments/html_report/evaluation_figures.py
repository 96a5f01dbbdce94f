"""The figures of an evaluation's rows on a page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools

from experiments import methods as methods_lib
from experiments.evaluation import plots
from experiments.html_report import figures as figures_lib
from experiments.reporting import figures
from experiments.reporting import rows as rows_lib


@dataclasses.dataclass(frozen=True)
class Figure:
  """One figure of a page."""

  caption: str
  svg: str


def of_setting(rows: Sequence[rows_lib.Row], name: str) -> Iterator[Figure]:
  """Yields the figures that a setting's rows have values for.

  Args:
    rows: rows of result.json, over all prompts and by category.
    name: a word that is unique among the settings of the page.
  """
  if not figures.are_possible():
    return
  for i, (caption, draw) in enumerate(_all(rows)):
    yield Figure(caption, figures.to_svg(draw, f'{name}-{i}'))


def of_passes(
  by_name: Mapping[str, Mapping[str, float]], name: str
) -> list[Figure]:
  """Returns the figure of t(n), if there is anything to draw.

  Args:
    by_name: for each hardware, milliseconds by number of tokens.
    name: a word that is unique among the figures of the page.
  """
  if not by_name or not figures.are_possible():
    return []
  draw = functools.partial(figures_lib.pass_times, by_name)
  caption = "The target's pass over n tokens, by hardware"
  return [Figure(caption, figures.to_svg(draw, name))]


def _all(
  rows: Sequence[rows_lib.Row],
) -> Iterator[tuple[str, Callable[[], figures.Figure]]]:
  overall = rows_lib.overall(rows)
  yield (
    'Tokens a round, speedup and acceptance over all prompts',
    functools.partial(plots.overall, overall, ''),
  )
  drafting = [row for row in rows if row.method != methods_lib.BASELINE]
  with_speedup = [row for row in drafting if row.speedup is not None]
  if rows_lib.are_several(row.category for row in with_speedup):
    yield (
      'Speedup by category, with 95% intervals',
      functools.partial(figures_lib.by_category, with_speedup),
    )
  if with_costs := [row for row in overall if row.speedup]:
    yield (
      'Tokens per round against the time of a round; lines join equal speedups',
      functools.partial(figures_lib.cost, with_costs),
    )
  yield (
    'A round: its parts, and how near the roofline it is',
    functools.partial(figures_lib.roofline, overall),
  )
  predicted = [
    row
    for row in overall
    if row.predicted_speedup is not None
    and row.speedup is not None
    and row.method != methods_lib.BASELINE
  ]
  if predicted:
    yield (
      'Speedup as the parts of a round predict it, and as measured',
      functools.partial(figures_lib.predicted, predicted),
    )
  curves = figures_lib.curves(overall)
  if curves:
    yield (
      'Against the number of draft tokens K, as in Figure 1 of Chen et al., '
      '2302.01318',
      functools.partial(figures_lib.against_num_drafts, curves),
    )
