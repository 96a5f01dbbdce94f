"""Models saved by the library."""

import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample.models import attention
from specsample.models import checkpoint
from specsample.models import experts
from specsample.models import gated_delta
from specsample.models import packed
from specsample.models import rotary
from specsample.models import transformer


def _model(rope_scaling=None, **changes):
  return transformer.Transformer(
    vocab_size=50,
    num_layers=2,
    dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    max_length=32,
    rope_scaling=rope_scaling,
    **changes,
  )


def _assert_equal(found, expected):
  found = packed.plain(found)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
  'model',
  [
    _model(tie_embeddings=True, sliding_window=5),
    _model(rotary.LinearRope(factor=2.5), attention_bias=True),
    _model(rotary.FactorRope(factors=(1.0, 8.0))),
    _model(
      delta=gated_delta.Delta(
        layers=(0,), num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3
      ),
      has_output_gate=True,
      rotary_dim=2,
    ),
    _model(
      rotary.Llama3Rope(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
      ),
      norm_eps=1e-6,
      rope_theta=5e5,
    ),
    _model(
      rotary.YarnRope(factor=4.0, original_max_position_embeddings=16),
      sliding_window=5,
      sliding_layers=(0,),
      experts=experts.Experts(
        num_experts=4, num_per_token=2, mlp_dim=8, dense_layers=(1,)
      ),
      latent=attention.Latent(
        kv_rank=6, rope_dim=4, head_dim=6, value_dim=5, query_rank=7
      ),
    ),
  ],
)
def test_what_is_saved_is_loaded(tmp_path, model):
  params = model.init(jax.random.key(0))
  checkpoint.save(tmp_path / 'model', model, params)
  loaded = specsample.load(tmp_path / 'model')
  assert loaded.model == model
  _assert_equal(loaded.params, params)
  assert os.listdir(tmp_path) == ['model']
  with pytest.raises(ValueError, match=r'tokenizer\.json'):
    _ = loaded.tokenizer


def test_another_dtype_is_cast_to(tmp_path):
  model = _model()
  params = model.init(jax.random.key(0))
  checkpoint.save(tmp_path / 'model', model, params)
  loaded = specsample.load(tmp_path / 'model', dtype='bfloat16')
  assert loaded.model.dtype == 'bfloat16'
  cast = lambda leaf: leaf.astype(jnp.bfloat16)
  _assert_equal(loaded.params, jax.tree.map(cast, params))


def test_the_tokenizer_is_kept(tmp_path, smollm2):
  model = _model()
  params = model.init(jax.random.key(0))
  tokenizer = smollm2.tokenizer
  checkpoint.save(tmp_path / 'model', model, params, tokenizer)
  found = specsample.load(tmp_path / 'model').tokenizer
  text = 'Grüße 123 🤗 <|im_end|>'
  assert found.encode(text) == tokenizer.encode(text)
  chat = [{'role': 'user', 'content': text}]
  assert found.encode_chat(chat) == tokenizer.encode_chat(chat)
  assert found.eos_ids == tokenizer.eos_ids
  assert found.named_tokens == tokenizer.named_tokens


def test_nothing_is_overwritten(tmp_path):
  model = _model()
  params = model.init(jax.random.key(0))
  (tmp_path / 'model').mkdir()
  with pytest.raises(ValueError, match='model exists'):
    checkpoint.save(tmp_path / 'model', model, params)
  assert not os.listdir(tmp_path / 'model')


def test_a_failure_leaves_nothing_behind(tmp_path, smollm2):
  model = _model()
  params = model.init(jax.random.key(0))
  # This fails after tokenizer.json and more have been written.
  broken = dataclasses.replace(smollm2.tokenizer, chat_template=object())
  with pytest.raises(TypeError):
    checkpoint.save(tmp_path / 'model', model, params, broken)
  assert not os.listdir(tmp_path)


def test_parameters_of_another_model_are_not_saved(tmp_path):
  params = _model().init(jax.random.key(0))
  with pytest.raises(ValueError, match=r'unembedding.*\(16, 50\) is unknown'):
    checkpoint.save(tmp_path / 'model', _model(tie_embeddings=True), params)
  params['norm']['scale'] = jnp.ones(7)
  with pytest.raises(ValueError, match=r'norm\.scale.*\(7,\).*\(16,\)'):
    checkpoint.save(tmp_path / 'model', _model(), params)
  assert not os.listdir(tmp_path)


@pytest.fixture
def saved(tmp_path):
  """A checkpoint that loads, to be broken."""
  model = _model()
  checkpoint.save(tmp_path / 'model', model, model.init(jax.random.key(0)))
  return tmp_path / 'model'


def test_a_dtype_is_given_by_name_or_as_a_type(saved):
  named, typed = (
    specsample.load(saved, dtype=dtype) for dtype in ('bfloat16', jnp.bfloat16)
  )
  assert named.model == typed.model
  assert named.model.dtype == 'bfloat16'
  _assert_equal(typed.params, named.params)


def _rejected(path, *words):
  with pytest.raises(ValueError) as caught:
    specsample.load(path)
  for word in (str(path), *words):
    assert word in str(caught.value)


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'family': 'rwkv'}, ['rwkv', 'transformer']),
    ({'surprise': 1}, ['surprise']),
    ({'dim': 'wide'}, ['specsample.json', 'save the model again']),
    ({'rope_scaling': {'type': 'longrope'}}, ['longrope']),
    ({'rope_scaling': 'linear'}, ['specsample.json']),
    ({'dim': 32}, ['params', 'embedding', '(16, 50)', '(32, 50)']),
    (
      {'num_layers': 3},
      ['params', 'layers.2.', 'is missing', 'save the model'],
    ),
    (
      {'num_layers': 1},
      ['params', 'layers.1.', 'is unknown', 'save the model'],
    ),
  ],
)
def test_a_configuration_that_does_not_fit_is_named(saved, changes, words):
  path = saved / checkpoint.CONFIG_NAME
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
  _rejected(saved, *words)


@pytest.mark.parametrize('content', ['', '{"family": "tran', '[]', '{}'])
def test_a_damaged_configuration_is_named(saved, content):
  (saved / checkpoint.CONFIG_NAME).write_text(content)
  _rejected(saved, checkpoint.CONFIG_NAME)


def test_missing_parameters_are_named(saved):
  shutil.rmtree(saved / 'params')
  _rejected(saved, 'params')


def test_truncated_parameters_are_named(saved):
  cut = [path for path in (saved / 'params').rglob('d/*') if path.is_file()]
  assert cut
  for path in cut:
    path.write_bytes(path.read_bytes()[:100])
  _rejected(saved, 'params')
