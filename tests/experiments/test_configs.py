"""Every configuration binds what there is; tables name their own methods."""

import pathlib

import gin
import pytest

from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import papers

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_RUNS = sorted(path.stem for path in _ROOT.glob('configs/runs/*.gin'))
_FULL = sorted(path.stem for path in _ROOT.glob('configs/full/*.gin'))


@pytest.fixture(autouse=True)
def _own_gin():
  gin.clear_config()
  gin.add_config_file_search_path(str(_ROOT))
  yield
  gin.clear_config()


def _methods(scope):
  with gin.config_scope(scope or None):
    bound = gin.get_bindings(
      evaluation_lib.Evaluation, resolve_references=False
    )
  found = bound.get('methods', ())
  if repr(found).startswith('%'):
    found = gin.query_parameter(repr(found))
  return set(found)


def _check_paper():
  """Checks that the paper's rows and names are of methods that are there."""
  try:
    parts = gin.query_parameter('suite.evaluations.parts')
  except ValueError:  # there is only one setting
    found = {'': _methods('')}
  else:
    found = {name: _methods(ref.config_key[0]) for name, ref in parts.items()}
  paper = papers.Paper()
  ours = [row for row in paper.rows if row[1] in found.get(row[0], ())]
  assert bool(ours) == bool(paper.rows)
  assert set(paper.names) <= set().union(*found.values())
  for part, method, over, _ in paper.ratios:
    assert {method, over} <= found[part]


@pytest.mark.parametrize('name', _RUNS)
def test_a_run_is_whole(name):
  gin.parse_config_files_and_bindings([f'configs/runs/{name}.gin'], None)
  _check_paper()


@pytest.mark.parametrize('name', _FULL)
def test_a_table_at_full_size_is_whole(name):
  files = [f'configs/runs/{name}.gin', f'configs/full/{name}.gin']
  gin.parse_config_files_and_bindings(files, None)
  _check_paper()


@pytest.mark.parametrize('folder', ['models', 'pairs'])
def test_models_and_pairs_can_be_read(folder):
  for path in sorted(_ROOT.glob(f'configs/{folder}/*.gin')):
    gin.clear_config()
    gin.parse_config_file(str(path))


def test_every_task_can_be_chosen():
  text = (_ROOT / 'configs/tasks.gin').read_text('utf-8')
  for line in text.splitlines():
    if line.endswith('.chat = True'):
      name = line.removesuffix('.chat = True')
      gin.clear_config()
      gin.parse_config_files_and_bindings(
        ['configs/runs/spec_bench.gin', 'configs/tasks.gin'],
        [f'Evaluation.task = @{name}()'],
      )
      task = gin.query_parameter('evaluation.Evaluation.task')
      assert task.scoped_configurable_fn().chat
