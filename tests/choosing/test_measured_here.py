"""Times are measured once on a machine, and kept for what they depend on."""

import itertools
import json
import types

import jax
import pytest

from specsample import host
from specsample.choosing import measured_here


@pytest.fixture
def recall(tmp_path, monkeypatch):
  """A function that recalls a time; the first to be measured is 1, then 2."""
  monkeypatch.setenv('SPECSAMPLE_CACHE', str(tmp_path / 'times'))
  numbers = itertools.count(1)

  def recall(**what):
    measure = lambda: {'x': [float(next(numbers))]}
    return measured_here.recall(what, measure, lambda _: True)['x'][0]

  return recall


def test_times_are_measured_once_on_a_machine(recall, tmp_path):
  assert recall(a=1) == recall(a=1) == 1
  assert recall(a=2) == 2
  # Entries of another machine or version and truncated files are ignored.
  entries = {path: path.read_text() for path in (tmp_path / 'times').iterdir()}
  (path,) = [p for p, x in entries.items() if json.loads(x)['of']['a'] == 1]
  kept = json.loads(entries[path])
  older = kept | {'of': kept['of'] | {'versions': {'jax': '0.1'}}}
  for text, expected in ((json.dumps(older), 3), (entries[path][:20], 4)):
    path.write_text(text)
    assert recall(a=1) == expected
    assert json.loads(path.read_text())['of'] == kept['of']


def test_where_nothing_can_be_written_times_are_measured_anew(
  recall, tmp_path, monkeypatch
):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('SPECSAMPLE_CACHE', str(tmp_path / 'file' / 'times'))
  assert [recall(), recall()] == [1, 2]


@pytest.mark.parametrize(
  ('module', 'name'), [(measured_here, '_code'), (host, 'num_cores')]
)
def test_times_of_other_code_or_fewer_cores_are_not_recalled(
  recall, monkeypatch, module, name
):
  assert recall() == recall() == 1
  monkeypatch.setattr(module, name, lambda: 0)
  assert recall() == 2


def test_times_of_other_products_are_not_recalled(recall, monkeypatch):
  device = types.SimpleNamespace(platform='gpu', device_kind='a GPU')
  monkeypatch.setattr(measured_here.jax, 'devices', lambda: [device])
  for number, precision in enumerate(('highest', 'bfloat16'), start=1):
    with jax.default_matmul_precision(precision):
      assert recall() == recall() == number
