"""The certificate in a terminal, also if an entry is NaN."""

import json
import re

from experiments.certificate import terminal
from experiments.certificate.planted import detectors


def _sections(**sections):
  names = ('cases', 'lossy', 'statistical', 'choices', 'planted_bugs')
  return {name: [] for name in names} | sections


def test_what_is_no_number_is_shown_and_fails(capsys):
  case = {
    'verifier': 'mine',
    'law': 'sampled',
    'max_error': None,
    'expected_accepted': None,
    'passed': False,
  }
  drawn = {
    'drafter': 'Chain',
    'verifier': 'mine',
    'settings': 'mixed batch',
    'statistic': None,
    'threshold': 60.0,
    'detectable_total_variation': 0.01,
    'accepted': None,
    'predicted_accepted': None,
    'passed': False,
  }
  bug = {
    'name': 'a bug',
    'statistic': None,
    'threshold': 1.0,
    'shipped_statistic': None,
    'caught': False,
  }
  choice = {
    'settings': 'greedy',
    'wrong': 1,
    'missed_bounds': 2,
    'scored': {'8': 30, '640': 2},
    'passed': False,
  }
  certificate = _sections(
    cases=[case, case | {'max_error': 1e-16, 'expected_accepted': 1.0}],
    statistical=[drawn],
    choices=[choice],
    planted_bugs=[bug],
  )
  json.dumps(certificate, allow_nan=False)
  terminal.show(certificate)
  shown = capsys.readouterr().out
  assert shown.count('NaN') >= 6
  assert re.search(r'greedy +32 +1 +2 +30 +2', shown)
  assert len(list(terminal.failures(certificate))) == 5


def test_wrong_tokens_of_all_scenes_are_counted(capsys):
  scene = {
    'verifier': 'coupled',
    'law': 'sampled',
    'keys': 2,
    'tokens': 10,
    'max_error': 3,
    'expected_accepted': 1.0,
    'passed': False,
  }
  terminal.show(_sections(cases=[scene, scene | {'max_error': 2}]))
  assert '5 of 20 tokens' in capsys.readouterr().out


def test_a_lossy_rule_is_shown_with_its_distance_from_the_target(capsys):
  record = lambda rule, distance: {
    'verifier': rule,
    'law': 'sampled',
    'max_error': distance / 2,
    'total_variation': distance,
    'expected_accepted': 1.0,
    'passed': True,
  }
  certificate = _sections(
    cases=[record('exact', 0.0)],
    lossy=[record('typical', 0.25), record('typical', 0.5)],
  )
  terminal.show(certificate)
  exact, typical = capsys.readouterr().out.splitlines()[-3:-1]
  assert 'exact' in exact
  assert 'lossy' not in exact
  assert '2.5e-01 (lossy, TV 0.25 to 0.50)' in typical
  terminal.show(_sections(lossy=[record('typical', 0.25)]))
  assert '(lossy, TV' in capsys.readouterr().out


def test_a_statistic_that_is_no_number_is_an_alarm():
  assert detectors.Reading(float('nan'), 1.0, 'any').alarm
  assert not detectors.Reading(1.0, 1.0, 'any').alarm
