"""Runs every table of configs/full by its command, on a mesh of 16 devices.

Models keep the names that the configurations give them; small stand-ins lie in
the Hugging Face cache. The bindings are those that a user would set (the files
of data sets) and some that keep decoding short.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.at_full_size import stand_ins

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# For each table: its configuration in configs/full, the number of devices of
# its mesh and the files that it reads.
_TABLES = {
  'block_verification': ('block_verification', 16, ('GSM8K',)),
  'chen2023_figure1': ('chen2023_figure1', 16, ('xsum',)),
  'chen2023_table1': ('chen2023_table1', 16, ('xsum',)),
  'dflash': ('dflash', 4, ('GSM8K', 'MATH500', 'mt_bench')),
  'dflash2': ('dflash2', 4, ('GSM8K', 'MATH500', 'mt_bench')),
  'dflash_dspark': ('dflash_dspark', 4, ('GSM8K', 'MATH500', 'mt_bench')),
  'eagle': ('eagle', 4, ('mt_bench',)),
  'hydra': ('medusa', 4, ('mt_bench',)),
  'lattice': ('lattice', 4, ('GSM8K', 'MATH500', 'mt_bench')),
  'leviathan2023': ('leviathan2023', 16, ('cnn_dailymail',)),
  'medusa': ('medusa', 4, ('mt_bench',)),
  'mtp': ('mtp', 16, ('mt_bench',)),
  'spec_bench': ('spec_bench', 4, ('spec_bench',)),
}
_QUESTION = {
  'question_id': 81,
  'category': 'writing',
  'turns': ['Why is it?', 'And then?'],
}
_RECORDS = {
  'GSM8K': {'question': 'What is 1 + 1?', 'answer': 'Two. #### 2'},
  'MATH500': {'problem': 'What is 1 + 1?', 'answer': '2'},
  'cnn_dailymail': {'article': 'It rained today.', 'highlights': 'Rain.'},
  'mt_bench': _QUESTION,
  'spec_bench': _QUESTION,
  'xsum': {'document': 'It rained. The roof is wet.', 'summary': 'Rain.'},
}
# Some XSum records have a summary but no article.
_WITHOUT_A_TEXT = {'xsum': {'document': '', 'summary': 'Snow.'}}


@pytest.fixture(scope='session', name='files')
def fixture_files(tmp_path_factory):
  """A folder with the hub's cache and one problem of each data set."""
  folder = tmp_path_factory.mktemp('files')
  (folder / 'hub').mkdir()
  stand_ins.write(folder / 'hub')
  for name, record in _RECORDS.items():
    records = [*filter(None, [_WITHOUT_A_TEXT.get(name)]), record]
    (folder / f'{name}.jsonl').write_text(
      ''.join(json.dumps(one) + '\n' for one in records)
    )
  return folder


def test_every_table_is_here():
  full = {path.stem for path in (_ROOT / 'configs/full').glob('*.gin')}
  assert {name for name, *_ in _TABLES.values()} == full


@pytest.mark.parametrize('table', _TABLES)
def test_table_is_made_of_the_published_names(files, tmp_path, table):
  full, num_devices, data = _TABLES[table]
  bindings = {f'{name}.path': f'{files}/{name}.jsonl' for name in data}
  bindings |= {'Evaluation.max_new_tokens': 8, 'Evaluation.repeats': 1}
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'experiments.evaluate'),
      *('--limit=1', '--num_seeds=2'),
      f'--gin_file=configs/runs/{table}.gin',
      f'--gin_file=configs/full/{full}.gin',
      *(f'--gin_bindings={key} = {value!r}' for key, value in bindings.items()),
      f'--out={tmp_path}',
    ],
    env=os.environ
    | {
      'HF_HOME': str(files),
      'HF_HUB_OFFLINE': '1',
      'JAX_NUM_CPU_DEVICES': str(num_devices),
    },
    cwd=_ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  result = json.loads((tmp_path / 'result.json').read_text())
  left_out = {name: read['left_out'] for name, read in result['data'].items()}
  assert left_out == {name: int(name == 'XSum') for name in left_out}
  notice = 'XSum: records without a text, left out: 1'
  assert (notice in done.stdout) == ('xsum' in data)
  rows = result['rows']
  assert {row['method'] for row in rows} > {'autoregressive'}
  # A random drafter accepts little, but it must not change the output.
  for row in rows:
    assert row['tokens'] >= row['rounds'] > 0
    assert not row['outputs_differing']
