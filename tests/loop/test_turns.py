"""`extend`: a row with more text equals the row of the whole text."""

import dataclasses

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import policies
from specsample import testing
from specsample.loop import turns
from specsample.loop.decoder import Decoder
from specsample.testing import trained

_VOCAB = 16
_HASHES = testing.HashModel(vocab_size=_VOCAB, seed=3)
_PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5]]
# One text takes more than one pass, the other is empty.
_TEXTS = [[4, 1, 2, 9, 9, 1, 2] * 6, []]
_FIRST, _SECOND = 9, 20
_CHAIN = drafters.Chain(
  model=dataclasses.replace(_HASHES, noise=0.3), num_draft_tokens=3
)
_ADAPTIVE = drafters.Adaptive(
  drafter=_CHAIN, policies=(policies.Fastest(costs=(1, 1.1, 1.2, 1.3)),)
)
_SUFFIX = drafters.Suffix(num_draft_tokens=4, min_kept=0.1)
_EITHER = drafters.Either(remembered=_SUFFIX, trained=_CHAIN)
# Their drafts depend on what they have seen.
_LEARNING = {'Adaptive', 'Suffix', 'Either'}
_UNTRAINED = {
  type(drafter).__name__: trained.Trained(
    type(drafter).__name__, _HASHES, drafter, params
  )
  for drafter, params in (
    (drafters.NoDraft(), {'target': {}}),
    (drafters.Ngram(num_draft_tokens=4, min_ngram=1), {'target': {}}),
    (_CHAIN, {'target': {}, 'drafter': {}}),
    (_ADAPTIVE, {'target': {}, 'drafter': {}}),
    (_SUFFIX, {'target': {}}),
    (_EITHER, {'target': {}, 'drafter': {'trained': {}}}),
  )
}
_NAMES = (*_UNTRAINED, *(kind.name for kind in trained.CASES))


def _scene(name):
  return _UNTRAINED.get(name) or trained.scene(name, _VOCAB)


def _prefill(scene, prompts, max_new_tokens, sampling=specsample.Sampling()):
  padded, lengths = specsample.pad_prompts(prompts)
  return specsample.prefill(
    Decoder(scene.model, scene.drafter, specsample.verify.chain),
    scene.params,
    padded,
    lengths,
    jax.random.key(0),
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    max_length=160,
  )


def _decoded(scene, state):
  """Returns each row's text when it is done, and the state."""
  state = specsample.advance(
    Decoder(scene.model, scene.drafter, specsample.verify.chain),
    scene.params,
    state,
    max_rounds=100,
  )
  rows = zip(*jax.device_get((state.tokens, state.length)), strict=True)
  return [tokens[:length].tolist() for tokens, length in rows], state


def _extend(scene, state, texts, max_new_tokens=_SECOND):
  lengths = [len(text) for text in texts]
  tokens = np.zeros((len(texts), max(lengths)), np.int32)
  for row, text in zip(tokens, texts, strict=True):
    row[: len(text)] = text
  return specsample.extend(
    Decoder(scene.model, scene.drafter, specsample.verify.chain),
    scene.params,
    state,
    tokens,
    lengths,
    max_new_tokens=max_new_tokens,
  )


def _counts(state):
  return np.stack(jax.device_get((state.proposed, state.accepted)))


@pytest.mark.nightly(but=('Adaptive', 'Suffix', 'Hydra++', 'MTP'))
@pytest.mark.parametrize('name', _NAMES)
def test_extended_rows_go_on_as_the_whole_text_does(name):
  scene = _scene(name)
  rows, state = _decoded(scene, _prefill(scene, _PROMPTS, _FIRST))
  before = _counts(state)
  state = _extend(scene, state, _TEXTS)
  found, state = _decoded(scene, state)
  whole = [row + text for row, text in zip(rows, _TEXTS, strict=True)]
  expected, alone = _decoded(scene, _prefill(scene, whole, _SECOND))
  assert found == expected
  assert [len(row) for row in found] == [len(row) + _SECOND for row in whole]
  # Drafts are as good as if the drafter had read the whole text at once.
  if name not in _LEARNING:
    np.testing.assert_array_equal(_counts(state) - before, _counts(alone))
  np.testing.assert_array_equal(state.stop_reason, alone.stop_reason)


@pytest.mark.parametrize('name', ['Adaptive', 'Either'])
def test_policies_learn_nothing_of_a_text_that_is_given(name):
  scene = _scene(name)
  _, state = _decoded(scene, _prefill(scene, _PROMPTS, _FIRST))
  learned = scene.drafter.learned(state.draft)
  state = _extend(scene, state, _TEXTS)
  jax.tree.map(
    np.testing.assert_array_equal, scene.drafter.learned(state.draft), learned
  )


def test_penalties_count_what_was_said_before():
  scene = _scene('NoDraft')
  sampling = specsample.Sampling(repetition_penalty=1.5, presence_penalty=2.0)
  state = _prefill(scene, _PROMPTS, _FIRST, sampling)
  rows, state = _decoded(scene, state)
  found, _ = _decoded(scene, _extend(scene, state, _TEXTS))
  whole = [row + text for row, text in zip(rows, _TEXTS, strict=True)]
  state = _prefill(scene, whole, _SECOND, sampling)
  assert found == _decoded(scene, state)[0]


def test_rows_are_extended_until_they_are_full():
  scene = _scene('NoDraft')
  state = _prefill(scene, [[1]], 1)
  room = turns.room(state, scene.model)
  state = _extend(scene, state, [[2] * (room - 3)], max_new_tokens=100)
  (row,), state = _decoded(scene, state)
  assert len(row) == room
  assert int(state.stop_reason[0]) == specsample.StopReason.CACHE_FULL
  with pytest.raises(ValueError, match=f'row {room + 1} .* room for {room}'):
    _extend(scene, state, [[2]])


@pytest.mark.parametrize(
  ('texts', 'message'),
  [
    ([[1], [2]], r'shape \(2, 1\) .* give \[1, T\]'),
    ([[_VOCAB]], f'range from {_VOCAB} to {_VOCAB}'),
    ([[-1]], 'range from -1'),
  ],
)
def test_texts_that_do_not_fit_are_refused(texts, message):
  scene = _scene('NoDraft')
  state = _prefill(scene, [[1]], 1)
  with pytest.raises(ValueError, match=message):
    _extend(scene, state, texts)


def test_a_drafter_that_cannot_be_left_out_is_refused():
  recording = drafters.Recording(drafter=_CHAIN, model=_HASHES)
  scene = dataclasses.replace(_scene('Chain'), drafter=recording)
  with pytest.raises(ValueError, match='Recording cannot sit out a round'):
    _extend(scene, _prefill(scene, [[1]], 1), [[2]])


@pytest.mark.parametrize(
  'other',
  [drafters.NoDraft(), dataclasses.replace(_CHAIN, num_draft_tokens=5)],
)
def test_a_drafter_that_the_state_was_not_made_for_is_refused(other):
  scene = _scene('Chain')
  state = _prefill(scene, [[1]], 1)
  with pytest.raises(ValueError, match='made for 3 to a depth of 3'):
    _extend(dataclasses.replace(scene, drafter=other), state, [[2]])
