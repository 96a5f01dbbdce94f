"""Prints the tables of docs/ from what docs/measure.sh measured, in Markdown.

    python docs/measured.py DIR [NAMES]

NAMES is a regular expression; only tables whose names match are printed.
"""

from collections.abc import Iterator, Sequence
import json
import pathlib
import re
import sys
from typing import Any

Record = dict[str, Any]

_COLUMNS = (
  *('setting', 'T', 'method', 'drafts', 'tokens per round', 'ms per token'),
  *('speedup', 'predicted', 'decoding alone', 't(K+1)/t(1)', 'roofline'),
)


def tables(folder: pathlib.Path, names: str) -> Iterator[tuple[str, str]]:
  """Yields the name and the Markdown of each finished table of `evaluate`."""
  for result in sorted(folder.glob('**/result.json')):
    name = str(result.parent.relative_to(folder))
    content = json.loads(result.read_text())
    if re.search(names, name) and 'speedup' in (content.get('rows') or [{}])[0]:
      yield name, table(content['rows'])


def table(rows: Sequence[Record]) -> str:
  """Returns the rows of all prompts, and the speedup of each category."""
  overall = [row for row in rows if row['category'] == 'overall']
  lines = [_line(_COLUMNS), _line(['---'] * len(_COLUMNS))]
  baselines = {
    (row['part'], row['temperature']): row
    for row in overall
    if row['num_draft_tokens'] == 0 and row['speedup'] == 1
  }
  for row in overall:
    plain = baselines.get((row['part'], row['temperature']), {})
    lines.append(_line(_cells(row, plain)))
  categories = dict.fromkeys(row['category'] for row in rows)
  del categories['overall']
  is_one_setting = len({row['part'] for row in rows}) == 1
  if categories and is_one_setting:
    lines += ['', *_by_category(rows, list(categories))]
  return '\n'.join(lines)


def _cells(row: Record, plain: Record) -> list[str]:
  return [
    row['part'],
    f'{row["temperature"]:g}',
    row['method'],
    str(row['num_draft_tokens']),
    f'{row["tokens_per_round"]:.2f}',
    f'{row["ms_per_token"]:.1f}',
    _speedup(row),
    _number(row['predicted_speedup'], '.2f', 'x'),
    _number(_decoding_alone(row, plain), '.2f', 'x'),
    _number(_ratio(row['verify_ms'], plain.get('verify_ms')), '.2f'),
    _number(row['percent_of_roofline'], '.0f', '%'),
  ]


def _speedup(row: Record) -> str:
  low, high = row['speedup_ci95'] or (1, 1)
  is_known = low < high
  interval = f' ({low:.2f}-{high:.2f})' if is_known else ''
  return f'{row["speedup"]:.2f}x{interval}'


def _decoding_alone(row: Record, plain: Record) -> float | None:
  """Returns the speedup without the prefill, from the parts of a round."""
  ms = lambda of: sum(
    of[name] for name in ('draft_ms', 'verify_ms', 'overhead_ms')
  )
  if row['verify_ms'] is None or plain.get('verify_ms') is None:
    return None
  return row['tokens_per_round'] * ms(plain) / ms(row)


def _ratio(above, below):
  return None if above is None or below is None else above / below


def _by_category(
  rows: Sequence[Record], categories: Sequence[str]
) -> Iterator[str]:
  """Yields a table of the methods' speedups in each category."""
  yield _line(['speedup', *categories])
  yield _line(['---'] * (1 + len(categories)))
  for method in dict.fromkeys(row['method'] for row in rows):
    of = {row['category']: row for row in rows if row['method'] == method}
    cells = [_speedup(of[name]) if name in of else '' for name in categories]
    yield _line([method, *cells])


def _number(value: float | None, form: str, unit: str = '') -> str:
  return '' if value is None else f'{value:{form}}{unit}'


def _line(cells: Sequence[str]) -> str:
  return '| ' + ' | '.join(cells) + ' |'


def main(arguments: Sequence[str]) -> int:
  """Prints the tables; returns the exit code."""
  if not arguments:
    print(__doc__)
    return 2
  folder = pathlib.Path(arguments[0])
  found = dict(tables(folder, arguments[1] if arguments[1:] else '.'))
  if not found:
    print(
      f'{folder} has no result.json of such a name: give the folder that '
      'docs/measure.sh filled',
      file=sys.stderr,
    )
    return 2
  for name, markdown in found.items():
    print(f'## {name}\n\n{markdown}\n')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
