"""The most likely prefixes of a lattice, as a tree."""

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
from specsample import verify
from specsample.drafters import lattice
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.types import DraftKind

_V, _K = 12, 3
_TARGET = testing.tiny_llama(vocab_size=_V, num_layers=3)
_D2T = np.asarray([6, 1, 11, 4, 3, 0, 9])
_SOME = {
  'model': _TARGET,
  'num_draft_tokens': _K,
  'feature_layers': (0, 2),
  'draft_vocab_size': _D2T.size,
}
_DRAFTERS = {
  'dflash': drafters.DFlash(**_SOME),
  'dspark': drafters.DSpark(rank=5, **_SOME),
  'gated dspark': drafters.DSpark(rank=5, head='gated', **_SOME),
}
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % _V
_LENGTHS = np.asarray([6, 2, 5, 1])
_each = pytest.mark.parametrize('name', _DRAFTERS)


@functools.cache
def _params(name):
  target = jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))
  own = _DRAFTERS[name].init_params(jax.random.key(1), target, _D2T)
  noisy = testing.with_noise(own, jax.random.key(2), 0.3)
  return {'target': target, 'drafter': noisy}


def _paths(steps, parents, size):
  """Returns the candidates on the path to each prefix of one row."""
  paths = [()]
  for step, parent in zip(steps, parents, strict=True):
    paths.append((*paths[parent], int(step) % size))
  return paths[1:]


def test_worked_example():
  first, second = np.log([0.6, 0.3, 0.1]), np.log([0.7, 0.2, 0.1])
  log_probs = jnp.asarray([[[first] * 3, [second] * 3]], jnp.float32)
  found = lattice.best_prefixes(log_probs, 5)
  a, b, x, y = 0, 1, 0, 1
  paths = _paths(found.step[0], found.parent[0], size=3)
  assert paths == [(a,), (a, x), (b,), (b, x), (a, y)]
  np.testing.assert_array_equal(found.parent[0], [0, 1, 0, 3, 1])
  probs = np.exp(found.score[0])
  np.testing.assert_allclose(probs, [0.6, 0.42, 0.3, 0.21, 0.12], rtol=1e-6)
  np.testing.assert_allclose(1 + probs[:4].sum(), 2.53, rtol=1e-6)


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


def _random(seed, is_tied):
  """Returns the log-probabilities of 8 lattices; some steps never happen."""
  rng = np.random.default_rng(seed)
  shape = (8, 3, 3, 3)
  scores = -rng.integers(0, 3, shape) if is_tied else -rng.random(shape)
  scores = np.where(rng.random(shape) < 0.2, -np.inf, scores)
  scores[0, 0] = -np.inf  # nothing at all
  scores[:, 0] = scores[:, 0, :1]
  return scores.astype(np.float32)


@pytest.mark.parametrize('is_tied', [False, True])
@pytest.mark.parametrize('num_prefixes', [1, 2, 5, 8])
def test_prefixes_are_the_best_of_all(num_prefixes, is_tied):
  log_probs = _random(num_prefixes, is_tied)
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


def test_the_first_prefixes_are_the_best_tree_of_their_number():
  log_probs = _random(3, is_tied=True)
  find = lambda count: lattice.best_prefixes(log_probs, count)
  for count in (2, 5):
    first = jax.tree.map(lambda x: x[:, :count], find(8))  # noqa: B023
    jax.tree.map(np.testing.assert_array_equal, find(count), first)


@functools.partial(jax.jit, static_argnames='drafter')
def _run(params, *, drafter):
  """Returns the draft after the prompts, and lattices of 7 and 4 candidates.

  Also returns the drafter's logits of the first position, those of the second
  after each of the 7 candidates, and the confidence there.
  """
  output, _ = _TARGET.apply(
    params['target'],
    _PROMPTS,
    _TARGET.init_cache(len(_PROMPTS), 0),
    drafter.feature_layers,
  )
  state = drafter.init(params, len(_PROMPTS), 32)
  state = drafter.observe(params, _PROMPTS, _LENGTHS - 1, output, None, state)
  tokens = jnp.pad(_PROMPTS, ((0, 0), (0, 26)))
  found = drafter.propose(params, None, None, tokens, _LENGTHS, state)[0]
  inner = drafter.drafter
  lattices = [
    inner.lattice(params, tokens, _LENGTHS, state, count) for count in (7, 4)
  ]
  logits, carry = inner.first(params, tokens, _LENGTHS, state)
  parents = jnp.zeros((4, _D2T.size), jnp.int32)
  ids = lattices[0].ids[:, 0]
  after, carry = inner.next(params, ids, parents, carry)
  said = inner.confidence(params, carry)
  return found, lattices, (logits, after, said)


def test_over_independent_positions_it_is_the_dynamic_tree():
  drafter = _DRAFTERS['dflash']
  of = {'drafter': drafter, 'num_draft_tokens': 7}
  found, _, _ = _run(
    _params('dflash'), drafter=drafters.LatticeTree(candidates=7, **of)
  )
  expected, _, _ = _run(
    _params('dflash'), drafter=drafters.DynamicTree(width=7, **of)
  )
  assert found.kind is DraftKind.POINT_MASS
  for row in range(4):
    nodes = []
    for draft in (found, expected):
      paths = [()]
      for token, parent in zip(
        draft.tokens[row], draft.parents[row], strict=True
      ):
        paths.append((*paths[int(parent)], int(token)))
      said = [draft.signals.log_prob, draft.signals.max_log_prob]
      said = np.stack([*said, draft.signals.rank])[:, row].T
      nodes.append(dict(zip(paths[1:], said, strict=True)))
    assert nodes[0].keys() == nodes[1].keys()
    for path, said in nodes[0].items():
      np.testing.assert_allclose(said, nodes[1][path], atol=1e-5)


@_each
def test_steps_are_those_of_the_drafter(name):
  drafter = drafters.LatticeTree(
    drafter=_DRAFTERS[name], num_draft_tokens=5, candidates=4
  )
  _, (found, few), (first, after, said) = _run(_params(name), drafter=drafter)
  place = np.argsort(_D2T)[np.searchsorted(np.sort(_D2T), found.ids)]
  for position, logits in ((0, first), (1, after)):
    expected = np.broadcast_to(jax.nn.log_softmax(logits), after.shape)
    order = np.broadcast_to(place[:, position, None], after.shape)
    expected = np.take_along_axis(expected, order, axis=2)
    np.testing.assert_allclose(
      found.log_probs[:, position], expected, atol=1e-5
    )
    # With fewer candidates the probabilities on the best path are the same.
    np.testing.assert_allclose(
      few.log_probs[:, position, 0], expected[:, 0, :4], atol=1e-5
    )
    np.testing.assert_array_equal(
      few.ids[:, position], found.ids[:, position, :4]
    )
  if said is None:
    assert found.confidence is None
  else:
    np.testing.assert_allclose(found.confidence[:, 1], said, atol=1e-6)


@_each
def test_signals_are_of_the_steps_to_the_nodes(name):
  drafter = drafters.LatticeTree(
    drafter=_DRAFTERS[name], num_draft_tokens=9, candidates=7
  )
  found, (whole, _), _ = _run(_params(name), drafter=drafter)
  ids = np.asarray(whole.ids)
  for row, node in itertools.product(range(4), range(9)):
    path, at = [], node
    while at >= 0:
      path.insert(0, found.tokens[row, at])
      at = int(found.parents[row, at]) - 1
    index = [list(ids[row, i]).index(token) for i, token in enumerate(path)]
    before = index[-2] if len(index) > 1 else 0
    law = np.asarray(whole.log_probs[row, len(path) - 1, before])
    own = jax.tree.map(lambda x: x[row, node], found.signals)  # noqa: B023
    np.testing.assert_allclose(own.log_prob, law[index[-1]], atol=1e-6)
    np.testing.assert_allclose(own.max_log_prob, law.max(), atol=1e-6)
    assert own.rank == (law > law[index[-1]]).sum()
    np.testing.assert_allclose(
      own.entropy, -(np.exp(law) * law).sum(), atol=1e-5
    )
    if whole.confidence is not None:
      of_step = whole.confidence[row, len(path) - 1, before]
      np.testing.assert_allclose(own.confidence, of_step, atol=1e-6)


def _tree_of(name):
  return drafters.LatticeTree(
    drafter=_DRAFTERS[name], num_draft_tokens=6, candidates=4
  )


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (
      {'candidates': 2, 'num_draft_tokens': 15},
      '2 candidates for each of 3 positions make only 14 nodes',
    ),
    ({'candidates': 0}, 'candidates is 0: give an integer of at least 1'),
    ({'num_draft_tokens': 0}, 'give at least 1 token'),
    (
      {'drafter': drafters.Ngram(num_draft_tokens=3)},
      'Ngram: give one that has a lattice, DFlash, DFlash2 or DSpark',
    ),
  ],
)
def test_trees_that_cannot_be_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_tree_of('dspark'), **settings)


@pytest.mark.parametrize(
  ('name', 'head', 'candidates', 'message'),
  [
    ('dspark', 'vanilla', 8, 'the drafter drafts only 7'),
    ('dspark', 'rnn', 3, "head is 'rnn', .* use DynamicTree"),
  ],
)
def test_lattices_that_a_drafter_does_not_have_are_refused(
  name, head, candidates, message
):
  drafter = dataclasses.replace(
    _tree_of(name),
    candidates=candidates,
    drafter=dataclasses.replace(_DRAFTERS[name], head=head),
  )
  with pytest.raises(ValueError, match=message):
    specsample.prefill(
      Decoder(_TARGET, drafter, verify.tree),
      _params(name),
      _PROMPTS,
      _LENGTHS,
      jax.random.key(0),
      sampling=Sampling(),
      max_new_tokens=4,
    )
