"""DFlash and DSpark: a block drafted in one pass over masks."""

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
from specsample.drafters import dflash_network
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.testing import conditional as conditional_lib
from specsample.testing import drafted as drafted_lib
from specsample.testing import enumerate as enumerate_lib
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
}
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % _V
_LENGTHS = np.asarray([6, 2, 5, 1])
_each = pytest.mark.parametrize('name', _DRAFTERS)


@functools.cache
def _params(name):
  # Larger than at initialisation, where tokens hardly matter.
  target = jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))
  own = _DRAFTERS[name].init_params(jax.random.key(1), target, _D2T)
  noisy = testing.with_noise(own, jax.random.key(2), 0.3)
  return {'target': target, 'drafter': noisy}


def test_sixteen_tokens_of_all_are_drafted_at_once():
  drafter = drafters.DSpark(
    model=_TARGET, num_draft_tokens=16, feature_layers=(-1,), rank=3
  )
  target = _params('dspark')['target']
  own = drafter.init_params(jax.random.key(1), target)
  own = testing.with_noise(own, jax.random.key(2), 0.3)
  testing.assert_greedy_equal(
    {'target': target, 'drafter': own},
    _PROMPTS,
    _LENGTHS,
    model=_TARGET,
    drafter=drafter,
    verify=verify.chain,
    max_new_tokens=24,
  )


def _features(params, tokens):
  """Returns the target's features of whole sequences, from scratch."""
  empty = _TARGET.init_cache(len(tokens), 0)
  return _TARGET.apply(params['target'], tokens, empty, features=(0, 2))[0]


def _propose(name, sequence, draw, drafter=None):
  """Returns the draft after one sequence, prefilled in one pass."""
  params, drafter = _params(name), drafter or _DRAFTERS[name]
  tokens = np.zeros((1, 16), np.int32)
  tokens[0, : len(sequence)] = sequence

  @jax.jit
  def propose(params, tokens, length):
    state = drafter.init(params, 1, 16)
    output = _features(params, tokens)
    state = drafter.observe(params, tokens, length - 1, output, None, state)
    warp = lambda logits, drafted: jax.nn.softmax(logits)
    return drafter.propose(params, draw, warp, tokens, length, state)

  return propose(params, tokens, np.asarray([len(sequence)]))


def _norm(x, scale):
  return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * scale


def _silu(x):
  return x / (1 + np.exp(-x))


def _softmax(x):
  weights = np.exp(x - x.max())
  return weights / weights.sum()


def _rotate(head, position):
  half = head.size // 2
  angles = position * 10_000.0 ** (-np.arange(half) / half)
  first, second = head[:half], head[half:]
  return np.concatenate(
    [
      first * np.cos(angles) - second * np.sin(angles),
      second * np.cos(angles) + first * np.sin(angles),
    ]
  )


def _by_hand(params, sequence):
  """Returns the vectors [K, D] of the masks, computed by loops in float64."""
  to_numpy = lambda tree: jax.tree.map(lambda x: np.asarray(x, float), tree)
  target, own = to_numpy(params['target']), to_numpy(params['drafter'])
  pending = len(sequence) - 1
  features = _features(params, np.asarray([sequence])).features
  features = np.concatenate(features, axis=-1)[0][:pending].astype(float)
  fused = features @ own['fuse']['kernel']
  fused = _norm(fused, own['fused_norm']['scale'])
  x = [target['embedding'][:, sequence[-1]]] + [own['mask']] * _K
  for layer in own['layers'].values():
    attention = {n: w['kernel'] for n, w in layer['attention'].items()}
    normed = [_norm(row, layer['attention_norm']['scale']) for row in x]
    # Each with its position: first the context, then the block.
    seen = [*enumerate(fused), *enumerate(normed, start=pending)]
    attended = []
    for i, row in enumerate(normed):
      query = (row @ attention['query']).reshape(4, 8)
      heads = []
      for h in range(4):
        of_kv = slice(8 * (h // 2), 8 * (h // 2) + 8)
        rotated = _rotate(query[h], pending + i)
        scores = [
          rotated @ _rotate((y @ attention['key'])[of_kv], position) / 8**0.5
          for position, y in seen
        ]
        values = np.stack([(y @ attention['value'])[of_kv] for _, y in seen])
        heads.append(_softmax(np.asarray(scores)) @ values)
      attended.append(np.concatenate(heads) @ attention['out'])
    x = [row + added for row, added in zip(x, attended, strict=True)]
    mlp = {n: w['kernel'] for n, w in layer['mlp'].items()}
    normed = [_norm(row, layer['mlp_norm']['scale']) for row in x]
    x = [
      row + (_silu(y @ mlp['gate']) * (y @ mlp['up'])) @ mlp['down']
      for row, y in zip(x, normed, strict=True)
    ]
  return _norm(np.stack(x[1:]), own['norm']['scale'])


def _by_hand_probs(name, sequence, drafted):
  """Returns the probabilities [K, V] that the draft tokens were drawn from."""
  params = _params(name)
  own = jax.tree.map(lambda x: np.asarray(x, float), params['drafter'])
  logits = _by_hand(params, sequence) @ own['vocabulary']['unembedding']
  probs = np.zeros((_K, _V))
  for i, before in enumerate([sequence[-1], *drafted[:-1]]):
    if name == 'dspark' and before in _D2T:
      column = own['markov']['before'][:, _D2T.tolist().index(before)]
      logits[i] += column @ own['markov']['behind']
    probs[i, _D2T] = _softmax(logits[i])
  return probs


@pytest.mark.parametrize('sequence', [[5], [6], [3, 1, 4, 1, 5, 9, 2, 6]])
@_each
def test_drafts_are_those_of_a_pass_worked_out_by_hand(name, sequence):
  # Draws the second most likely token, so that an argmax would be noticed.
  second = lambda probs, position: probs.argsort(axis=-1)[:, -2].astype('int32')
  draft, _ = _propose(name, sequence, second)
  assert draft.kind is DraftKind.SAMPLED
  drafted = np.asarray(draft.tokens[0]).tolist()
  expected = _by_hand_probs(name, sequence, drafted)
  np.testing.assert_allclose(draft.probs[0], expected, atol=2e-5)
  assert drafted == expected.argsort()[:, -2].tolist()


def test_a_tree_that_is_a_chain_drafts_the_best_token_of_every_slot():
  sequence = [3, 1, 4, 1, 5, 9, 2, 6]
  best = drafters.Tree(drafter=_DRAFTERS['dflash'], topology=tree.chain(_K))
  draft, _ = _propose('dflash', sequence, None, drafter=best)
  assert draft.kind is DraftKind.POINT_MASS
  assert draft.probs is None
  drafted = np.asarray(draft.tokens[0]).tolist()
  expected = _by_hand_probs('dflash', sequence, drafted)
  assert drafted == expected.argmax(axis=-1).tolist()


def test_the_best_tokens_are_verified_exactly_at_temperature_one():
  two = dataclasses.replace(_DRAFTERS['dflash'], num_draft_tokens=2)
  best = drafters.Tree(drafter=two, topology=tree.chain(2))
  params, prompt = _params('dflash'), (3, 1, 4)
  sampling = Sampling(temperature=1.0)
  proposal = drafted_lib.from_drafter(
    best, params, _TARGET, prompt, sampling, rounds=1
  )
  target = conditional_lib.from_model(
    _TARGET, params['target'], prompt, sampling
  )
  found = enumerate_lib.Enumeration(verify.tree, proposal, target)
  difference, _ = found.error(1, target)
  assert difference < 1e-12
  assert 0 < found.expected_accepted() < 2


@_each
def test_drafts_hang_on_context_and_on_each_other_only_in_dspark(name):
  probs = lambda sequence, token: np.asarray(
    _propose(
      name, sequence, lambda probs, _: jnp.full(len(probs), token, jnp.int32)
    )[0].probs[0]
  )
  found = probs([3, 1, 4], 1)
  assert np.abs(found - probs([2, 1, 4], 1)).max() > 1e-3
  others = probs([3, 1, 4], 6)
  np.testing.assert_array_equal(found[0], others[0])
  if name == 'dflash':
    np.testing.assert_array_equal(found, others)
  else:
    assert np.abs(found - others)[1:].max() > 1e-3


@pytest.mark.nightly(but=('dflash',))
@_each
def test_a_round_leaves_the_context_of_what_was_kept(name):
  params, drafter = _params(name), _DRAFTERS[name]
  prompts = np.tile(_PROMPTS, (8, 1))
  state = specsample.prefill(
    Decoder(_TARGET, drafter, verify.chain),
    params,
    prompts,
    np.tile(_LENGTHS, 8),
    jax.random.key(2),
    sampling=Sampling(temperature=1.0),
    max_new_tokens=24,
  )

  @jax.jit
  def afresh(params, tokens):
    return drafter.context(params, _features(params, tokens).features)

  kept = set()
  for _ in range(3):
    state = specsample.advance(
      Decoder(_TARGET, drafter, verify.chain), params, state, max_rounds=1
    )
    kept |= set(np.flatnonzero(np.asarray(state.accepted).any(axis=0)))
    expected = afresh(params, state.tokens)
    for row, length in enumerate(np.asarray(state.length)):
      # The last token is pending.
      assert state.draft.length[row] == length - 1
      jax.tree.map(
        lambda x, y, row=row, end=length - 1: np.testing.assert_allclose(
          x[row, :, :end], y[row, :, :end], atol=1e-4
        ),
        (state.draft.keys, state.draft.values),
        (expected.keys, expected.values),
      )
  assert kept == set(range(_K + 1))


# The pending token is token 5 and the context is 0 to 4: what each token of the
# block sees.
_SEEN = {
  'causal': (3, True, [{3, 4, 5}, {4, 5, 6}, {5, 6, 7}]),
  'both sides': (3, False, [{3, 4, 5, 6, 7}, {4, 5, 6, 7}, {5, 6, 7}]),
  'a window smaller than the block': (2, False, [{4, 5, 6}, {5, 6, 7}, {6, 7}]),
  'the token itself': (1, False, [{5}, {6}, {7}]),
  'causal without a window': (
    *(None, True),
    [{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5, 6}, {0, 1, 2, 3, 4, 5, 6, 7}],
  ),
}


@pytest.mark.parametrize('case', _SEEN)
def test_a_block_sees_through_its_window(case):
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
    _DRAFTERS['dflash'], layer_config=sliding, causal_layers=(0,)
  )
  params = _params('dflash')
  tokens = np.random.default_rng(3).integers(_V, size=(3, 40))
  output = _features(params, tokens)

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


def test_the_targets_windows_are_not_those_of_its_drafter():
  sliding = dataclasses.replace(_TARGET, sliding_window=3)
  drafter = dataclasses.replace(_DRAFTERS['dflash'], model=sliding)
  assert drafter.shape.window(0) is None


@_each
def test_blocks_of_a_batch_are_those_of_decoding(name):
  params, drafter = _params(name), _DRAFTERS[name]
  tokens = np.asarray([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
  start = np.asarray([[0, 4, 7]])

  @jax.jit
  def blocks(params):
    context = drafter.context(params, _features(params, tokens).features)
    first = jnp.take_along_axis(jnp.asarray(tokens), start, axis=1)
    return drafter.vectors(params, first, start, context)

  found = blocks(params)[0]
  for vectors, place in zip(found, start[0], strict=True):
    expected = _by_hand(params, tokens[0, : place + 1].tolist())
    np.testing.assert_allclose(vectors, expected, atol=1e-4)


def _of_rank_1(head):
  """Returns a drafter of two tokens, and parameters that are all 0.

  But W1 is (1, 2) for them, and W2 (1, -1).
  """
  drafter = drafters.DSpark(
    model=testing.tiny_llama(vocab_size=2),
    num_draft_tokens=2,
    feature_layers=(0,),
    rank=1,
    head=head,
  )
  own = jax.tree.map(
    lambda x: np.zeros(x.shape, np.float32), drafter.abstract_params()
  )
  own['markov']['before'][:] = [[1, 2]]
  own['markov']['behind'][:] = [[1, -1]]
  return drafter, own


def _terms(drafter, own, vectors, previous):
  """Returns what is added to the logits of the slots of a block, [K, 2]."""
  params, terms = {'drafter': own}, []
  state = drafter.initial_memory(params, np.asarray([previous[0]]))
  for vector, token in zip(vectors, previous, strict=True):
    slot = np.zeros((1, 2), np.float32), vector[None]
    logits, state = drafter.given(params, slot, np.asarray([token]), state)
    terms.append(logits[0])
  return terms, state


def test_a_gate_worked_out_by_hand():
  vector = np.zeros((1, 16), np.float32)
  vector[0, 0] = 0.5
  drafter, own = _of_rank_1('gated')
  # The vector comes first: 1 * 0.5 - 0.25 * 2 = 0, whose sigmoid is 1 / 2.
  own['markov']['gate']['kernel'][[0, 16], 0] = [1, -0.25]
  (found,), state = _terms(drafter, own, vector, [1])
  np.testing.assert_allclose(found, [1, -1], atol=1e-6)
  assert state is None
  (found,), _ = _terms(*_of_rank_1('vanilla'), vector, [1])
  np.testing.assert_allclose(found, [2, -2])


def test_an_rnn_worked_out_by_hand():
  drafter, own = _of_rank_1('rnn')
  # Columns are the share that is kept (1 / 2), the new state (the token's
  # number), and the output (the state before plus the token's number).
  own['markov']['joint']['kernel'][:2] = [[0, 0, 1], [0, 1, 1]]
  vectors = np.zeros((2, 16), np.float32)
  (first, second), state = _terms(drafter, own, vectors, [0, 1])
  np.testing.assert_allclose(first, [0.761594, -0.761594], atol=1e-6)
  # tanh(2.380797), where 0.380797 is tanh(1) / 2, the state after the first.
  np.testing.assert_allclose(second, [0.983041, -0.983041], atol=1e-6)
  np.testing.assert_allclose(state, [[0.672412]], atol=1e-6)
  _, state = _terms(drafter, own, vectors[:1], [0])
  np.testing.assert_allclose(state, [[0.380797]], atol=1e-6)


def test_the_state_of_an_rnn_is_that_of_a_nodes_path():
  drafter = dataclasses.replace(
    _DRAFTERS['dspark'], num_draft_tokens=4, head='rnn'
  )
  target = _params('dspark')['target']
  own = drafter.init_params(jax.random.key(1), target, _D2T)
  own = testing.with_noise(own, jax.random.key(2), 1.0)
  params = {'target': target, 'drafter': own}
  tokens, length = np.asarray([[3, 1, 4]]), np.asarray([3])

  @jax.jit
  def logits_after(params, levels, parents):
    state = drafter.init(params, 1, 16)
    output = _features(params, tokens)
    state = drafter.observe(params, tokens, length - 1, output, None, state)
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
  params, drafter = _params('dspark'), _DRAFTERS['dspark']
  vectors = np.random.default_rng(0).normal(size=(2, _K, _TARGET.dim))
  previous = np.asarray([[5, 6, 1], [9, 2, 0]])
  found = drafter.confidence_logits(
    params, vectors.astype(np.float32), previous
  )
  own = jax.tree.map(lambda x: np.asarray(x, float), params['drafter'])
  for b, k in np.ndindex(2, _K):
    embedded = np.zeros(5)
    if previous[b, k] in _D2T:
      index = _D2T.tolist().index(previous[b, k])
      embedded = own['markov']['before'][:, index]
    read = np.concatenate([vectors[b, k], embedded])
    score = read @ own['confidence']['kernel'] + own['confidence']['bias']
    np.testing.assert_allclose(found[b, k], score[0], rtol=1e-4, atol=1e-4)


@_each
def test_all_but_the_targets_part_is_trained(name):
  drafter = _DRAFTERS[name]
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  assert shapes(drafter.abstract_params()) == shapes(_params(name)['drafter'])
  trained = drafter.is_trained()
  assert not any(jax.tree.leaves(trained.pop('vocabulary')))
  assert all(jax.tree.leaves(trained))


def test_the_last_norm_begins_as_the_targets():
  params = _params('dflash')
  own = _DRAFTERS['dflash'].init_params(
    jax.random.key(1), params['target'], _D2T
  )
  np.testing.assert_array_equal(
    own['norm']['scale'], params['target']['norm']['scale']
  )


def test_a_target_of_another_dtype_is_refused():
  params = _params('dflash')
  half = dataclasses.replace(_TARGET, dtype='bfloat16')
  cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params['target'])
  with pytest.raises(ValueError, match=r'bfloat16, but .* float32: load both'):
    specsample.generate(
      params | {'target': cast},
      _PROMPTS,
      _LENGTHS,
      jax.random.key(0),
      model=half,
      drafter=dataclasses.replace(_DRAFTERS['dflash'], model=half),
      verify=verify.block,
      sampling=Sampling(),
      max_new_tokens=4,
    )


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'feature_layers': ()}, r'feature_layers are \(\), but the target has'),
    ({'feature_layers': (0, 3)}, r'are \(0, 3\), .* has layers 0 to 2'),
    ({'num_layers': 0}, 'num_layers is 0'),
    ({'causal_layers': (0, 2)}, r'causal_layers are \(0, 2\), .* 0 to 1'),
    ({'num_draft_tokens': 0}, 'num_draft_tokens is 0'),
    ({'rank': 0}, 'rank is 0: give an integer of at least 1'),
    ({'head': 'lstm'}, "head is 'lstm': give one of 'vanilla', 'gated', 'rnn'"),
    (
      {'model': testing.HashModel(vocab_size=8), 'draft_vocab_size': None},
      'layers with the shape of HashModel.*, which is not a Transformer',
    ),
  ],
)
def test_settings_out_of_range_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_DRAFTERS['dspark'], **settings)


def test_a_block_that_does_not_fit_the_cache_is_refused():
  with pytest.raises(
    ValueError, match='num_draft_tokens is 3, but a cache of 3 tokens has no'
  ):
    _DRAFTERS['dflash'].init(_params('dflash'), 1, 3)


def test_parameters_that_are_missing_are_named():
  with pytest.raises(ValueError, match=r"\['target'\], but DFlash reads"):
    _DRAFTERS['dflash'].init({'target': {}}, 1, 8)
  whole = dataclasses.replace(_DRAFTERS['dflash'], draft_vocab_size=None)
  with pytest.raises(ValueError, match="give the target's parameters"):
    whole.init_params(jax.random.key(0))
