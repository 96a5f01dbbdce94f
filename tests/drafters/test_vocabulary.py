"""The vocabulary that a drafter drafts from."""

import dataclasses

import jax
import numpy as np

from specsample import drafters
from specsample import testing
from specsample.drafters import vocabulary

_V, _K = 8, 3
_TARGET = testing.tiny_llama(vocab_size=_V)
_SOME = {'num_draft_tokens': _K, 'draft_vocab_size': 5}
_D2T = np.asarray([6, 1, 4, 3, 0])


def test_logits_of_a_draft_vocabulary_have_the_targets_cap():
  model = dataclasses.replace(_TARGET, logit_softcap=0.5)
  target = model.init(jax.random.key(0))
  drafter = drafters.Medusa(model=model, **_SOME)
  own = drafter.init_params(jax.random.key(1), target, _D2T)
  np.testing.assert_allclose(
    own['vocabulary']['unembedding'], target['unembedding'][:, _D2T], atol=1e-6
  )
  params = {'target': target, 'drafter': own}
  vectors = 2 * jax.random.normal(jax.random.key(2), (2, 3, model.dim))
  expected = model.unembed(target, vectors)[..., _D2T]
  found = drafter.logits(params, vectors)
  assert 0.4 < np.abs(found).max() < 0.5
  np.testing.assert_allclose(found, expected, atol=1e-5)
  # A drafter that was trained elsewhere has no cap, as in its own training.
  published = drafters.Eagle(
    model=model, num_draft_tokens=_K, own_unembedding=True
  )
  assert vocabulary.make(published).softcap is None
