"""Folders of config.json and safetensors, whole and broken."""

import json

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
import transformers

import specsample

_SIZES = {
  'vocab_size': 96,
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 48,
  'max_position_embeddings': 64,
}


def _save(folder, model=None, **options):
  model = model or transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**_SIZES)
  )
  model.save_pretrained(folder, **options)
  return model


def _assert_equal(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_shards_are_joined(tmp_path):
  model = _save(tmp_path / 'whole')
  _save(tmp_path / 'shards', model, max_shard_size='20KB')
  index = tmp_path / 'shards' / 'model.safetensors.index.json'
  weight_map = json.loads(index.read_text())['weight_map']
  assert len(set(weight_map.values())) > 2
  whole = specsample.load(tmp_path / 'whole')
  shards = specsample.load(tmp_path / 'shards')
  assert whole.model == shards.model
  _assert_equal(shards.params, whole.params)
  gate = whole.params['layers'][1]['mlp']['gate']['kernel']
  expected = model.model.layers[1].mlp.gate_proj.weight.detach().numpy()
  np.testing.assert_array_equal(gate, expected.T)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(tmp_path, dtype):
  model = _save(tmp_path / 'half', _save(tmp_path / 'whole').to(dtype))
  loaded = specsample.load(tmp_path / 'half')
  expected = model.lm_head.weight.detach().float().numpy()
  assert loaded.params['unembedding'].dtype == np.float32
  np.testing.assert_array_equal(loaded.params['unembedding'], expected.T)


def test_what_old_checkpoints_store_beside_parameters_is_left(tmp_path):
  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True)
  )
  _save(tmp_path, model)
  expected = specsample.load(tmp_path)
  assert expected.model.tie_embeddings
  path = tmp_path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']
  tensors['model.layers.1.self_attn.rotary_emb.inv_freq'] = np.zeros(4)
  safetensors.numpy.save_file(tensors, path)
  _assert_equal(specsample.load(tmp_path).params, expected.params)


def test_a_stored_unembedding_that_differs_is_used(tmp_path, capsys):
  model = _save(tmp_path)
  path = tmp_path / 'config.json'
  values = json.loads(path.read_text())
  path.write_text(json.dumps(values | {'tie_word_embeddings': True}))
  loaded = specsample.load(tmp_path)
  assert not loaded.model.tie_embeddings
  expected = model.lm_head.weight.detach().numpy()
  np.testing.assert_array_equal(loaded.params['unembedding'], expected.T)
  line = capsys.readouterr().err.splitlines()[-1]
  assert 'lm_head.weight differs from the embedding, so it is used' in line


_SCALED = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'original_max_position_embeddings': 64,
}


def test_two_spellings_of_one_rope_must_agree(tmp_path):
  _save(tmp_path)
  path = tmp_path / 'config.json'
  values = json.loads(path.read_text()) | {'rope_scaling': _SCALED}
  path.write_text(json.dumps(values))
  _rejected(tmp_path, 'rope_parameters is', 'rope_scaling is', "'yarn'")
  values['rope_parameters'] = _SCALED | {'rope_theta': 10_000.0}
  path.write_text(json.dumps(values))
  assert specsample.load(tmp_path).model.max_length == 256
  path.write_text(json.dumps(values | {'rope_theta': 50.0}))
  _rejected(tmp_path, 'rope_theta is 50.0 and rope_theta of rope_parameters is')


def _rejected(path, *words):
  with pytest.raises(ValueError) as caught:
    specsample.load(path)
  for word in (str(path), *words):
    assert word in str(caught.value)


@pytest.fixture
def folder(tmp_path):
  """A folder that loads, to be broken."""
  _save(tmp_path, max_shard_size='20KB')
  return tmp_path


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'model_type': 'mamba'}, ["'mamba'", 'llama, mistral']),
    ({'model_type': None}, ['model_type is None']),
    ({'hidden_act': 'gelu'}, ['hidden_act', "'gelu'", "'silu'"]),
    ({'mlp_bias': True}, ['mlp_bias', 'True']),
    (
      {'quantization_config': {'bits': 4}},
      ['quant_method of quantization_config is None'],
    ),
    ({'hidden_size': None}, ['hidden_size is None']),
    ({'vocab_size': '96'}, ["vocab_size is '96'"]),
    ({'num_hidden_layers': -2}, ['num_hidden_layers is -2']),
    (
      {'num_hidden_layers': 2**31},
      ['num_hidden_layers is 2147483648', 'from 1 to 1000'],
    ),
    (
      {'num_nextn_predict_layers': 2**31},
      ['num_nextn_predict_layers is 2147483648', 'from 1 to 1000'],
    ),
    ({'rms_norm_eps': 0}, ['rms_norm_eps is 0']),
    (
      {'rope_parameters': {'rope_type': 'longrope', 'factor': 2.0}},
      ["'longrope'", "'llama3'"],
    ),
    (
      {'rope_parameters': {'rope_type': 'llama3', 'factor': 2.0}},
      ['low_freq_factor is None'],
    ),
    ({'vocab_size': 97}, ['embed_tokens', '(96, 32)', '(97, 32)']),
    ({'num_key_value_heads': 1}, ['k_proj', '(16, 32)', '(8, 32)']),
    ({'num_hidden_layers': 3}, ['lacks 9 tensors', 'layers.2.']),
    ({'num_hidden_layers': 1}, ['has 9 tensors', 'layers.1.', 'unknown']),
    (
      {'model_type': 'mistral', 'sliding_window': -1},
      ['sliding_window is -1'],
    ),
    (
      {'model_type': 'mistral', 'sliding_window': 0},
      ['sliding_window is 0'],
    ),
    ({'attention_bias': True}, ['lacks 8 tensors', '_proj.bias']),
    ({'tie_word_embeddings': 'false'}, ["tie_word_embeddings is 'false'"]),
    ({'rope_parameters': 5}, ['rope_parameters is 5']),
  ],
)
def test_a_configuration_that_does_not_fit_is_named(folder, changes, words):
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
  _rejected(folder, *words)


@pytest.mark.parametrize('content', ['', '{"model_type": ', '[]', '\x80'])
def test_a_damaged_configuration_is_named(folder, content):
  (folder / 'config.json').write_text(content, encoding='latin-1')
  _rejected(folder, 'config.json')


def test_a_missing_shard_is_named(folder):
  shards = sorted(folder.glob('model-0000[23]-*.safetensors'))
  for shard in shards:
    shard.unlink()
  _rejected(folder, *(shard.name for shard in shards), 'download')


@pytest.mark.parametrize('content', ['', '{}', '{"weight_map": []}'])
def test_a_damaged_index_is_named(folder, content):
  name = 'model.safetensors.index.json'
  (folder / name).write_text(content)
  _rejected(folder, name)


@pytest.mark.parametrize('kept', [0, 4, 100, 0.5, 0.999])
def test_a_truncated_shard_is_named(folder, kept):
  shard = sorted(folder.glob('*.safetensors'))[1]
  content = shard.read_bytes()
  size = kept if isinstance(kept, int) else int(kept * len(content))
  shard.write_bytes(content[:size])
  _rejected(folder, shard.name, 'download it again')


def test_quantised_tensors_are_named(folder):
  shard = sorted(folder.glob('*.safetensors'))[0]
  tensors = safetensors.numpy.load_file(shard)
  name = next(iter(tensors))
  tensors[name] = tensors[name].astype(np.int8)
  safetensors.numpy.save_file(tensors, shard)
  _rejected(folder, name, 'I8', 'not quantised')


def test_a_pickle_is_refused_unread(folder):
  for path in folder.glob('*.safetensors*'):
    path.unlink()
  (folder / 'pytorch_model.bin').write_bytes(b'not even a pickle')
  _rejected(folder, 'pytorch_model.bin', 'safe_serialization=True')


def test_a_folder_without_weights_is_named(folder):
  for path in folder.glob('*.safetensors*'):
    path.unlink()
  _rejected(folder, 'model.safetensors', 'download the weights')
