"""Drafters with Gemma 4's layers, against the parts of transformers.

Their names and settings are those that DeepSpec writes for targets of Gemma 4.
"""

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma4 import modeling_gemma4 as theirs

import specsample
from specsample import drafters
from tests.loading.published import by_hand
from tests.loading.published import folders

_V, _D, _L, _NUM, _RANK, _MASK, _CAP = 32, 16, 6, 2, 4, 31, 2.0
_HEADS, _KV, _HEAD, _MLP = 4, 1, 8, 24
_SIZES = {
  'vocab_size': _V,
  'hidden_size': _D,
  'num_hidden_layers': _L,
  'num_attention_heads': _HEADS,
  'num_key_value_heads': 2,
  'num_global_key_value_heads': _KV,
  'intermediate_size': _MLP,
  'max_position_embeddings': 64,
  'layer_types': ['sliding_attention', 'full_attention'] * 3,
  'head_dim': 6,
  'global_head_dim': _HEAD,
  'attention_k_eq_v': True,
  'sliding_window': 7,
  'hidden_size_per_layer_input': 0,
  'final_logit_softcapping': _CAP,
}
_OF_LAYERS = transformers.Gemma4TextConfig(
  **_SIZES
  | {'num_hidden_layers': _NUM, 'layer_types': ['full_attention'] * _NUM}
)
_PROMPT = [3, 1, 4, 9, 2]
_LAYERS = [1, 3]  # of the target, which are read


@pytest.fixture(scope='module')
def target(tmp_path_factory):
  folder = tmp_path_factory.mktemp('target')
  torch.manual_seed(0)
  config = transformers.Gemma4TextConfig(**_SIZES, initializer_range=0.3)
  transformers.Gemma4ForCausalLM(config).save_pretrained(folder)
  return specsample.load(folder)


def _settings(architecture, num_layers=_NUM, **more):
  """Returns the target's settings with those that DeepSpec changes."""
  return {
    **_SIZES,
    'model_type': 'gemma4_unified_text',
    'architectures': [architecture],
    'hidden_activation': 'gelu_pytorch_tanh',
    'rms_norm_eps': 1e-6,
    'rope_parameters': _OF_LAYERS.rope_parameters,
    'use_bidirectional_attention': 'vision',
    'enable_moe_block': False,
    'use_double_wide_mlp': False,
    'num_kv_shared_layers': 0,
    'num_hidden_layers': num_layers,
    'layer_types': ['full_attention'] * num_layers,
    'num_target_layers': _L,
    'tie_word_embeddings': False,
    'target_layer_ids': _LAYERS,
    **more,
  }


_OF_BLOCKS = {'block_size': 3, 'mask_token_id': _MASK, 'num_anchors': 8}
_DFLASH = _settings(
  'Gemma4DSparkModel',
  **_OF_BLOCKS,
  markov_rank=0,
  enable_confidence_head=False,
)
_DSPARK = _settings(
  'Gemma4DSparkModel',
  **_OF_BLOCKS,
  markov_rank=_RANK,
  markov_head_type='vanilla',
  enable_confidence_head=True,
  confidence_head_with_markov=True,
)
_EAGLE3 = _settings(
  'Gemma4Eagle3Model',
  num_layers=1,
  ttt_length=3,
  draft_num_hidden_layers=1,
  step_loss_decay=0.8,
)
_CONFIGS = {'dflash': _DFLASH, 'dspark': _DSPARK, 'eagle3': _EAGLE3}


def _tensors(kind, target, has_value=False, has_head=False):
  rng, tensors = np.random.default_rng(0), {}
  is_eagle = kind == 'eagle3'
  in_dim = 2 * _D if is_eagle else _D
  matrices = {
    'self_attn.q_proj': (_HEADS * _HEAD, in_dim),
    'self_attn.k_proj': (_KV * _HEAD, in_dim),
    'self_attn.o_proj': (_D, _HEADS * _HEAD),
    'mlp.gate_proj': (_MLP, _D),
    'mlp.up_proj': (_MLP, _D),
    'mlp.down_proj': (_D, _MLP),
  }
  if has_value:
    matrices['self_attn.v_proj'] = (_KV * _HEAD, in_dim)
  norms = {
    'self_attn.q_norm': _HEAD,
    'self_attn.k_norm': _HEAD,
    'input_layernorm': _D,
    'post_attention_layernorm': _D,
    'pre_feedforward_layernorm': _D,
    'post_feedforward_layernorm': _D,
  }
  if is_eagle:
    norms['hidden_norm'] = _D
  for i in range(1 if is_eagle else _NUM):
    name = f'layers.{i}.'
    for part, shape in matrices.items():
      tensors[f'{name}{part}.weight'] = by_hand.normal(rng, *shape)
    for part, size in norms.items():
      tensors[f'{name}{part}.weight'] = 1 + by_hand.normal(rng, size)
    tensors[f'{name}layer_scalar'] = np.ones(1, np.float32)
  tensors['fc.weight'] = by_hand.normal(rng, _D, len(_LAYERS) * _D)
  for name in ('norm',) if is_eagle else ('norm', 'hidden_norm'):
    tensors[f'{name}.weight'] = 1 + by_hand.normal(rng, _D)
  copy = np.ascontiguousarray(by_hand.embedding(target).astype(np.float32))
  tensors['embed_tokens.weight'] = copy
  tensors['lm_head.weight'] = by_hand.normal(rng, _V, _D) if has_head else copy
  if kind == 'dspark':
    tensors |= {
      'markov_head.markov_w1.weight': by_hand.normal(rng, _V, _RANK),
      'markov_head.markov_w2.weight': by_hand.normal(rng, _V, _RANK),
      'confidence_head.proj.weight': by_hand.normal(rng, 1, _D + _RANK),
      'confidence_head.proj.bias': by_hand.normal(rng, 1),
    }
  return tensors


class _Reference:
  """The layers in float32, made of the classes of transformers."""

  def __init__(self, tensors):
    self.tensors = {name: torch.tensor(x) for name, x in tensors.items()}
    self.rope = theirs.Gemma4TextRotaryEmbedding(_OF_LAYERS)

  def linear(self, name, x):
    return x @ self.tensors[f'{name}.weight'].T

  def norm(self, name, x):
    made = theirs.Gemma4RMSNorm(x.shape[-1], 1e-6, with_scale=name is not None)
    if name is not None:
      made.weight.data = self.tensors[f'{name}.weight']
    return made(x)

  def embed(self, ids):
    return self.tensors['embed_tokens.weight'][ids] * _D**0.5

  def fuse(self, found):
    joined = np.concatenate(found.features, axis=-1).astype(np.float32)
    return self.linear('fc', torch.tensor(joined))

  def attend(self, name, x, context, mask=None):
    """Returns the attention of rows x that see the context and each other."""
    name += 'self_attn'
    seen = torch.cat([context, x])
    heads = lambda part, rows: self.linear(f'{name}.{part}_proj', rows).view(
      1, len(rows), -1, _HEAD
    )
    value_of = 'v' if f'{name}.v_proj.weight' in self.tensors else 'k'
    query = self.norm(f'{name}.q_norm', heads('q', x))
    key = self.norm(f'{name}.k_norm', heads('k', seen))
    value = self.norm(None, heads(value_of, seen))
    cos, sin = self.rope(
      seen, torch.arange(len(seen))[None], layer_type='full_attention'
    )
    turn = lambda rows, count: theirs.apply_rotary_pos_emb(
      rows, cos[:, -count:], sin[:, -count:], unsqueeze_dim=2
    ).transpose(1, 2)
    mixed = torch.nn.functional.scaled_dot_product_attention(
      turn(query, len(x)),
      turn(key, len(seen)),
      value.transpose(1, 2),
      attn_mask=mask,
      scale=1.0,
      enable_gqa=True,
    )
    mixed = mixed.transpose(1, 2).reshape(len(x), -1)
    return self.linear(f'{name}.o_proj', mixed)

  def feed(self, name, x, attended):
    x = x + self.norm(f'{name}post_attention_layernorm', attended)
    mlp = theirs.Gemma4TextMLP(_OF_LAYERS, 0)
    for part in ('gate_proj', 'up_proj', 'down_proj'):
      weight = self.tensors[f'{name}mlp.{part}.weight']
      getattr(mlp, part).weight.data = weight
    fed = mlp(self.norm(f'{name}pre_feedforward_layernorm', x))
    return x + self.norm(f'{name}post_feedforward_layernorm', fed)

  def logits(self, rows):
    return torch.tanh(self.linear('lm_head', rows) / _CAP) * _CAP

  def block(self, found):
    """Returns the logits of a block that drafts from the pending token."""
    context = self.norm('hidden_norm', self.fuse(found))
    num_drafts = len(found.drafts)
    x = self.embed([found.text[-1]] + [_MASK] * (num_drafts - 1))
    for i in range(_NUM):
      name = f'layers.{i}.'
      read = self.norm(f'{name}input_layernorm', x)
      x = self.feed(name, x, self.attend(name, read, context))
    logits = self.logits(self.norm('norm', x))
    if 'markov_head.markov_w1.weight' in self.tensors:
      before = [found.text[-1], *found.drafts[:-1]]
      embedded = self.tensors['markov_head.markov_w1.weight'][before]
      logits = logits + self.linear('markov_head.markov_w2', embedded)
    return logits

  def chain(self, found):
    """Returns the logits of a chain that continues from its own outputs."""
    tokens, features = [*found.text, *found.drafts], self.fuse(found)
    name, logits = 'layers.0.', []
    for _ in found.drafts:
      size = len(features)
      embedded = self.embed(tokens[1 : size + 1])
      read = torch.cat(
        [
          self.norm(f'{name}input_layernorm', embedded),
          self.norm(f'{name}hidden_norm', features),
        ],
        dim=-1,
      )
      mask = torch.tril(torch.ones(size, size, dtype=torch.bool))
      attended = self.attend(name, read, read[:0], mask)
      last = self.feed(name, features, attended)[-1:]
      logits.append(self.logits(self.norm('norm', last)))
      features = torch.cat([features, last])
    return torch.cat(logits)


_CASES = {
  'dflash': ('dflash', {}, {}),
  'dspark with a head': ('dspark', {'has_head': True}, {}),
  'eagle3': ('eagle3', {}, {}),
  # As transformers has written sizes since 5.15, for the target's layers.
  'eagle3 with values': (
    'eagle3',
    {'has_value': True, 'has_head': True},
    {
      'attention_k_eq_v': False,
      'global_head_dim': None,
      'num_global_key_value_heads': None,
      'per_layer_config': {str(i): {'head_dim': _HEAD} for i in (1, 3, 5)},
    },
  ),
}


@pytest.mark.parametrize('case', _CASES)
def test_drafts_are_those_of_transformers_layers(tmp_path, target, case):
  kind, parts, changes = _CASES[case]
  tensors = _tensors(kind, target, **parts)
  folder = folders.save(tmp_path, tensors, _CONFIGS[kind] | changes)
  loaded = specsample.load_drafter(folder, target)
  drafter = loaded.drafter
  kinds = {
    'dflash': drafters.DFlash,
    'dspark': drafters.DSpark,
    'eagle3': drafters.Eagle3,
  }
  assert type(drafter) is kinds[kind]
  assert drafter.num_draft_tokens == 3
  assert drafter.own_unembedding == parts.get('has_head', False)
  reference = _Reference(tensors)
  for found in by_hand.two_rounds(loaded, target, _PROMPT, 1, 7):
    with torch.no_grad():
      draft = reference.chain if kind == 'eagle3' else reference.block
      expected = draft(found)
    np.testing.assert_allclose(found.logits, expected.numpy(), atol=1e-4)


def _without(name):
  return lambda tensors: {x: y for x, y in tensors.items() if x != name}


_as_they_are = lambda tensors: tensors
_REFUSED = {
  'scaled layers': (
    {},
    lambda x: x | {'layers.1.layer_scalar': np.full(1, 0.5, np.float32)},
    r'layers.1.layer_scalar is \[0.5\], but in drafters only \[1.0\]',
  ),
  'windows': (
    {'layer_types': ['sliding_attention', 'full_attention']},
    _as_they_are,
    r"layer_types is \['sliding_attention'.*, without a window",
  ),
  'experts': (
    {'enable_moe_block': True},
    _as_they_are,
    'enable_moe_block is True, but only False',
  ),
  'an embedding per layer': (
    {'hidden_size_per_layer_input': 8},
    _as_they_are,
    'hidden_size_per_layer_input is 8, but only 0',
  ),
  'another softcap': (
    {'final_logit_softcapping': 30.0},
    _as_they_are,
    "softcapping is 30.0, but the target's is 2.0: the drafter was made for",
  ),
  'no values': (
    {'attention_k_eq_v': False},
    _as_they_are,
    'lacks 2 tensors .layers.0.self_attn.v_proj.weight',
  ),
  'heads that do not fit': (
    {'num_attention_heads': 2},
    _as_they_are,
    'q_proj.weight has shape .32, 16., expected .16, 16.',
  ),
  'no norms of queries': (
    {},
    _without('layers.0.self_attn.q_norm.weight'),
    'no tensor layers.0.self_attn.q_norm.weight',
  ),
  'an earlier Gemma': (
    {'model_type': 'gemma3_text'},
    _as_they_are,
    "config.json: model_type is 'gemma3_text', and the drafter's layers have "
    "norms after attention and feed-forward, as Gemma 2's and 3's .tensor "
    'layers.0.post_feedforward_layernorm.weight.: give a drafter whose layers',
  ),
}


@pytest.mark.parametrize('case', _REFUSED)
def test_what_is_not_supported_is_named(tmp_path, target, case):
  changes, damage, message = _REFUSED[case]
  tensors = damage(_tensors('dflash', target))
  folders.save(tmp_path, tensors, _DFLASH | changes)
  with pytest.raises(ValueError, match=message) as caught:
    specsample.load_drafter(tmp_path, target)
  assert str(tmp_path) in str(caught.value)


_QWEN = {'model_type': 'qwen3', 'hidden_act': 'silu', 'rope_parameters': None}
_OF_OTHERS = {
  'gpt-oss': ('self_attn.sinks', np.ones(4, np.float32), 'attention sinks'),
  'DeepSeek': (
    'self_attn.kv_a_proj_with_mqa.weight',
    np.ones((4, _D), np.float32),
    'latent attention',
  ),
  'experts': ('mlp.gate.weight', np.ones((4, _D), np.float32), 'a mixture of'),
  'Qwen3.5': (
    'self_attn.q_proj.weight',
    np.ones((2 * _HEADS * _HEAD, _D), np.float32),
    'an output gate',
  ),
}


@pytest.mark.parametrize('case', _OF_OTHERS)
def test_layers_of_other_families_are_named(tmp_path, target, case):
  name, tensor, kind = _OF_OTHERS[case]
  tensors = {
    key: x
    for key, x in _tensors('dflash', target, has_value=True).items()
    if '_feedforward_' not in key and 'scalar' not in key
  }
  tensors[f'layers.0.{name}'] = tensor
  folders.save(tmp_path, tensors, _DFLASH | _QWEN | {'head_dim': _HEAD})
  with pytest.raises(ValueError, match=f"drafter's layers have {kind}"):
    specsample.load_drafter(tmp_path, target)


def test_an_activation_by_another_name(tmp_path, target):
  tensors = _without('layers.0.post_feedforward_layernorm.weight')
  changes = _QWEN | {'hidden_act': None}
  folders.save(tmp_path, tensors(_tensors('dflash', target)), _DFLASH | changes)
  message = "hidden_activation is 'gelu_pytorch_tanh', but only 'silu'"
  with pytest.raises(ValueError, match=message):
    specsample.load_drafter(tmp_path, target)
