"""Each paper's configuration can be read, and names what it compares."""

import dataclasses
import json
import pathlib
import re

import gin
import pytest

from experiments import methods
from experiments.evaluation import evaluation as evaluation_lib
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
_TASKS = (
  *('articles', 'cnn_dailymail', 'GSM8K', 'HumanEval', 'MATH500', 'mt_bench'),
  *('spec_bench', 'speed_bench', 'xsum'),
)
_QUESTIONS = ('configs/runs/spec_bench.gin', 'configs/tasks.gin')
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


def _task_of(name):
  return f'Evaluation.task = @{name}()'


def _task():
  """Returns the evaluation's task without loading its target."""
  return gin.query_parameter(
    'evaluation.Evaluation.task'
  ).scoped_configurable_fn()


def _bindings():
  """Returns what each part's evaluation is bound to, without making it."""
  try:
    parts = gin.query_parameter('suite.evaluations.parts')
  except ValueError:  # there is only one setting
    return {'': _in_scope('')}
  return {part: _in_scope(ref.config_key[0]) for part, ref in parts.items()}


def _in_scope(scope, configurable=evaluation_lib.Evaluation):
  with gin.config_scope(scope or None):
    bound = gin.get_bindings(configurable, resolve_references=False)
  return {key: _of_macro(value) for key, value in bound.items()}


def _of_macro(value):
  """Returns the value of a macro, and any other value unchanged."""
  is_macro = repr(value).startswith('%')
  return gin.query_parameter(repr(value)) if is_macro else value


def _drafter(method):
  """Returns what a method's trained drafter is bound to; {} if it has none."""
  scope, name = method.config_key
  if name.endswith('.lattice_tree'):
    return _drafter(_in_scope(scope, methods.lattice_tree)['method'])
  is_trained = name.endswith('.trained')
  return _in_scope(scope, methods.trained) if is_trained else {}


@pytest.mark.parametrize('path', _ALL, ids=lambda path: path.stem)
def test_every_configuration_binds_what_there_is(path):
  gin.parse_config_file(str(path))


@pytest.mark.parametrize(
  ('pair', 'scope'),
  [
    ('gpt_oss_20b_and_eagle3', 'eagle3'),
    ('gemma_4_e4b_and_assistant', 'assistant'),
    ('qwen3_5_4b_and_dflash', 'dflash'),
    ('qwen3_6_27b_and_dflash', 'dflash'),
  ],
)
def test_a_trained_pair_is_of_one_target(pair, scope):
  names = ['configs/runs/generate.gin', f'configs/pairs/{pair}.gin']
  gin.parse_config_files_and_bindings(names, [])
  target = gin.query_parameter('target/specsample.load.name_or_path')
  bound = _in_scope(scope, methods.trained)
  assert repr(bound['target']) == '@target/gin.singleton()'
  # The drafter is named after the target, whatever its authors call the chat.
  (size,) = re.findall(r'-(E?\d+[bB])', target)
  assert f'-{size}-' in bound['name']
  models = (_ROOT / 'docs/models.md').read_text('utf-8')
  assert re.search(f'`{target}` .* `{bound["name"]}`', models)


@pytest.mark.parametrize(('table', 'full'), _READ)
def test_papers_rows_are_of_the_evaluation(table, full):
  names = [f'configs/runs/{table}.gin']
  if full is not None:
    names.append(f'configs/full/{full}.gin')
  gin.parse_config_files_and_bindings(names, [])
  found = {part: set(bound['methods']) for part, bound in _bindings().items()}
  assert all('autoregressive' in names for names in found.values())
  paper = papers.Paper()
  ours = [row for row in paper.rows if row[1] in found.get(row[0], ())]
  assert bool(ours) == bool(paper.rows)
  fields = {field.name for field in dataclasses.fields(rows_lib.Row)}
  for _, _, values in ours:
    for quantity in values:
      is_position = quantity.startswith('acceptance at ')
      assert quantity in fields or is_position or quantity in _SCORES
  assert set(paper.names) <= set().union(*found.values())
  for part, method, over, values in paper.ratios:
    assert {method, over} <= found[part]
    assert set(values) <= set(ratios.RATIOS)


def _is_bound(key):
  try:
    gin.query_parameter(key)
  except ValueError:
    return False
  return True


@pytest.mark.parametrize(
  'table', ['dflash', 'dflash2', 'dflash_dspark', 'lattice']
)
def test_a_setting_has_what_its_name_says(table):
  names = [f'configs/{folder}/{table}.gin' for folder in ('runs', 'full')]
  gin.parse_config_files_and_bindings(names, [])
  of_data = set()
  for part, bound in _bindings().items():
    task = bound['task'].scoped_configurable_fn()
    assert task.chat
    if part.endswith(task.name):
      of_data.add(task.name)
    else:
      assert (task.name, part[:-1]) == ('GSM8K', 'Qwen3-8B, T = ')
    (size,) = re.findall(r'-(\d+B)', part) or ['8B']
    loader = bound['target'].config_key[0]
    target = gin.query_parameter(f'{loader}/specsample.load.name_or_path')
    drafters = list(filter(None, map(_drafter, bound['methods'].values())))
    for drafter in drafters:
      assert repr(drafter['target']) == repr(bound['target'])
      assert size.lower() in drafter['name'].lower()
    assert drafters
    assert size in target
    # Qwen3-Coder does not think; what a drafter learned from decides otherwise.
    if 'Coder' not in target:
      keys = (f'{loader}/specsample.load', 'specsample.load')
      assert any(_is_bound(f'{key}.chat_variables') for key in keys)
  assert of_data == {'GSM8K', 'MATH-500', 'HumanEval', 'MT-Bench'}


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


@pytest.mark.parametrize('table', ['chen2023_table1', 'chen2023_figure1'])
def test_xsum_is_the_split_of_the_papers_size(table):
  names = [f'configs/{folder}/{table}.gin' for folder in ('runs', 'full')]
  gin.parse_config_files_and_bindings(names, [])
  assert summarization.xsum().source.hub.split == 'validation'


@pytest.mark.parametrize('task', _TASKS)
def test_a_task_may_stand_behind_a_table(task):
  gin.parse_config_files_and_bindings(_QUESTIONS, [_task_of(task)])
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
    _QUESTIONS, [_task_of('spec_bench'), f"spec_bench.path = '{path}'"]
  )
  task = _task()
  assert [one.category for one in task.prompts()] == ['mt_bench'] * 2 + ['qa']
