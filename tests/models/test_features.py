"""The outputs of single layers, which drafters read."""

import dataclasses

import jax
import numpy as np
import pytest

from specsample import testing
from specsample.models import gated_delta
from specsample.models import replicated
from specsample.types import KeysAndValues

_MODEL = testing.tiny_llama(num_layers=3)
_TOKENS = np.arange(8).reshape(2, 4)
_models = pytest.mark.parametrize(
  'model', [_MODEL, replicated.Replicated(_MODEL)], ids=['itself', 'replicated']
)


@_models
def test_features_are_outputs_of_layers_and_the_embedding(model):
  params = _MODEL.init(jax.random.key(0))
  empty = model.init_cache(2, 4)
  output, _ = model.apply(params, _TOKENS, empty, features=(2, -1, 0))
  last, embedded, first = output.features
  np.testing.assert_allclose(embedded, model.embed(params, _TOKENS))
  scale = np.sqrt(np.square(last).mean(axis=-1, keepdims=True) + 1e-5)
  np.testing.assert_allclose(output.hidden, last / scale, rtol=1e-4)
  # The last vectors of a model that ends after layer 0 are that layer's output.
  short = _MODEL.keep_layers((0,))
  other, _ = short.apply(
    _MODEL.keep_params(params, (0,)), _TOKENS, short.init_cache(2, 4)
  )
  scale = np.sqrt(np.square(first).mean(axis=-1, keepdims=True) + 1e-5)
  np.testing.assert_allclose(other.hidden, first / scale, rtol=1e-4)


@_models
@pytest.mark.parametrize('missing', [3, -2])
def test_a_layer_that_is_not_there_is_refused(model, missing):
  apply = jax.jit(model.apply, static_argnames='features')
  params = _MODEL.init(jax.random.key(0))
  with pytest.raises(
    ValueError, match=f'{missing}: name outputs of layers 0 to 2'
  ):
    apply(params, _TOKENS, model.init_cache(2, 4), features=(0, missing))


_RECURRENT = dataclasses.replace(
  _MODEL,
  delta=gated_delta.Delta(
    layers=(1,), num_key_heads=1, num_value_heads=1, key_dim=4, value_dim=4
  ),
)


def test_a_recurrent_layer_has_no_keys_and_values():
  assert _RECURRENT.own_kv_layers == (0, 2)
  params = _RECURRENT.abstract_params()
  with pytest.raises(ValueError, match='no keys and values of layer 1: name'):
    _RECURRENT.apply(
      params,
      _TOKENS,
      _RECURRENT.init_cache(2, 4),
      features=(KeysAndValues(0), KeysAndValues(1)),
    )


def test_keys_and_values_of_a_recurrent_layer_are_not_shared():
  with pytest.raises(ValueError, match='none of the first 2 layers has keys'):
    dataclasses.replace(
      _RECURRENT, num_shared=1, sliding_window=3, sliding_layers=(0,)
    )
