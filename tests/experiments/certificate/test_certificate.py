"""Certificates that are interrupted, or whose code changes meanwhile."""

import contextlib
import functools

import pytest

from experiments.certificate import certificate
from experiments.command import environment
from experiments.command import journal as journal_lib

_HEADER = {'source': '0123'}
_NAMES = ('one', 'two', 'three', 'four')


def _find(name):
  return [{'name': name, 'passed': True, 'error': 0.1}, {'passed': True}]


_UNITS = [
  certificate.unit((section, i, name), functools.partial(_find, section + name))
  for section in ('cases', 'lossy')
  for i, name in enumerate(_NAMES)
]


def _build(folder, steps_before_a_kill=None, header=_HEADER):
  """Returns the certificate (None if it was killed) and the steps it took."""
  begun = []

  @contextlib.contextmanager
  def progress(total):
    def step(description):
      if len(begun) == steps_before_a_kill:
        raise KeyboardInterrupt
      begun.append(description)

    yield step
    assert len(begun) == total

  journal = journal_lib.Journal(folder, header)
  try:
    return certificate.build(_UNITS, journal, progress), begun
  except KeyboardInterrupt:
    return None, begun
  finally:
    journal.close()


def test_what_a_kill_left_is_gone_on_from(tmp_path):
  for name in ('whole', 'killed'):
    (tmp_path / name).mkdir()
  expected, everything = _build(tmp_path / 'whole')
  assert len(everything) == len(_UNITS)
  assert expected['passed'] and not expected['complete']
  assert expected['lossy'] == [
    record for name in _NAMES for record in _find('lossy' + name)
  ]
  found = []
  for count in (1, 5, None):
    result, begun = _build(tmp_path / 'killed', count)
    found += begun
  assert found == everything
  assert result == expected


def test_a_certificate_is_of_one_version_of_the_code(tmp_path):
  _build(tmp_path, 1)
  with pytest.raises(ValueError, match='a run that differs in source: give'):
    _build(tmp_path, header=_HEADER | {'source': '4567'})
  plan = certificate.Plan(seed=3)
  header = certificate.header(plan)
  assert header['code'] == environment.source()
  assert header['configuration']['seed'] == 3
