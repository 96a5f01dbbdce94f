"""The compiled loop, sampled, against the exact law of its output.

`python -m experiments.certify` does the same with more rows, and records the
result. test_planted_bugs.py shows that these tests can fail.
"""

import functools

import pytest

from experiments.certificate import sampled
from experiments.certificate import sampled_cases
from specsample.types import DraftKind

# Each takes half a minute, so they are left to the certificate, and others of
# their kind stand for them here.
_LEFT_OUT = (
  *('DraftModel', 'EAGLE +', 'MTP', 'DFlash', 'Hydra++', 'P-EAGLE'),
  *('Adaptive, AdaEDL + chain', 'Adaptive, AdaEDL + coupled'),
  *('Adaptive, Fastest + block', 'Hydra + block'),
  *('Medusa + chain', 'Medusa + coupled'),
  *('Tree of EAGLE', 'Tree of MTP', 'Tree of DFlash', 'Tree of DSpark'),
  'Assistant',
  'Skip + block, mixed batch, tiny Llama',
  'Online distillation of DraftModel after every round + block',
  'Online distillation of Eagle after every round + chain',
)
_ALL = tuple(sampled_cases.draws())
_DRAWS = {
  draw.name: draw for draw in _ALL if not draw.name.startswith(_LEFT_OUT)
}


@functools.cache
def _measure(name):
  # A round of a network takes ten times as long as one of a table.
  num_rows = 3072 if 'tiny Llama' in name else 8192
  return sampled.measure(_DRAWS[name], num_rows=num_rows, seed=1)


@pytest.mark.slow
@pytest.mark.nightly(
  but=(
    'NoDraft + chain, mixed batch',
    'Ngram + chain, mixed batch',
    'Chain + chain, mixed batch',
    'Chain + chain, penalties, an EOS',
    'Adaptive, Fastest + chain, mixed batch',
    'Chain + block, mixed batch',
    'PARD + block, mixed batch',
    'Chain + block, penalties, an EOS',
    'Chain of the least likely tokens + block, mixed batch',
    'Medusa + block, mixed batch',
    'Chain + coupled, mixed batch',
    'Skip + coupled, mixed batch',
    'Chain + coupled, penalties, an EOS',
    'Hydra + coupled, mixed batch',
    'Tree, point mass + tree, mixed batch',
    'Tree, sampled + tree, mixed batch',
    'Tree, without replacement + traversal, mixed batch',
    'Tree, sampled + k_seq, mixed batch',
    'Tree, top and sampled + greedy_draft, mixed batch',
    'Tree, sampled + multi_path_block, mixed batch',
    'Tree, sampled + tree, penalties, an EOS',
    'Tree, sampled + tree, constraint',
    'LatticeTree of DSpark + tree, two settings, tiny Llama',
    'DynamicTree + tree, mixed batch',
    'NgramTree + tree, mixed batch',
    'Tree, Budget + tree, mixed batch',
    'Suffix + chain, mixed batch',
    'Either of Suffix and Chain + block, mixed batch',
  )
)
@pytest.mark.parametrize('name', _DRAWS)
def test_compiled_loop_follows_the_target(name):
  record = _measure(name)
  assert record['passed'], record
  # Otherwise a pass would mean little.
  assert record['detectable_total_variation'] < 0.1


def test_every_rule_and_kind_is_sampled():
  names = [draw.name for draw in _ALL]
  assert len(set(names)) == len(names)
  for start in _LEFT_OUT:
    assert any(name.startswith(start) for name in names), start
  rules = {draw.verifier_name for draw in _DRAWS.values()}
  assert rules == {*sampled_cases.VERIFIERS, *sampled_cases.TREE_VERIFIERS}
  assert {draw.kind for draw in _DRAWS.values()} == set(DraftKind)


def test_an_adversarial_drafter_is_kept_as_often_as_the_theory_says():
  adversarial = [_measure(name) for name in _DRAWS if 'least likely' in name]
  assert len(adversarial) == len(sampled_cases.VERIFIERS)
  for record in adversarial:
    assert record['acceptance_statistic'] <= record['acceptance_threshold']
  friendly = [
    _measure(f'Chain + {name}, mixed batch') for name in sampled_cases.VERIFIERS
  ]
  kept = lambda records: [record['accepted'] for record in records]
  assert max(kept(adversarial)) < min(kept(friendly))
