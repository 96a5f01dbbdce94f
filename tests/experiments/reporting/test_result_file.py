"""Result files of the current schema, of older ones, and of neither."""

import json
import re

import pytest

from experiments.reporting import result_file
from experiments.reporting import rows as rows_lib
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


@pytest.mark.parametrize(
  ('change', 'why'),
  [
    ({'rows': []}, 'no row over all prompts'),
    ({'rows': None}, 'other rows ('),
    ({'rows': ['a']}, 'other rows ('),
    ({'rows': [{'method': 'ngram'}]}, 'other rows (Row.__init__() missing'),
    (
      _of_row(of_a_later_day=3),
      "other rows (Row.__init__() got an unexpected keyword argument 'of_a",
    ),
    (_of_row(category='a'), 'no row over all prompts'),
  ],
)
def test_what_cannot_be_made_up_is_refused(tmp_path, change, why):
  path = _write(tmp_path, _RESULT | change)
  expected = f'{path} has schema 5 and {why}'
  with pytest.raises(ValueError, match=re.escape(expected)) as error:
    result_file.read(path)
  assert 'evaluate again into another --out' in str(error.value)


@pytest.mark.parametrize(
  ('text', 'why'),
  [
    *(
      (
        json.dumps(_RESULT | {'schema': schema}),
        f'schema {schema}, but this version reads schema 5: make it again',
      )
      for schema in (6, 4, True, None)
    ),
    (json.dumps([_RESULT]), 'cannot be read .it holds no JSON object.'),
    ('{"rows": [', 'cannot be read .*: move it away'),
    ('\udcff', 'cannot be read .*: move it away'),
  ],
)
def test_other_files_are_refused_by_name(tmp_path, text, why):
  path = tmp_path / 'result.json'
  path.write_bytes(text.encode(errors='surrogateescape'))
  with pytest.raises(ValueError, match=f'^{re.escape(str(path))} .*{why}'):
    result_file.read(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
  with pytest.raises(ValueError, match=r'none\.json cannot be read \(No such'):
    result_file.read(tmp_path / 'none.json')


def test_of_other_commands_the_number_alone_is_checked(tmp_path):
  path = tmp_path / 'benchmark.json'
  content = {'schema': 5, 't_ms': {'1': 16.2}}
  path.write_text(json.dumps(content))
  assert result_file.read(path) == content
  path.write_text('{"schema": 9}')
  with pytest.raises(ValueError, match=r'benchmark\.json has schema 9'):
    result_file.read(path)
