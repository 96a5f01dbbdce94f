"""DFlash 2: convolutions over a block, and a selector among few candidates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.types import Draft, DraftKind

_V, _K, _C = 12, 3, 3
_TARGET = testing.tiny_llama(vocab_size=_V, num_layers=3)
_D2T = np.asarray([6, 1, 11, 4, 3, 0, 9])
_SOME = {
  'model': _TARGET,
  'num_draft_tokens': _K,
  'feature_layers': (0, 2),
  'draft_vocab_size': _D2T.size,
}
_DRAFTER = drafters.DFlash2(
  conv_group_size=8, selector_rank=5, selector_top_k=_C, **_SOME
)
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % _V
_LENGTHS = np.asarray([6, 2, 5, 1])


@functools.cache
def _params():
  target = jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))
  own = _DRAFTER.init_params(jax.random.key(1), target, _D2T)
  noisy = testing.with_noise(own, jax.random.key(2), 0.5)
  return {'target': target, 'drafter': noisy}


def _observed(drafter, params, tokens, length):
  """Returns the state after a prefill of rows [B, T] with pending tokens."""
  empty = _TARGET.init_cache(len(tokens), 0)
  output, _ = _TARGET.apply(params['target'], tokens, empty, features=(0, 2))
  state = drafter.init(params, len(tokens), tokens.shape[1])
  return drafter.observe(params, tokens, length - 1, output, None, state)


def test_a_convolution_worked_out_by_hand():
  drafter = drafters.DFlash2(
    model=testing.tiny_llama(vocab_size=4),
    num_draft_tokens=1,
    feature_layers=(0,),
    conv_group_size=2,
    selector_rank=1,
    selector_top_k=1,
  )
  own = jax.tree.map(
    lambda x: np.zeros(x.shape, np.float32), drafter.abstract_params()
  )
  conv = own['layers'][0]['mlp_conv']
  # What taps 0 and 1 have for the first two of 16 numbers, the first group; and
  # what the second token adds to them.
  conv['base'][:2, :, 0] = [[1, 0.5], [1, 0]]
  conv['base'][:, 0, 1] = 1
  conv['projection']['kernel'][1, [0, 8]] = [0.1, -0.2]
  apply = drafter.merge({'drafter': own}).layers[0].mlp_conv
  before, after = apply.kernels(jnp.zeros((2, 16)).at[1, 1].set(1))
  x = jnp.zeros((2, 16)).at[:, :2].set([[1, 2], [3, 4]])
  np.testing.assert_allclose(
    apply(before, x)[:, :2], [[1, 2], [3.6, 4]], rtol=1e-6
  )
  np.testing.assert_array_equal(apply(after, x), x)
  # A second block does not see the first.
  both = apply(jnp.concatenate([before] * 2), jnp.concatenate([x] * 2))
  np.testing.assert_array_equal(both[:2], both[2:])


def test_a_selection_worked_out_by_hand():
  drafter = drafters.DFlash2(
    model=testing.tiny_llama(vocab_size=10),
    num_draft_tokens=1,
    feature_layers=(0,),
    selector_rank=1,
    selector_top_k=2,
  )
  own = jax.tree.map(
    lambda x: np.zeros(x.shape, np.float32), drafter.abstract_params()
  )
  selector = own['selector']
  selector['hidden']['kernel'][0] = 1
  selector['predecessor'][0, 5] = 0.5  # after token 5, times a gate of 2
  selector['successor'][0, [7, 9]] = [-1, 0.5]
  params = {'drafter': own}
  logits = np.full((1, 10), 0.25, np.float32)
  logits[0, [7, 9]] = [2, 1.5]
  vectors = np.zeros((1, 16), np.float32)
  vectors[0, 0] = 2
  slots = drafter.candidates(params, logits, vectors)
  found, _ = drafter.given(params, slots, np.asarray([5]), None)
  expected = np.full(10, -np.inf)
  expected[[7, 9]] = [1, 2]
  np.testing.assert_allclose(found[0], expected)
  assert found[0].argmax() == 9
  probs = jax.nn.softmax(found)
  np.testing.assert_allclose(probs[0, [7, 9]], [0.26894, 0.73106], atol=1e-5)

  # The residual is over all tokens, not only the candidates.
  target = np.zeros(10, np.float32)
  target[[7, 9, 3]] = [0.5, 0.4, 0.1]
  stop, after = {}, {}
  for token in (7, 9):
    draft = Draft(
      tokens=np.asarray([token]), probs=probs, kind=DraftKind.SAMPLED
    )
    law = verify.chain.law(draft, jnp.stack([target, target]))
    stop[token], after[token] = law.stop[0], law.next[0]
  np.testing.assert_allclose(1 - stop[9], 0.54715, atol=1e-5)
  np.testing.assert_allclose(stop[7], 0)
  accepted = probs[0, 7] + probs[0, 9] * (1 - stop[9])
  np.testing.assert_allclose(accepted, 0.66894, atol=1e-5)
  np.testing.assert_allclose(
    after[9][jnp.asarray([7, 3])], [0.69794, 0.30206], atol=1e-5
  )


def test_it_begins_as_the_most_likely_tokens_of_dflash():
  target = _params()['target']
  plain = drafters.DFlash(**_SOME)
  own = _DRAFTER.init_params(jax.random.key(1), target, _D2T)
  params = {'target': target, 'drafter': own}
  layers = own['layers'].items()
  of_plain = plain.abstract_params()
  of_plain |= {name: own[name] for name in of_plain} | {
    'layers': {
      i: {name: layer[name] for name in of_plain['layers'][i]}
      for i, layer in layers
    }
  }

  @functools.partial(jax.jit, static_argnums=0)
  def propose(drafter, params):
    state = _observed(drafter, params, _PROMPTS, _LENGTHS)
    warp = lambda logits, drafted: jax.nn.softmax(logits)
    best = lambda probs, position: jnp.argmax(probs, axis=-1)
    return drafter.propose(params, best, warp, _PROMPTS, _LENGTHS, state)[0]

  found = np.asarray(propose(_DRAFTER, params).probs)
  of_dflash = propose(plain, {'target': target, 'drafter': of_plain}).probs
  least = np.sort(of_dflash, axis=-1)[..., -_C, None]
  expected = np.where(of_dflash >= least, of_dflash, 0)
  expected /= expected.sum(axis=-1, keepdims=True)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  assert ((found > 0).sum(axis=-1) == _C).all()


def test_a_node_of_a_tree_is_drafted_as_on_a_chain():
  params = _params()
  tokens, length = np.asarray([[3, 1, 4, 0, 0, 0]]), np.asarray([3])

  @jax.jit
  def logits_after(params, levels, parents):
    state = _observed(_DRAFTER, params, tokens, length)
    found = [_DRAFTER.first(params, tokens, length, state)]
    for level in levels:
      found.append(_DRAFTER.next(params, level, parents, found[-1][1]))
    pending = tokens[:, 2:3]
    vectors = _DRAFTER.vectors(params, pending, length[:, None] - 1, state)
    return [x[0][0] for x in found], vectors[0, 0]

  parents = np.asarray([[0, 0, 1, 2]])
  levels = [np.asarray([[6, 2]]), np.asarray([[9, 0]])]
  found, vectors = logits_after(params, levels, parents)
  # Token 2 is never drafted, but may be what comes before.
  for slot, previous in enumerate(([4], [6, 2], [9, 0])):
    for of_node, token in zip(found[slot], previous, strict=True):
      slots = _DRAFTER.read(params, vectors[slot][None])
      expected, _ = _DRAFTER.given(params, slots, np.asarray([token]), None)
      np.testing.assert_allclose(of_node, expected[0], atol=1e-5)
      assert np.isfinite(of_node).sum() == _C
  assert (np.isfinite(found[1][0]) == np.isfinite(found[1][1])).all()
  probs = jax.nn.softmax(jnp.stack(found[1]))
  assert jnp.abs(probs[0] - probs[1]).max() > 0.01
  first = logits_after(params, levels[:1], None)[0][0]
  np.testing.assert_array_equal(first, found[0])


def test_a_lattice_has_the_probabilities_of_each_step():
  params = _params()
  tokens = np.pad(_PROMPTS, ((0, 0), (0, 8)))

  @functools.partial(jax.jit, static_argnums=1)
  def lattice(params, count):
    state = _observed(_DRAFTER, params, tokens, _LENGTHS)
    found = _DRAFTER.lattice(params, tokens, _LENGTHS, state, count)
    logits, carry = _DRAFTER.first(params, tokens, _LENGTHS, state)
    steps, last = [logits], found.ids
    for i in range(_K - 1):
      logits, carry = _DRAFTER.next(params, last[:, i], None, carry)
      steps.append(logits)
    wide = [jax.nn.log_softmax(_DRAFTER.widen(params, x)) for x in steps]
    return found, wide

  found, steps = jax.device_get(lattice(params, _C))
  for b, k, i, j in np.ndindex(found.log_probs.shape):
    after = steps[k][b, i if k else 0]
    np.testing.assert_allclose(
      found.log_probs[b, k, i, j], after[found.ids[b, k, j]], atol=1e-4
    )
  fewer, _ = jax.device_get(lattice(params, 2))
  np.testing.assert_array_equal(fewer.ids, found.ids[..., :2])
  np.testing.assert_allclose(
    fewer.log_probs, found.log_probs[..., :2, :2], atol=1e-5
  )
  with pytest.raises(ValueError, match='candidates is 4, but selector_top_k i'):
    lattice(params, 4)


def test_the_best_tree_of_a_lattice_gives_the_targets_text():
  tree = drafters.LatticeTree(
    drafter=_DRAFTER, num_draft_tokens=8, candidates=_C
  )
  testing.assert_greedy_equal(
    *(_params(), _PROMPTS, _LENGTHS),
    model=_TARGET,
    drafter=tree,
    verify=verify.tree,
    max_new_tokens=16,
  )


def test_blocks_of_a_batch_are_those_of_decoding():
  """So nothing crosses from one block into the next."""
  params = _params()
  tokens = np.asarray([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
  start = np.asarray([[0, 4, 7]])

  @jax.jit
  def vectors(params, start):
    state = _observed(_DRAFTER, params, tokens, np.asarray([10]))
    first = jnp.take_along_axis(jnp.asarray(tokens), start, axis=1)
    return _DRAFTER.vectors(params, first, start, state)[0]

  found = vectors(params, start)
  for i, place in enumerate(start[0]):
    alone = vectors(params, np.asarray([[place]]))[0]
    np.testing.assert_allclose(found[i], alone, atol=1e-5)
    assert np.abs(found[i] - found[i - 1]).max() > 0.1


def test_scales_and_a_cap_of_the_logits():
  drafter = dataclasses.replace(
    _DRAFTER,
    output_multiplier=0.5,
    final_logit_softcapping=2.0,
    input_embedding_scale=3.0,
  )
  params = _params()
  unscaled = params | {'drafter': params['drafter'] | {}}
  unscaled['drafter']['mask'] = 3 * params['drafter']['mask']
  embedding = 3 * params['target']['embedding']

  @functools.partial(jax.jit, static_argnums=0)
  def vectors(drafter, params, target):
    state = _observed(drafter, params, _PROMPTS, _LENGTHS)
    pending = _PROMPTS[np.arange(4), _LENGTHS - 1][:, None]
    start = _LENGTHS[:, None] - 1
    return drafter.vectors(params | {'target': target}, pending, start, state)

  found = vectors(drafter, params, params['target'])
  scaled = params['target'] | {'embedding': embedding}
  expected = vectors(_DRAFTER, unscaled, scaled)
  np.testing.assert_allclose(found, 0.5 * expected, atol=1e-5)

  logits = drafter.logits(params, found)[:, 0]
  previous = np.zeros((4, _K), np.int32)
  slots = drafter.read(params, found[:, 0])
  capped, _ = drafter.given(params, slots, previous, None)
  slots = _DRAFTER.candidates(params, 2 * np.tanh(logits / 2), expected[:, 0])
  of_plain, _ = _DRAFTER.given(params, slots, previous, None)
  np.testing.assert_allclose(capped, of_plain, atol=1e-4)


def test_a_target_with_a_cap_caps_once():
  model = dataclasses.replace(_TARGET, logit_softcap=2.0)
  drafter = dataclasses.replace(
    _DRAFTER, model=model, final_logit_softcapping=2.0
  )
  logits = np.asarray([1.0, -2.0])
  np.testing.assert_array_equal(drafter.capped(logits), logits)
  with pytest.raises(
    ValueError, match=r"final_logit_softcapping is 3.0, but the target's .* 2.0"
  ):
    dataclasses.replace(drafter, final_logit_softcapping=3.0)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'conv_group_size': 3}, 'conv_group_size is 3: give a divisor of 16'),
    ({'conv_group_size': 0}, 'conv_group_size is 0: give an integer of at'),
    ({'conv_kernel_size': 0}, 'conv_kernel_size is 0: give an integer'),
    ({'selector_rank': 0}, 'selector_rank is 0: give an integer of at least 1'),
    ({'selector_top_k': 8}, 'selector_top_k is 8: give at most 7, the number'),
    ({'selector_top_k': 0}, 'selector_top_k is 0: give an integer of at'),
    ({'drafts_from_pending': True}, 'DFlash2 reads draft i at mask i: leave'),
    ({'output_multiplier': 0.0}, 'output_multiplier is 0.0: give a number'),
    ({'input_embedding_scale': -1.0}, 'input_embedding_scale is -1.0: give'),
    ({'final_logit_softcapping': 0.0}, 'softcapping is 0.0: .* above 0'),
  ],
)
def test_settings_out_of_range_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_DRAFTER, **settings)
