"""The rules for trees: exact by enumeration, and on worked examples."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.certificate import sampled_cases
from specsample import drafts
from specsample import stats
from specsample import tree
from specsample import verify
from specsample.sampling import Sampling
from specsample.testing import conditional as conditional_lib
from specsample.testing import enumerate as enumerate_lib
from specsample.testing import proposal as proposal_lib
from specsample.testing.hash_model import HashModel
from specsample.types import Draft, DraftKind

_RULES = sampled_cases.TREE_VERIFIERS
_TREES = {
  'chain': tree.chain(2),
  'siblings': tree.k_ary((3,)),
  'binary': tree.k_ary((2, 1)),
  'depth first': tree.Topology((0, 1, 1, 0)),
}
_TARGET, _DRAFT = np.asarray([0.5, 0.3, 0.2]), np.asarray([0.2, 0.3, 0.5])


def _table(noise, sampling=Sampling(temperature=1.0)):
  model = HashModel(vocab_size=3, noise=noise)
  return conditional_lib.from_model(model, {}, (1, 0, 1), sampling)


def _k_seq(b, c):
  """Returns how many of two siblings k-SEQ keeps if beta = b + c / rho.

  For two, 1 - (1 - beta)^2 = rho beta says that beta = 2 - rho. So rho^2 -
  (2 - b) rho + c = 0, and rho beta is kept (Sun et al., 2310.15141).
  """
  rho = (2 - b + math.sqrt((2 - b) ** 2 - 4 * c)) / 2
  return rho * (2 - rho)


# p = (.5, .3, .2) is the target's distribution and q = (.2, .3, .5) the
# drafter's. One draft is kept with sum min(p, q) = .2 + .3 + .2 = .7, and a
# rejection, always of token 2, leaves only token 0 in the residual.
_OF_TWO_SIBLINGS = {
  # The second is token 0 with probability .2, so .7 + .3 * .2.
  ('tree', DraftKind.SAMPLED): 0.76,
  # The second is not token 2 and hence token 0 with .2 / .5: .7 + .3 * .4.
  ('tree', DraftKind.WITHOUT_REPLACEMENT): 0.82,
  # Tokens 2 and 1 are drafted, and kept with what the target gives them.
  ('tree', DraftKind.POINT_MASS): 0.5,
  # Token 2 is kept with .2. Otherwise tokens 0 and 1 are left, with p = (5, 3)
  # / 8 and q = (2, 3) / 5 and sum min(p, q) = .4 + .375: .2 + .8 * .775.
  ('tree', DraftKind.TOP_AND_SAMPLED): 0.82,
  # With depth 1, traversal is the same as recursive rejection.
  ('traversal', DraftKind.SAMPLED): 0.76,
  ('traversal', DraftKind.WITHOUT_REPLACEMENT): 0.82,
  ('traversal', DraftKind.POINT_MASS): 0.5,
  ('traversal', DraftKind.TOP_AND_SAMPLED): 0.82,
  # beta = sum min(q, p / rho) = .2 + .3 / rho + .2 / rho; .7914 are kept.
  ('k_seq', DraftKind.SAMPLED): _k_seq(0.2, 0.5),
  # Token 2 is kept with .2. The other child is drawn from q = (2, 3, 0) / 5,
  # and sum min(p, q) = .4 + .3.
  ('greedy_draft', DraftKind.TOP_AND_SAMPLED): 0.9,
  # The better of the two is 0, 1 or 2 with probability .36, .39 and .25. The
  # minimum of these and p is .36 + .3 + .2, the most that is possible.
  ('multi_path_block', DraftKind.SAMPLED): 0.86,
}
# A node with two children: p = (1, 2) / 3 and q = (2, 1) / 3 everywhere. The
# node is kept with sum min(p, q) = 2 / 3 if it is tested alone, and so is its
# first child. A rejection, of token 0, leaves only token 1 in the residual.
_OF_A_NODE_WITH_TWO_CHILDREN = {
  # The children are kept with 2 / 3 + 1 / 3 * 1 / 3 = 7 / 9, so the sum is
  # 2 / 3 + 2 / 3 * 7 / 9.
  ('tree', DraftKind.SAMPLED): 32 / 27,
  # If the node is token 1, a = 1 and the sum is 1 + 7 / 9. If it is token 0,
  # a = 1 / 2: the first child is kept with 2 / 3 * 1 / 4 + 1 / 3 * 1 = 1 / 2.
  # Its rejection leaves (p / 2 - q)+ = 0, a = 0 and nothing: the sum is 1 / 2
  # of 2. Together 1 / 3 * 16 / 9 + 2 / 3 * 1.
  ('traversal', DraftKind.SAMPLED): 34 / 27,
  # beta = 1 / (3 rho) + 1 / 3 for the children.
  ('k_seq', DraftKind.SAMPLED): 2 / 3 * (1 + _k_seq(1 / 3, 1 / 3)),
  # Both tokens are drafted, so that one is kept.
  ('greedy_draft', DraftKind.TOP_AND_SAMPLED): 4 / 3,
  # The better child is 0 or 1 with probability 4 / 9 and 5 / 9. Prefixes
  # (0), (1) are drafted and kept with min(p, q) = 1 / 3 each; for whole paths
  # it is the minimum of that times p and q times the better child's: 3 / 27,
  # 6 / 27, 3 / 27 and 5 / 27 for (0, 0), (0, 1), (1, 0) and (1, 1).
  ('multi_path_block', DraftKind.SAMPLED): 2 / 3 + 17 / 27,
}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('branching', 'target', 'draft', 'name', 'kind', 'kept'),
  [
    *(
      ((2,), _TARGET, _DRAFT, *rule, kept)
      for rule, kept in _OF_TWO_SIBLINGS.items()
    ),
    *(
      ((1, 2), np.asarray([1, 2]) / 3, np.asarray([2, 1]) / 3, *rule, kept)
      for rule, kept in _OF_A_NODE_WITH_TWO_CHILDREN.items()
    ),
  ],
)
def test_drafts_are_kept_as_often_as_was_worked_out(
  branching, target, draft, name, kind, kept
):
  everywhere = lambda probs: lambda t, _: np.tile(probs, (probs.size**t, 1))
  proposal = proposal_lib.tree(everywhere(draft), tree.k_ary(branching), kind)
  enumeration = enumerate_lib.Enumeration(
    _RULES[name], proposal, everywhere(target)
  )
  expected = pytest.approx(kept, abs=1e-12)
  assert enumeration.expected_accepted() == expected
  formula = sampled_cases.KEPT[name]
  assert formula(proposal, everywhere(target)).sum() == expected


@pytest.mark.slow
@pytest.mark.parametrize('count', [2, 3])
def test_rules_keep_no_more_than_an_optimal_one_and_k_seq_not_much_less(count):
  rng = np.random.default_rng(count)
  topology = tree.k_ary((count,))
  for _ in range(8):
    target, draft = rng.dirichlet(np.full(4, 0.7), size=2)
    everywhere = lambda probs: lambda t, _: np.tile(probs, (4**t, 1))
    for kind in stats.BOUNDED_KINDS:
      proposal = proposal_lib.tree(everywhere(draft), topology, kind)
      kept = {
        name: enumerate_lib.Enumeration(
          rule, proposal, everywhere(target)
        ).expected_accepted()
        for name, rule in _RULES.items()
        if kind in rule.draft_kinds
      }
      most = stats.optimal_acceptance(target, draft, count, kind)
      assert max(kept.values()) < most + 1e-12
      # Sun et al. (2310.15141) show that k-SEQ keeps at least this share.
      if 'k_seq' in kept:
        assert kept['k_seq'] > (1 - (1 - 1 / count) ** count) * most - 1e-12


def _kept(rule, kind, shape):
  proposal = proposal_lib.tree(_table(0.5), _TREES[shape], kind)
  enumeration = enumerate_lib.Enumeration(rule, proposal, _table(0.0))
  return enumeration.expected_accepted()


def test_on_a_chain_they_are_the_rules_for_chains():
  sampled = DraftKind.SAMPLED
  chain = proposal_lib.sampled(_table(0.5), 2)
  kept = lambda rule: enumerate_lib.Enumeration(
    rule, chain, _table(0.0)
  ).expected_accepted()
  token = pytest.approx(kept(verify.chain), abs=1e-12)
  assert _kept(verify.tree, sampled, 'chain') == token
  assert _kept(verify.k_seq, sampled, 'chain') == token
  block = pytest.approx(kept(verify.block), abs=1e-12)
  assert _kept(verify.traversal, sampled, 'chain') == block
  assert _kept(verify.multi_path_block, sampled, 'chain') == block


@pytest.mark.slow
def test_traversal_keeps_at_least_as_much():
  for kind, shape in itertools.product(DraftKind, _TREES):
    least = _kept(verify.tree, kind, shape) - 1e-12
    assert _kept(verify.traversal, kind, shape) >= least


@pytest.mark.slow
@pytest.mark.parametrize('rule', [verify.tree, verify.traversal])
def test_a_token_that_is_there_twice_is_kept_once(rule):
  draft = lambda *tokens: Draft(
    tokens=jnp.asarray(tokens, jnp.int32),
    probs=None,
    kind=DraftKind.POINT_MASS,
    parents=jnp.zeros(len(tokens), jnp.int32),
    depth=1,
  )
  target = jnp.broadcast_to(_TARGET, (4, 3))
  once = rule.law(draft(1, 0), target[:3])
  twice = rule.law(draft(1, 1, 0), target)
  np.testing.assert_allclose(twice.stop[jnp.asarray([0, 1, 3])], once.stop)
  assert twice.stop[2] == 0
  np.testing.assert_allclose(twice.next[0], once.next[0], atol=1e-7)


def test_what_was_cut_does_not_stand_for_the_drawn_child():
  # Two children, the likeliest and a drawn one, and a child of the latter.
  # This child is cut, and then has no parent.
  left = np.asarray([0.0, 0.6, 0.4])
  full = Draft(
    tokens=jnp.asarray([0, 1, 2]),
    probs=jnp.stack([jnp.eye(3)[0], left, left]),
    kind=DraftKind.TOP_AND_SAMPLED,
    parents=jnp.asarray([0, 0, 2]),
  )
  batch = dataclasses.replace(
    full,
    tokens=full.tokens[None],
    probs=full.probs[None],
    parents=full.parents[None],
  )
  stays = jnp.asarray([[True, True, False]])
  cut = drafts.compact(drafts.cut(batch, stays))
  row = dataclasses.replace(
    cut, tokens=cut.tokens[0], probs=cut.probs[0], parents=cut.parents[0]
  )
  # The drawn child is as likely as in its draft, so it is always kept.
  target = jnp.tile(jnp.asarray(left), (4, 1))
  law = verify.greedy_draft.law(row, target)
  np.testing.assert_allclose(law.stop, [0, 0, 1, 0], atol=1e-6)


def test_without_its_drawn_child_a_node_keeps_the_likeliest_as_often():
  draft = Draft(
    tokens=jnp.asarray([0, -1]),
    probs=jnp.stack([jnp.eye(3)[0], jnp.zeros(3)]),
    kind=DraftKind.TOP_AND_SAMPLED,
    parents=jnp.zeros(2, jnp.int32),
  )
  law = verify.greedy_draft.law(draft, jnp.tile(jnp.asarray(_TARGET), (3, 1)))
  np.testing.assert_allclose(law.stop, [0.5, 0.5, 0], atol=1e-6)
  np.testing.assert_allclose(law.next[0], [0, 0.6, 0.4], atol=1e-6)


def test_typical_acceptance_keeps_the_longest_likely_path():
  draft = Draft(
    tokens=jnp.asarray([0, 1, 2, 2], jnp.int32),
    probs=None,
    kind=DraftKind.POINT_MASS,
    parents=jnp.asarray([0, 0, 1, 2], jnp.int32),
    depth=2,
  )
  target = jnp.asarray(
    [[0.5, 0.4, 0.1], [0.9, 0.095, 0.005], [0.3, 0.4, 0.3], *[_TARGET] * 2]
  )
  # With entropies of .94, .36 and 1.09, all thresholds are .09.
  law = verify.Typical().law(draft, target)
  np.testing.assert_array_equal(law.stop, [0, 0, 0, 0, 1])
  np.testing.assert_array_equal(law.next, target)
  # .999 exp(-1.09) = .34 lets no grandchild pass; .999 exp(-.94) = .39 lets
  # both children pass, of which the first is the likelier.
  strict = verify.Typical(epsilon=0.9, delta=0.999).law(draft, target)
  np.testing.assert_array_equal(strict.stop, [0, 1, 0, 0, 0])


@pytest.mark.parametrize(
  ('probs', 'settings', 'stop'),
  [
    # Token 0 is likely enough, or the whole vocabulary is asked.
    (_TARGET, {'threshold': 0.5}, [0, 0, 1, 0]),
    (_TARGET, {'threshold': 0.51}, [1, 0, 0, 0]),
    # Only token 1 is looked at.
    (_TARGET, {'threshold': 0.3, 'k': 1}, [0, 1, 0, 0]),
    (_TARGET, {'threshold': 0.31, 'k': 1}, [1, 0, 0, 0]),
    # Of equally likely ones the first is kept.
    ([0.4, 0.4, 0.2], {'threshold': 0.1}, [0, 1, 0, 0]),
    # A greedy target's token is kept.
    ([0, 1, 0], {'threshold': 1.0}, [0, 1, 0, 0]),
    ([1, 0, 0], {'threshold': 1.0}, [0, 0, 1, 0]),
    ([0, 0, 1], {'threshold': 1.0}, [0, 0, 0, 1]),
  ],
)
def test_candidates_keep_the_best_of_k_that_passes(probs, settings, stop):
  draft = Draft(
    tokens=jnp.asarray([1, 0, 2]),
    probs=None,
    kind=DraftKind.POINT_MASS,
    parents=jnp.zeros(3, jnp.int32),
    depth=1,
  )
  target = jnp.asarray([probs, *[[1 / 3] * 3] * 3])
  law = verify.Candidates(**settings).law(draft, target)
  np.testing.assert_array_equal(law.stop, stop)
  np.testing.assert_allclose(law.next, target)
