"""Trees of the most likely tokens, for every drafter that can branch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.loop import step
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.testing import trained
from specsample.types import DraftKind

_V = 12
_TARGET = testing.tiny_llama(vocab_size=_V, num_layers=3)
_D2T = np.asarray([6, 1, 11, 4, 3, 0, 9])
_TREE = tree.Topology((0, 0, 1, 0, 1, 2, 5, 3, 5))
_K = _TREE.depth
_DRAFTERS = {
  'skip': drafters.Skip(model=_TARGET, layers=(0, 2), num_draft_tokens=_K),
  **{
    kind.name.lower(): kind.make(_TARGET, _K, _D2T.size)
    for kind in trained.CASES
    if kind.branches
  },
}
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % _V
_LENGTHS = np.asarray([6, 2, 5, 1])
_each = pytest.mark.parametrize('name', _DRAFTERS)


@functools.cache
def _params(name):
  drafter = _DRAFTERS[name]
  target = jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))
  if name == 'skip':
    return {'target': target}
  d2t = None if drafter.draft_vocab_size is None else _D2T
  own = drafter.init_params(jax.random.key(1), target, d2t)
  noisy = testing.with_noise(own, jax.random.key(2))
  return {'target': target, 'drafter': noisy}


@functools.partial(jax.jit, static_argnames=('drafter', 'chain'))
def _propose(params, forced, *, drafter, chain):
  """Returns a tree drafter's draft after the prompts, or its inner chain's."""
  output, _ = _TARGET.apply(
    params['target'],
    _PROMPTS,
    _TARGET.init_cache(len(_PROMPTS), 0),
    drafter.feature_layers,
  )
  state = drafter.init(params, len(_PROMPTS), 32)
  state = drafter.observe(params, _PROMPTS, _LENGTHS - 1, output, None, state)

  def draw(probs, position, node=None):
    del node
    index = (position - _LENGTHS)[:, None]
    return jnp.take_along_axis(forced, index, axis=1)[:, 0]

  drafter = drafter.drafter if chain else drafter
  tokens = jnp.pad(_PROMPTS, ((0, 0), (0, 26)))
  warp = lambda logits, drafted: jax.nn.softmax(logits)
  return drafter.propose(params, draw, warp, tokens, _LENGTHS, state)[0]


@pytest.mark.nightly(but=('eagle-3',))
@_each
def test_siblings_are_the_most_likely_behind_their_path(name):
  drafter = drafters.Tree(drafter=_DRAFTERS[name], topology=_TREE)
  nothing = jnp.zeros((4, _K), jnp.int32)
  found = _propose(_params(name), nothing, drafter=drafter, chain=False)
  assert found.kind is DraftKind.POINT_MASS
  assert found.depth == _K
  np.testing.assert_array_equal(found.parents, [_TREE.parents] * 4)
  tokens = np.asarray(found.tokens)
  paths = [[]]
  for i, parent in enumerate(_TREE.parents):
    paths.append([*paths[parent], i])
    forced = np.zeros((4, _K), np.int32)
    forced[:, : len(paths[-1])] = tokens[:, paths[-1]]
    chain = _propose(_params(name), forced, drafter=drafter, chain=True)
    probs = np.asarray(chain.probs[:, _TREE.depths[i] - 1])
    order = np.argsort(-probs, axis=-1, kind='stable')
    np.testing.assert_array_equal(tokens[:, i], order[:, _TREE.ranks[i]])


def test_every_node_is_drawn_with_a_key_of_its_own():
  chain = drafters.Chain(
    model=testing.HashModel(vocab_size=_V), num_draft_tokens=_K
  )
  drafter = drafters.Tree(drafter=chain, topology=_TREE, kind=DraftKind.SAMPLED)
  drawn = []

  def draw(probs, position, node=None):
    drawn.append(node)
    return jnp.zeros_like(position)

  def propose(tokens, lengths):
    state = drafter.init({}, *tokens.shape)
    warp = lambda logits, drafted: jax.nn.softmax(logits)
    return drafter.propose({'drafter': {}}, draw, warp, tokens, lengths, state)

  jax.eval_shape(propose, np.zeros((4, 32), np.int32), _LENGTHS)
  # The nodes' numbers, which `streams.draft_key` takes besides the position.
  assert sorted(drawn) == list(range(1, _TREE.num_nodes + 1))


# Chain and DraftModel keep the same state as Skip, Medusa as Hydra, and EAGLE
# and MTP as EAGLE-3.
@pytest.mark.nightly(but=('eagle-3',))
@pytest.mark.parametrize('name', ['skip', 'hydra', 'eagle-3'])
def test_behind_kept_paths_it_drafts_as_one_that_is_given_all_at_once(name):
  params = _params(name)
  drafter = drafters.Tree(drafter=_DRAFTERS[name], topology=_TREE)
  start = lambda tokens, lengths: specsample.prefill(
    Decoder(_TARGET, drafter, verify.tree),
    params,
    tokens,
    lengths,
    jax.random.key(0),
    sampling=Sampling(temperature=1.0),
    max_new_tokens=60,
    max_length=80,
  )
  # The rule accepts untrained drafts too, some paths wholly, others in part.
  rule = verify.Typical(epsilon=0.02, delta=1.0)
  state = specsample.advance(
    Decoder(_TARGET, drafter, rule),
    params,
    start(_PROMPTS, _LENGTHS),
    max_rounds=6,
  )
  kept = np.asarray(state.accepted).sum(axis=0)
  assert kept[_K] and kept[1:_K].any(), kept
  fresh = start(state.tokens, np.asarray(state.length))
  fresh = dataclasses.replace(fresh, limit=state.limit)
  propose = jax.jit(
    lambda state: step.propose(Decoder(_TARGET, drafter, rule), params, state)[
      0
    ]
  )
  found, expected = propose(state), propose(fresh)
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  np.testing.assert_allclose(
    found.signals.log_prob, expected.signals.log_prob, atol=2e-4
  )


def _dynamic(name):
  return drafters.DynamicTree(
    drafter=_DRAFTERS[name], num_draft_tokens=6, width=3
  )


def _expanded(name, width, num_nodes):
  """Returns EAGLE-2's tree after each prompt, by path: [(path, score)]."""

  def probs(paths):
    """Returns the law after each row's path [4, V]; all have one length."""
    forced = np.zeros((4, _K), np.int32)
    forced[:, : paths.shape[1]] = paths
    chain = _propose(_params(name), forced, drafter=_dynamic(name), chain=True)
    return np.asarray(chain.probs[:, paths.shape[1]])

  trees = []
  for row in range(4):
    level, candidates = [((), 0.0)], []
    for _ in range(_K):
      found = []
      for path, score in level:
        of_path = probs(np.tile(np.asarray(path, np.int32), (4, 1)))[row]
        best = np.argsort(-of_path, kind='stable')[:width]
        found += [((*path, int(x)), score + np.log(of_path[x])) for x in best]
      candidates += found
      level = sorted(found, key=lambda x: -x[1])[:width]
    trees.append(sorted(candidates, key=lambda x: -x[1])[:num_nodes])
  return trees


@pytest.mark.parametrize('name', ['medusa', 'hydra', 'draftmodel', 'eagle-3'])
def test_a_dynamic_tree_is_of_the_likeliest_paths(name):
  drafter = _dynamic(name)
  nothing = jnp.zeros((4, _K), jnp.int32)
  found = _propose(_params(name), nothing, drafter=drafter, chain=False)
  expected = _expanded(name, width=3, num_nodes=6)
  for row in range(4):
    paths = [()]
    for token, parent in zip(
      found.tokens[row], found.parents[row], strict=True
    ):
      paths.append((*paths[int(parent)], int(token)))
    assert set(paths[1:]) == {path for path, _ in expected[row]}
    assert len(set(paths)) == 7


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (
      {'num_draft_tokens': 22},
      'width 3 finds only 21 candidates down to depth 3',
    ),
    ({'width': 0}, 'width is 0: give an integer'),
    ({'num_draft_tokens': 0}, 'give at least 1 token'),
  ],
)
def test_dynamic_trees_that_cannot_be_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_dynamic('hydra'), **settings)


@pytest.mark.parametrize(
  'of',
  [
    lambda x: drafters.Tree(drafter=x, topology=tree.chain(3)),
    lambda x: drafters.DynamicTree(drafter=x, num_draft_tokens=3),
  ],
)
def test_a_drafter_that_cannot_branch_is_refused(of):
  with pytest.raises(
    ValueError,
    match='which Ngram cannot do: make the tree with Assi',
  ):
    of(drafters.Ngram(num_draft_tokens=3))


def test_a_drafter_of_another_depth_is_refused():
  with pytest.raises(
    ValueError, match='2 levels deep, but the drafter drafts 3'
  ):
    drafters.Tree(drafter=_DRAFTERS['hydra'], topology=tree.k_ary((2, 2)))


@pytest.mark.parametrize(
  'wide',
  [
    lambda drafter: drafters.Tree(
      drafter=drafter, topology=tree.k_ary((8, 1, 1))
    ),
    lambda drafter: drafters.DynamicTree(
      drafter=drafter, num_draft_tokens=9, width=8
    ),
  ],
)
def test_more_siblings_than_there_are_drafted_tokens_are_refused(wide):
  drafter = _DRAFTERS['medusa']  # drafts seven of the target's tokens
  with pytest.raises(
    ValueError, match='8 siblings, but the drafter drafts only 7'
  ):
    specsample.prefill(
      Decoder(_TARGET, wide(drafter), verify.tree),
      _params('medusa'),
      _PROMPTS,
      _LENGTHS,
      jax.random.key(0),
      sampling=Sampling(),
      max_new_tokens=4,
    )


def test_trees_of_several_modules_are_refused():
  drafter = drafters.MTP(model=_TARGET, num_draft_tokens=_K, num_modules=2)
  target = _params('mtp')['target']
  own = drafter.init_params(jax.random.key(0), target)
  whole = drafters.Tree(drafter=drafter, topology=_TREE)
  with pytest.raises(ValueError, match='num_modules is 2, but a tree needs a'):
    _propose(
      {'target': target, 'drafter': own},
      jnp.zeros((4, _K), jnp.int32),
      drafter=whole,
      chain=False,
    )


def test_a_dynamic_tree_of_fewer_nodes_than_levels_fits_a_full_cache():
  model = testing.HashModel(vocab_size=_V)
  drafter = drafters.DynamicTree(
    drafter=drafters.Chain(model=model, num_draft_tokens=8),
    num_draft_tokens=2,
    width=1,
  )
  # 64 + 61 tokens and a round of 3 would fill 128 slots, but paths have 8.
  testing.assert_greedy_equal(
    {'target': {}, 'drafter': {}},
    np.random.default_rng(0).integers(_V, size=(4, 64)),
    np.full(4, 64),
    model=model,
    drafter=drafter,
    verify=verify.tree,
    max_new_tokens=61,
  )
