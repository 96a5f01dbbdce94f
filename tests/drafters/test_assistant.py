"""A drafter whose layers read the target's own keys and values."""

import dataclasses

import jax
import numpy as np
import pytest

from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.models import gated_delta
from specsample.training import eagle

_V, _K = 12, 3
_TARGET = testing.tiny_llama(vocab_size=_V, num_layers=3)
_RECURRENT = dataclasses.replace(
  _TARGET,
  delta=gated_delta.Delta(
    layers=(2,), num_key_heads=1, num_value_heads=1, key_dim=4, value_dim=4
  ),
)
_LAYERS = dataclasses.replace(
  _TARGET,
  num_layers=4,
  num_shared=2,
  sliding_window=3,
  sliding_layers=(0, 2),
)
_DRAFTER = drafters.Assistant(
  model=_TARGET,
  num_draft_tokens=_K,
  kv_layers=(2, 1),
  layer_config=_LAYERS,
  num_clusters=6,
  num_best_clusters=2,
)
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % _V
_LENGTHS = np.asarray([6, 2, 5, 1])


@pytest.mark.parametrize('query_offset', [0, -1])
def test_a_tree_of_it_is_exact(query_offset):
  target = jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))
  own = _DRAFTER.init_params(jax.random.key(1))
  drafter = dataclasses.replace(_DRAFTER, query_offset=query_offset)
  testing.assert_greedy_equal(
    {'target': target, 'drafter': testing.with_noise(own, jax.random.key(2))},
    _PROMPTS,
    _LENGTHS,
    model=_TARGET,
    drafter=drafters.Tree(drafter=drafter, topology=tree.k_ary((2, 1, 2))),
    verify=verify.tree,
    max_new_tokens=16,
  )


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (
      {'layer_config': dataclasses.replace(_LAYERS, num_kv_heads=1)},
      'has 1 key-value heads of 8 numbers, but layer 2 of the target has 2 of',
    ),
    ({'num_clusters': 5}, 'num_clusters is 5, which does not divide the 12'),
    ({'num_clusters': -2}, 'num_clusters is -2: give an integer of at least 0'),
    # Nothing would ever be drafted.
    (
      {'num_best_clusters': 0},
      'best_clusters is 0: give an integer from 1',
    ),
    ({'num_best_clusters': 7}, 'is 7: give an integer from 1 to 6'),
    ({'kv_layers': (2, 3)}, r'kv_layers are \(2, 3\), but .* are \(0, 1,'),
    (
      {'model': dataclasses.replace(_TARGET, num_shared=1)},
      r'kv_layers are \(2, 1\), but .* are \(0, 1\): name',
    ),
    (
      {'model': _RECURRENT},
      r'kv_layers are \(2, 1\), but .* are \(0, 1\): name',
    ),
    (
      {'kv_layers': (2,)},
      r'layers \(0, 1\) of layer_config have .* must be the first 1, one',
    ),
    (
      {'layer_config': dataclasses.replace(_LAYERS, num_shared=1)},
      r'layers \(0, 1, 2\) of layer_config .* must be the first 2, one',
    ),
    ({'layer_config': None}, 'layer_config is None: give a models.transformer'),
    ({'draft_vocab_size': 4}, 'draft_vocab_size is 4: give None, because'),
    ({'own_unembedding': False}, 'own_unembedding is False: give True, '),
    ({'model': testing.HashModel(vocab_size=_V)}, 'give a models.transformer'),
  ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_DRAFTER, **settings)


def test_it_is_not_trained():
  with pytest.raises(ValueError, match='drafter is Assistant, but Feature'):
    eagle.FeatureObjective(drafter=_DRAFTER)


def test_its_features_cannot_be_recorded():
  with pytest.raises(ValueError, match='Assistant, which reads the target'):
    drafters.Recording(drafter=_DRAFTER, model=_TARGET)
