"""Hybrids of recurrent layers and attention: trees, layouts, broken folders."""

import functools
import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

import specsample
from specsample.models import gated_delta
from specsample.models import int8
from specsample.models import layers

_SIZES = {
  'vocab_size': 131,
  'hidden_size': 32,
  'num_hidden_layers': 4,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 16,
  'max_position_embeddings': 256,
  'linear_key_head_dim': 8,
  'linear_value_head_dim': 6,
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 4,
  'initializer_range': 0.2,
  'rope_parameters': {
    'rope_type': 'default',
    'rope_theta': 1_000.0,
    'partial_rotary_factor': 0.5,
  },
}
_DENSE = _SIZES | {'intermediate_size': 48}
_SPARSE = _SIZES | {
  'num_experts': 4,
  'num_experts_per_tok': 2,
  'moe_intermediate_size': 20,
  'shared_expert_intermediate_size': 28,
}


def _reference(config=None):
  torch.manual_seed(0)
  config = config or transformers.Qwen3_5TextConfig(**_DENSE)
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for name, value in model.named_parameters():
      if name.endswith('norm.weight'):
        value += torch.empty_like(value).uniform_(-0.5, 0.5)
      elif 'experts.' in name or name.endswith('gate.weight'):
        value.normal_(0, 0.3)
  return model


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A folder that transformers wrote, and the model that it wrote."""
  folder = tmp_path_factory.mktemp('qwen3_5')
  reference = _reference()
  reference.save_pretrained(folder)
  return folder, reference


@pytest.fixture(scope='module')
def sparse(tmp_path_factory):
  """The same for a mixture of experts."""
  folder = tmp_path_factory.mktemp('qwen3_5_moe')
  _reference(transformers.Qwen3_5MoeTextConfig(**_SPARSE)).save_pretrained(
    folder
  )
  return folder


def _tensors(folder):
  return safetensors.numpy.load_file(folder / 'model.safetensors')


def _write(folder, tensors, config):
  folder.mkdir()
  safetensors.numpy.save_file(tensors, folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(config))
  return folder


def _config(folder):
  return json.loads((folder / 'config.json').read_text())


def _assert_equal(found, expected):
  assert found.model == expected.model
  jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize('num_tokens', [1, 5, 150])
def test_a_recurrent_layer_is_that_of_transformers(saved, num_tokens):
  folder, reference = saved
  loaded = specsample.load(folder)
  x = np.random.default_rng(0).normal(size=(2, num_tokens, 32))
  x = x.astype(np.float32)
  with torch.no_grad():
    expected = reference.model.layers[1].linear_attn(torch.tensor(x)).numpy()
  made = gated_delta.GatedDelta(
    loaded.model, layers.random_keys(jax.random.key(0))
  )
  layer = nnx.merge(nnx.split(made)[0], loaded.params['layers'][1]['delta'])
  order = gated_delta.order(2, num_tokens, None)
  found = jax.jit(lambda rows: layer(rows, order, None)[0])(x.reshape(-1, 32))
  np.testing.assert_allclose(
    found.reshape(x.shape), expected, rtol=1e-5, atol=1e-5
  )


def test_every_path_of_a_tree_equals_transformers(saved):
  folder, reference = saved
  loaded = _load(folder)
  model, params = loaded.model, loaded.params
  rng = np.random.default_rng(1)
  text = rng.integers(131, size=(2, 9), dtype=np.int32)
  nodes = rng.integers(131, size=(2, 7), dtype=np.int32)
  parents = np.asarray([[0, 0, 1, 2, 2, 4], [0, 1, 2, 0, 4, 4]], np.int32)
  lengths = np.asarray([9, 6])
  apply = jax.jit(model.apply)
  _, cache = apply(params, text, model.init_cache(2, 32))
  cache = model.commit(cache, lengths)
  found, after = apply(params, nodes, cache, parents=parents)
  following = rng.integers(131, size=(2, 1), dtype=np.int32)
  for node in range(7):
    paths = [_path_to(of_row, node) for of_row in parents]
    kept = np.asarray([len(path) for path in paths])
    padded = np.asarray([path + [0] * (7 - len(path)) for path in paths])
    committed = model.commit(after, lengths + kept, lengths[:, None] + padded)
    last, _ = apply(params, following, committed)
    for row, path in enumerate(paths):
      tokens = [*text[row, : lengths[row]], *nodes[row, path], *following[row]]
      with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
      np.testing.assert_allclose(
        found.logits[row, node], expected[-2], rtol=0, atol=1e-3
      )
      np.testing.assert_allclose(
        last.logits[row, 0], expected[-1], rtol=0, atol=1e-3
      )


def _path_to(parents, node):
  path = [node]
  while path[0]:
    path.insert(0, parents[path[0] - 1])
  return path


def test_bfloat16_rounds_where_transformers_does(saved, tmp_path):
  folder, reference = saved
  loaded = specsample.load(folder, dtype='bfloat16')
  tokens = np.random.default_rng(2).integers(131, size=(2, 40), dtype=np.int32)
  cache = loaded.model.init_cache(2, 40)
  output, cache = jax.jit(loaded.model.apply)(loaded.params, tokens, cache)
  assert cache.states[0].memory.dtype == jnp.float32
  assert cache.states[0].tail.key.dtype == jnp.bfloat16
  exact = _logits(reference, tokens)
  reference.save_pretrained(tmp_path)
  narrow = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, dtype=torch.bfloat16
  )
  error = lambda logits: np.abs(logits - exact).mean()
  theirs = error(_logits(narrow, tokens))
  assert 0 < error(np.asarray(output.logits)) < 1.2 * theirs


def _logits(reference, tokens):
  with torch.no_grad():
    return reference(torch.tensor(tokens)).logits.float().numpy()


def test_a_model_with_images_is_read_without_what_reads_them(saved, tmp_path):
  folder, _ = saved
  tensors = {
    name.replace('model.', 'model.language_model.', 1): tensor
    for name, tensor in _tensors(folder).items()
  }
  tensors['model.visual.blocks.0.norm1.weight'] = np.ones(3, np.float32)
  text = _config(folder)
  tied = text.pop('tie_word_embeddings')
  found = _write(
    tmp_path / 'with_images',
    tensors,
    {
      'model_type': 'qwen3_5',
      'text_config': text,
      'vision_config': {},
      'tie_word_embeddings': tied,
    },
  )
  _assert_equal(_load(found), _load(folder))


def test_experts_of_one_tensor_are_those_of_several(sparse, tmp_path):
  tensors = _tensors(sparse)
  for layer in range(4):
    prefix = f'model.layers.{layer}.mlp.experts.'
    of = lambda name, prefix=prefix: np.stack(
      [tensors.pop(f'{prefix}{i}.{name}_proj.weight') for i in range(4)]
    )
    both = np.concatenate([of('gate'), of('up')], axis=1)
    tensors[f'{prefix}gate_up_proj'] = both
    tensors[f'{prefix}down_proj'] = of('down')
  found = _write(
    tmp_path / 'fused',
    tensors,
    {'model_type': 'qwen3_5_moe', 'text_config': _config(sparse)},
  )
  _assert_equal(_load(found), _load(sparse))


def test_older_configurations_are_read_alike(saved, tmp_path):
  folder, _ = saved
  config = _config(folder)
  del config['layer_types'], config['rope_parameters']
  config |= {
    'full_attention_interval': 4,
    'rope_theta': 1_000.0,
    'partial_rotary_factor': 0.5,
    'rope_scaling': None,
  }
  _assert_equal(
    _load(_write(tmp_path / 'older', _tensors(folder), config)), _load(folder)
  )


def _changed(saved, tmp_path, changes):
  folder, _ = saved
  config = _config(folder) | changes
  return _write(tmp_path / 'changed', _tensors(folder), config)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'layer_types': ['linear_attention'] * 3},
      "layer_types is .* expected one of .'full_attention', 'linear_attention'",
    ),
    (
      {'layer_types': ['linear_attention'] * 3 + ['mamba']},
      'layer_types is .* for each layer',
    ),
    (
      {'layer_types': ['linear_attention'] * 4},
      'delta.layers names all 4 layers',
    ),
    (
      {'layer_types': ['full_attention'] * 2 + ['linear_attention'] * 2},
      r'lacks \d+ tensors .model.layers.0.self_attn',
    ),
    ({'attention_bias': True}, 'attention_bias is True, but only False'),
    ({'attn_output_gate': False}, 'attn_output_gate is False, but only True'),
    ({'linear_num_value_heads': 3}, 'num_value_heads is 3'),
    (
      {'linear_num_value_heads': 8},
      r'tensor model.layers.0.linear_attn.conv1d.weight has shape '
      r'\(56, 1, 4\), expected \(80, 1, 4\)',
    ),
    (
      {'rope_parameters': {'rope_theta': 1e3, 'partial_rotary_factor': 0.2}},
      'partial_rotary_factor is 0.2, by which 3 of 16 dimensions',
    ),
  ],
)
def test_configurations_of_another_model_are_refused(
  saved, tmp_path, changes, message
):
  with pytest.raises(ValueError, match=message):
    specsample.load(_changed(saved, tmp_path, changes))


@pytest.mark.parametrize('is_shifted', [True, False])
def test_norms_to_which_1_was_added_are_refused(saved, tmp_path, is_shifted):
  folder, _ = saved
  tensors = _tensors(folder)
  for name, tensor in tensors.items():
    if name.endswith(('layernorm.weight', '_norm.weight')):
      tensors[name] = tensor + 1 if is_shifted else 0 * tensor
  found = _write(tmp_path / 'shifted', tensors, _config(folder))
  if not is_shifted:  # as they are before training
    specsample.load(found)
    return
  message = r'input_layernorm\.weight have a median of (0.9|1.0).*1 was added'
  with pytest.raises(ValueError, match=message):
    specsample.load(found)


def test_a_converted_checkpoint_is_refused(saved, tmp_path):
  folder, _ = saved
  tensors = _tensors(folder)
  for name, tensor in tensors.items():
    if name.endswith('conv1d.weight'):
      tensors[name] = np.ascontiguousarray(tensor.transpose(0, 2, 1))
    elif name.endswith(('layernorm.weight', '_norm.weight')):
      tensors[name] = tensor + 1
  found = _write(tmp_path / 'converted', tensors, _config(folder))
  with pytest.raises(
    ValueError,
    match=r'conv1d.weight has shape \(56, 4, 1\), expected size 1 along '
    r'axis 1: the checkpoint was converted .* load the original one',
  ):
    specsample.load(found)


def test_int8_weights_are_near_those_that_are_rounded(saved):
  folder, _ = saved
  exact, rounded = (
    specsample.load(folder, weights=weights) for weights in (None, 'int8')
  )
  tokens = np.random.default_rng(2).integers(131, size=(2, 40), dtype=np.int32)
  run = lambda loaded: (
    jax.jit(loaded.model.apply)(
      loaded.params, tokens, loaded.model.init_cache(2, 0)
    )[0].logits
  )
  expected = np.asarray(run(exact))
  of_layer = rounded.params['layers'][0]['delta']
  assert isinstance(of_layer['value']['kernel'], int8.Int8)
  assert of_layer['value_convolution'].dtype == jnp.float32
  difference = np.abs(run(rounded) - expected).mean()
  assert 0 < difference < 0.2 * expected.std()


@functools.cache
def _load(folder):
  return specsample.load(folder)
