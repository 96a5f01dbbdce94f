"""Result files of any schema, and tables in terminals of any width."""

import json
import re

import pytest

from experiments.evaluation import results
from experiments.reporting import result_file
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables
from tests.experiments import reports

_RESULT = {
  'schema': 5,
  'hardware': {'platform': 'cpu', 'device': 'cpu', 'cpu_cores': 2},
  'versions': {'python': '3.11.2', 'jax': '0.10.2'},
  'git_commit': '6cb26cd',
  'command': 'python -m experiments.evaluate',
  'gin_config': '',
  'rows': [reports.row('ngram', 'overall', 2)],
}


def _of_row(**values):
  return {'rows': [_RESULT['rows'][0] | values]}


def _write(folder, content):
  (folder / 'result.json').write_text(json.dumps(content))
  return folder / 'result.json'


def test_what_is_written_says_its_schema_and_is_read(tmp_path):
  path = tmp_path / 'result.json'
  paper = {'source': 'a', 'note': '', 'targets': '', 'rows': []}
  content = _RESULT | _of_row(outputs_differing=1) | {'paper': paper}
  result_file.write(path, content)
  written = json.loads(path.read_text())
  assert next(iter(written)) == 'schema'
  rows = [rows_lib.Row(**record) for record in written['rows']]
  assert result_file.read(path) == written | {'rows': rows}
  assert written.items() >= content.items()


def test_results_of_other_settings_are_not_replaced(tmp_path):
  path = tmp_path / 'result.json'
  result_file.check_settings(path, ['greedy'])
  result_file.write(path, _RESULT)
  result_file.check_settings(path, [''])
  with pytest.raises(ValueError, match='the results of a single setting, not'):
    result_file.check_settings(path, ['greedy', 'drawn'])
  rows = [_RESULT['rows'][0] | {'part': part} for part in ('greedy', 'drawn')]
  result_file.write(path, _RESULT | {'rows': rows})
  result_file.check_settings(path, ['greedy', 'drawn'])
  with pytest.raises(ValueError, match="the results of 'greedy', 'drawn', not"):
    result_file.check_settings(path, ['greedy'])
  # Results that are too old to be read are not replaced either.
  _write(tmp_path, {'rows': [{'method': 'ngram'}]})
  with pytest.raises(ValueError, match='the results of a single setting, not'):
    result_file.check_settings(path, ['greedy'])
  for damaged in ('{', '{"rows": []}', '{"rows": 1}', '{}'):
    path.write_text(damaged)
    result_file.check_settings(path, ['greedy'])


_AGAIN = 'evaluate again into another --out'
_OTHER = 'schema 5 and other rows ('
_NONE = 'schema 5 and no row over all prompts'


@pytest.mark.parametrize(
  ('content', 'why', 'remedy'),
  [
    (_RESULT | {'rows': []}, _NONE, _AGAIN),
    (_RESULT | {'rows': None}, _OTHER, _AGAIN),
    (_RESULT | {'rows': ['a']}, _OTHER, _AGAIN),
    (
      _RESULT | {'rows': [{'method': 'ngram'}]},
      f'{_OTHER}Row.__init__() missing',
      _AGAIN,
    ),
    (
      _RESULT | _of_row(of_a_later_day=3),
      f"{_OTHER}Row.__init__() got an unexpected keyword argument 'of_a",
      _AGAIN,
    ),
    (_RESULT | _of_row(category='a'), _NONE, _AGAIN),
    *(
      (
        _RESULT | {'schema': schema},
        f'schema {schema}, but this version reads schema 5',
        'make it again',
      )
      for schema in (6, 4, True, None)
    ),
  ],
)
def test_other_results_are_refused(tmp_path, content, why, remedy):
  path = _write(tmp_path, content)
  with pytest.raises(ValueError) as error:
    result_file.read(path)
  assert str(error.value).startswith(f'{path} has {why}')
  assert remedy in str(error.value)


@pytest.mark.parametrize(
  ('text', 'why'),
  [
    ('[{}]', 'it holds no JSON object'),
    ('{"rows": [', '.*: move it away'),
    ('\udcff', '.*: move it away'),
    (None, 'No such'),
  ],
)
def test_file_that_holds_no_result_is_refused_by_name(tmp_path, text, why):
  path = tmp_path / 'result.json'
  if text is not None:
    path.write_bytes(text.encode(errors='surrogateescape'))
  message = rf'^{re.escape(str(path))} cannot be read .{why}'
  with pytest.raises(ValueError, match=message):
    result_file.read(path)


def test_of_other_commands_the_number_alone_is_checked(tmp_path):
  path = tmp_path / 'benchmark.json'
  content = {'schema': 5, 't_ms': {'1': 16.2}}
  path.write_text(json.dumps(content))
  assert result_file.read(path) == content
  path.write_text('{"schema": 9}')
  with pytest.raises(ValueError, match=r'benchmark\.json has schema 9'):
    result_file.read(path)


# rich would read these as a closing tag, a colour, an emoji and a link.
_NAMES = ('a[/b]', '[red]x', ':bug:', '[link=x]y', 'long name ' * 9 + 'end')
_HEADINGS = (
  *('method', 'K', 'tokens per round', 'speedup', '95% interval'),
  *(f'c{i}' for i in range(9)),
)


def _print(*shown):
  console = tables.console()
  for one in shown:
    console.print(one)


def _table():
  columns = range(1, len(_HEADINGS))
  return tables.Table(
    _HEADINGS,
    [[name, *(f'{i}x{j}' for j in columns)] for i, name in enumerate(_NAMES)],
  )


@pytest.mark.parametrize('width', [30, 80, 100, 300])
def test_nothing_is_cut_at_any_width(width, in_terminal):
  text = in_terminal(width, _print, _table())
  assert max(map(len, text.splitlines())) <= width
  words = text.split()
  for i in range(len(_NAMES)):
    for j in range(1, len(_HEADINGS)):
      assert words.count(f'{i}x{j}') == 1
  for heading in _HEADINGS:
    assert set(heading.split()) <= set(words)
  for name in _NAMES[:-1]:
    assert name in text
  # A name that is folded keeps its end.
  assert 'end' in words


def test_a_part_repeats_the_names(in_terminal):
  parts = in_terminal(50, _print, _table()).split('method')[1:]
  assert len(parts) > 1
  for part in parts:
    assert all(name in part for name in _NAMES[:-1])
  (whole,) = in_terminal(300, _print, _table()).split('method')[1:]
  assert _NAMES[-1] in whole


def test_lines_about_methods_have_their_names(in_terminal):
  found = {
    'a[/b]': rows_lib.Mismatches(0, 0),
    '[red]x': rows_lib.Mismatches(1, 0),
    ':bug:': rows_lib.Mismatches(0, 1),
    '[x]': rows_lib.Mismatches(1, 0, 1),
  }
  lines = results.mismatch_lines(found)
  text = in_terminal(100, _print, *lines, 'a str [/b] [red] :bug:')
  for name in (*found, 'a str [/b] [red] :bug:'):
    assert name in text
