"""Gemma 4's assistants against transformers, with its own target."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from tests.loading.published import by_hand

_WINDOW = 7
_SIZES = {
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 6,
  'global_head_dim': 8,
  'num_global_key_value_heads': 1,
  'attention_k_eq_v': True,
  'hidden_size_per_layer_input': 0,
  'max_position_embeddings': 64,
  'sliding_window': _WINDOW,
  'initializer_range': 0.3,
}
_TARGET = transformers.Gemma4TextConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=4,
  layer_types=['sliding_attention', 'full_attention'] * 2,
  num_kv_shared_layers=1,
  **_SIZES,
)
_PROMPT = [3, 1, 4, 9, 2, 6, 5, 30, 5, 8, 9, 7]


def _random(config):
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for name, value in model.named_parameters():
      if 'norm' in name:
        value.uniform_(0.5, 1.5)
      value.copy_(value.bfloat16())  # as weights are published
    for name, value in model.named_buffers():
      if name.endswith('layer_scalar'):
        value.uniform_(0.5, 1.5)
      elif name.endswith('token_ordering'):
        value.copy_(torch.randperm(len(value)))
  return model


def _assistant(is_ordered=False):
  layers = transformers.Gemma4TextConfig(
    vocab_size=32,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=4,
    layer_types=['sliding_attention'] * 3 + ['full_attention'],
    num_kv_shared_layers=4,
    vocab_size_per_layer_input=0,
    **_SIZES,
  )
  return transformers.Gemma4AssistantConfig(
    text_config=layers,
    backbone_hidden_size=16,
    use_ordered_embeddings=is_ordered,
    num_centroids=8,
    centroid_intermediate_top_k=3,
  )


def save_target(folder):
  torch.manual_seed(0)
  reference = _random(_TARGET)
  reference.save_pretrained(folder)
  return reference


@pytest.fixture(scope='module')
def target(tmp_path_factory):
  """A random target: transformers' and ours."""
  folder = tmp_path_factory.mktemp('target')
  return save_target(folder), specsample.load(folder)


def save(folder, is_ordered=False):
  torch.manual_seed(1)
  reference = _random(_assistant(is_ordered))
  reference.save_pretrained(folder)
  return reference


def _logits(target, assistant, text, drafts):
  """Returns what transformers computes for each draft after a text."""
  with torch.no_grad():
    read = target(
      torch.tensor([text[:-1]]),
      output_hidden_states=True,
      return_shared_kv_states=True,
    )
    shared = dict(read.shared_kv_states)
    # Otherwise its mask lets one more token through than the target's window.
    shared['sliding_attention'] = tuple(
      x[:, :, -_WINDOW:] for x in shared['sliding_attention']
    )
    hidden, token, logits = read.hidden_states[-1][:, -1:], text[-1], []
    for draft in drafts:
      embedded = target.get_input_embeddings()(torch.tensor([[token]]))
      made = assistant(
        inputs_embeds=torch.cat([embedded, hidden], dim=-1),
        position_ids=torch.tensor([[len(text) - 1]]),
        shared_kv_states=shared,
      )
      hidden, token = made.last_hidden_state, draft
      logits.append(made.logits[0, 0].numpy())
  return np.stack(logits)


@pytest.mark.parametrize('is_ordered', [False, True])
def test_drafts_are_those_of_transformers(tmp_path, target, is_ordered):
  reference, ours = target
  assistant = save(tmp_path, is_ordered)
  loaded = specsample.load_drafter(tmp_path, ours)
  assert loaded.drafter.num_draft_tokens == 4
  assert loaded.drafter.kv_layers == (2, 1)
  for found in by_hand.two_rounds(loaded, ours, _PROMPT, 1, 7):
    expected = _logits(reference, assistant, found.text, found.drafts)
    drafted = np.isfinite(found.logits)
    # Three clusters of four tokens.
    assert drafted.sum(axis=-1).tolist() == [12 if is_ordered else 32] * 4
    assert np.std(expected) > 0.3
    np.testing.assert_allclose(
      found.logits[drafted], expected[drafted], rtol=0, atol=1e-4
    )
    # transformers gives all other tokens a smaller logit than the drafted.
    worst = np.where(drafted, expected, np.inf).min(axis=-1, keepdims=True)
    assert (drafted | (expected < worst)).all()


def test_the_configuration_says_how_many_tokens_to_draft(tmp_path, target):
  save(tmp_path)
  path = tmp_path / 'generation_config.json'
  path.write_text(json.dumps({'num_assistant_tokens': 6}))
  ours = target[1]
  found = specsample.load_drafter(tmp_path, ours).drafter
  assert found.num_draft_tokens == 6
  found = specsample.load_drafter(tmp_path, ours, 2).drafter
  assert found.num_draft_tokens == 2


@pytest.mark.parametrize('is_tree', [False, True])
def test_greedy_text_is_the_targets(tmp_path, target, is_tree):
  ours = target[1]
  save(tmp_path, is_ordered=not is_tree)
  loaded = specsample.load_drafter(tmp_path, ours, 2)
  drafter, verify = loaded.drafter, specsample.verify.chain
  if is_tree:
    shape = tree.from_paths([(0,), (1,), (0, 0), (1, 0)])
    drafter = drafters.Tree(drafter=drafter, topology=shape)
    verify = specsample.verify.tree
  testing.assert_greedy_equal(
    {'target': ours.params, 'drafter': loaded.params},
    np.asarray([_PROMPT, [8, 5] + [0] * 10]),
    np.asarray([12, 2]),
    model=ours.model,
    drafter=drafter,
    verify=verify,
    max_new_tokens=8,
  )


def test_keys_and_values_are_those_of_the_cache(target):
  model, params = target[1].model, target[1].params
  wanted = (
    specsample.types.KeysAndValues(1),
    specsample.types.KeysAndValues(2),
  )
  tokens = jnp.asarray([_PROMPT])
  output, cache = model.apply(
    params, tokens, model.init_cache(1, 12), features=wanted
  )
  for layer, found in zip((1, 2), output.features, strict=True):
    keys, values = cache.keys[layer], cache.values[layer]
    np.testing.assert_array_equal(jnp.swapaxes(found[:, :, 0], 1, 2), keys)
    np.testing.assert_array_equal(jnp.swapaxes(found[:, :, 1], 1, 2), values)
  # Layer 3 reads those of layer 1.
  missing = (specsample.types.KeysAndValues(3),)
  with pytest.raises(ValueError, match='no keys and values of layer 3'):
    model.apply(params, tokens, model.init_cache(1, 12), features=missing)


@pytest.mark.parametrize(
  ('changes', 'text', 'tensors', 'words'),
  [
    (
      {'backbone_hidden_size': 20},
      {},
      {},
      ["backbone_hidden_size is 20, but the target's is 16", 'another target'],
    ),
    ({}, {'vocab_size': 64}, {}, ["vocab_size is 64, but the target's is 32"]),
    (
      {},
      {'num_key_value_heads': 4},
      {},
      ['has 4 key-value heads of 6 numbers, but layer 2 of the target has 2'],
    ),
    (
      {},
      {'enable_moe_block': True},
      {},
      ['enable_moe_block is True, but only'],
    ),
    (
      {},
      {},
      {'pre_projection.weight': torch.ones(12, 30)},
      ['pre_projection.weight has shape (12, 30), expected (12, 32)'],
    ),
    (
      {},
      {},
      {'model.layers.3.layer_scalar': None},
      ['lacks 1 tensors (layers.3.layer_scalar)'],
    ),
  ],
)
def test_what_does_not_fit_is_refused(
  tmp_path, target, changes, text, tensors, words
):
  save(tmp_path)
  path = tmp_path / 'config.json'
  config = json.loads(path.read_text()) | changes
  config['text_config'] |= text
  path.write_text(json.dumps(config))
  path = tmp_path / 'model.safetensors'
  stored = safetensors.torch.load_file(path) | tensors
  stored = {name: x for name, x in stored.items() if x is not None}
  safetensors.torch.save_file(stored, path)
  with pytest.raises(ValueError) as caught:
    specsample.load_drafter(tmp_path, target[1])
  for word in words:
    assert word in str(caught.value)
