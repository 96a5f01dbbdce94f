"""Certificates that are interrupted, of changed code, and that fail."""

import contextlib
import functools
import json
import pathlib

import pytest

from experiments.certificate import certificate
from experiments.command import environment
from experiments.command import journal as journal_lib

_ROOT = pathlib.Path(__file__).resolve().parents[3]
# A lossy rule that accepts nothing is exact, so the enumeration finds no error,
# which has to fail the certificate.
_MISTAKE = """
from experiments.certificate import certificate
from specsample import verify
certificate._SYNTHETIC = verify.Synthetic(rate=0.0)
"""
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


@pytest.mark.nightly
def test_an_entry_that_fails_is_named_and_fails_the_command(commands, tmp_path):
  (tmp_path / 'keeps_nothing.py').write_text(_MISTAKE)
  flags = lambda name: (
    'certify',
    "--gin_bindings=Plan.sections = ('lossy',)",
    f'--out={tmp_path / name}',
  )
  good, bad = commands.run_all(
    [flags('good'), (*flags('bad'), '--gin_bindings=import keeps_nothing')],
    variables={'PYTHONPATH': f'{tmp_path}:{_ROOT}'},
  )
  read = lambda name: json.loads(
    (tmp_path / name / 'certificate.json').read_text()
  )
  found = read('good')
  assert good.code == 0, good.err
  assert found['passed']
  # Only one of five sections was asked for.
  assert not found['complete']
  assert len(found['lossy']) == 20
  assert not any(
    found[x] for x in ('cases', 'statistical', 'choices', 'planted_bugs')
  )
  verifiers = {record['verifier'] for record in found['lossy']}
  assert verifiers == {'candidates', 'lenient', 'synthetic', 'typical'}
  assert 'FAILED' not in good.err

  found = read('bad')
  assert bad.code == 1, bad.err
  assert not found['passed']
  failed = [record for record in found['lossy'] if not record['passed']]
  lines = [x for x in bad.err.splitlines() if x.startswith('FAILED lossy: ')]
  assert len(lines) == len(failed) > 0
  assert 'verifier synthetic, ' in lines[0]
  assert ', rate 0.0, ' in lines[0]
  assert f'certificate.json is in {tmp_path / "bad"}' in bad.out
