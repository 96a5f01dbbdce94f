"""Each paper's configuration reads, and names what it compares."""

import dataclasses
import pathlib

import gin
import pytest

from experiments import papers
from experiments import results

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SCORES = ('ROUGE-2', 'pass@100')
_FULL = sorted(path.stem for path in (_ROOT / 'configs/full').glob('*.gin'))
_READ = (
  *((table, None) for table in (*_FULL, 'hydra', 'mtp', 'trees', 'adaptive')),
  *((table, table) for table in _FULL),
  ('hydra', 'medusa'),  # of the same pair, with the same heads
)


@pytest.fixture(autouse=True)
def _own_gin():
  gin.clear_config()
  gin.add_config_file_search_path(str(_ROOT))
  yield
  gin.clear_config()


def _keys(parameter):
  """Of a dictionary that is bound, without making its values."""
  return set(gin.query_parameter(parameter))


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
  except ValueError:  # of one setting
    parts = {''}
  paper = papers.Paper()
  ours = [row for row in paper.rows if row[0] in parts and row[1] in methods]
  if paper.rows:
    assert ours
  fields = {field.name for field in dataclasses.fields(results.Row)}
  for _, _, values in ours:
    for quantity in values:
      is_position = quantity.startswith('acceptance at ')
      assert quantity in fields or is_position or quantity in _SCORES
  assert set(paper.names) <= methods
