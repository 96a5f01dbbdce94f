"""Times are measured once on a machine, and kept for what they depend on."""

import json
import types

import jax
import pytest

from specsample import host
from specsample.choosing import measured_here


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('SPECSAMPLE_CACHE', str(tmp_path / 'times'))
  return tmp_path / 'times'


def test_times_are_measured_once_on_a_machine(cache):
  calls = []

  def measure():
    calls.append(1)
    return {'x': [1.0]}

  recall = lambda what: measured_here.recall(what, measure, lambda _: True)
  assert recall({'a': 1}) == recall({'a': 1}) == {'x': [1.0]}
  assert len(calls) == 1
  recall({'a': 2})
  assert len(calls) == 2
  # Entries of another machine or version and truncated files are ignored.
  (path,) = [
    p for p in cache.iterdir() if json.loads(p.read_text())['of']['a'] < 2
  ]
  kept = json.loads(path.read_text())
  for text in (
    json.dumps(kept | {'of': kept['of'] | {'versions': {'jax': '0.1'}}}),
    path.read_text()[:20],
  ):
    path.write_text(text)
    recall({'a': 1})
  assert len(calls) == 4
  assert json.loads(path.read_text()) == kept


def test_where_nothing_can_be_written_times_are_measured_anew(
  tmp_path, monkeypatch
):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('SPECSAMPLE_CACHE', str(tmp_path / 'file' / 'times'))
  times = iter(({'x': [1.0]}, {'x': [2.0]}))
  recall = lambda: measured_here.recall({}, lambda: next(times), lambda _: True)
  assert recall() == {'x': [1.0]}
  assert recall() == {'x': [2.0]}


@pytest.mark.parametrize(
  ('module', 'name'), [(measured_here, '_code'), (host, 'num_cores')]
)
def test_times_of_other_code_or_fewer_cores_are_not_recalled(
  cache, monkeypatch, module, name
):
  times = iter(({'x': [1.0]}, {'x': [2.0]}))
  recall = lambda: measured_here.recall({}, lambda: next(times), lambda _: True)
  assert recall() == recall() == {'x': [1.0]}
  monkeypatch.setattr(module, name, lambda: 0)
  assert recall() == {'x': [2.0]}


def test_times_of_other_products_are_not_recalled(cache, monkeypatch):
  device = types.SimpleNamespace(platform='gpu', device_kind='a GPU')
  monkeypatch.setattr(measured_here.jax, 'devices', lambda: [device])
  times = iter(({'x': [1.0]}, {'x': [2.0]}))
  recall = lambda: measured_here.recall({}, lambda: next(times), lambda _: True)
  for precision in ('highest', 'bfloat16'):
    with jax.default_matmul_precision(precision):
      found = recall()
      assert recall() == found
  assert found == {'x': [2.0]}
