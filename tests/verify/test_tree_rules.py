"""The rules for trees: exact by enumeration, and on worked examples."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafts
from specsample import tree
from specsample import verify
from specsample.sampling import Sampling
from specsample.testing import conditional as conditional_lib
from specsample.testing import enumerate as enumerate_lib
from specsample.testing import proposal as proposal_lib
from specsample.testing.hash_model import HashModel
from specsample.types import Draft, DraftKind

_RULES = {
  'tree': verify.tree,
  'traversal': verify.traversal,
  'k_seq': verify.k_seq,
  'greedy_draft': verify.greedy_draft,
  'multi_path_block': verify.multi_path_block,
}
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


@pytest.mark.parametrize(
  ('kind', 'name', 'accepted'),
  [
    (DraftKind.SAMPLED, 'tree', 0.76),
    (DraftKind.WITHOUT_REPLACEMENT, 'tree', 0.82),
    (DraftKind.SAMPLED, 'traversal', 0.76),
    # The better of the two is 0, 1 or 2 with probability .36, .39 and .25.
    (DraftKind.SAMPLED, 'multi_path_block', 0.86),
  ],
)
def test_two_siblings_are_kept_as_often_as_was_worked_out(kind, name, accepted):
  draft = lambda t, _: np.tile(_DRAFT, (3**t, 1))
  target = lambda t, _: np.tile(_TARGET, (3**t, 1))
  proposal = proposal_lib.tree(draft, tree.k_ary((2,)), kind)
  enumeration = enumerate_lib.Enumeration(_RULES[name], proposal, target)
  assert enumeration.expected_accepted() == pytest.approx(accepted, abs=1e-12)


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


def test_traversal_keeps_at_least_as_much():
  for kind, shape in itertools.product(DraftKind, _TREES):
    least = _kept(verify.tree, kind, shape) - 1e-12
    assert _kept(verify.traversal, kind, shape) >= least


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


@pytest.mark.parametrize(
  ('rule', 'kind'),
  [
    (verify.k_seq, DraftKind.WITHOUT_REPLACEMENT),
    (verify.k_seq, DraftKind.POINT_MASS),
    (verify.greedy_draft, DraftKind.SAMPLED),
    (verify.multi_path_block, DraftKind.WITHOUT_REPLACEMENT),
  ],
)
def test_another_kind_is_refused(rule, kind):
  draft = Draft(
    tokens=jnp.zeros(2, jnp.int32),
    probs=None if kind is DraftKind.POINT_MASS else jnp.ones((2, 3)) / 3,
    kind=kind,
    parents=jnp.zeros(2, jnp.int32),
    depth=1,
  )
  with pytest.raises(
    ValueError, match=f'not exact for drafts of kind .{kind.value}'
  ):
    rule.law(draft, jnp.ones((3, 3)) / 3)


@pytest.mark.parametrize(
  'rule', [verify.chain, verify.block, verify.Synthetic(rate=0.5)]
)
def test_rules_for_chains_refuse_a_tree(rule):
  draft = Draft(
    tokens=jnp.zeros(2, jnp.int32),
    probs=None,
    kind=DraftKind.POINT_MASS,
    parents=jnp.zeros(2, jnp.int32),
    depth=1,
  )
  with pytest.raises(
    ValueError, match='for chains, but the draft is a tree of 2'
  ):
    rule.law(draft, jnp.ones((3, 3)) / 3)


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


_GAPS = tree.Topology((0, 0, 1, 1, 2, 0, 3))


def _with_gaps(rng, kind):
  """Returns a draft of `_GAPS` of a kind; some nodes drafted nothing."""
  size, vocab = _GAPS.num_nodes, 5
  tokens = np.full(size, -1, np.int32)
  probs = np.zeros((size, vocab))
  for node in range(size + 1):
    if (node and tokens[node - 1] < 0) or rng.random() < 0.3:
      continue
    left = rng.dirichlet(np.full(vocab, 0.5))
    children = _GAPS.children(node)
    for child in children:
      drawn = int(rng.choice(vocab, p=left))
      is_best = kind is DraftKind.POINT_MASS or (
        kind is DraftKind.TOP_AND_SAMPLED and child != children[-1]
      )
      tokens[child - 1] = left.argmax() if is_best else drawn
      one_hot = np.eye(vocab)[tokens[child - 1]]
      probs[child - 1] = one_hot if is_best else left
      if kind is not DraftKind.SAMPLED:
        left = np.where(one_hot, 0, left)
        left /= left.sum()
  return Draft(
    tokens=jnp.asarray(tokens)[None],
    probs=None if kind is DraftKind.POINT_MASS else jnp.asarray(probs)[None],
    kind=kind,
    parents=jnp.asarray(_GAPS.parents, jnp.int32)[None],
    depth=_GAPS.depth,
    num_children=_GAPS.num_children,
  )


def _emitted(law_of, draft, target):
  """Returns how likely each path is, with the token after it."""
  row = dataclasses.replace(
    draft,
    tokens=draft.tokens[0],
    probs=None if draft.probs is None else draft.probs[0],
    parents=draft.parents[0],
  )
  law, found = law_of(row, jnp.asarray(target)), {}
  for node, stop in enumerate(np.asarray(law.stop)):
    path, at = [], node
    while at:
      path.insert(0, int(row.tokens[at - 1]))
      at = int(row.parents[at - 1])
    assert stop == 0 or -1 not in path
    for token, share in enumerate(np.asarray(law.next[node]) * (stop > 0)):
      key = (*path, token)
      found[key] = found.get(key, 0) + stop * share
  return {key: share for key, share in found.items() if -1 not in key}


@pytest.mark.parametrize(
  ('name', 'kind'),
  [
    (name, kind)
    for name, rule in _RULES.items()
    for kind in DraftKind
    if kind in rule.draft_kinds
  ],
)
def test_a_tree_without_its_gaps_gives_the_same(name, kind):
  rng, law_of = np.random.default_rng(0), jax.jit(_RULES[name].law)
  for _ in range(12):
    draft = _with_gaps(rng, kind)
    target = rng.dirichlet(np.full(5, 0.5), _GAPS.num_nodes + 1)
    order = np.argsort(np.asarray(draft.tokens[0]) < 0, kind='stable')
    moved = np.concatenate([target[:1], target[1:][order]])
    expected = _emitted(law_of, draft, target)
    found = _emitted(law_of, drafts.compact(draft), moved)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    for path in expected | found:
      assert found.get(path, 0) == pytest.approx(
        expected.get(path, 0), abs=1e-6
      )


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
  assert not verify.Typical().lossless


def test_thresholds_that_are_no_probability_are_refused():
  with pytest.raises(ValueError, match=r'delta is 1\.5: give a number from'):
    verify.Typical(delta=1.5)
