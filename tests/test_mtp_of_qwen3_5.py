"""Qwen3.5's module for multi-token prediction, against transformers' layers."""

import copy
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

import specsample
from specsample import testing

_V, _D, _K = 96, 32, 3
_SIZES = {
  'vocab_size': _V,
  'hidden_size': _D,
  'num_hidden_layers': 2,
  'layer_types': ['linear_attention', 'full_attention'],
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 16,
  'max_position_embeddings': 64,
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
_SPARSE = _SIZES | {
  'num_experts': 4,
  'num_experts_per_tok': 2,
  'moe_intermediate_size': 20,
  'shared_expert_intermediate_size': 28,
}
_FORMS = {
  'dense': (
    transformers.Qwen3_5TextConfig(**_SIZES, intermediate_size=48),
    modeling_qwen3_5.Qwen3_5DecoderLayer,
  ),
  'sparse': (
    transformers.Qwen3_5MoeTextConfig(**_SPARSE),
    modeling_qwen3_5_moe.Qwen3_5MoeDecoderLayer,
  ),
  'next': (
    transformers.Qwen3NextConfig(**_SPARSE, intermediate_size=48),
    modeling_qwen3_next.Qwen3NextDecoderLayer,
  ),
}
_OWN_SHAPES = {
  'mtp.fc.weight': (_D, 2 * _D),
  'mtp.pre_fc_norm_embedding.weight': (_D,),
  'mtp.pre_fc_norm_hidden.weight': (_D,),
  'mtp.norm.weight': (_D,),
}


def _reference(form):
  """Returns a target, and the tensors and the layer of its module."""
  config, layer = _FORMS[form]
  torch.manual_seed(0)
  network = transformers.AutoModelForCausalLM.from_config(config).eval()
  layer = layer(copy.deepcopy(config), 1).eval()
  with torch.no_grad():
    for value in layer.parameters():
      value.normal_(0, 0.3)
    for name, value in network.named_parameters():
      if name.endswith('norm.weight'):
        value += torch.empty_like(value).uniform_(-0.5, 0.5)
  rng = np.random.default_rng(0)
  own = {
    name: rng.normal(0, 0.3, shape).astype('f4')
    for name, shape in _OWN_SHAPES.items()
  }
  return network, own, layer


def _write(folder, form, network, own, layer):
  """Writes them with the names and the configuration of the hub."""
  network.save_pretrained(folder)
  path = folder / 'model.safetensors'
  stored = safetensors.numpy.load_file(path) | own
  # Experts stay in one tensor, as they are published by Qwen3.5.
  stored |= {
    f'mtp.layers.0.{name}': value.numpy()
    for name, value in layer.state_dict().items()
  }
  config = json.loads((folder / 'config.json').read_text())
  if form != 'next':
    stored = {
      name.replace('model.', 'model.language_model.', 1)
      if name.startswith('model.')
      else name: value
      for name, value in stored.items()
    }
    config |= {'mtp_num_hidden_layers': 1}
    config = {
      'model_type': config['model_type'].removesuffix('_text'),
      'text_config': config,
      'tie_word_embeddings': config.pop('tie_word_embeddings'),
    }
  safetensors.numpy.save_file(stored, path)
  (folder / 'config.json').write_text(json.dumps(config))
  return folder


@pytest.fixture(scope='module', name='dense')
def fixture_dense(tmp_path_factory):
  folder = tmp_path_factory.mktemp('qwen3_5')
  return _write(folder, 'dense', *_reference('dense'))


def _normed(x, scale):
  scale = 1 + torch.as_tensor(scale)
  return torch.nn.functional.rms_norm(x, (_D,), scale, eps=1e-6)


def _expected(network, own, layer, text, length):
  """Returns the logits [K, V] of K drafts after text [:length].

  `text` includes the drafts. The target's vectors after its last norm are read
  up to the token before the pending one, and after that the module's outputs
  after its last norm.
  """
  text = torch.tensor(text)[None]
  embedded = network.model.embed_tokens(text)[0]
  read = network.model(text[:, : length - 1]).last_hidden_state[0]
  found = []
  for _ in range(_K):
    size = len(read)
    joined = torch.cat(
      [
        _normed(
          embedded[1 : size + 1], own['mtp.pre_fc_norm_embedding.weight']
        ),
        _normed(read, own['mtp.pre_fc_norm_hidden.weight']),
      ],
      dim=-1,
    )
    x = (joined @ torch.tensor(own['mtp.fc.weight']).T)[None]
    mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
    positions = torch.arange(size)[None]
    rope = network.model.rotary_emb(x, positions)
    output = layer(x, position_embeddings=rope, attention_mask=mask)
    output = output[0] if isinstance(output, tuple) else output
    last = _normed(output.reshape(size, _D)[-1:], own['mtp.norm.weight'])
    found.append(network.lm_head(last)[0])
    read = torch.cat([read, last])
  return torch.stack(found).numpy()


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize('form', _FORMS)
def test_drafts_are_those_of_the_published_equations(tmp_path, form):
  network, own, layer = _reference(form)
  folder = _write(tmp_path, form, network, own, layer)
  target = specsample.load(folder)
  loaded = specsample.load_drafter(folder, target, num_draft_tokens=_K)
  drafter = loaded.drafter
  params = {'target': target.params, 'drafter': loaded.params}
  rng = np.random.default_rng(1)
  tokens = rng.integers(_V, size=(2, 24)).astype(np.int32)
  lengths = np.asarray([5, 19])

  @jax.jit
  def propose(params, tokens, lengths):
    empty = target.model.init_cache(*tokens.shape)
    output, _ = target.model.apply(params['target'], tokens, empty)
    state = drafter.init(params, *tokens.shape)
    state = drafter.observe(params, tokens, lengths - 1, output, None, state)
    warp = lambda logits, drafted: jax.nn.log_softmax(logits)
    draw = lambda probs, position: probs.argmax(-1)
    draft, _ = drafter.propose(params, draw, warp, tokens, lengths, state)
    return draft

  draft = propose(params, tokens, lengths)
  for row, length in enumerate(lengths):
    text = np.concatenate([tokens[row, :length], draft.tokens[row]])
    logits = torch.tensor(_expected(network, own, layer, text, length))
    expected = logits.log_softmax(-1).numpy()
    np.testing.assert_allclose(draft.probs[row], expected, rtol=0, atol=1e-3)
    np.testing.assert_array_equal(draft.tokens[row], expected.argmax(-1))


@pytest.mark.parametrize('form', ['chain', 'tree'])
def test_output_is_the_target_s(dense, form):
  target = specsample.load(dense)
  loaded = specsample.load_drafter(dense, target, num_draft_tokens=_K)
  drafter, verify = loaded.drafter, specsample.verify.chain
  if form == 'tree':
    topology = specsample.tree.k_ary((2, 2, 1))
    drafter = specsample.drafters.Tree(drafter=drafter, topology=topology)
    verify = specsample.verify.tree
  testing.assert_greedy_equal(
    {'target': target.params, 'drafter': loaded.params},
    np.arange(8).reshape(2, 4),
    np.asarray([4, 1]),
    model=target.model,
    drafter=drafter,
    verify=verify,
    max_new_tokens=12,
  )


def test_an_untrained_module_begins_with_the_target_s_norm(dense):
  target = specsample.load(dense)
  drafter = specsample.load_drafter(dense, target).drafter
  params = drafter.init_params(jax.random.key(0), target.params)
  np.testing.assert_allclose(
    params['layers'][0]['norm']['scale'],
    target.params['norm']['scale'],
    atol=1e-6,
  )


def _changed(folder, tmp_path, of_tensors=None, **of_config):
  """Copies a folder with other tensors (None to leave one out) or settings."""
  stored = safetensors.numpy.load_file(folder / 'model.safetensors')
  stored |= of_tensors or {}
  stored = {name: x for name, x in stored.items() if x is not None}
  safetensors.numpy.save_file(stored, tmp_path / 'model.safetensors')
  config = json.loads((folder / 'config.json').read_text())
  config['text_config'] |= of_config
  (tmp_path / 'config.json').write_text(json.dumps(config))
  return tmp_path


_CONVOLUTION = 'model.language_model.layers.0.linear_attn.conv1d.weight'


@pytest.mark.parametrize(
  ('tensors', 'settings', 'message'),
  [
    (
      {'mtp.fc.weight': None},
      {},
      r'lacks 1 tensors \(mtp\.fc\.weight\): the checkpoint is incomplete',
    ),
    (
      {'mtp.fc.weight': np.zeros((_D, _D), 'f4')},
      {},
      r'mtp\.fc\.weight has shape \(32, 32\), expected \(32, 64\)',
    ),
    (
      {'mtp.layers.0.self_attn.q_proj.weight': np.zeros((64, _D), 'f4')},
      {},
      r'q_proj\.weight has shape \(64, 32\), expected \(128, 32\)',
    ),
    (
      {'mtp.layers.1.input_layernorm.weight': np.zeros(_D, 'f4')},
      {},
      r'has 1 tensors \(mtp\.layers\.1\.input_layernorm\.weight\) unknown',
    ),
    ({}, {'mtp_num_hidden_layers': 2}, 'mtp_num_hidden_layers is 2, but only'),
    (
      {},
      {'mtp_use_dedicated_embeddings': True},
      'mtp_use_dedicated_embeddings is True, but only',
    ),
    # Its norms have 1 added, which the shapes of the module do not show.
    (
      {_CONVOLUTION: np.zeros((56, 4, 1), 'f4')},
      {},
      'the checkpoint was converted for another library',
    ),
  ],
)
def test_modules_that_do_not_fit_are_refused(
  dense, tmp_path, tensors, settings, message
):
  target = specsample.load(dense)
  folder = _changed(dense, tmp_path, tensors, **settings)
  with pytest.raises(ValueError, match=message):
    specsample.load_drafter(folder, target)


def test_a_target_of_another_family_is_refused(dense, tmp_path):
  config = transformers.LlamaConfig(
    vocab_size=_V,
    hidden_size=_D,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
  )
  transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
  with pytest.raises(ValueError, match=r'lacks .*q_proj\.weight\[query\]'):
    specsample.load_drafter(dense, specsample.load(tmp_path))
