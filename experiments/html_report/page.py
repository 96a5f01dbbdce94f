"""One page of all results: the runs that `files` finds, in a template."""

from collections.abc import Iterator, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from experiments.decoding import rounds
from experiments.evaluation import generations
from experiments.evaluation import papers
from experiments.evaluation import suite
from experiments.evaluation import summary
from experiments.html_report import evaluation_figures
from experiments.html_report import files
from experiments.html_report import other_tables
from experiments.html_report import views
from experiments.reporting import columns
from experiments.reporting import figures
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables as reporting_tables

_HERE = pathlib.PurePath()


@dataclasses.dataclass(frozen=True)
class Block:
  """A setting's tables and figures, or tables alone."""

  tables: list[reporting_tables.Table]
  title: str = ''
  details: list[reporting_tables.Table] = dataclasses.field(
    default_factory=list
  )
  figures: list[evaluation_figures.Figure] = dataclasses.field(
    default_factory=list
  )
  written: 'Written | None' = None


@dataclasses.dataclass(frozen=True)
class Written:
  """The texts of a setting, as the page's script reads them."""

  anchor: str
  data: list[dict[str, Any]]

  @property
  def methods(self) -> set[str]:
    """The methods that wrote a text, to which rows of a table link."""
    return {name for one in self.data for name in one['methods']}

  @property
  def categories(self) -> set[str]:
    """The categories of the prompts."""
    return {one['category'] for one in self.data}


@dataclasses.dataclass(frozen=True)
class Section:
  """The section of one run."""

  anchor: str
  name: str
  facts: list[tuple[str, str]]
  command: str
  gin_config: str
  blocks: list[Block]
  rounds: str  # HTML; '' unless each round was kept


def render(runs: Sequence[files.Run], title: str) -> str:
  """Returns the page as HTML, with style, script, figures and texts inside."""
  notes = []
  if not figures.are_possible():
    notes.append(f'The figures are left out: {figures.MISSING}.')
  has_rows = any(run.file == files.EVALUATION for run in runs)
  return views.ENVIRONMENT.get_template('report.html').render(
    title=title,
    notes=notes,
    passes=evaluation_figures.of_passes(_passes(runs), 'passes'),
    sections=[_section(run, i) for i, run in enumerate(runs)],
    columns=columns.of(rows_lib.Row).values() if has_rows else (),
    style=(views.TEMPLATES / 'report.css').read_text(),
    script=(views.TEMPLATES / 'report.js').read_text(),
  )


def _passes(runs) -> dict[str, dict[str, float]]:
  """Returns what benchmark measured of t(n), by hardware and run."""
  return {
    f'{_hardware(run.content["hardware"])} ({run.name})': run.content['t_ms']
    for run in runs
    if run.content.get('t_ms') and run.content.get('hardware')
  }


def _section(run, number):
  anchor = f'run-{number}'
  described = other_tables.description(run.content)
  facts = list(_facts(described))
  if run.file == files.EVALUATION:
    blocks = list(_blocks(run, anchor))
  else:
    content = run.content
    if run.file == files.GENERATION:
      facts += [(name, content[name]) for name in ('prompt', 'text')]
      content = content['metrics']
    tables = list(other_tables.tables(content, run.file))
    blocks = [Block(tables)]
  return Section(
    anchor=anchor,
    name=run.name,
    facts=facts,
    command=described.get('command') or '',
    gin_config=run.content.get('gin_config') or '',
    blocks=blocks,
    rounds=_rounds(run),
  )


def _blocks(run, anchor) -> Iterator[Block]:
  content = run.content
  if content.get('paper'):
    yield Block([papers.table(content['paper'])])
  others = {
    name: value
    for name, value in content.items()
    if name not in ('rows', 'paper') and value  # no data set, no divergence
  }
  all_rows = [rows_lib.Row(**record) for record in content['rows']]
  for i, setting in enumerate(dict.fromkeys(row.setting for row in all_rows)):
    rows = [row for row in all_rows if row.setting == setting]
    name = f'{anchor}-{i}'
    prompts = run.texts.get(suite.folder(_HERE, rows[0].part).name)
    texts = [_texts(one) for one in prompts or ()]
    yield Block(
      [summary.main(rows), *summary.parts(rows, with_intervals=True)],
      rows_lib.title(rows_lib.overall(rows)[0]),
      list(summary.in_detail(rows)),
      list(evaluation_figures.of_setting(rows, name)),
      Written(f'{name}-texts', texts) if texts else None,
    )
  yield Block(list(other_tables.tables(others, files.EVALUATION)))


def _rounds(run) -> str:
  found = run.content.get('rounds')
  if run.file != files.GENERATION or not found:
    return ''
  return views.of_rounds([rounds.from_json(one) for one in found])


def _facts(described) -> Iterator[tuple[str, str]]:
  """Yields where the results were measured, in words."""
  hardware = described.get('hardware') or {}
  if hardware:
    yield 'hardware', _hardware(hardware)
  versions = described.get('versions') or {}
  if versions:
    yield 'versions', ', '.join(f'{name} {x}' for name, x in versions.items())
  yield from (described.get('compiler_flags') or {}).items()
  if 'git_commit' in described:
    yield 'commit', described['git_commit'] or 'not in a repository'


def _hardware(hardware):
  """Returns '2 cores of an AMD EPYC, 16 GB', after any other devices."""
  words = []
  if hardware.get('platform') not in (None, 'cpu'):
    count = hardware.get('device_count', 1)
    words.append(f'{count} x {hardware.get("device")}')
  if hardware.get('process_count', 1) > 1:
    words.append(f'{hardware["process_count"]} processes')
  words.append(
    f'{hardware.get("cpu_cores", "?")} cores of {hardware.get("cpu", "a CPU")}'
  )
  if hardware.get('memory_bytes'):
    words.append(f'{hardware["memory_bytes"] / 1e9:.0f} GB')
  return ', '.join(words)


def _texts(prompt: generations.Prompt) -> dict[str, Any]:
  data = json.dumps(dataclasses.asdict(prompt), ensure_ascii=False)
  # JSON may hold half of a surrogate pair, which a page may not contain.
  return json.loads(data.encode(errors='replace'))
