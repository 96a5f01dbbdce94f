"""Results, journals and compiled programs in a bucket (gs://)."""

import json
import pathlib

import pytest

from experiments.command import journal
from experiments.reporting import files as reporting_files
from specsample import files
from tests import bucket

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_HEADER = {'configuration': {'a': '1'}, 'shape': (1, 2)}
_NEW_TOKENS = 24
_OUT = '--out=gs://bucket/run'
# Python runs this before anything else.
_STAND_IN = """
import os, pathlib
from tests import bucket
bucket.make(pathlib.Path(os.environ['BUCKETS']))
"""
_NO_PACKAGE = "import sys\nsys.modules['gcsfs'] = None\n"


@pytest.fixture
def folder(tmp_path):
  """A folder in a bucket, and its local folder."""
  bucket.make(tmp_path)
  return files.at('gs://bucket/run'), tmp_path / 'bucket' / 'run'


def _variables(folder, first):
  (folder / 'sitecustomize.py').write_text(first)
  return {
    'PYTHONPATH': f'{folder}:{_ROOT}',
    'BUCKETS': str(folder),
    'JAX_COMPILATION_CACHE_DIR': 'gs://bucket/cache',
  }


def test_each_unit_is_an_object(folder):
  remote, local = folder
  first = journal.Journal(remote, _HEADER)
  first.add(('generation', 'n/a, b', 0), {'seconds': 0.1})
  first.add(('generation', 'n', 'a, b/0'), {'seconds': 0.2})
  first.add(('copy',), {'bytes': 3})
  first.close()
  names = {path.name for path in (local / 'journal').iterdir()}
  assert len(names) == 4
  assert {'header.json', 'copy.json'} < names
  again = journal.Journal(remote, _HEADER)
  assert len(again) == 3
  assert again['generation', 'n/a, b', 0] == {'seconds': 0.1}
  assert again['generation', 'n', 'a, b/0'] == {'seconds': 0.2}
  with pytest.raises(ValueError, match='already'):
    again.add(('copy',), {'bytes': 4})
  again.remove()
  assert not list(local.iterdir())


def test_another_configuration_is_refused(folder):
  remote, _ = folder
  journal.Journal(remote, _HEADER).close()
  with pytest.raises(ValueError, match='bucket/run/journal belongs to'):
    journal.Journal(remote, _HEADER | {'configuration': {'a': '2'}})
  journal.Journal(remote, _HEADER).close()


@pytest.mark.parametrize(
  ('name', 'content', 'expected'),
  [
    ('header.json', None, 'has no header.json: give another --out'),
    ('copy.json', '{"key": [', r'copy\.json is damaged: delete the file'),
  ],
)
def test_damage_is_refused(folder, name, content, expected):
  remote, local = folder
  whole = journal.Journal(remote, _HEADER)
  whole.add(('copy',), {'bytes': 3})
  (local / 'journal' / name).unlink()
  if content is not None:
    (local / 'journal' / name).write_text(content)
  with pytest.raises(ValueError, match=expected):
    journal.Journal(remote, _HEADER)


def test_files_are_written_to_a_bucket(folder):
  remote, local = folder
  remote.mkdir(parents=True)
  reporting_files.write_json(remote / 'result.json', {'a': 1})
  assert json.loads((local / 'result.json').read_text()) == {'a': 1}
  assert [path.name for path in local.iterdir()] == ['result.json']


@pytest.mark.nightly
def test_an_evaluation_goes_on_from_a_bucket(
  commands, tiny_evaluate, greedy, tmp_path
):
  (tmp_path / 'prompts.txt').write_text('One.\nTwo.\nThree.\n')
  call = (
    *(
      'evaluate',
      *tiny_evaluate,
      f'--prompts={tmp_path / "prompts.txt"}',
      _OUT,
    ),
    f'--gin_bindings=Evaluation.max_new_tokens = {_NEW_TOKENS}',
    '--gin_bindings=Evaluation.repeats = 1',
    "--gin_bindings=Evaluation.methods = {'ngram': @ngram/Method()}",
  )
  variables = _variables(tmp_path, _STAND_IN)
  (first,) = commands.run_all([call], variables=variables)
  assert first.code == 0, first.err
  assert 'results.png are in gs://bucket/run\n' in first.out
  folder = tmp_path / 'bucket' / 'run'
  units = {path.name: path for path in (folder / 'journal').iterdir()}
  assert units.keys() == {
    *('header.json', 'parts,ngram,2.json'),
    *(f'memory_bandwidth,{i}.json' for i in range(2)),
    *(f'generation,ngram,{i}.json' for i in range(3)),
  }
  cached = list((tmp_path / 'bucket' / 'cache').glob('jit__advance*'))
  assert cached

  # As if it had been preempted before two units and the results.
  kept = units.pop('generation,ngram,0.json').read_bytes()
  for name in ('generation,ngram,1.json', 'parts,ngram,2.json'):
    units.pop(name).unlink()
  (folder / 'result.json').unlink()
  (second,) = commands.run_all([call], variables=variables)
  assert second.code == 0, second.err
  steps = [line.partition('] ')[2] for line in second.err.splitlines()]
  assert [step for step in steps if not step.startswith('warm-up')] == [
    *('prompt 2 of 3, ngram', 'parts of a round, ngram')
  ]
  generations = [
    json.loads((folder / 'journal' / f'generation,ngram,{i}.json').read_text())
    for i in range(3)
  ]
  assert json.dumps(generations[0]).encode() == kept
  assert [
    record['value']['generations'][0]['tokens'] for record in generations
  ] == [
    greedy(prompt, _NEW_TOKENS, chat=True)[0]
    for prompt in ('One.', 'Two.', 'Three.')
  ]
  result = json.loads((folder / 'result.json').read_text())
  assert result['rows'][0]['prompts'] == 3


def test_a_missing_package_is_one_line(commands, tiny, tmp_path):
  variables = _variables(tmp_path, _NO_PACKAGE)
  calls = [
    ('generate', *tiny, '--prompt=Hello'),  # fills the compilation cache
    ('certify', _OUT),
    ('compile_tpu', _OUT),
  ]
  for outcome in commands.run_all(calls, variables=variables):
    assert outcome.code == 2, outcome.err
    assert outcome.out == ''
    (line,) = outcome.remarks
    assert 'gs://bucket/cache' in line
    assert "pip install 'specsample[gcs]'" in line
  del variables['JAX_COMPILATION_CACHE_DIR']
  calls = [
    ('evaluate', *tiny, _OUT),
    ('generate', *tiny, _OUT, '--prompt=Hello'),
    ('benchmark', *tiny, _OUT),
  ]
  for outcome in commands.run_all(calls, variables=variables):
    assert outcome.code == 2, outcome.err
    assert outcome.out == ''
    (line,) = outcome.remarks
    assert 'gs://bucket/run' in line
    assert "pip install 'specsample[gcs]'" in line
