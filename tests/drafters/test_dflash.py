"""DFlash, DFlash 2 and DSpark: a block drafted in one pass over masks.

How they draft is in tests/loading/published/, against NumPy.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.drafters import dflash_network
from tests.drafters import rounds

_V, _K, _C, _D2T = rounds.V, rounds.K, 3, rounds.D2T
_TARGET = rounds.TARGET
_SOME = {
  'model': _TARGET,
  'num_draft_tokens': _K,
  'feature_layers': (0, 2),
  'draft_vocab_size': _D2T.size,
}
_DFLASH = drafters.DFlash(**_SOME)
_DSPARK = drafters.DSpark(rank=5, **_SOME)
_DFLASH2 = drafters.DFlash2(
  conv_group_size=8, selector_rank=5, selector_top_k=_C, **_SOME
)
_params = functools.partial(rounds.params, noise=0.3)


def _features(params, tokens):
  """Returns the target's features of whole sequences, from scratch."""
  return rounds.read(params, jnp.asarray(tokens), (0, 2)).features


@pytest.mark.slow
def test_sixteen_tokens_of_all_are_drafted_at_once():
  drafter = drafters.DSpark(
    model=_TARGET, num_draft_tokens=16, feature_layers=(-1,), rank=3
  )
  testing.assert_greedy_equal(
    _params(drafter),
    rounds.PROMPTS,
    rounds.LENGTHS,
    model=_TARGET,
    drafter=drafter,
    verify=verify.chain,
    max_new_tokens=24,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'drafter', [_DFLASH, _DSPARK], ids=['dflash', 'dspark']
)
def test_drafts_hang_on_context_and_on_each_other_only_in_dspark(drafter):
  def probs(text, token):
    draw = lambda probs, _: jnp.full(len(probs), token, jnp.int32)
    draft, _ = rounds.propose(drafter, _params(drafter), [text], draw=draw)
    return np.asarray(draft.probs[0])

  found = probs([3, 1, 4], 1)
  assert np.abs(found - probs([2, 1, 4], 1)).max() > 1e-3
  # Only tokens 1 and 6 of these have a term of their own in DSpark.
  others, outside = probs([3, 1, 4], 6), probs([3, 1, 4], 5)
  np.testing.assert_array_equal(found[0], others[0])
  np.testing.assert_array_equal(outside, probs([3, 1, 4], 2))
  if drafter is _DFLASH:
    np.testing.assert_array_equal(found, others)
  else:
    assert np.abs(found - others)[1:].max() > 1e-3
    assert np.abs(found - outside)[1:].max() > 1e-3


# The pending token is token 5 and the context is 0 to 4: what each token of the
# block sees.
_SEEN = {
  'causal': (3, True, [{3, 4, 5}, {4, 5, 6}, {5, 6, 7}]),
  'both sides': (3, False, [{3, 4, 5, 6, 7}, {4, 5, 6, 7}, {5, 6, 7}]),
  'a window smaller than the block': (2, False, [{4, 5, 6}, {5, 6, 7}, {6, 7}]),
  'the token itself': (1, False, [{5}, {6}, {7}]),
  'causal without a window': (
    None,
    True,
    [{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5, 6}, {0, 1, 2, 3, 4, 5, 6, 7}],
  ),
}


@pytest.mark.parametrize('case', _SEEN)
def test_block_sees_through_its_window(case):
  window, is_causal, expected = _SEEN[case]
  # A ring of 8: the second entry is empty, the first three are of later tokens.
  seen_at = np.asarray(
    [[8, -7, 10, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, -3, -2, -1]]
  )
  start = np.asarray([[5, 11], [5, 11]])
  mask = dflash_network.block_mask(start, 3, seen_at, window, is_causal)
  of_context, own = np.split(np.asarray(mask), [8], axis=2)
  for row in range(2):
    for i, tokens in enumerate(expected):
      found = set(seen_at[row][of_context[row, i]].tolist())
      found |= set((5 + np.flatnonzero(own[row, i])).tolist())
      assert found == {x for x in tokens if x >= 5 or x in seen_at[row]}
  np.testing.assert_array_equal(own[:, :3, :3], own[:, 3:, 3:])
  assert not own[:, :3, 3:].any() and not own[:, 3:, :3].any()


def test_rings_draft_as_whole_contexts_do():
  sliding = dataclasses.replace(
    _TARGET, sliding_window=3, sliding_layers=(0,), sliding_rope_theta=50.0
  )
  drafter = dataclasses.replace(
    _DFLASH, layer_config=sliding, causal_layers=(0,)
  )
  params = _params(_DFLASH)
  tokens = np.random.default_rng(3).integers(_V, size=(3, 40))
  output = rounds.read(params, tokens, (0, 2))

  @functools.partial(jax.jit, static_argnames='is_round')
  def observe(params, start, count, state, is_round):
    width = _K + 1 if is_round else 12  # a chunk is longer than the ring
    index = jnp.minimum(start[:, None] + jnp.arange(width), 39)
    take = lambda x: jnp.take_along_axis(x, index[..., None], axis=1)
    fed = jax.tree.map(take, output)
    verdict = is_round or None
    return drafter.observe(params, index, count, fed, verdict, state)

  @jax.jit
  def vectors(params, state):
    start = state.length[:, None]
    first = jnp.take_along_axis(jnp.asarray(tokens), start, axis=1)
    whole = drafter.context(params, output.features)
    draft = lambda context: drafter.vectors(params, first, start, context)
    return draft(state), draft(whole)

  state = drafter.init(params, 3, 64)
  assert [x.shape[2] for x in state.keys] == [3 + _K + 1, 64]
  # Rows end inside a chunk, or before it; one has fewer tokens than a window.
  prompts = np.asarray([21, 1, 12])
  for i in range(2):
    count = np.clip(prompts - 12 * i, 0, 12)
    state = observe(params, state.length, count, state, is_round=False)
    np.testing.assert_allclose(*vectors(params, state), atol=1e-4)
  for count in ([4, 1, 2], [1, 4, 3], [4, 0, 4], [1, 0, 1], [2, 1, 0]):
    state = observe(
      params, state.length, np.asarray(count), state, is_round=True
    )
    np.testing.assert_allclose(*vectors(params, state), atol=1e-4)
  np.testing.assert_array_equal(state.length, [21 + 12, 1 + 6, 12 + 10])


def test_windows_of_the_target_are_not_those_of_its_drafter():
  sliding = dataclasses.replace(_TARGET, sliding_window=3)
  assert dataclasses.replace(_DFLASH, model=sliding).shape.window(0) is None


@pytest.mark.slow
@pytest.mark.parametrize(
  'drafter', [_DFLASH, _DSPARK, _DFLASH2], ids=['dflash', 'dspark', 'dflash2']
)
def test_blocks_of_training_are_those_of_decoding(drafter):
  """So nothing crosses from one block into the next."""
  params = _params(drafter)
  text = jnp.asarray([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
  start = jnp.asarray([[0, 4, 7]])
  forced = lambda probs, position: text[position]
  context = drafter.context(params, _features(params, text[None]))
  vectors = jax.jit(drafter.vectors)
  found = vectors(params, text[start], start, context)[0]
  for i, place in enumerate(start[0].tolist()):
    prompts = [text[: place + 1].tolist()]
    state = rounds.begin(drafter, params, prompts)
    here = jnp.asarray([[place]])
    alone = vectors(params, text[here], here, state)[0, 0]
    np.testing.assert_allclose(found[i], alone, atol=1e-4)
    assert np.abs(found[i] - found[i - 1]).max() > 0.1
    if place < 7:  # a draft is made of these vectors
      draft, _ = rounds.propose(drafter, params, prompts, draw=forced)
      slots = drafter.read(params, found[i])
      previous = text[place : place + _K]
      logits, _ = drafter.given(params, slots, previous, None)
      expected = jax.nn.softmax(drafter.widen(params, logits))
      np.testing.assert_allclose(draft.probs[0], expected, atol=1e-4)


@pytest.mark.slow
def test_state_of_an_rnn_is_that_of_a_nodes_path():
  drafter = dataclasses.replace(_DSPARK, num_draft_tokens=4, head='rnn')
  params = rounds.params(drafter, 1.0)
  tokens, length = rounds.rows([[3, 1, 4]])

  @jax.jit
  def logits_after(params, levels, parents):
    state = rounds.begin(drafter, params, [[3, 1, 4]])
    found, carry = drafter.first(params, tokens, length, state)
    num_nodes = 0
    for level in levels:
      num_nodes += level.shape[1]
      above = None if parents is None else parents[:, :num_nodes]
      found, carry = drafter.next(params, level, above, carry)
    return found[0]

  # Nodes 4 and 5 continue nodes 3 and 1, and nodes 6 and 7 nodes 5 and 4.
  levels = [np.asarray([x]) for x in ([6, 1, 4], [3, 9], [0, 11])]
  found = logits_after(params, levels, np.asarray([[0, 0, 0, 3, 1, 5, 4]]))
  chain = lambda *path: logits_after(
    params, [np.asarray([[token]]) for token in path], None
  )[0]
  np.testing.assert_allclose(found[0], chain(6, 9, 0), atol=1e-4)
  np.testing.assert_allclose(found[1], chain(4, 3, 11), atol=1e-4)
  assert np.abs(chain(4, 9, 0) - found[0]).max() > 0.01


def test_confidence_is_of_what_is_known_before_the_draw():
  """The token before may be outside the draft vocabulary."""
  params = _params(_DSPARK)
  vectors = np.random.default_rng(0).normal(size=(2, _K, _TARGET.dim))
  previous = np.asarray([[5, 6, 1], [9, 2, 0]])
  found = _DSPARK.confidence_logits(
    params, vectors.astype(np.float32), previous
  )
  own = jax.tree.map(lambda x: np.asarray(x, float), params['drafter'])
  for b, k in np.ndindex(2, _K):
    is_it = (previous[b, k] == _D2T).astype(float)
    read = np.concatenate([vectors[b, k], own['markov']['before'] @ is_it])
    score = read @ own['confidence']['kernel'] + own['confidence']['bias']
    np.testing.assert_allclose(found[b, k], score[0], rtol=1e-4, atol=1e-4)


def test_dflash2_begins_as_the_most_likely_tokens_of_dflash():
  params = rounds.params(_DFLASH2, 0.0)
  own = params['drafter']
  names = _DFLASH.abstract_params()
  of_dflash = {name: own[name] for name in names} | {
    'layers': {
      i: {name: layer[name] for name in names['layers'][i]}
      for i, layer in own['layers'].items()
    }
  }
  found, _ = rounds.propose(_DFLASH2, params, rounds.TEXTS)
  plain, _ = rounds.propose(
    _DFLASH, params | {'drafter': of_dflash}, rounds.TEXTS
  )
  least = np.sort(plain.probs, axis=-1)[..., -_C, None]
  expected = np.where(plain.probs >= least, plain.probs, 0)
  expected /= expected.sum(axis=-1, keepdims=True)
  np.testing.assert_allclose(found.probs, expected, atol=1e-6)
  assert ((found.probs > 0).sum(axis=-1) == _C).all()


def test_node_of_a_tree_is_drafted_as_on_a_chain():
  params = _params(_DFLASH2)
  tokens, length = rounds.rows([[3, 1, 4]])
  parents = np.asarray([[0, 0, 1, 2]])
  levels = [np.asarray([[6, 2]]), np.asarray([[9, 0]])]

  @jax.jit
  def logits_after(params):
    state = rounds.begin(_DFLASH2, params, [[3, 1, 4]])
    found = [_DFLASH2.first(params, tokens, length, state)]
    for level in levels:
      found.append(_DFLASH2.next(params, level, parents, found[-1][1]))
    pending = tokens[:, 2:3]
    vectors = _DFLASH2.vectors(params, pending, length[:, None] - 1, state)
    return [x[0][0] for x in found], vectors[0, 0]

  found, vectors = logits_after(params)
  # Token 2 is never drafted, but may be what comes before.
  for slot, previous in enumerate(([4], [6, 2], [9, 0])):
    for of_node, token in zip(found[slot], previous, strict=True):
      slots = _DFLASH2.read(params, vectors[slot][None])
      expected, _ = _DFLASH2.given(params, slots, np.asarray([token]), None)
      np.testing.assert_allclose(of_node, expected[0], atol=1e-5)
      assert np.isfinite(of_node).sum() == _C
  assert (np.isfinite(found[1][0]) == np.isfinite(found[1][1])).all()
  probs = jax.nn.softmax(jnp.stack(found[1]))
  assert jnp.abs(probs[0] - probs[1]).max() > 0.01


def test_target_with_a_cap_caps_once():
  model = dataclasses.replace(_TARGET, logit_softcap=2.0)
  drafter = dataclasses.replace(
    _DFLASH2, model=model, final_logit_softcapping=2.0
  )
  logits = np.asarray([1.0, -2.0])
  np.testing.assert_array_equal(drafter.capped(logits), logits)


def test_block_that_does_not_fit_the_cache_is_refused():
  with pytest.raises(
    ValueError, match='num_draft_tokens is 3, but a cache of 3 tokens has no'
  ):
    _DFLASH.init(_params(_DFLASH), 1, 3)
