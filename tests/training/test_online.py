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
from specsample.loop.decoder import Decoder
from specsample.testing import trained
from specsample.training import dflash
from specsample.training import draft
from specsample.training import eagle
from specsample.training import heads
from specsample.training import losses
from specsample.training import online

_V, _K = 16, 3
_TARGET = testing.tiny_llama(vocab_size=_V)
_SMALL = testing.tiny_llama(vocab_size=_V, num_layers=1, dim=8)
_OBJECTIVES = {
  'Medusa': heads.HeadsObjective,
  'Hydra': heads.HeadsObjective,
  'Hydra++': heads.HeadsObjective,
  'DraftModel': draft.DraftObjective,
  'DFlash': dflash.DFlashObjective,
  'DFlash 2': dflash.DFlash2Objective,
  'DSpark': dflash.DSparkObjective,
  'EAGLE-3': eagle.FeatureObjective,
  'EAGLE': eagle.FeatureObjective,
  'MTP': eagle.FeatureObjective,
  'MTP of 2': eagle.FeatureObjective,
  'Chain': functools.partial(draft.ChainObjective, target=_TARGET),
}
_DRAFTERS = {
  kind.name: kind.make(_TARGET, _K, None) for kind in trained.CASES
} | {'Chain': drafters.Chain(model=_SMALL, num_draft_tokens=_K)}
_LEARNERS = {
  name: online.Learner(
    objective=objective(
      drafter=_DRAFTERS[name],
      token_weight=0.0,
      teacher_weight=1.0,
      teacher_loss=losses.forward_kl,
    ),
    optimizer=optax.adam(0.01),
    rounds=4,
    window=24,
  )
  for name, objective in _OBJECTIVES.items()
}
_LEARNER = _LEARNERS['DraftModel']
_PROMPTS, _LENGTHS = specsample.pad_prompts([[1, 2, 3, 1], [5], [7, 8, 9]])
_SETTINGS = {'sampling': specsample.Sampling(), 'max_new_tokens': 32}


@functools.cache
def _params(name='DraftModel'):
  target = jax.tree.map(lambda x: 2 * x, _TARGET.init(jax.random.key(3)))
  key, drafter = jax.random.key(1), _DRAFTERS[name]
  if name == 'Chain':
    own = drafter.model.init(key)
  else:
    own = drafter.init_params(key, target)
  own = testing.with_noise(own, jax.random.key(4))
  return {'target': target, 'drafter': own}


def _state(learner=_LEARNER, name='DraftModel', rounds=6):
  """Returns the state after some rounds, in which drafts were rejected."""
  decoder = Decoder(_TARGET, learner.drafter, verify.chain)
  state = decode.prefill(
    decoder,
    _params(name),
    _PROMPTS,
    _LENGTHS,
    jax.random.key(0),
    **_SETTINGS,
  )
  return decode.advance(decoder, _params(name), state, max_rounds=rounds)


def _generate(learned, learner=_LEARNER, seed=0, **settings):
  return online.generate(
    learned,
    _PROMPTS,
    _LENGTHS,
    jax.random.key(seed),
    learner=learner,
    model=_TARGET,
    verify=verify.chain,
    **(_SETTINGS | settings),
  )


@functools.cache
def _plain():
  """Returns the target's own tokens."""
  return specsample.generate(
    _params(),
    _PROMPTS,
    _LENGTHS,
    jax.random.key(0),
    model=_TARGET,
    drafter=drafters.NoDraft(),
    verify=verify.chain,
    **_SETTINGS,
  ).tokens


@pytest.mark.slow
@pytest.mark.nightly(but=('Medusa', 'EAGLE-3', 'Chain'))
@pytest.mark.parametrize('name', _LEARNERS)
def test_acceptance_rises_and_greedy_output_stays(name):
  learner = dataclasses.replace(
    _LEARNERS[name], num_steps=3, rejected_only=False
  )
  learned = online.init(_params(name), learner)
  rounds = []
  for _ in range(9):
    output, learned, reports = _generate(learned, learner)
    np.testing.assert_array_equal(output.tokens, _plain())
    rounds.append(int(output.rounds.sum()))
    assert len(reports) == -(-int(output.rounds.max()) // learner.rounds)
  assert rounds[-1] < 0.8 * rounds[0]


@pytest.mark.slow
@pytest.mark.nightly(but=('Chain', 'EAGLE-3'))
@pytest.mark.parametrize('name', ['DraftModel', 'Chain', 'EAGLE-3', 'Hydra++'])
def test_an_update_is_a_step_on_what_the_target_reads_itself(name):
  learner = dataclasses.replace(_LEARNERS[name], window=1000)
  state = _state(learner, name)
  found = online.examples(
    state.draft.recorded, state.tokens, state.length, learner=learner
  )
  assert found['mask'].sum() > 6
  read = {name: found[name] for name in ('tokens', 'mask')}
  objective = jax.jit(learner.objective)
  loss, report = objective(_params(name), read)
  recorded = objective(_params(name), found)
  np.testing.assert_allclose(recorded[0], loss, rtol=1e-5)
  _, _, of_update = online.update(
    state, online.init(_params(name), learner), learner
  )
  np.testing.assert_allclose(of_update['loss'], loss, rtol=1e-5)
  np.testing.assert_allclose(of_update['kept'], report['kept'], rtol=1e-5)
  assert of_update['recorded'] == found['mask'].sum()


@pytest.mark.slow
def test_examples_are_the_last_tokens_of_each_row():
  state = _state()
  recorded, length = state.draft.recorded, np.asarray(state.length)
  assert recorded.learned.sum() > 6
  for window in (6, 24, 1000):
    found = online.examples(
      recorded,
      state.tokens,
      state.length,
      learner=dataclasses.replace(_LEARNER, window=window),
    )
    width = min(window, state.tokens.shape[1])
    assert found['tokens'].shape == found['mask'].shape == (3, width)
    assert found['hidden'].shape == (3, width, _TARGET.dim)
    for row in range(3):
      start = max(length[row] - width, 0)
      read = slice(start, start + width)
      of_row = jax.tree.map(lambda x, row=row: x[row], found)
      np.testing.assert_array_equal(of_row['tokens'], state.tokens[row, read])
      np.testing.assert_array_equal(
        of_row['hidden'], recorded.outputs[row, read]
      )
      # The first token has no hidden vector before it.
      assert not of_row['mask'][0]
      np.testing.assert_array_equal(
        of_row['mask'][1:], recorded.learned[row, read][:-1]
      )


@pytest.mark.slow
def test_an_update_learns_and_empties_the_record():
  learned = online.init(_params(), _LEARNER)
  state, after, report = online.update(_state(), learned, _LEARNER)
  assert report['loss_after'] < report['loss']
  assert report['is_finite']
  assert report['recorded'] > 6
  assert not state.draft.recorded.learned.any()
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
  parts = (decode._advance, online._learn, online.examples)
  sizes = [part._cache_size() for part in parts]
  _generate(learned, seed=1)
  assert [part._cache_size() for part in parts] == sizes


@pytest.mark.slow
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


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'rounds': 0}, 'rounds is 0: give an integer of at least 1'),
    ({'rounds': 1.5}, 'rounds is 1.5: give an integer'),
    ({'window': 0}, 'window is 0: give an integer of at least 1'),
    ({'num_steps': -1}, 'num_steps is -1: give an integer of at least 1'),
    ({'rejected_only': 1}, 'rejected_only is 1: give True or False'),
    ({'objective': _LEARNER.drafter}, 'objective is of type Recording: give'),
  ],
)
def test_settings_that_learn_nothing_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_LEARNER, **settings)


def _moved(target, key):
  noise = testing.with_noise(target, jax.random.key(key), scale=0.05)
  return jax.tree.map(lambda x, like: x.astype(like.dtype), noise, target)


def _rollout(params, drafter, key):
  return specsample.rollout(
    params,
    [[1, 2, 3, 1], [5], [7, 8, 9]],
    jax.random.key(key),
    model=_TARGET,
    drafter=drafter,
    verify=verify.chain,
    sampling=specsample.Sampling(temperature=1.0),
    num_samples=4,
    max_prompt_length=4,
    max_new_tokens=24,
    batch_size=6,
  )


@pytest.mark.slow
def test_texts_of_a_target_that_moved_are_read_with_its_current_weights():
  learner, params = _LEARNERS['EAGLE'], _params('EAGLE')
  batch = _rollout(params, _DRAFTERS['EAGLE'], 0).documents()
  moved = _moved(params['target'], 0)
  learned = online.init(params, learner)
  found, report = online.learn(batch, learned, learner, target=moved)
  afresh = online.init(params | {'target': moved}, learner)
  expected, _ = online.learn(batch, afresh, learner, target=moved)
  stale, _ = online.learn(batch, learned, learner, target=params['target'])
  jax.tree.map(
    np.testing.assert_array_equal,
    online.params_of(found, learner),
    online.params_of(expected, learner),
  )
  leaf = lambda learned: jax.tree.leaves(learned.train.trained)[0]
  assert np.any(leaf(found) != leaf(stale))
  assert report['recorded'] == batch['mask'].sum()


def test_a_target_of_another_shape_is_refused_by_its_parameter():
  learner, params = _LEARNERS['EAGLE'], _params('EAGLE')
  batch = {'tokens': np.ones((1, 4), np.int32), 'mask': np.ones((1, 4), bool)}
  other = testing.tiny_llama(vocab_size=2 * _V).init(jax.random.key(0))
  message = r'target are not those of .*parameter embedding has shape'
  with pytest.raises(ValueError, match=message):
    online.learn(batch, online.init(params, learner), learner, target=other)


@pytest.mark.slow
def test_a_drafter_that_learns_from_rollouts_keeps_up_with_the_policy():
  learner = dataclasses.replace(_LEARNERS['EAGLE'], num_steps=8)
  drafter, params = _DRAFTERS['EAGLE'], _params('EAGLE')
  learned, first = online.init(params, learner), params['drafter']
  target, kept = params['target'], []
  for step in range(6):
    target = _moved(target, step)
    moving = online.params_of(learned, learner) | {'target': target}
    rollouts = _rollout(moving, drafter, step)
    fixed = _rollout({'target': target, 'drafter': first}, drafter, step)
    kept.append([specsample.stats.summarize(x).kept for x in (rollouts, fixed)])
    batch = rollouts.documents()
    learned, _ = online.learn(batch, learned, learner, target=target)
  assert kept[0][0] == kept[0][1]
  learning, fixed = np.sum(kept[3:], axis=0)
  assert learning > 1.2 * fixed, kept
