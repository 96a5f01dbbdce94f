"""Gemma 4 as the hub has it; `test_families` compares its logits."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import specsample
from specsample import drafters
from specsample import testing
from specsample.models import checkpoint

_SIZES = {
  'vocab_size': 32,
  'hidden_size': 16,
  'num_hidden_layers': 4,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 24,
  'max_position_embeddings': 64,
  'layer_types': ['sliding_attention', 'full_attention'] * 2,
  'head_dim': 6,
  'global_head_dim': 8,
  'sliding_window': 7,
  'num_kv_shared_layers': 2,
  'hidden_size_per_layer_input': 6,
  'vocab_size_per_layer_input': 32,
}


def _save(folder, **changes):
  torch.manual_seed(0)
  config = transformers.Gemma4TextConfig(**_SIZES | changes)
  transformers.Gemma4ForCausalLM(config).save_pretrained(folder)
  return folder


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  """A text model as transformers saves it."""
  return _save(tmp_path_factory.mktemp('text'))


def _change(folder, tensors=None, **changes):
  path = folder / 'config.json'
  content = json.loads(path.read_text()) | changes
  path.write_text(json.dumps(content))
  if tensors is not None:
    safetensors.torch.save_file(tensors, folder / 'model.safetensors')


def test_layers_are_numbered_at_any_width(tmp_path):
  kinds = ['sliding_attention', 'full_attention'] * 6
  sizes = {'num_hidden_layers': 12, 'layer_types': kinds}
  _save(tmp_path, **sizes)
  values = json.loads((tmp_path / 'config.json').read_text())
  assert '01' in values['per_layer_config']
  model = specsample.load(tmp_path).model
  assert model.num_layers == 12 and model.full_head_dim == 8


def test_the_hubs_spelling_means_the_same(tmp_path, text):
  """Its text model is part of one that also sees and hears."""
  tensors = safetensors.torch.load_file(text / 'model.safetensors')
  renamed = {
    name.replace('model.', 'model.language_model.', 1): x
    for name, x in tensors.items()
  }
  # The hub has matrices of shared layers, which nothing reads.
  for name, size in (('k_proj', (12, 16)), ('v_proj', (12, 16)), ('k_norm', 6)):
    unread = f'model.language_model.layers.2.self_attn.{name}.weight'
    renamed[unread] = torch.ones(size)
  for name in ('vision_tower.x', 'audio_tower.y', 'embed_vision.z'):
    renamed[f'model.{name}.weight'] = torch.ones(2)
  of_text = json.loads((text / 'config.json').read_text())
  of_text |= {'global_head_dim': 8, 'use_bidirectional_attention': 'vision'}
  del of_text['per_layer_config']
  config = {'model_type': 'gemma4', 'text_config': of_text}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  safetensors.torch.save_file(renamed, tmp_path / 'model.safetensors')
  expected, found = specsample.load(text), specsample.load(tmp_path)
  assert found.model == expected.model
  jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def test_its_configuration_is_saved(text):
  model = specsample.load(text).model
  saved = json.loads(json.dumps(checkpoint.to_json(model)))
  assert checkpoint.from_json(saved, model.dtype) == model


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'layer_types': ['full_attention'] * 3}, ['layer_types is [', 'each lay']),
    (
      {'layer_types': ['full_attention'] * 4, 'num_kv_shared_layers': 4},
      ['num_kv_shared_layers is 4, expected an integer from 0 to 3'],
    ),
    (
      {
        'layer_types': ['sliding_attention'] * 3 + ['full_attention'],
        'per_layer_config': {'3': {'head_dim': 8}},
      },
      ['num_kv_shared_layers is 2, but none of the first 2 layers has keys'],
    ),
    (
      {'per_layer_config': {'1': {'head_dim': 8}, '3': {'head_dim': 6}}},
      ["per_layer_config is {'1': {'", 'the same sizes for the layers 1, 3'],
    ),
    (
      {'per_layer_config': {'0': {'head_dim': 8}}},
      ['per_layer_config is', 'for the layers 1, 3 and no others'],
    ),
    (
      {'per_layer_config': {'1': {'head_dim': 8}, '3': 8}},
      ['the same sizes for the layers 1, 3'],
    ),
    (
      {'num_kv_shared_layers': 2.0},
      ['num_kv_shared_layers is 2.0, expected an integer'],
    ),
    (
      {'hidden_size_per_layer_input': '6'},
      ["hidden_size_per_layer_input is '6', expected an integer"],
    ),
    (
      {'hidden_size_per_layer_input': -6},
      ['hidden_size_per_layer_input is -6, expected an integer of at least 1'],
    ),
    (
      {'vocab_size_per_layer_input': 16},
      ['vocab_size_per_layer_input is 16, but only 32 is supported'],
    ),
    ({'use_bidirectional_attention': 'all'}, ["is 'all', but only None is"]),
    (
      {'num_kv_shared_layers': 0},
      ['lacks 6 tensors (model.layers.2.self_attn.k_norm.weight'],
    ),
    (
      {'hidden_size_per_layer_input': 0},
      ['unknown to the model', 'model.embed_tokens_per_layer.weight'],
    ),
  ],
)
def test_what_is_wrong_is_named(tmp_path, changes, words):
  _change(_save(tmp_path), **changes)
  with pytest.raises(ValueError) as caught:
    specsample.load(tmp_path)
  for word in (str(tmp_path), *words):
    assert word in str(caught.value)


def test_a_subset_of_layers_keeps_what_others_read(text):
  model = dataclasses.replace(specsample.load(text).model, layer_input_dim=0)
  kept = model.keep_layers((0, 1, 3))
  assert (kept.num_shared, kept.sliding_layers) == (1, (0,))
  with pytest.raises(ValueError, match=r'layer 3 reads .* of layer 1: keep'):
    model.keep_layers((0, 2, 3))
  with pytest.raises(ValueError, match='layer_input_dim is 0'):
    specsample.load(text).model.keep_layers((0, 1))


@pytest.mark.parametrize(
  'kind', [drafters.Eagle3, drafters.MTP], ids=['eagle3', 'mtp']
)
def test_a_drafters_layers_are_alike(text, kind):
  target = specsample.load(text)
  drafter = kind(model=target.model, num_draft_tokens=2)
  own = drafter.init_params(jax.random.key(0), target.params)
  testing.assert_greedy_equal(
    {'target': target.params, 'drafter': own},
    np.asarray([[3, 1, 4, 9, 2], [8, 5, 0, 0, 0]]),
    np.asarray([5, 2]),
    model=target.model,
    drafter=drafter,
    verify=specsample.verify.chain,
    max_new_tokens=6,
  )
