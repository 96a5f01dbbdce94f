"""Llama models, with a window or a subset of layers, and SmolLM2's text."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import specsample
from tests.models import random_models

_BATCH, _LENGTH = 2, 48
_NUM_TOKENS = random_models.SIZES['vocab_size']


@pytest.fixture(scope='module', autouse=True)
def _one_torch_thread():
  """Uses one torch thread: several busy-wait, even if others need the cores."""
  before = torch.get_num_threads()
  torch.set_num_threads(1)
  yield
  torch.set_num_threads(before)


def _apply(model):
  return jax.jit(model.apply, static_argnames='features')


def _close(found, expected):
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_a_subset_of_layers_equals_transformers(tmp_path):
  reference = random_models.reference('llama')
  reference.save_pretrained(tmp_path)
  loaded = specsample.load(tmp_path)
  reference.model.layers = torch.nn.ModuleList(
    [reference.model.layers[i] for i in (0, 2)]
  )
  tokens = torch.randint(0, _NUM_TOKENS, (_BATCH, _LENGTH))
  with torch.no_grad():
    logits = reference(tokens, use_cache=False).logits.numpy()
  model = loaded.model.keep_layers((0, 2))
  params = loaded.model.keep_params(loaded.params, (0, 2))
  cache = model.init_cache(_BATCH, _LENGTH)
  _close(_apply(model)(params, tokens.numpy(), cache)[0].logits, logits)


def test_bfloat16_errs_no_more_than_transformers(tmp_path):
  reference = random_models.reference('llama3')
  reference.save_pretrained(tmp_path)
  loaded = specsample.load(tmp_path, dtype='bfloat16')
  leaves = jax.tree.leaves(loaded.params)
  assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
  tokens = torch.randint(0, _NUM_TOKENS, (_BATCH, _LENGTH))
  with torch.no_grad():
    exact = reference(tokens).logits.numpy()
    rounded = reference.bfloat16()(tokens).logits.float().numpy()
  cache = loaded.model.init_cache(_BATCH, _LENGTH)
  found, cache = _apply(loaded.model)(loaded.params, tokens.numpy(), cache)
  assert cache.keys[0].dtype == jnp.bfloat16
  error = lambda logits: np.sqrt(np.mean((logits - exact) ** 2))
  assert error(np.asarray(found.logits)) < 1.5 * error(rounded)


def test_configurations_of_older_transformers_mean_the_same(tmp_path):
  for name, spelling in (('llama_linear', 'type'), ('llama3', 'rope_type')):
    folder = tmp_path / name
    random_models.reference(name).save_pretrained(folder)
    expected = specsample.load(folder).model
    assert expected.rope_scaling is not None
    config = json.loads((folder / 'config.json').read_text())
    rope = config.pop('rope_parameters')
    config['rope_theta'] = rope.pop('rope_theta')
    config['rope_scaling'] = {spelling: rope.pop('rope_type')} | rope
    (folder / 'config.json').write_text(json.dumps(config))
    assert specsample.load(folder).model == expected


def test_whole_sequences_need_no_cache(tiny_llama):
  model, params = tiny_llama
  tokens = np.arange(2 * 12).reshape(2, 12) % model.vocab_size
  output, cache = _apply(model)(params, tokens, model.init_cache(2, 0))
  expected, _ = _apply(model)(params, tokens, model.init_cache(2, 12))
  _close(output.logits, expected.logits)
  np.testing.assert_array_equal(cache.length, 0)


def test_a_window_ends_where_it_says(tiny_llama):
  model, params = tiny_llama
  # One layer, because two would pass a token on over two windows.
  model = dataclasses.replace(model, num_layers=1, sliding_window=5)
  params = params | {'layers': {0: params['layers'][0]}}
  tokens = np.arange(24)[None]
  other = tokens.copy()
  other[0, 10] += 1
  logits = functools.partial(_logits, model, params)
  difference = np.abs(logits(tokens) - logits(other)).max(axis=-1)
  assert np.flatnonzero(difference > 1e-5).tolist() == [10, 11, 12, 13, 14]


def _logits(model, params, tokens):
  cache = model.init_cache(*tokens.shape)
  return np.asarray(_apply(model)(params, tokens, cache)[0].logits[0])
