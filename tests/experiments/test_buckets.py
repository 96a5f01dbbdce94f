"""Results and compiled programs in a bucket (gs://)."""

import json
import pathlib

import pytest

from experiments.reporting import files as reporting_files
from specsample import files
from tests import bucket

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_NEW_TOKENS = 24
_OUT = '--out=gs://bucket/run'
# Python runs this before anything else.
_STAND_IN = """
import os, pathlib
from tests import bucket
bucket.make(pathlib.Path(os.environ['BUCKETS']))
"""
_NO_PACKAGE = "import sys\nsys.modules['gcsfs'] = None\n"


def _variables(folder, first):
  (folder / 'sitecustomize.py').write_text(first)
  return {
    'PYTHONPATH': f'{folder}:{_ROOT}',
    'BUCKETS': str(folder),
    'JAX_COMPILATION_CACHE_DIR': 'gs://bucket/cache',
  }


def test_files_are_written_to_a_bucket(tmp_path):
  bucket.make(tmp_path)
  remote = files.at('gs://bucket/run')
  remote.mkdir(parents=True)
  reporting_files.write_json(remote / 'result.json', {'a': 1})
  (path,) = (tmp_path / 'bucket' / 'run').iterdir()
  assert path.name == 'result.json'
  assert json.loads(path.read_text()) == {'a': 1}


@pytest.mark.nightly
def test_an_evaluation_goes_on_from_a_bucket(
  commands, tiny_evaluate, greedy, tmp_path
):
  (tmp_path / 'prompts.txt').write_text('One.\nTwo.\nThree.\n')
  prompts = f'--prompts={tmp_path / "prompts.txt"}'
  call = (
    *('evaluate', *tiny_evaluate, prompts, _OUT),
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
  calls = [
    ('generate', *tiny, '--prompt=Hello'),
    ('certify', _OUT),
    ('compile_tpu', _OUT),
  ]
  variables = _variables(tmp_path, _NO_PACKAGE)
  for outcome in commands.run_all(calls, variables=variables):
    outcome.check_refused("gs://bucket/cache ... pip install 'specsample[gcs]'")
