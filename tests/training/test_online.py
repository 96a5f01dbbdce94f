"""Learning while decoding: what is learned, what is undone and what stays."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.loop import decode
from specsample.training import losses
from specsample.training import online
from specsample.training import recorded

_V, _K, _D2T = 16, 3, np.asarray([9, 3, 4, 0, 12, 7])
_TARGET = testing.tiny_llama(vocab_size=_V)
_DRAFTER = drafters.DraftModel(
  model=_TARGET, num_draft_tokens=_K, layers=(0,), draft_vocab_size=_D2T.size
)
_WHOLE = dataclasses.replace(_DRAFTER, draft_vocab_size=None)
_LEARNER = online.Learner(
  objective=recorded.DraftModelObjective(drafter=_WHOLE),
  optimizer=optax.adam(0.01),
  rounds=4,
  num_positions=8,
  top_k=4,
  window=24,
)
_PROMPTS, _LENGTHS = specsample.pad_prompts([[1, 2, 3, 1], [5], [7, 8, 9]])
_SETTINGS = {
  'model': _TARGET,
  'sampling': specsample.Sampling(),
  'max_new_tokens': 32,
}


@functools.cache
def _params(drafter=_WHOLE):
  target = jax.tree.map(lambda x: 2 * x, _TARGET.init(jax.random.key(3)))
  d2t = None if drafter.draft_vocab_size is None else _D2T
  own = drafter.init_params(jax.random.key(1), target, d2t)
  noisy = testing.with_noise(own, jax.random.key(4))
  kept = {name: own[name] for name in own if name == 'vocabulary'}
  return {'target': target, 'drafter': noisy | kept}


def _state(learner=_LEARNER, rounds=6):
  """Returns the state after some rounds, in which drafts were rejected."""
  state = decode.prefill(
    _params(),
    _PROMPTS,
    _LENGTHS,
    jax.random.key(0),
    drafter=learner.drafter,
    **_SETTINGS,
  )
  return decode.advance(
    _params(),
    state,
    model=_TARGET,
    drafter=learner.drafter,
    verify=verify.chain,
    max_rounds=rounds,
  )


def _generate(learned, learner=_LEARNER, seed=0, **settings):
  return online.generate(
    learned,
    _PROMPTS,
    _LENGTHS,
    jax.random.key(seed),
    learner=learner,
    verify=verify.chain,
    **(_SETTINGS | settings),
  )


def test_outcomes_are_tokens_and_the_rest():
  logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
  draft, target = recorded.outcomes(
    logits,
    jnp.asarray([2, 0, 0]),
    jnp.asarray([True, True, False]),
    jnp.log(jnp.asarray([0.4, 0.3, 0.2])),
  )
  expected = [0.15, 0.5, 0, 0.35]
  np.testing.assert_allclose(np.exp(draft), expected, atol=2e-6)
  # Undrafted tokens have no mass; the last entry is what the target has left.
  np.testing.assert_allclose(np.exp(target), [0.4, 0.3, 0, 0.1], atol=2e-6)


@pytest.mark.parametrize('drafter', [_WHOLE, _DRAFTER], ids=['all', 'some'])
def test_the_loss_of_all_tokens_is_that_of_the_whole_law(drafter):
  rng = np.random.default_rng(0)
  tokens = rng.integers(_V, size=(2, 12)).astype(np.int32)
  params = _params(drafter)
  empty = _TARGET.init_cache(2, 0)
  logits = _TARGET.apply(params['target'], tokens, empty)[0].logits
  log_probs = jax.nn.log_softmax(logits)
  places = np.asarray([[1, 7, 4], [11, 3, 3]])
  mask = np.asarray([[True, True, False], [True, True, True]])
  at = lambda x: np.asarray(x)[np.arange(2)[:, None], places]
  ids = np.broadcast_to(rng.permutation(_V), (2, 3, _V)).astype(np.int32)
  batch = {
    'tokens': tokens,
    'places': places,
    'mask': mask,
    'ids': ids,
    'log_probs': np.take_along_axis(at(log_probs), ids, axis=-1),
  }
  objective = recorded.DraftModelObjective(drafter=drafter)
  loss, report = jax.jit(objective)(params, batch)
  own = at(drafter.logits(params, drafter.vectors(params, tokens)))
  d2t = np.arange(_V) if drafter is _WHOLE else _D2T
  teacher = at(log_probs)[..., d2t]
  expected = losses.forward_kl(own, teacher)
  np.testing.assert_allclose(loss, expected[mask].mean(), atol=1e-4)
  kept = 1 - losses.total_variation(own, teacher)
  np.testing.assert_allclose(report['kept'], kept[mask].mean(), atol=1e-4)
  assert report['recorded'] == 5


def test_examples_are_the_last_tokens_of_each_row():
  state = _state()
  ring, length = state.draft.ring, np.asarray(state.length)
  assert (np.asarray(ring.position) >= 0).sum() > 6
  for window in (6, 24, 1000):
    found = recorded.examples(ring, state.tokens, state.length, window=window)
    width = min(window, state.tokens.shape[1])
    assert found['tokens'].shape == (3, width)
    for row in range(3):
      start = max(length[row] - width, 0)
      for i, position in enumerate(ring.position[row].tolist()):
        is_read = position > start
        assert found['mask'][row, i] == is_read
        if is_read:
          place = found['places'][row, i]
          before = found['tokens'][row, place]
          assert before == state.tokens[row, position - 1]
    np.testing.assert_allclose(
      found['log_probs'],
      ring.logits - np.asarray(ring.log_sum_exp)[..., None],
    )


def test_an_update_learns_and_empties_the_rings():
  learned = online.init(_params(), _LEARNER)
  state, after, report = online.update(_state(), learned, _LEARNER)
  assert report['loss_after'] < report['loss']
  assert report['is_finite']
  assert report['recorded'] > 6
  assert (np.asarray(state.draft.ring.position) == -1).all()
  # The state that was passed in is unchanged.
  before = online.params_of(learned, _LEARNER)['drafter']
  jax.tree.map(np.testing.assert_array_equal, before, _params()['drafter'])
  # With nothing to learn from, nothing changes, not even by momentum.
  _, same, report = online.update(state, after, _LEARNER)
  assert report['recorded'] == 0
  jax.tree.map(
    np.testing.assert_array_equal, same.train.trained, after.train.trained
  )
  jax.tree.map(
    np.testing.assert_array_equal, same.train.optimizer, after.train.optimizer
  )
  assert same.train.step == after.train.step + 1


def test_acceptance_rises_and_greedy_output_stays():
  learned = online.init(_params(), _LEARNER)
  plain = specsample.generate(
    _params(),
    _PROMPTS,
    _LENGTHS,
    jax.random.key(0),
    drafter=drafters.NoDraft(),
    verify=verify.chain,
    **_SETTINGS,
  )
  rounds = []
  for _ in range(9):
    output, learned, reports = _generate(learned)
    np.testing.assert_array_equal(output.tokens, plain.tokens)
    rounds.append(int(output.rounds.sum()))
    assert len(reports) == -(-int(output.rounds.max()) // _LEARNER.rounds)
  assert rounds[-1] < 0.8 * rounds[0]


def test_a_number_a_row_is_taken_and_a_stop_that_is_none_refused():
  most = np.arange(1, 1 + len(_PROMPTS))
  learned = online.init(_params(), _LEARNER)
  output, _, _ = _generate(learned, max_new_tokens=most)
  np.testing.assert_array_equal(output.lengths, most)
  with pytest.raises(ValueError, match='id 99'):
    _generate(learned, stop=specsample.Stop(eos_ids=(99,)))


def test_decoding_and_learning_are_one_executable_each():
  learned = online.init(_params(), _LEARNER)
  _, learned, _ = _generate(learned)
  parts = (decode.advance, online._learn, recorded.examples)
  sizes = [part._cache_size() for part in parts]
  _generate(learned, seed=1)
  assert [part._cache_size() for part in parts] == sizes


@pytest.mark.parametrize(
  'optimizer',
  # The second optimizer's first step is finite, but its result is not.
  [optax.scale(jnp.nan), optax.sgd(1e30)],
  ids=['nan', 'too far'],
)
def test_an_update_that_comes_to_no_number_is_undone(optimizer, caplog):
  learner = dataclasses.replace(_LEARNER, optimizer=optimizer)
  learned = online.init(_params(), learner)
  with caplog.at_level(logging.WARNING):
    output, after, reports = _generate(learned, learner)
  assert not any(report['is_finite'] for report in reports)
  jax.tree.map(
    np.testing.assert_array_equal, after.train.trained, learned.train.trained
  )
  # There is one message per update, with its number; and decoding has gone on.
  messages = [record.getMessage() for record in caplog.records]
  assert len(messages) == len(reports) > 2
  for number, message in enumerate(messages, 1):
    assert f'update up to step {number} gave NaN or infinity' in message
    assert 'the weights from before it are kept' in message
  assert output.lengths.tolist() == [32] * 3


def test_what_was_learned_survives_an_update_that_is_undone():
  learned = online.init(_params(), _LEARNER)
  _, learned, _ = online.update(_state(), learned, _LEARNER)
  state = _state()
  nans = jnp.full_like(state.draft.ring.logits, jnp.nan)
  ring = dataclasses.replace(state.draft.ring, logits=nans)
  draft = dataclasses.replace(state.draft, ring=ring)
  bad = dataclasses.replace(state, draft=draft)
  _, after, report = online.update(bad, learned, _LEARNER)
  assert not report['is_finite']
  for old, new in (
    (learned.train.trained, after.train.trained),
    (learned.train.optimizer, after.train.optimizer),
  ):
    jax.tree.map(np.testing.assert_array_equal, new, old)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'rounds': 0}, 'rounds is 0: give an integer of at least 1'),
    ({'rounds': 1.5}, 'rounds is 1.5: give an integer'),
    ({'window': 0}, 'window is 0: give an integer of at least 1'),
    ({'num_steps': -1}, 'num_steps is -1: give an integer of at least 1'),
    ({'num_positions': 0}, 'num_positions is 0: record at least 1'),
  ],
)
def test_settings_that_learn_nothing_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_LEARNER, **settings)
