"""Each paper's configuration can be read, and names what it compares."""

import dataclasses
import json
import pathlib

import gin
import pytest

from experiments.evaluation import papers
from experiments.reporting import ratios
from experiments.reporting import rows as rows_lib
from experiments.tasks import summarization

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_ALL = sorted(
  path
  for folder in ('runs', 'models', 'pairs')
  for path in (_ROOT / 'configs' / folder).glob('*.gin')
)
_SCORES = ('ROUGE-2', 'pass@100')
_FULL = sorted(path.stem for path in (_ROOT / 'configs/full').glob('*.gin'))
_TASKS = sorted(path.stem for path in (_ROOT / 'configs/tasks').glob('*.gin'))
_HERE = ('hydra', 'trees', 'trees_sampled', 'adaptive')
_READ = (
  *((table, None) for table in (*_FULL, *_HERE)),
  *((table, table) for table in _FULL),
  ('hydra', 'medusa'),  # the same pair and the same heads
)


@pytest.fixture(autouse=True)
def _own_gin():
  gin.clear_config()
  gin.add_config_file_search_path(str(_ROOT))
  yield
  gin.clear_config()


def _task():
  """Returns the evaluation's task without loading its target."""
  return gin.query_parameter(
    'evaluation.Evaluation.task'
  ).scoped_configurable_fn()


def _keys(parameter):
  """Returns the keys of a bound dictionary without making its values."""
  return set(gin.query_parameter(parameter))


@pytest.mark.parametrize('path', _ALL, ids=lambda path: path.stem)
def test_every_configuration_binds_what_there_is(path):
  gin.parse_config_file(str(path))


@pytest.mark.parametrize(('table', 'full'), _READ)
def test_papers_rows_are_of_the_evaluation(table, full):
  names = [f'configs/runs/{table}.gin']
  if full is not None:
    names.append(f'configs/full/{full}.gin')
  gin.parse_config_files_and_bindings(names, [])
  methods = _keys('evaluation.Evaluation.methods')
  assert 'autoregressive' in methods
  try:
    parts = _keys('suite.evaluations.parts')
  except ValueError:  # there is only one setting
    parts = {''}
  paper = papers.Paper()
  ours = [row for row in paper.rows if row[0] in parts and row[1] in methods]
  assert bool(ours) == bool(paper.rows)
  fields = {field.name for field in dataclasses.fields(rows_lib.Row)}
  for _, _, values in ours:
    for quantity in values:
      is_position = quantity.startswith('acceptance at ')
      assert quantity in fields or is_position or quantity in _SCORES
  assert set(paper.names) <= methods
  for part, method, over, values in paper.ratios:
    assert part in parts
    assert {method, over} <= methods
    assert set(values) <= set(ratios.RATIOS)


def test_medusas_own_number_is_not_under_hydras_paper():
  gin.parse_config_file('configs/runs/hydra.gin')
  found = papers.compare(papers.Paper(), [])
  assert [(row.row, row.quantity, row.paper) for row in found] == [
    ('Hydra++', 'speedup', 2.70),
    ('Hydra++ over Medusa', 'speedup', 1.27),
  ]


def test_trees_name_the_papers_of_both_rows():
  gin.parse_config_file('configs/runs/trees.gin')
  paper = papers.Paper()
  rows = {row.row: row.paper for row in papers.compare(paper, [])}
  assert rows == {
    'Medusa': 2.18,
    'Hydra++': 2.70,
    'Hydra++ over Medusa': 1.27,
  }
  assert '2401.10774' in paper.source
  assert '2402.05109' in paper.source


def test_each_size_of_qwen_has_its_own_target_and_drafter():
  names = ['configs/runs/dflash.gin', 'configs/full/dflash.gin']
  gin.parse_config_files_and_bindings(names, [])
  methods = gin.query_parameter('qwen3_4b/evaluation.Evaluation.methods')
  assert repr(methods['dflash']) == '@dflash_4b/methods.trained()'
  for of_4b in ('qwen3_4b/evaluation.Evaluation', 'dflash_4b/methods.trained'):
    assert repr(gin.query_parameter(f'{of_4b}.target')) == '%TARGET_4B'
    of_8b = of_4b.rpartition('/')[-1]
    assert repr(gin.query_parameter(f'{of_8b}.target')) == '%TARGET'
  for scope, size in (('target_4b', '4B'), ('target', '8B')):
    loaded = gin.query_parameter(f'{scope}/specsample.load.name_or_path')
    assert loaded == f'Qwen/Qwen3-{size}'
  for scope, size in (('dflash_4b', '4B'), ('dflash', '8B')):
    drafter = f'{scope}/methods.trained'
    name = gin.query_parameter(f'{drafter}.name')
    assert name == f'z-lab/Qwen3-{size}-DFlash-b16'
    assert gin.query_parameter(f'{drafter}.num_draft_tokens') == 15


@pytest.mark.parametrize('table', ['chen2023_table1', 'chen2023_figure1'])
def test_xsum_is_the_split_of_the_papers_size(table):
  names = [f'configs/{folder}/{table}.gin' for folder in ('runs', 'full')]
  gin.parse_config_files_and_bindings(names, [])
  assert summarization.xsum().source.hub.split == 'validation'


@pytest.mark.parametrize('task', _TASKS)
def test_a_task_may_stand_behind_a_table(task):
  names = ['configs/runs/spec_bench.gin', f'configs/tasks/{task}.gin']
  gin.parse_config_files_and_bindings(names, [])
  made = _task()
  assert made.chat
  assert made.name


def test_spec_benchs_questions_are_a_task(tmp_path):
  path = tmp_path / 'question.jsonl'
  lines = [
    {'question_id': i, 'category': category, 'turns': ['Why?', 'And?'][:turns]}
    for i, category, turns in (
      (81, 'writing', 2),
      (141, 'stem', 2),
      (321, 'qa', 1),
    )
  ]
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  gin.parse_config_files_and_bindings(
    ['configs/runs/spec_bench.gin', 'configs/tasks/spec_bench.gin'],
    [f"spec_bench.path = '{path}'"],
  )
  task = _task()
  assert [one.category for one in task.prompts()] == ['mt_bench'] * 2 + ['qa']
