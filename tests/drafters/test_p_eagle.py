"""P-EAGLE: EAGLE-3 whose drafts come from masks, in one pass."""

import dataclasses

import jax
import pytest

from specsample import drafters
from specsample import testing
from specsample.training import eagle

_V, _K = 12, 3
_TARGET = testing.tiny_llama(vocab_size=_V, num_layers=3)
_DRAFTER = drafters.PEagle(
  model=_TARGET,
  num_draft_tokens=_K,
  feature_layers=(-1, 1, 0),
  mask_token_id=5,
  num_layers=2,
)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (
      {'mask_token_id': _V},
      'mask_token_id is 12, .* tokens 0 to 11',
    ),
    ({'mask_token_id': None}, 'mask_token_id is None'),
    ({'num_layers': 0}, 'num_layers is 0'),
    ({'own_embedding': 1}, 'own_embedding is 1: give True or False'),
  ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_DRAFTER, **settings)


def test_it_is_not_trained():
  with pytest.raises(ValueError, match='drafter is PEagle, whose drafts are'):
    eagle.FeatureObjective(drafter=_DRAFTER)
  own = dataclasses.replace(_DRAFTER, own_embedding=True)
  with pytest.raises(ValueError, match='own_embedding is for drafters that we'):
    own.init_params(jax.random.key(0))
