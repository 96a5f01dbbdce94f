"""Result files of the current schema, of older ones, and of neither."""

import dataclasses
import json
import re

import pytest

from experiments.reporting import result_file
from experiments.reporting import rows as rows_lib

# As written before files stated their schema.
_OLD = {
  'hardware': {'platform': 'cpu', 'device': 'cpu', 'cpu_cores': 2},
  'versions': {'python': '3.11.2', 'jax': '0.10.2'},
  'git_commit': '6cb26cd',
  'command': 'python -m experiments.evaluate',
  'gin_config': '',
  'rows': [
    {
      'method': 'ngram',
      'drafter': 'ngram',
      'verifier': 'chain',
      'law': 'point_mass',
      'lossless': True,
      'benchmark': 'prompts',
      'category': 'overall',
      'num_draft_tokens': 2,
      'temperature': 0.0,
      'batch_size': 1,
      'prompts': 2,
      'tokens': 256,
      'rounds': 128,
      'tokens_per_round': 2.0,
      'acceptance_by_position': [0.75, None],
      'ms_per_token': 16.25,
      'speedup': 1.5,
      'speedup_ci95': [1.25, 1.75],
      'draft_ms': 0.5,
      'verify_ms': 20.0,
      'overhead_ms': None,
      'percent_of_roofline': 71.0,
    }
  ],
}


def _of_row(**values):
  return {'rows': [_OLD['rows'][0] | values]}


def _write(folder, content):
  (folder / 'result.json').write_text(json.dumps(content))
  return folder / 'result.json'


def test_what_is_written_says_its_schema_and_is_read(tmp_path):
  path = tmp_path / 'result.json'
  rows = [_OLD['rows'][0] | {'outputs_differing': 1, 'of a later day': 3}]
  content = _OLD | {'rows': rows, 'paper': {'source': 'a', 'rows': []}}
  result_file.write(path, content)
  written = json.loads(path.read_text())
  assert next(iter(written)) == 'schema'
  assert result_file.read(path) == written == content | {'schema': 5}


def test_an_older_file_gets_what_is_known_of_it(tmp_path):
  found = result_file.read(_write(tmp_path, _OLD))
  (row,) = found['rows']
  assert found == _OLD | {'schema': 5, 'paper': None, 'rows': [row]}
  measured = _OLD['rows'][0] | {'percent_of_roofline': None}
  assert row.items() >= measured.items()
  assert row['predicted_speedup'] is None
  # It decoded one setting, each prompt once, and scored nothing.
  assert (row['part'], row['samples'], row['scores']) == ('', 1, {})
  assert row['outputs_differing'] is None
  assert row['plain_rounds'] is row['verify_ms_by_width'] is None


@pytest.mark.parametrize('num_drafts', [0, 2])
@pytest.mark.parametrize('schema', [3, 4])
def test_what_meant_another_thing_is_not_known(tmp_path, schema, num_drafts):
  values = {'cost_ratio': 0.1, 'leviathan_speedup': 1.5, 'overhead_ms': 2.5}
  rows = _of_row(num_draft_tokens=num_drafts, **values)
  path = _write(tmp_path, _OLD | rows | {'schema': schema})
  (row,) = result_file.read(path)['rows']
  redefined = ('cost_ratio', 'leviathan_speedup', 'percent_of_roofline')
  assert {row[name] is None for name in redefined} == {schema == 3}
  without_drafts = {row[name] is None for name in ('verify_ms', 'overhead_ms')}
  assert without_drafts == {schema == 3 and not num_drafts}
  assert row['speedup'] == 1.5


def test_every_field_of_a_row_is_of_some_schema(tmp_path):
  (row,) = result_file.read(_write(tmp_path, _OLD))['rows']
  known = {field.name for field in dataclasses.fields(rows_lib.Row)}
  assert known <= row.keys()


def test_results_of_other_settings_are_not_replaced(tmp_path):
  path = tmp_path / 'result.json'
  result_file.check_settings(path, ['greedy'])
  result_file.write(path, _OLD)
  result_file.check_settings(path, [''])
  with pytest.raises(ValueError, match='the results of a single setting, not'):
    result_file.check_settings(path, ['greedy', 'drawn'])
  rows = [_OLD['rows'][0] | {'part': part} for part in ('greedy', 'drawn')]
  result_file.write(path, _OLD | {'rows': rows})
  result_file.check_settings(path, ['greedy', 'drawn'])
  with pytest.raises(ValueError, match="the results of 'greedy', 'drawn', not"):
    result_file.check_settings(path, ['greedy'])
  path.write_text('{')
  result_file.check_settings(path, ['greedy'])


@pytest.mark.parametrize('schema', [{}, {'schema': 2}, {'schema': 5}])
@pytest.mark.parametrize(
  ('change', 'why'),
  [
    ({'rows': []}, 'no rows'),
    ({'rows': None}, 'no rows'),
    ({'rows': ['a']}, 'rows that are not objects'),
    ({'rows': [{'method': 'ngram'}]}, 'no drafter, verifier, law, lossless,'),
    (_of_row(speedup='fast'), "a speedup that is 'fast'"),
    (_of_row(lossless=1), 'a lossless that is 1'),
    (_of_row(category='a'), 'no row over all prompts'),
    ({'paper': {'rows': 'x'}}, "a paper's numbers in another form"),
    ({'paper': {'rows': [{'paper': 1.5}]}}, "a paper's numbers in another"),
  ],
)
def test_what_cannot_be_made_up_is_refused(tmp_path, schema, change, why):
  path = _write(tmp_path, _OLD | change | schema)
  number = schema.get('schema', 1)
  expected = f'{path} has schema {number} and {why}'
  with pytest.raises(ValueError, match=re.escape(expected)) as error:
    result_file.read(path)
  assert 'evaluate again into another --out' in str(error.value)


def test_a_file_that_does_not_say_where_it_was_measured_is_refused(tmp_path):
  content = {name: _OLD[name] for name in ('rows', 'versions', 'git_commit')}
  with pytest.raises(ValueError, match='and no hardware, command, which'):
    result_file.read(_write(tmp_path, content))


@pytest.mark.parametrize(
  ('text', 'why'),
  [
    (json.dumps(_OLD | {'schema': 6}), r'schema 6, .* update specsample'),
    (json.dumps(_OLD | {'schema': 0}), 'schema 0, which never existed'),
    (json.dumps(_OLD | {'schema': True}), 'schema True, which never existed'),
    (json.dumps(_OLD | {'schema': None}), 'schema None, which never existed'),
    (json.dumps([_OLD]), 'does not hold a JSON object'),
    ('{"rows": [', 'is not a JSON file: move it away'),
    ('\udcff', 'is not a JSON file: move it away'),
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
  path.write_text('{"t_ms": {"1": 16.2}}')
  assert result_file.read(path) == {'t_ms': {'1': 16.2}, 'schema': 5}
  path.write_text('{"schema": 9}')
  with pytest.raises(ValueError, match=r'benchmark\.json has schema 9'):
    result_file.read(path)
