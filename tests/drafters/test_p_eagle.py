"""P-EAGLE: EAGLE-3 whose drafts come from masks, in one pass."""

import dataclasses

import jax
import numpy as np
import pytest

from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import verify
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
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % _V
_LENGTHS = np.asarray([6, 2, 5, 1])


def test_a_tree_of_it_is_exact():
  target = jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))
  own = _DRAFTER.init_params(jax.random.key(1), target)
  testing.assert_greedy_equal(
    {'target': target, 'drafter': testing.with_noise(own, jax.random.key(2))},
    _PROMPTS,
    _LENGTHS,
    model=_TARGET,
    drafter=drafters.Tree(drafter=_DRAFTER, topology=tree.k_ary((2, 1, 2))),
    verify=verify.tree,
    max_new_tokens=16,
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
