"""One page of all results, in a template: tables, figures, texts and rounds."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
from typing import Any

from experiments.decoding import rounds
from experiments.evaluation import generations
from experiments.evaluation import papers
from experiments.evaluation import plots
from experiments.evaluation import results
from experiments.evaluation import suite
from experiments.html_report import views
from experiments.reporting import figures
from experiments.reporting import result_file
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables as tables_lib
from specsample import files

# Shown separately, as facts about the run.
_DESCRIPTION = (
  *('schema', 'hardware', 'versions', 'compiler_flags', 'git_commit'),
  *('command', 'gin_config', 'environment'),
)
# A certificate has thousands of rows; the file has the rest.
_MOST_ROWS = 30


@dataclasses.dataclass(frozen=True)
class Block:
  """A setting's tables, figures and texts, or tables alone."""

  tables: Sequence[tables_lib.Table]
  anchor: str = ''
  title: str = ''
  details: Sequence[tables_lib.Table] = ()
  figures: Sequence[tuple[str, str]] = ()  # captions, and SVG
  texts: Sequence[dict[str, Any]] = ()  # as the page's script reads them


def render(runs: Sequence[result_file.Run], title: str, prompts: int) -> str:
  """Returns the page as HTML, with style, script, figures and texts inside.

  It has the texts of so many prompts of each category.
  """
  notes = []
  if not figures.are_possible():
    notes.append(f'The figures are left out: {figures.MISSING}.')
  has_rows = any(run.path.name == result_file.EVALUATION for run in runs)
  return views.ENVIRONMENT.get_template('report.html').render(
    title=title,
    notes=notes,
    passes=_figures(_passes(runs), 'passes'),
    sections=[_section(run, f'run-{i}', prompts) for i, run in enumerate(runs)],
    columns=tables_lib.columns(rows_lib.Row).values() if has_rows else (),
    style=(views.TEMPLATES / 'report.css').read_text(),
    script=(views.TEMPLATES / 'report.js').read_text(),
  )


def _passes(runs):
  """Yields the figure of what benchmark measured of t(n), if it did."""
  by_name = {
    f'{_hardware(run.content["hardware"])} ({run.name})': run.content['t_ms']
    for run in runs
    if run.content.get('t_ms') and run.content.get('hardware')
  }
  if by_name:
    draw = functools.partial(plots.pass_times, by_name)
    yield "The target's pass over n tokens, by hardware", draw


def _figures(drawn, name) -> list[tuple[str, str]]:
  """Returns captions and figures, whose ids begin with the unique `name`."""
  if not figures.are_possible():
    return []
  return [
    (caption, figures.to_svg(draw, f'{name}-{i}'))
    for i, (caption, draw) in enumerate(drawn)
  ]


def _section(run, anchor, prompts) -> dict[str, Any]:
  """Returns the section of one run, as the template reads it."""
  content = run.content
  described = content.get('environment') or content
  facts = list(_facts(described))
  shown_rounds = ''
  if run.path.name == result_file.EVALUATION:
    blocks = list(_blocks(run, anchor, prompts))
  elif run.path.name == result_file.GENERATION:
    facts += [(name, content[name]) for name in ('prompt', 'text')]
    blocks = [Block(list(_tables(content['metrics'], run.path.name)))]
    if found := content.get('rounds'):
      shown_rounds = views.of_rounds(list(map(rounds.from_json, found)))
  else:
    blocks = [Block(list(_tables(content, run.path.name)))]
  return {
    'anchor': anchor,
    'name': run.name,
    'facts': facts,
    'command': described.get('command'),
    'gin_config': content.get('gin_config'),
    'blocks': blocks,
    'rounds': shown_rounds,
  }


def _blocks(run, anchor, prompts) -> Iterator[Block]:
  content = run.content
  if content.get('paper'):
    yield Block([papers.table(content['paper'])])
  settings = dict.fromkeys(row.setting for row in content['rows'])
  for i, setting in enumerate(settings):
    rows = [row for row in content['rows'] if row.setting == setting]
    folder = suite.folder(run.path.parent, rows[0].part)
    path = files.at(folder / generations.NAME)
    texts = generations.read(path, prompts) if path.exists() else ()
    yield Block(
      [results.main(rows), *results.parts(rows, with_intervals=True)],
      f'{anchor}-{i}-texts',
      rows_lib.title(rows_lib.overall(rows)[0]),
      list(results.in_detail(rows)),
      _figures(plots.of_rows(rows), f'{anchor}-{i}'),
      list(map(_text, texts)),
    )
  others = {
    name: value
    for name, value in content.items()
    if name not in ('rows', 'paper') and value  # no data set, no divergence
  }
  yield Block(list(_tables(others, run.path.name)))


def _text(prompt: dict[str, Any]) -> dict[str, Any]:
  data = json.dumps(prompt, ensure_ascii=False)
  # JSON may hold half of a surrogate pair, which a page may not contain.
  return json.loads(data.encode(errors='replace'))


def _tables(
  content: Mapping[str, Any], file: str
) -> Iterator[tables_lib.Table]:
  """Yields a table of the single values, then one per list of records."""
  words = lambda name: name.replace('_', ' ')
  shown = {
    name: _records(value)
    for name, value in content.items()
    if name not in _DESCRIPTION
  }
  if values := [
    [words(name), tables_lib.text(content[name])]
    for name, records in shown.items()
    if records is None
  ]:
    yield tables_lib.Table(['name', 'value'], values, 'Values')
  for caption, records in shown.items():
    if not records:
      continue
    names = list(dict.fromkeys(name for record in records for name in record))
    left = len(records) - _MOST_ROWS
    yield tables_lib.Table(
      list(map(words, names)),
      [
        [tables_lib.text(record.get(name)) for name in names]
        for record in records[:_MOST_ROWS]
      ],
      words(caption),
      f'{left:,} more rows are in {file}.' if left > 0 else '',
    )


def _records(value) -> list[dict[str, Any]] | None:
  """Returns records as a list, also records by name; None for other values."""
  if isinstance(value, dict) and value:
    if not all(isinstance(record, dict) for record in value.values()):
      return None
    value = [{'': name, **record} for name, record in value.items()]
  is_table = isinstance(value, list) and all(
    isinstance(record, dict) for record in value
  )
  return value if is_table else None


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
