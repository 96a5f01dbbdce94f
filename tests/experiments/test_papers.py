"""What a paper reports beside rows that were made up."""

import dataclasses

import pytest

from experiments import evaluation
from experiments import methods
from experiments import papers
from experiments import results
import specsample

_GAIN = papers.Paper(
  source='A paper: gains',
  over='token',
  names={'token': 'the token rule'},
  rows=[
    ('a', 'block', {'tokens_per_round': 1.083, 'speedup': 1.065}),
    ('a', 'block', {'acceptance at 1': 1.1, 'cost_ratio': 1.0}),
    ('a', 'greedy', {'speedup': 1.5}),
    ('b', 'block', {'speedup': 1.5}),
  ],
)


def _row(part, method, **values):
  names = [field.name for field in dataclasses.fields(results.Row)]
  common = {'part': part, 'method': method, 'scores': {}}
  return results.Row(**dict.fromkeys(names) | common | values)


def _evaluation(*names):
  method = methods.Method(specsample.drafters.NoDraft())
  own = dict.fromkeys(names, method)
  return evaluation.Evaluation(target=None, methods=own)


def test_gains_are_ratios_to_the_method_of_the_same_setting():
  rows = [
    _row(
      *('a', 'token'),
      tokens_per_round=2.0,
      speedup=1.6,
      speedup_ci95=[1.5, 1.7],
      acceptance_by_position=[0.5],
    ),
    _row(
      *('a', 'block'),
      tokens_per_round=2.1,
      speedup=2.0,
      speedup_ci95=[1.9, 2.1],
      acceptance_by_position=[0.6],
    ),
    # Its setting has no row of the token rule.
    _row('b', 'block', speedup=3.0),
  ]
  found = papers.compare(_GAIN, rows)
  assert [one.ours for one in found] == [
    *(pytest.approx(1.05), pytest.approx(1.25), pytest.approx(1.2)),
    *(None, None, None),
  ]
  assert {one.ci95 is None for one in found} == {True}
  assert found[0].row == 'a, block over the token rule'
  plain = papers.compare(dataclasses.replace(_GAIN, over=''), rows)
  assert (plain[1].row, plain[1].ours) == ('a, block', 2.0)
  assert plain[1].ci95 == [1.9, 2.1]


def test_gains_over_no_method_are_refused():
  papers.check(_GAIN, {'a': _evaluation('block', 'token')})
  # What is not run here is for reference.
  papers.check(_GAIN, {'a': _evaluation('autoregressive')})
  message = "Paper.over is 'token', which is no method of 'a': choose one of"
  with pytest.raises(ValueError, match=message):
    papers.check(_GAIN, {'a': _evaluation('block')})
