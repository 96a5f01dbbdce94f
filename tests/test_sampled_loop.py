"""The compiled loop, sampled, against the exact law of what it emits.

`python -m experiments.certify` does the same with more rows, and writes it
down. That these tests can fail is what test_planted_bugs.py shows.
"""

import functools

import pytest

from experiments import statistical

_DRAWS = {draw.name: draw for draw in statistical.draws()}


@functools.cache
def _measure(name):
  return statistical.measure(_DRAWS[name], num_rows=8192, seed=1)


@pytest.mark.parametrize('name', _DRAWS)
def test_compiled_loop_follows_the_target(name):
  record = _measure(name)
  assert record['passed'], record
  # Else a pass would mean little.
  assert record['detectable_total_variation'] < 0.1


def test_an_adversarial_drafter_is_kept_as_often_as_the_theory_says():
  adversarial = [_measure(name) for name in _DRAWS if 'least likely' in name]
  assert len(adversarial) == len(statistical.VERIFIERS)
  for record in adversarial:
    assert record['acceptance_statistic'] <= record['acceptance_threshold']
  friendly = [
    _measure(f'Chain + {name}, mixed batch') for name in statistical.VERIFIERS
  ]
  kept = lambda records: [record['accepted'] for record in records]
  assert max(kept(adversarial)) < min(kept(friendly))
