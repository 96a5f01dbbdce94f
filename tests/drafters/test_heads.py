"""Medusa and Hydra: heads on hidden vectors.

How they draft is in tests/loading/published/test_heads.py, against NumPy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters
from tests.drafters import rounds

_K, _TARGET = rounds.K, rounds.TARGET
_MEDUSA = drafters.Medusa(
  model=_TARGET, num_draft_tokens=_K, num_layers=2, draft_vocab_size=7
)
_HYDRA = drafters.Hydra(model=_TARGET, num_draft_tokens=_K)
_PLUS = drafters.Hydra(
  model=_TARGET, num_draft_tokens=_K, num_layers=2, prefix_attention=True
)


@pytest.mark.slow
@pytest.mark.parametrize(
  'drafter', [_MEDUSA, _HYDRA, _PLUS], ids=['medusa', 'hydra', 'hydra++']
)
def test_training_sees_what_drafting_sees(drafter):
  params = rounds.params(drafter)
  text = jnp.asarray(np.random.default_rng(0).integers(rounds.V, size=9))
  hidden = rounds.read(params, text[None]).hidden
  vectors = drafter.vectors(params, text[None], hidden)
  logits = drafter.target_logits(params, jnp.stack(vectors, axis=2))
  trained = jax.nn.softmax(logits)[0]
  ends = np.asarray([0, 3, 5])
  forced = lambda probs, position: text[position]
  texts = [text[: end + 2].tolist() for end in ends]
  draft, _ = rounds.propose(drafter, params, texts, draw=forced)
  np.testing.assert_allclose(draft.probs, trained[ends], atol=1e-5)


def test_untrained_heads_repeat_the_targets_own_prediction():
  medusa = drafters.Medusa(model=_TARGET, num_draft_tokens=_K)
  params = rounds.params(medusa, 0.0)
  draft, state = rounds.propose(medusa, params, rounds.TEXTS)
  expected = jax.nn.softmax(_TARGET.unembed(params['target'], state.hidden))
  for i in range(_K):
    np.testing.assert_allclose(draft.probs[:, i], expected, atol=1e-6)


@pytest.mark.parametrize(
  ('d2t', 'message'),
  [
    ([0, 1], 'd2t names 2 tokens, but draft_vocab_size is 7'),
    ([0, 1, 2, 3, 4, 5, 12], 'holds id 12, outside the vocabulary of 12'),
    ([0, 1, 2, 3, 4, 5, -1], 'holds id -1'),
    ([0, 1, 2, 3, 4, 5, 5], 'names a token twice'),
    ([0, 1, 2, 3, 4, 5, 6.5], 'd2t is float64'),
  ],
)
def test_draft_vocabulary_that_is_none_is_refused(d2t, message):
  with pytest.raises(ValueError, match=message):
    _MEDUSA.init_params(jax.random.key(0), rounds.target_params(), d2t)
