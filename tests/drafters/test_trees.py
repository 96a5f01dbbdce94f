"""Trees of the most likely tokens, for every drafter that can branch."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.drafters import lattice
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.testing import trained
from specsample.types import DraftKind
from tests.drafters import rounds

_V, _D2T, _TARGET = rounds.V, rounds.D2T, rounds.TARGET
_TREE = tree.Topology((0, 0, 1, 0, 1, 2, 5, 3, 5))
_K = _TREE.depth
_SOME = {
  'model': _TARGET,
  'num_draft_tokens': _K,
  'feature_layers': (0, 2),
  'draft_vocab_size': _D2T.size,
}
_DRAFTERS = {
  kind.name: kind.make(_TARGET, _K, _D2T.size)
  for kind in trained.CASES
  if kind.branches
}
# Drafters with a lattice, and how many candidates it may have.
_LATTICES = {
  'dflash': (drafters.DFlash(**_SOME), 7),
  'dspark': (drafters.DSpark(rank=5, **_SOME), 7),
  'gated dspark': (drafters.DSpark(rank=5, head='gated', **_SOME), 7),
  'dflash2': (
    drafters.DFlash2(
      conv_group_size=8, selector_rank=5, selector_top_k=3, **_SOME
    ),
    3,
  ),
}
_each_lattice = pytest.mark.parametrize('name', _LATTICES)
_lattice_params = functools.partial(rounds.params, noise=0.3)


def _forced(drafter, params, paths):
  """Returns a chain [4, K, V] of probabilities after paths [4, K] of drafts."""
  draw = lambda probs, position: jnp.take_along_axis(
    paths, (position - rounds.LENGTHS)[:, None], axis=1
  )[:, 0]
  state = rounds.begin(drafter, params, rounds.TEXTS)
  tokens, lengths = rounds.rows(rounds.TEXTS)
  draft, _ = drafter.propose(
    params, draw, rounds.softmax, tokens, lengths, state
  )
  return draft.probs


@functools.lru_cache(maxsize=1)
def _forced_by(drafter):
  return jax.jit(functools.partial(_forced, drafter))


def _probs(name, paths):
  """Returns each row's probabilities [4, V] behind a path [4, n] of drafts."""
  drafter = _DRAFTERS[name]
  forced = np.zeros((4, _K), np.int32)
  forced[:, : paths.shape[1]] = paths
  probs = _forced_by(drafter)(rounds.params(drafter), forced)
  return np.asarray(probs[:, paths.shape[1]])


def _nodes(draft, row):
  """Returns the nodes of one row's tree by their paths."""
  paths = [()]
  for token, parent in zip(
    draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True
  ):
    paths.append((*paths[parent], token))
  return {path: node for node, path in enumerate(paths[1:])}


@pytest.mark.slow
@pytest.mark.nightly(but=('EAGLE-3',))
@pytest.mark.parametrize('name', _DRAFTERS)
def test_siblings_are_the_most_likely_behind_their_path(name):
  drafter = drafters.Tree(drafter=_DRAFTERS[name], topology=_TREE)
  params = rounds.params(_DRAFTERS[name])
  found, _ = rounds.propose(drafter, params, rounds.TEXTS)
  assert found.kind is DraftKind.POINT_MASS
  assert found.depth == _K
  np.testing.assert_array_equal(found.parents, [_TREE.parents] * 4)
  tokens = np.asarray(found.tokens)
  paths = [[]]
  for i, parent in enumerate(_TREE.parents):
    paths.append([*paths[parent], i])
    order = np.argsort(
      -_probs(name, tokens[:, paths[parent]]), axis=-1, kind='stable'
    )
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
    params = {'drafter': {}}
    state = drafter.init(params, *tokens.shape)
    return drafter.propose(params, draw, rounds.softmax, tokens, lengths, state)

  jax.eval_shape(propose, *rounds.rows(rounds.TEXTS))
  # The nodes' numbers, which `streams.draft_key` takes besides the position.
  assert sorted(drawn) == list(range(1, _TREE.num_nodes + 1))


def _dynamic(name):
  return drafters.DynamicTree(
    drafter=_DRAFTERS[name], num_draft_tokens=6, width=3
  )


def _expanded(name, width, num_nodes):
  """Returns the paths of EAGLE-2's tree after each prompt."""
  trees = []
  for row in range(4):
    level, candidates = [((), 0.0)], []
    for _ in range(_K):
      found = []
      for path, score in level:
        of_path = _probs(name, np.tile(np.asarray(path, np.int32), (4, 1)))[row]
        best = np.argsort(-of_path, kind='stable')[:width]
        found += [((*path, int(x)), score + np.log(of_path[x])) for x in best]
      candidates += found
      level = sorted(found, key=lambda x: -x[1])[:width]
    best = sorted(candidates, key=lambda x: -x[1])[:num_nodes]
    trees.append({path for path, _ in best})
  return trees


@pytest.mark.slow
@pytest.mark.parametrize('name', ['Medusa', 'EAGLE-3'])
def test_dynamic_tree_is_of_the_likeliest_paths(name):
  params = rounds.params(_DRAFTERS[name])
  found, _ = rounds.propose(_dynamic(name), params, rounds.TEXTS)
  expected = _expanded(name, width=3, num_nodes=6)
  assert [_nodes(found, row).keys() for row in range(4)] == expected


@pytest.mark.slow
def test_dynamic_tree_of_fewer_nodes_than_levels_fits_a_full_cache():
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


def _paths(steps, parents, size):
  """Returns the candidates on the path to each prefix of one row."""
  paths = [()]
  for step, parent in zip(steps, parents, strict=True):
    paths.append((*paths[parent], int(step) % size))
  return paths[1:]


def _all_prefixes(log_probs):
  """Returns {prefix: its log-probability} of one row, [K, C, C], summed up."""
  depth, size, _ = log_probs.shape
  found = {(): np.float32(0)}
  for length in range(1, depth + 1):
    for prefix in itertools.product(range(size), repeat=length):
      last = prefix[-2] if length > 1 else 0
      step = log_probs[length - 1, last, prefix[-1]]
      found[prefix] = np.float32(found[prefix[:-1]] + step)
  return {prefix: score for prefix, score in found.items() if prefix}


def _random_lattices(seed, is_tied):
  """Returns the log-probabilities of 8 lattices; some steps never happen."""
  rng = np.random.default_rng(seed)
  shape = (8, 3, 3, 3)
  scores = -rng.integers(0, 3, shape) if is_tied else -rng.random(shape)
  scores = np.where(rng.random(shape) < 0.2, -np.inf, scores)
  scores[0, 0] = -np.inf  # nothing at all
  scores[:, 0] = scores[:, 0, :1]
  return scores.astype(np.float32)


@pytest.mark.slow(but=('1-False',))
@pytest.mark.parametrize('is_tied', [False, True])
@pytest.mark.parametrize('num_prefixes', [1, 2, 5, 8])
def test_prefixes_are_the_best_of_all(num_prefixes, is_tied):
  log_probs = _random_lattices(num_prefixes, is_tied)
  found = jax.device_get(lattice.best_prefixes(log_probs, num_prefixes))
  for row in range(len(log_probs)):
    scores = _all_prefixes(log_probs[row])
    paths = _paths(found.step[row], found.parent[row], size=3)
    # Shorter first among equals, then in the order of the parents.
    order = {(): 0}
    expected = []
    while len(expected) < num_prefixes:
      left = [x for x in scores if x[:-1] in order and x not in order]
      best = max(
        left, key=lambda x: (scores[x], -len(x), -order[x[:-1]], -x[-1])
      )
      order[best] = len(order)
      expected.append(best)
    is_there = np.isfinite([scores[x] for x in expected])
    np.testing.assert_array_equal(
      found.score[row], [scores[x] for x in expected]
    )
    there = [x for x, ok in zip(expected, is_there, strict=True) if ok]
    assert paths[: len(there)] == there
    assert np.all(found.parent[row] < np.arange(1, num_prefixes + 1))
    assert not found.parent[row][~is_there].any()


@pytest.mark.slow
def test_lattice_over_independent_positions_is_the_dynamic_tree():
  drafter, _ = _LATTICES['dflash']
  of = {'drafter': drafter, 'num_draft_tokens': 7}
  found, expected = (
    rounds.propose(whole, _lattice_params(drafter), rounds.TEXTS)[0]
    for whole in (
      drafters.LatticeTree(candidates=7, **of),
      drafters.DynamicTree(width=7, **of),
    )
  )
  assert found.kind is DraftKind.POINT_MASS
  for row in range(4):
    nodes, others = _nodes(found, row), _nodes(expected, row)
    assert nodes.keys() == others.keys()
    for signal in ('log_prob', 'max_log_prob', 'rank'):
      said = getattr(found.signals, signal)[row]
      np.testing.assert_allclose(
        said[np.asarray(list(nodes.values()))],
        getattr(expected.signals, signal)[row][
          np.asarray([others[path] for path in nodes])
        ],
        atol=1e-5,
      )


@pytest.mark.slow
@_each_lattice
def test_lattice_has_the_probabilities_of_each_step(name):
  drafter, size = _LATTICES[name]
  tokens, lengths = rounds.rows(rounds.TEXTS)

  @functools.partial(jax.jit, static_argnums=1)
  def run(params, count):
    state = rounds.begin(drafter, params, rounds.TEXTS)
    found = drafter.lattice(params, tokens, lengths, state, count)
    logits, carry = drafter.first(params, tokens, lengths, state)
    laws, said = [logits], []
    for i in range(_K - 1):
      logits, carry = drafter.next(params, found.ids[:, i], None, carry)
      laws.append(logits)
      said.append(drafter.confidence(params, carry))
    widen = lambda x: jax.nn.log_softmax(drafter.widen(params, x))
    return found, [widen(law) for law in laws], said

  params = _lattice_params(drafter)
  found, laws, said = jax.device_get(run(params, size))
  for b, k, i, j in np.ndindex(found.log_probs.shape):
    law = laws[k][b, i if k else 0]
    np.testing.assert_allclose(
      found.log_probs[b, k, i, j], law[found.ids[b, k, j]], atol=1e-4
    )
  # Confidences are those of the second position and on.
  if said[0] is None:
    assert found.confidence is None
  else:
    np.testing.assert_allclose(found.confidence[:, 1], said[0], atol=1e-5)
  fewer, _, _ = jax.device_get(run(params, size - 1))
  np.testing.assert_array_equal(fewer.ids, found.ids[..., : size - 1])
  # In DSpark, tokens that are no candidates keep their logits after the best.
  behind = size - 1 if name == 'dflash2' else 1
  np.testing.assert_allclose(
    fewer.log_probs[:, :, :behind],
    found.log_probs[:, :, :behind, : size - 1],
    atol=1e-5,
  )


@pytest.mark.slow
@_each_lattice
def test_signals_are_of_the_steps_to_the_nodes(name):
  drafter, size = _LATTICES[name]
  params, whole = (
    _lattice_params(drafter),
    drafters.LatticeTree(drafter=drafter, num_draft_tokens=9, candidates=size),
  )
  found, _ = rounds.propose(whole, params, rounds.TEXTS)
  state = rounds.begin(drafter, params, rounds.TEXTS)
  lattice_of = jax.jit(drafter.lattice, static_argnums=4)
  laws = lattice_of(params, *rounds.rows(rounds.TEXTS), state, size)
  ids = np.asarray(laws.ids)
  for row in range(4):
    for path, node in _nodes(found, row).items():
      index = [list(ids[row, i]).index(token) for i, token in enumerate(path)]
      before = index[-2] if len(index) > 1 else 0
      law = np.asarray(laws.log_probs[row, len(path) - 1, before])
      own = jax.tree.map(lambda x: x[row, node], found.signals)  # noqa: B023
      np.testing.assert_allclose(own.log_prob, law[index[-1]], atol=1e-5)
      np.testing.assert_allclose(own.max_log_prob, law.max(), atol=1e-5)
      assert own.rank == (law > law[index[-1]]).sum()
      np.testing.assert_allclose(
        own.entropy, -(np.exp(law) * law).sum(), atol=1e-4
      )
      if laws.confidence is not None:
        of_step = laws.confidence[row, len(path) - 1, before]
        np.testing.assert_allclose(own.confidence, of_step, atol=1e-5)


_MEDUSA = _DRAFTERS['Medusa']  # drafts seven of the target's tokens
_DSPARK, _ = _LATTICES['dspark']


@pytest.mark.slow(but=('drafter2-num_modules is 2, but a tree needs a',))
@pytest.mark.parametrize(
  ('drafter', 'message'),
  [
    (
      drafters.Tree(drafter=_MEDUSA, topology=tree.k_ary((8, 1, 1))),
      '8 siblings, but the drafter drafts only 7',
    ),
    (
      drafters.DynamicTree(drafter=_MEDUSA, num_draft_tokens=9, width=8),
      '8 siblings, but the drafter drafts only 7',
    ),
    (
      drafters.Tree(
        drafter=drafters.MTP(model=_TARGET, num_draft_tokens=3, num_modules=2),
        topology=_TREE,
      ),
      'num_modules is 2, but a tree needs a',
    ),
    (
      drafters.LatticeTree(drafter=_DSPARK, num_draft_tokens=6, candidates=8),
      'the drafter drafts only 7',
    ),
    (
      drafters.LatticeTree(
        drafter=dataclasses.replace(_DSPARK, head='rnn'),
        num_draft_tokens=6,
        candidates=3,
      ),
      "head is 'rnn', .* use DynamicTree",
    ),
    (
      drafters.LatticeTree(
        drafter=_LATTICES['dflash2'][0], num_draft_tokens=6, candidates=4
      ),
      'candidates is 4, but selector_top_k i',
    ),
  ],
)
def test_trees_that_a_drafter_does_not_have_are_refused(drafter, message):
  with pytest.raises(ValueError, match=message):
    specsample.prefill(
      Decoder(_TARGET, drafter, verify.tree),
      rounds.params(drafter.drafter),
      rounds.PROMPTS,
      rounds.LENGTHS,
      jax.random.key(0),
      sampling=Sampling(),
      max_new_tokens=4,
    )
