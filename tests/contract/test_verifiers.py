"""What every verification rule must do; test_exactness.py enumerates them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.certificate import sampled_cases
from specsample import drafts
from specsample import tree
from specsample import verify
from specsample.testing import chi_square
from specsample.testing import precision
from specsample.types import Draft, DraftKind

_ALL_KINDS = set(DraftKind)
_CHAIN_KINDS = {DraftKind.POINT_MASS, DraftKind.SAMPLED}
# Each rule of `verify.__all__`, and the kinds of drafts that it is made for.
_RULES = {
  'chain': (verify.chain, _CHAIN_KINDS),
  'block': (verify.block, _CHAIN_KINDS),
  'coupled': (verify.coupled, _CHAIN_KINDS),
  'tree': (verify.tree, _ALL_KINDS),
  'traversal': (verify.traversal, _ALL_KINDS),
  'k_seq': (verify.k_seq, {DraftKind.SAMPLED}),
  'multi_path_block': (verify.multi_path_block, {DraftKind.SAMPLED}),
  'greedy_draft': (verify.greedy_draft, {DraftKind.TOP_AND_SAMPLED}),
  'certified': (verify.certified, _ALL_KINDS),
  'Certified': (verify.Certified(coupled=True), _CHAIN_KINDS),
  'Candidates': (verify.Candidates(threshold=0.2), _ALL_KINDS),
  'Lenient': (verify.Lenient(lenience=0.5), _CHAIN_KINDS),
  'Synthetic': (verify.Synthetic(rate=0.8), _CHAIN_KINDS),
  'Typical': (verify.Typical(), _ALL_KINDS),
}
_LOSSY = ('Candidates', 'Lenient', 'Synthetic', 'Typical')
_each_rule = pytest.mark.parametrize('name', _RULES)
# With drawn drafts, shared noise decides, of which there is no law.
_WITH_A_LAW = [
  (name, kind)
  for name, (_, kinds) in _RULES.items()
  for kind in DraftKind
  if kind in kinds - ({DraftKind.SAMPLED} if name == 'coupled' else set())
]
# They choose the best token; see `loop/test_certified.py`.
_CERTIFIED = ('certified', 'Certified')
_TREE = tree.Topology((0, 0, 1, 1, 2, 0, 3))


def _weights(rng, shape):
  """Returns distributions [*shape], in which some tokens are impossible."""
  weights = rng.exponential(size=shape) * (rng.random(shape) < 0.7)
  weights[..., rng.integers(shape[-1])] += 0.1
  return weights / weights.sum(axis=-1, keepdims=True)


def _drafted(rng, kind, topology, own, gap=0.0):
  """Drafts tokens [N], and returns with them what each was drawn from [N, V].

  Args:
    rng: a generator.
    kind: how siblings are drawn.
    topology: the tree.
    own: [N + 1, V], what the first child of each node is drawn from.
    gap: how likely a node is to draft nothing.
  """
  size, vocab_size = topology.num_nodes, own.shape[1]
  tokens, probs = np.full(size, -1, np.int32), np.zeros((size, vocab_size))
  for node in range(size + 1):
    if (node and tokens[node - 1] < 0) or rng.random() < gap:
      continue
    left, children = own[node], topology.children(node)
    for child in children:
      is_best = kind is DraftKind.POINT_MASS or (
        kind is DraftKind.TOP_AND_SAMPLED and child != children[-1]
      )
      token = left.argmax() if is_best else rng.choice(vocab_size, p=left)
      one_hot = np.zeros(vocab_size)
      one_hot[token] = 1
      tokens[child - 1] = token
      probs[child - 1] = one_hot if is_best else left
      if kind is not DraftKind.SAMPLED:
        left = np.where(one_hot, 0, left)
        left = left / left.sum()
  return tokens, probs


def _draft(kind, topology, tokens, probs):
  """Returns the draft of a tree, or of a chain if its nodes are in line."""
  draft = Draft(
    tokens=jnp.asarray(tokens, jnp.int32),
    probs=None if kind is DraftKind.POINT_MASS else jnp.asarray(probs),
    kind=kind,
  )
  if topology == tree.chain(topology.num_nodes):
    return draft
  return dataclasses.replace(
    draft,
    parents=jnp.asarray(topology.parents, jnp.int32),
    depth=topology.depth,
    num_children=topology.num_children,
  )


def _random(rng, name, kind, size=3):
  """Returns a draft with gaps that a rule takes, and the target's [N + 1, V].

  There are 4 tokens on chains of `size`, and 9 on trees.
  """
  takes_trees = _RULES[name][0].takes_trees
  topology = _TREE if takes_trees else tree.chain(size)
  shape = (topology.num_nodes + 1, 9 if takes_trees else 4)
  if kind in _CHAIN_KINDS and not takes_trees:
    own = _weights(rng, shape)
  else:
    own = rng.dirichlet(np.full(shape[1], 0.5), shape[0])
  found = _drafted(rng, kind, topology, own, gap=0.3)
  target = jnp.asarray(_weights(rng, shape), jnp.float32)
  return _draft(kind, topology, *found), target


@_each_rule
def test_a_rule_takes_the_drafts_that_it_is_made_for_alone(name):
  assert set(_RULES) == set(verify.__all__)
  rule, kinds = _RULES[name]
  assert set(rule.draft_kinds) == kinds
  assert rule.takes_trees == (kinds != _CHAIN_KINDS)
  assert rule.lossless == (name not in _LOSSY)
  keys = jax.random.split(jax.random.key(0), 3)
  judge = lambda draft: rule(
    keys if rule.positional else keys[0], draft, jnp.ones((3, 3)) / 3
  )
  for kind in DraftKind:
    draft = _draft(kind, tree.chain(2), [0, 0], np.ones((2, 3)) / 3)
    message = f'not exact for drafts of kind {kind.value!r}'
    if kind in kinds:
      other = jnp.ones((2, 3)) / 3 if draft.probs is None else None
      draft = dataclasses.replace(draft, probs=other)
      message = f'kind {kind.value!r} came with'
    with pytest.raises(ValueError, match=message):
      judge(draft)
  if not rule.takes_trees:
    draft = _draft(DraftKind.POINT_MASS, tree.k_ary((2,)), [0, 1], None)
    with pytest.raises(ValueError, match='chains, but the draft is a tree of'):
      judge(draft)


def test_coupled_has_no_law_for_drawn_drafts():
  draft = _draft(DraftKind.SAMPLED, tree.chain(1), [0], np.ones((1, 3)) / 3)
  with pytest.raises(ValueError, match="exact for drafts of kind 'sampled'"):
    verify.coupled.law(draft, jnp.ones((2, 3)) / 3)


@pytest.mark.parametrize(('name', 'kind'), _WITH_A_LAW)
def test_a_law_is_a_distribution(name, kind):
  rule = _RULES[name][0]
  for size in (3,) if rule.takes_trees else (1, 3, 4):
    rng = np.random.default_rng(0)
    many = [_random(rng, name, kind, size) for _ in range(50)]
    drawn, target_probs = jax.tree.map(lambda *x: jnp.stack(x), *many)
    found = jax.jit(jax.vmap(rule.law))(drawn, target_probs)
    assert (found.stop >= 0).all() and (found.next >= 0).all()
    np.testing.assert_allclose(found.stop.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_allclose(found.next.sum(axis=-1), 1, atol=1e-6)
    is_padding = drawn.tokens < 0
    assert is_padding.any()
    assert (found.stop[:, 1:][is_padding] == 0).all()


@pytest.mark.slow(but=('chain-DraftKind.POINT_MASS',))
@pytest.mark.parametrize(('name', 'kind'), _WITH_A_LAW)
def test_without_drafts_the_law_is_the_targets_own(name, kind):
  rule = _RULES[name][0]
  target = np.asarray([0.5, 0.3, 0.2])
  nothing = _draft(kind, tree.chain(2), [-1, -1], np.zeros((2, 3)))
  law = rule.law(nothing, jnp.tile(target, (3, 1)))
  np.testing.assert_array_equal(law.stop, [1, 0, 0])
  np.testing.assert_allclose(law.next[0], target, atol=1e-6)
  empty = Draft(
    tokens=jnp.zeros(0, jnp.int32),
    probs=None if kind is DraftKind.POINT_MASS else jnp.zeros((0, 3)),
    kind=kind,
  )
  if rule.takes_trees:
    empty = dataclasses.replace(
      empty, parents=jnp.zeros(0, jnp.int32), depth=2, num_children=(2,)
    )
  law = rule.law(empty, jnp.asarray(target)[None])
  np.testing.assert_array_equal(law.stop, [1])
  np.testing.assert_allclose(law.next, target[None])
  key = jax.random.key(0)
  key = key[None] if rule.positional else key
  verdict = rule(key, empty, jnp.asarray([[0, 0, 1.0]]))
  assert (verdict.num_accepted, verdict.next_token) == (0, 2)
  assert verdict.path is None or verdict.path.tolist() == [0, 0]


@functools.partial(jax.jit, static_argnums=(0, 3))
def _draws(rule, draft, target_probs, num_draws):
  """Returns the verdicts of many keys."""
  shape = (num_draws, len(target_probs)) if rule.positional else (num_draws,)
  keys = jax.random.split(jax.random.key(5), shape)
  return jax.vmap(rule, (0, None, None))(keys, draft, target_probs)


@pytest.mark.parametrize(
  ('name', 'kind'),
  [
    (name, kind)
    for name, kind in _WITH_A_LAW
    if name not in _CERTIFIED
    and (kind in _CHAIN_KINDS or _RULES[name][1] == {kind})
  ],
)
def test_draws_follow_the_law(name, kind):
  rule, groups, rng = _RULES[name][0], [], np.random.default_rng(1)
  for _ in range(3):
    draft, target_probs = _random(rng, name, kind)
    found = rule.law(draft, target_probs)
    verdict = _draws(rule, draft, target_probs, 20_000)
    node = verdict.num_accepted
    if verdict.path is not None:
      node = verdict.path.max(axis=1)
    size = target_probs.shape[1]
    # In float64, where what float32 leaves over is no deviation.
    probs = np.asarray(found.stop, float)[:, None] * np.asarray(found.next)
    counts = np.bincount(node * size + verdict.next_token, minlength=probs.size)
    groups.append((counts, probs.ravel() / probs.sum()))
  result = chi_square.test(groups)
  assert result.passed, result
  assert result.detectable < (0.05 if rule.takes_trees else 0.03)


@pytest.mark.slow
@pytest.mark.parametrize('kind', [DraftKind.POINT_MASS, DraftKind.SAMPLED])
@pytest.mark.parametrize('name', ['chain', 'block', 'coupled', 'Synthetic'])
def test_a_token_of_probability_zero_is_never_drawn(name, kind):
  rng = np.random.default_rng(0)
  vocab_size, num_drafts = 1000, 3
  allowed = rng.random((num_drafts + 1, vocab_size)) < 0.01
  allowed[0] = np.arange(vocab_size) == 17  # a greedy row
  weights = allowed * rng.exponential(size=allowed.shape)
  target_probs = weights / weights.sum(axis=1, keepdims=True)
  tokens = np.asarray([17, *target_probs[1:3].argmax(axis=1)])
  # Likelier than to the target, so that some are rejected.
  probs = 0.9 * np.eye(vocab_size)[tokens] + 0.1 / vocab_size
  verdict = _draws(
    _RULES[name][0],
    _draft(kind, tree.chain(num_drafts), tokens, probs.astype(np.float32)),
    jnp.asarray(target_probs, jnp.float32),
    2_000,
  )
  assert allowed[verdict.num_accepted, verdict.next_token].all()
  assert len(np.unique(verdict.num_accepted)) > 1


def _paths(law_of, row, target):
  """Returns how likely each path of a tree is, with the token after it."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'kind'),
  [(x, kind) for x, kind in _WITH_A_LAW if x in sampled_cases.TREE_VERIFIERS],
)
def test_a_tree_without_its_gaps_gives_the_same(name, kind):
  rng, law_of = np.random.default_rng(0), jax.jit(_RULES[name][0].law)
  for _ in range(12):
    draft, target = _random(rng, name, kind)
    order = np.argsort(np.asarray(draft.tokens) < 0, kind='stable')
    moved = jnp.concatenate([target[:1], target[1:][order]])
    batch = jax.tree.map(lambda x: x[None], draft)
    compact = jax.tree.map(lambda x: x[0], drafts.compact(batch))
    expected = _paths(law_of, draft, target)
    found = _paths(law_of, compact, moved)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    for path in expected | found:
      assert found.get(path, 0) == pytest.approx(
        expected.get(path, 0), abs=1e-6
      )


def _softmax(logits):
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  return probs / probs.sum(-1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize('noise', [3.0, 0.0])
@pytest.mark.parametrize(
  ('name', 'kind'),
  [
    *((name, DraftKind.SAMPLED) for name in ('chain', 'block', 'k_seq')),
    ('multi_path_block', DraftKind.SAMPLED),
    ('tree', DraftKind.SAMPLED),
    ('tree', DraftKind.WITHOUT_REPLACEMENT),
    ('traversal', DraftKind.WITHOUT_REPLACEMENT),
    ('greedy_draft', DraftKind.TOP_AND_SAMPLED),
  ],
)
def test_a_law_over_a_real_vocabulary_is_that_of_float64(name, kind, noise):
  rule, rng = _RULES[name][0], np.random.default_rng(0)
  topology = tree.Topology((0, 0, 1, 1, 2))
  if not rule.takes_trees:
    topology = tree.chain(3)
  # A few likely tokens and a long tail: text has an entropy of a few bits.
  logits = rng.normal(scale=4, size=(topology.num_nodes + 1, 49_152))
  target = _softmax(logits).astype(np.float32)
  # Without noise the drafter equals the target up to rounding, so that only
  # rounding errors are left of the residual.
  own = _softmax(logits + noise * rng.normal(size=logits.shape))
  tokens, probs = _drafted(rng, kind, topology, own)
  probs = probs.astype(np.float32)

  def emitted(probs, target):
    draft = _draft(kind, topology, tokens, probs)
    law = jax.jit(rule.law)(draft, jnp.asarray(target))
    assert law.next.dtype == target.dtype
    return np.asarray(law.stop, float)[:, None] * np.asarray(law.next, float)

  found = emitted(probs, target)
  with precision.float64():
    expected = emitted(probs.astype(np.float64), target.astype(np.float64))
  # K-SEQ is exact at any rate from the best one on, and bisection in float32
  # ends at another one.
  tolerance = 1e-4 if rule is verify.k_seq else 1e-6
  assert abs(found - expected).sum() < tolerance
  assert expected.sum() == pytest.approx(1, abs=1e-6)
