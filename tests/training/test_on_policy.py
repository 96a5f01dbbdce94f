"""Texts drawn from the draft model, against its own law and by replaying."""

import functools

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.testing import chi_square
from specsample.training import on_policy

_V, _T = 12, 14
_TARGET = testing.tiny_llama(vocab_size=_V)
_D2T = np.asarray([9, 3, 4, 0, 7])
_DRAFTER = drafters.DraftModel(
  model=_TARGET, num_draft_tokens=2, layers=(1,), draft_vocab_size=_D2T.size
)
_RNG = np.random.default_rng(0)
_TOKENS = _RNG.integers(_V, size=(6, _T))
# Two answers per row, the second one up to the end.
_MASK = np.zeros((6, _T), bool)
_MASK[:, 3:7] = _MASK[:, 9:] = True
_BATCH = {'tokens': _TOKENS, 'mask': _MASK}


@functools.cache
def _params():
  target = jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))
  own = _DRAFTER.init_params(jax.random.key(1), target, _D2T)
  return {
    'target': target,
    'drafter': testing.with_noise(own, jax.random.key(2)),
  }


def _resample(batch=_BATCH, seed=0, **settings):
  return jax.device_get(
    on_policy.resample(
      _params(), batch, jax.random.key(seed), drafter=_DRAFTER, **settings
    )
  )


def test_only_the_answers_are_written_anew():
  found = _resample()
  np.testing.assert_array_equal(found['mask'], _MASK)
  np.testing.assert_array_equal(found['tokens'][~_MASK], _TOKENS[~_MASK])
  assert set(found['tokens'][_MASK]) <= set(_D2T)
  assert (found['tokens'] != _TOKENS)[_MASK].mean() > 0.5


def test_the_key_decides():
  first, again, other = _resample(), _resample(), _resample(seed=1)
  np.testing.assert_array_equal(first['tokens'], again['tokens'])
  assert (first['tokens'] != other['tokens']).any()
  # A row's text does not depend on those below it.
  fewer = _resample({name: leaf[:3] for name, leaf in _BATCH.items()})
  np.testing.assert_array_equal(fewer['tokens'], first['tokens'][:3])


@pytest.mark.slow
def test_at_temperature_0_they_are_what_the_draft_model_decodes():
  mask = np.zeros((6, _T), bool)
  mask[:, 3:] = True
  found = _resample({'tokens': _TOKENS, 'mask': mask}, temperature=0.0)
  expected = specsample.generate(
    {'target': _params()},
    _TOKENS[:, :3],
    np.full(6, 3),
    jax.random.key(0),
    model=_DRAFTER.draft_model,
    drafter=drafters.NoDraft(),
    verify=verify.chain,
    sampling=specsample.Sampling(),
    max_new_tokens=_T - 3,
  )
  np.testing.assert_array_equal(found['tokens'][:, 3:], expected.tokens)


def test_they_are_drawn_from_the_draft_models_law():
  prompt, rows, temperature = [5, 2], 4096, 1.3
  tokens = np.tile([*prompt, 0, 0], (rows, 1))
  mask = np.tile([False, False, True, True], (rows, 1))
  found = _resample({'tokens': tokens, 'mask': mask}, temperature=temperature)

  # The prompt, followed by each token.
  texts = np.asarray([[*prompt, i] for i in range(_V)])
  cache = _DRAFTER.draft_model.init_cache(_V, 3)
  output, _ = jax.jit(_DRAFTER.draft_model.apply)(_params(), texts, cache)
  weights = np.exp(np.asarray(output.logits, float) / temperature)
  probs = weights / weights.sum(axis=-1, keepdims=True)
  joint = (probs[0, 1][:, None] * probs[:, 2]).reshape(-1)
  cells = found['tokens'][:, 2] * _V + found['tokens'][:, 3]
  counts = np.bincount(cells, minlength=_V * _V)
  assert chi_square.test([(counts, joint)]).passed


def test_an_answer_may_end_before_its_room_does():
  end = int(_D2T[0])
  plain, found = _resample(), _resample(end_ids=(end,))
  seen = 0
  for row in range(6):
    for places in (range(3, 7), range(9, _T)):
      tokens = found['tokens'][row, places]
      ends = np.flatnonzero(tokens == end)
      length = ends[0] + 1 if ends.size else len(tokens)
      seen += length < len(tokens)
      assert (tokens[length:] == end).all()
      learned = np.arange(len(tokens)) < length
      np.testing.assert_array_equal(found['mask'][row, places], learned)
    # Up to the first end, the text is as before.
    first = np.argmax(found['mask'][row] & (found['tokens'][row] == end))
    np.testing.assert_array_equal(
      found['tokens'][row, :first], plain['tokens'][row, :first]
    )
  assert seen


@pytest.mark.parametrize('temperature', [-1.0, float('nan')])
def test_temperatures_that_are_none_are_refused(temperature):
  with pytest.raises(ValueError, match='temperature is'):
    _resample(temperature=temperature)
