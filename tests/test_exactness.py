"""The claim of the library: the output is distributed as the target alone.

`python -m experiments.certify` follows the drafters for a third round and has
more scenes of trees, and writes it down. That these tests can fail is what
test_planted_bugs.py shows.
"""

import collections

import pytest

from experiments import certificate
from experiments import statistical
from specsample.testing import cases as cases_lib
from specsample.types import DraftLaw

_BY_SHAPE = collections.defaultdict(list)
for _case in cases_lib.standard_cases(drafter_rounds=2):
  _shape = f'V={_case.vocab_size}-K={_case.num_draft_tokens}'
  _BY_SHAPE[_shape].append(_case)


@pytest.mark.parametrize('shape', _BY_SHAPE)
@pytest.mark.parametrize('name', statistical.VERIFIERS)
def test_every_sequence_has_the_targets_probability(name, shape):
  verifier = statistical.VERIFIERS[name]
  laws = {DraftLaw.POINT_MASS} if verifier.positional else verifier.draft_laws
  records = [
    record
    for case in _BY_SHAPE[shape]
    if case.law in laws
    for record in certificate.enumerate_case(name, verifier, case)
  ]
  # Of probabilities, and of how many drafts are kept against the theory.
  assert [record for record in records if not record['passed']] == []
  assert {record['law'] for record in records} <= {law.value for law in laws}
  assert min(record['rounds'] for record in records) >= 2


def test_every_law_is_enumerated_under_every_rule_that_takes_it():
  laws = {case.law for cases in _BY_SHAPE.values() for case in cases}
  assert laws == {DraftLaw.POINT_MASS, DraftLaw.SAMPLED}


# Of each tree, which the certificate has.
_SCENES_LEFT_OUT = ('temperature and top-k', 'greedy')


@pytest.mark.parametrize('name', statistical.TREE_VERIFIERS)
def test_every_sequence_of_a_tree_has_the_targets_probability(name):
  verifier = statistical.TREE_VERIFIERS[name]
  records = [
    certificate.enumerate_tree(name, verifier, case)
    for case in cases_lib.tree_cases()
    if case.law in verifier.draft_laws
    and not case.name.endswith(_SCENES_LEFT_OUT)
  ]
  assert [record for record in records if not record['passed']] == []
  assert {record['law'] for record in records} == {
    law.value for law in verifier.draft_laws
  }
  if name in ('tree', 'traversal', 'k_seq'):
    bounds = [r['optimal_accepted'] for r in records if 'optimal_accepted' in r]
    assert any(0.5 < bound < 1 for bound in bounds)


def test_typical_acceptance_is_noticed_to_be_lossy():
  (case,) = (
    case
    for case in cases_lib.tree_cases()
    if (case.name, case.law) == ('binary, plain', DraftLaw.POINT_MASS)
  )
  (record,) = certificate.measure_typical(case)
  assert record['passed'], record
  assert record['total_variation'] > 0.01
