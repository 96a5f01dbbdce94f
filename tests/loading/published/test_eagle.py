"""EAGLE 1 to 3 in every spelling, against NumPy."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from tests.loading.published import by_hand
from tests.loading.published import folders

_V, _D, _L, _DRAFTED = 32, 16, 6, 12
_HEADS, _KV, _HEAD, _MLP, _EPS, _THETA = 2, 1, 6, 24, 1e-6, 500.0
# The target's own layers have 4 heads of 8 numbers.
MODEL = testing.tiny_llama(vocab_size=_V, dim=_D, num_layers=_L)
TARGET = specsample.Loaded(MODEL, MODEL.init(jax.random.key(0)), None)
_PROMPT = [3, 1, 4, 9, 2]
_IDS = np.sort(np.random.default_rng(9).permutation(_V)[:_DRAFTED])
CONFIG = {
  'architectures': ['LlamaForCausalLM'],
  'model_type': 'llama',
  'hidden_act': 'silu',
  'hidden_size': _D,
  'intermediate_size': _MLP,
  'num_attention_heads': _HEADS,
  'num_key_value_heads': _KV,
  'head_dim': _HEAD,
  'num_hidden_layers': 1,
  'max_position_embeddings': 64,
  'rms_norm_eps': _EPS,
  'rope_theta': _THETA,
  'vocab_size': _V,
}
SPECULATORS = {
  'speculators_model_type': 'eagle3',
  'architectures': ['Eagle3Speculator'],
  'draft_vocab_size': _DRAFTED,
  'transformer_layer_config': CONFIG,
  'speculators_config': {
    'algorithm': 'eagle3',
    'proposal_methods': [{'proposal_type': 'greedy', 'speculative_tokens': 3}],
    'verifier': {'name_or_path': 'tiny', 'architectures': []},
  },
}


def layer_tensors(rng, name, in_dim):
  shapes = {
    'self_attn.q_proj': (_HEADS * _HEAD, in_dim),
    'self_attn.k_proj': (_KV * _HEAD, in_dim),
    'self_attn.v_proj': (_KV * _HEAD, in_dim),
    'self_attn.o_proj': (_D, _HEADS * _HEAD),
    'mlp.gate_proj': (_MLP, _D),
    'mlp.up_proj': (_MLP, _D),
    'mlp.down_proj': (_D, _MLP),
  }
  tensors = {
    f'{name}{part}.weight': by_hand.normal(rng, *shape)
    for part, shape in shapes.items()
  }
  return tensors | _norm(rng, f'{name}post_attention_layernorm')


def _norm(rng, name, size=_D):
  return {f'{name}.weight': 1 + by_hand.normal(rng, size)}


def joint_norm():
  return _norm(np.random.default_rng(3), 'input_norm', 3 * _D)


def eagle_tensors(has_bias=True):
  rng = np.random.default_rng(0)
  tensors = layer_tensors(rng, 'layers.0.', _D)
  tensors['fc.weight'] = by_hand.normal(rng, _D, 2 * _D)
  if has_bias:
    tensors['fc.bias'] = by_hand.normal(rng, _D)
  return tensors


def _embedding():
  return np.ascontiguousarray(by_hand.embedding(TARGET).astype(np.float32))


def eagle3_tensors(name='midlayer.', ids=_IDS, num_features=3):
  rng = np.random.default_rng(1)
  tensors = layer_tensors(rng, name, 2 * _D)
  tensors |= _norm(rng, f'{name}hidden_norm')
  tensors |= _norm(rng, f'{name}input_layernorm') | _norm(rng, 'norm')
  tensors['fc.weight'] = by_hand.normal(rng, _D, num_features * _D)
  size = _V if ids is None else len(ids)
  tensors['lm_head.weight'] = by_hand.normal(rng, size, _D)
  if ids is not None:
    tensors['d2t'] = ids - np.arange(len(ids))
    tensors['t2d'] = np.isin(np.arange(_V), ids)
  return tensors


def _chain(found, features, step):
  """Returns each draft's logits, using step(rows of embeddings, features).

  Entry t combines feature t with token t + 1. After the text, the output of the
  entry before takes the place of the feature.
  """
  tokens = [*found.text, *found.drafts]
  embedded, logits = by_hand.embedding(TARGET), []
  for _ in found.drafts:
    ids = tokens[1 : len(features) + 1]
    fed_back, row = step(embedded[ids], features)
    logits.append(row)
    features = np.concatenate([features, fed_back[None]])
  return logits


def _eagle_by_hand(tensors, found):
  name = 'layers.0'

  def step(embedded, features):
    x = by_hand.linear(
      tensors, 'fc', np.concatenate([embedded, features], axis=-1)
    )
    x = x + by_hand.causal_attention(
      tensors, f'{name}.self_attn', x, _HEAD, _THETA
    )
    read = by_hand.norm(tensors, f'{name}.post_attention_layernorm', x, _EPS)
    last = (x + by_hand.mlp(tensors, f'{name}.mlp', read))[-1]
    if 'lm_head.weight' in tensors:
      return last, by_hand.linear(tensors, 'lm_head', last)
    return last, by_hand.unembedding(TARGET) @ last

  return _chain(found, found.hidden, step)


def _eagle3_by_hand(tensors, found, name='midlayer', flags=(), window=None):
  def step(embedded, features):
    normed = by_hand.norm(tensors, f'{name}.hidden_norm', features, _EPS)
    first = by_hand.norm(tensors, f'{name}.input_layernorm', embedded, _EPS)
    read = np.concatenate([first, normed], axis=-1)
    around = normed if 'norm_before_residual' in flags else features
    x = around + by_hand.causal_attention(
      tensors, f'{name}.self_attn', read, _HEAD, _THETA, window=window
    )
    read = by_hand.norm(tensors, f'{name}.post_attention_layernorm', x, _EPS)
    last = (x + by_hand.mlp(tensors, f'{name}.mlp', read))[-1]
    normed = by_hand.norm(tensors, 'norm', last, _EPS)
    logits = by_hand.linear(tensors, 'lm_head', normed)
    if 'd2t' in tensors:
      of_target = np.full(_V, -np.inf)
      of_target[tensors['d2t'] + np.arange(_DRAFTED)] = logits
      logits = of_target
    return normed if 'norm_output' in flags else last, logits

  parts = found.features
  if 'fc_norm' in flags:
    parts = [
      by_hand.norm(tensors, f'fc_norm.{i}', x, _EPS)
      for i, x in enumerate(parts)
    ]
  joined = np.concatenate(parts, axis=-1)
  if 'norm_before_fc' in flags:
    joined = by_hand.norm(tensors, 'input_norm', joined, _EPS)
  features = by_hand.linear(tensors, 'fc', joined)
  return _chain(found, features, step)


def _assert_drafts(loaded, by_hand_of):
  for found in by_hand.two_rounds(loaded, TARGET, _PROMPT, 1, 7):
    np.testing.assert_allclose(found.logits, by_hand_of(found), atol=1e-4)


@pytest.mark.parametrize(
  ('name', 'has_bias', 'more'),
  [
    ('pytorch_model.bin', True, {}),
    ('model.safetensors', False, {'embed_tokens.weight': _embedding()}),
    (
      'model.safetensors',
      True,
      {'lm_head.weight': by_hand.normal(np.random.default_rng(5), _V, _D)},
    ),
  ],
)
def test_eagle_drafts_as_its_tensors_say(tmp_path, name, has_bias, more):
  tensors = eagle_tensors(has_bias) | more
  folder = folders.save(tmp_path, tensors, CONFIG | {'bias': has_bias}, name)
  loaded = specsample.load_drafter(folder, TARGET)
  assert type(loaded.drafter) is drafters.Eagle
  assert loaded.drafter.num_draft_tokens == 5
  assert loaded.drafter.bias == has_bias
  assert loaded.drafter.own_unembedding == ('lm_head.weight' in more)
  _assert_drafts(loaded, lambda x: _eagle_by_hand(tensors, x))


@pytest.mark.parametrize('has_bias', [True, False])
def test_eagle_of_speculators(tmp_path, has_bias):
  """The converter of speculators renames what EAGLE's authors wrote."""
  tensors = eagle_tensors(has_bias)
  saved = {
    name.replace('fc.', 'fusion_fc.').replace('layers.0.', 'transformer.'): x
    for name, x in tensors.items()
  }
  config = SPECULATORS | {
    'speculators_model_type': 'eagle',
    'fusion_bias': has_bias,
    'layernorms': False,
  }
  loaded = folders.load(tmp_path, saved, config, TARGET)
  assert type(loaded.drafter) is drafters.Eagle
  assert loaded.drafter.num_draft_tokens == 3
  assert loaded.drafter.bias == has_bias
  _assert_drafts(loaded, lambda x: _eagle_by_hand(tensors, x))


def test_the_products_of_attention_may_have_a_bias(tmp_path):
  """EAGLE for Qwen 2 has such biases, but none for the output projection."""
  rng, tensors = np.random.default_rng(6), eagle_tensors()
  for part, heads in (('q', _HEADS), ('k', _KV), ('v', _KV)):
    bias = by_hand.normal(rng, heads * _HEAD)
    tensors[f'layers.0.self_attn.{part}_proj.bias'] = bias
  folder = folders.save(tmp_path, tensors, CONFIG | {'qkv_bias': True})
  loaded = specsample.load_drafter(folder, TARGET, 3)
  _assert_drafts(loaded, lambda x: _eagle_by_hand(tensors, x))


_SPELLINGS = {
  'its authors': ('midlayer.', '', 'pytorch_model.bin', CONFIG),
  'SpecForge': (
    'midlayer.',
    '',
    'model.safetensors',
    CONFIG
    | {
      'architectures': ['LlamaForCausalLMEagle3'],
      'draft_vocab_size': _DRAFTED,
      'tie_word_embeddings': False,
    },
  ),
  'with a prefix': ('layers.0.', 'model.', 'model.safetensors', CONFIG),
  'speculators': ('layers.0.', '', 'model.safetensors', SPECULATORS),
}


@pytest.mark.parametrize('spelling', _SPELLINGS)
def test_eagle3_drafts_as_its_tensors_say(tmp_path, spelling):
  name, prefix, file_name, config = _SPELLINGS[spelling]
  tensors = eagle3_tensors(name)
  if spelling == 'SpecForge':
    tensors['embed_tokens.weight'] = _embedding()
  folder = folders.save(
    tmp_path,
    {
      key if key in ('d2t', 't2d', 'lm_head.weight') else prefix + key: x
      for key, x in tensors.items()
    },
    config,
    file_name,
  )
  loaded = specsample.load_drafter(folder, TARGET)
  drafter = loaded.drafter
  assert type(drafter) is drafters.Eagle3
  assert drafter.num_draft_tokens == (3 if spelling == 'speculators' else 5)
  assert drafter.feature_layers == (1, _L // 2 - 1, _L - 4)
  ids = np.asarray(loaded.params['vocabulary']['d2t'])
  np.testing.assert_array_equal(ids, _IDS)
  # Older files of speculators do not say that they have this norm.
  flags = ('norm_before_residual',) if spelling == 'speculators' else ()
  _assert_drafts(
    loaded, lambda x: _eagle3_by_hand(tensors, x, name[:-1], flags)
  )


def test_a_norm_before_fc_may_be_set_in_eagle_config(tmp_path):
  tensors = eagle3_tensors()
  tensors |= joint_norm()
  config = CONFIG | {'eagle_config': {'norm_before_fc': True}}
  drafter = folders.load(tmp_path, tensors, config, TARGET)
  assert drafter.drafter.has_joint_norm
  assert not drafter.drafter.norm_before_residual


def test_eagle3_of_all_tokens_and_five_layers(tmp_path):
  """As in DeepSpec, numbers are of layers' outputs, and heads have norms."""
  tensors = eagle3_tensors('layers.0.', ids=None, num_features=5)
  for part in ('q_norm', 'k_norm'):
    name = f'layers.0.self_attn.{part}'
    tensors |= _norm(np.random.default_rng(4), name, _HEAD)
  config = CONFIG | {'target_layer_ids': [0, 1, 2, 3, 4], 'ttt_length': 2}
  loaded = folders.load(tmp_path, tensors, config, TARGET)
  assert loaded.drafter.num_draft_tokens == 2
  assert loaded.drafter.feature_layers == (0, 1, 2, 3, 4)
  assert loaded.drafter.draft_vocab_size is None
  _assert_drafts(loaded, lambda x: _eagle3_by_hand(tensors, x, 'layers.0'))


@pytest.mark.parametrize(
  'flags',
  [
    ('norm_before_residual', 'fc_norm'),
    ('norm_output',),
    # The flags that speculators sets by default when it trains.
    ('norm_before_residual', 'norm_before_fc', 'norm_output'),
  ],
)
def test_what_speculators_may_change(tmp_path, flags):
  tensors = eagle3_tensors('layers.0.')
  if 'norm_before_fc' in flags:
    tensors |= joint_norm()
  if 'fc_norm' in flags:
    rng = np.random.default_rng(3)
    for i in range(3):
      tensors |= _norm(rng, f'fc_norm.{i}')
  config = SPECULATORS | {'norm_before_residual': False}
  config |= dict.fromkeys(flags, True)
  # In speculators' numbers the embedding counts as the first layer.
  config['eagle_aux_hidden_state_layer_ids'] = [0, 3, 5]
  loaded = folders.load(tmp_path, tensors, config, TARGET)
  assert loaded.drafter.feature_layers == (-1, 2, 4)
  _assert_drafts(
    loaded, lambda x: _eagle3_by_hand(tensors, x, 'layers.0', flags)
  )


def test_the_layer_may_have_a_window(tmp_path):
  sliding = {'layer_types': ['sliding_attention'], 'sliding_window': 3}
  config = SPECULATORS | {'transformer_layer_config': CONFIG | sliding}
  tensors = eagle3_tensors('layers.0.')
  loaded = folders.load(tmp_path, tensors, config, TARGET)
  assert loaded.drafter.window == 3
  flags = ('norm_before_residual',)
  _assert_drafts(
    loaded, lambda x: _eagle3_by_hand(tensors, x, 'layers.0', flags, window=3)
  )


def test_the_target_may_have_layers_of_another_kind(tmp_path):
  """Qwen 3, for example, has norms for its heads, and its drafters don't."""
  model = dataclasses.replace(
    MODEL, qk_norm=True, sliding_window=3, sliding_layers=(0, 2)
  )
  params = model.init(jax.random.key(1))
  params |= {'embedding': TARGET.params['embedding']}
  target = specsample.Loaded(model, params, None)
  tensors = eagle3_tensors()
  folder = folders.save(tmp_path, tensors, CONFIG)
  loaded = specsample.load_drafter(folder, target)
  assert not loaded.drafter.layer_config.qk_norm
  for found in by_hand.two_rounds(loaded, target, _PROMPT, 1, 7):
    expected = _eagle3_by_hand(tensors, found)
    np.testing.assert_allclose(found.logits, expected, atol=1e-4)


def test_sglangs_numbers_are_of_outputs(tmp_path):
  ids = {'eagle_aux_hidden_state_layer_ids': [0, 2, 4]}
  config = CONFIG | {'eagle_config': ids}
  loaded = folders.load(tmp_path, eagle3_tensors(), config, TARGET)
  assert loaded.drafter.feature_layers == (0, 2, 4)


def test_a_drafter_of_the_last_hidden_vector_is_refused(tmp_path):
  config = CONFIG | {'eagle_config': {'use_aux_hidden_state': False}}
  folder = folders.save(tmp_path, eagle3_tensors(), config)
  message = 'use_aux_hidden_state is False, but only True is supported'
  with pytest.raises(ValueError, match=message):
    specsample.load_drafter(folder, TARGET)


def test_layers_under_two_names_must_agree(tmp_path):
  config = CONFIG | {'aux_hidden_states_layer_ids': [0, 2, 4]}
  folder = folders.save(tmp_path, eagle3_tensors(), config)
  loaded = specsample.load_drafter(folder, TARGET)
  assert loaded.drafter.feature_layers == (0, 2, 4)
  config |= {'eagle_aux_hidden_state_layer_ids': [0, 2, 4]}
  folders.save(tmp_path, eagle3_tensors(), config)
  with pytest.raises(
    ValueError, match=r'is \(-1, 1, 3\) and aux_hidden_states'
  ):
    specsample.load_drafter(folder, TARGET)


def test_what_was_loaded_is_saved_and_drafts_the_targets_text(tmp_path):
  scaled = {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 100.0}
  config = CONFIG | {'rope_parameters': scaled, 'rope_theta': None}
  folder = folders.save(tmp_path / 'published', eagle3_tensors(), config)
  loaded = specsample.load_drafter(folder, TARGET, 2)
  assert loaded.drafter.layer_config.rope_theta == 100
  again = folders.saved_again(tmp_path / 'own', loaded, TARGET)
  assert again.card['settings']['layer_config']['rope_scaling'] == {
    'type': 'linear',
    'factor': 2.0,
  }
  folders.assert_greedy_equal(again, TARGET)


def test_parameters_take_the_targets_dtype(tmp_path):
  half = lambda x: x.astype('bfloat16')
  model = dataclasses.replace(MODEL, dtype='bfloat16')
  target = specsample.Loaded(model, jax.tree.map(half, TARGET.params), None)
  tensors = eagle3_tensors() | {'embed_tokens.weight': _embedding()}
  loaded = folders.load(tmp_path, tensors, CONFIG, target)
  dtypes = {str(x.dtype) for x in jax.tree.leaves(loaded.params)}
  assert dtypes == {'bfloat16', 'int32'}
  assert loaded.drafter.layer_config.dtype == 'bfloat16'


_DAMAGES = {
  'missing': (
    lambda: folders.changed(
      eagle3_tensors(), **{'midlayer.mlp.up_proj.weight': None}
    ),
    {},
    r'lacks 1 tensors \(midlayer\.mlp\.up_proj\.weight\): the checkpoint',
  ),
  'unknown': (
    lambda: folders.changed(
      eagle3_tensors(), **{'midlayer.gate.weight': np.ones(2, 'f4')}
    ),
    {},
    r'has 1 tensors \(midlayer\.gate\.weight\) unknown',
  ),
  'of another shape': (
    lambda: folders.changed(
      eagle3_tensors(), **{'norm.weight': np.ones(8, 'f4')}
    ),
    {},
    r'norm\.weight has shape \(8,\), expected \(16,\)',
  ),
  'two of another shape': (
    lambda: folders.changed(
      eagle3_tensors('midlayer.', None),
      **{
        'norm.weight': np.ones(8, 'f4'),
        'lm_head.weight': np.ones((_V, 8), 'f4'),
      },
    ),
    {},
    r'tensor lm_head\.weight has shape \(32, 8\), expected \(32, 16\); tensor '
    r'norm\.weight has shape \(8,\), expected \(16,\) according to the '
    'configuration',
  ),
  'of fewer features': (
    lambda: eagle3_tensors(num_features=2),
    {},
    r'fc\.weight has shape \(16, 32\), expected \(16, 48\)',
  ),
  'eagle of another shape': (
    lambda: folders.changed(
      eagle_tensors(), **{'fc.weight': np.ones((16, 48), 'f4')}
    ),
    {},
    r'fc\.weight has shape \(16, 48\), expected \(16, 32\)',
  ),
  'eagle without its layer': (
    lambda: {'fc.weight': np.ones((16, 32), 'f4')},
    {},
    r'lacks 8 tensors \(layers\.0\.mlp\.down_proj\.weight, ',
  ),
  'config with more heads': (
    eagle3_tensors,
    {'num_attention_heads': 4},
    r'o_proj\.weight has shape \(16, 12\), expected \(16, 24\)',
  ),
  'config of a wider drafter': (
    eagle3_tensors,
    {'hidden_size': 24},
    'config.json: hidden_size is 24, but the vectors of the target have 16',
  ),
  'config of two layers': (
    eagle_tensors,
    {'num_hidden_layers': 2},
    'num_hidden_layers is 2, but only drafters with one layer are supported',
  ),
  'config of windows of no size': (
    eagle3_tensors,
    {'layer_types': ['sliding_attention']},
    'sliding_window is None, expected an integer of at least 1',
  ),
  'config of another activation': (
    eagle_tensors,
    {'hidden_act': 'gelu'},
    "hidden_act is 'gelu', but only 'silu' is supported",
  ),
  'config of another vocabulary': (
    eagle3_tensors,
    {'draft_vocab_size': 16},
    r'draft_vocab_size is 16, but tensor d2t has shape \(12,\)',
  ),
  'config of a vocabulary and no ids': (
    lambda: folders.changed(eagle3_tensors(), d2t=None),
    {'draft_vocab_size': 12},
    "draft_vocab_size is 12, but .* has no tensor d2t to .* target's 32: the",
  ),
  'a norm before fc that is not there': (
    lambda: eagle3_tensors('layers.0.'),
    {'norm_before_fc': True},
    r'lacks 1 tensors \(input_norm\.weight\)',
  ),
  'a norm before fc that is not meant': (
    lambda: eagle3_tensors() | joint_norm(),
    {},
    r'has 1 tensors \(input_norm\.weight\) unknown',
  ),
  'the last layer': (
    lambda: eagle3_tensors('layers.0.', None),
    {'target_layer_ids': [1, 2, 5]},
    'reads the output of layer 5, the last layer, after the norm',
  ),
  'a layer that is not there': (
    eagle3_tensors,
    {'eagle_aux_hidden_state_layer_ids': [1, 2, 9]},
    r'feature_layers are \(0, 1, 8\), but the target has layers 0 to 5',
  ),
  'layers by name': (
    eagle3_tensors,
    {'eagle_config': {'eagle_aux_hidden_state_layer_ids': ['first']}},
    r"layer_ids is \['first'\], expected a list of integers",
  ),
  'a kind of layers that is no list': (
    eagle3_tensors,
    {'layer_types': 1},
    'layer_types is 1, expected a list of strings',
  ),
  'a part that is no object': (
    eagle3_tensors,
    {'transformer_layer_config': 'llama'},
    "transformer_layer_config is 'llama', expected an object",
  ),
  'a speculator of no name': (
    eagle3_tensors,
    {'speculators_model_type': ['eagle3']},
    r"speculators_model_type is \['eagle3'\], expected a string",
  ),
  'd2t outside': (
    lambda: folders.changed(
      eagle3_tensors(), d2t=eagle3_tensors()['d2t'] + _V, t2d=None
    ),
    {},
    'd2t holds id .* outside the vocabulary of 32',
  ),
  'd2t twice': (
    lambda: folders.changed(
      eagle3_tensors(), d2t=-np.arange(_DRAFTED), t2d=None
    ),
    {},
    'd2t names a token twice',
  ),
  't2d of other tokens': (
    lambda: folders.changed(eagle3_tensors(), t2d=np.arange(_V) < _DRAFTED),
    {},
    'tensors d2t and t2d name different tokens',
  ),
  'another embedding': (
    lambda: (
      eagle_tensors() | {'embed_tokens.weight': _embedding()[::-1].copy()}
    ),
    {},
    "embed_tokens.weight is not the target's embedding: the drafter was",
  ),
  'an embedding of more tokens': (
    lambda: eagle_tensors() | {'embed_tokens.weight': np.ones((40, _D), 'f4')},
    {},
    r'embed_tokens\.weight has shape \(40, 16\), but the target',
  ),
  'no such speculator': (
    eagle_tensors,
    {'speculators_model_type': 'mlp'},
    "speculators_model_type is 'mlp', but the supported types are peagle, "
    'eagle3, dspark, dflash2, dflash, eagle',
  ),
  'norms that EAGLE has not': (
    eagle_tensors,
    {'speculators_model_type': 'eagle', 'layernorms': True},
    'layernorms is True, but only False is supported',
  ),
  'damaged config': (
    eagle3_tensors,
    {'intermediate_size': 'many'},
    "intermediate_size is 'many', expected an integer",
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize('damage', _DAMAGES)
def test_what_does_not_fit_is_refused(tmp_path, damage):
  make, changes, message = _DAMAGES[damage]
  folder = folders.save(tmp_path, make(), CONFIG | changes)
  with pytest.raises(ValueError, match=message) as caught:
    specsample.load_drafter(folder, TARGET)
  assert '\n' not in str(caught.value)


def _shards(folder, suffix):
  """Writes the weights as two files and their index."""
  tensors = eagle_tensors()
  names = sorted(tensors)
  parts = [names[:5], names[5:]]
  stem = 'model' if suffix == 'safetensors' else 'pytorch_model'
  weight_map = {}
  for i, part in enumerate(parts):
    file_name = f'{stem}-{i + 1:05}-of-00002.{suffix}'
    some = {name: tensors[name] for name in part}
    folders.save(folder, some, CONFIG, file_name)
    weight_map |= dict.fromkeys(part, file_name)
  index = folder / f'{stem}.{suffix}.index.json'
  index.write_text(json.dumps({'weight_map': weight_map}))
  return folder


@pytest.mark.parametrize('suffix', ['safetensors', 'bin'])
def test_shards_are_read_through_their_index(tmp_path, suffix):
  loaded = specsample.load_drafter(_shards(tmp_path, suffix), TARGET)
  found = loaded.params['project']['linear']['kernel']
  np.testing.assert_array_equal(found, eagle_tensors()['fc.weight'].T)
  (missing,) = tmp_path.glob('*00002-of*')
  content = missing.read_bytes()
  missing.write_bytes(content[:-300])
  with pytest.raises(ValueError, match='download it again'):
    specsample.load_drafter(tmp_path, TARGET)
  os.remove(missing)
  with pytest.raises(ValueError, match=rf'lacks {missing.name}, which .*index'):
    specsample.load_drafter(tmp_path, TARGET)


@pytest.mark.parametrize('is_trained', [False, True])
def test_an_embedding_that_was_trained_must_be_the_targets(
  tmp_path, is_trained
):
  tensors = eagle3_tensors() | {'embed_tokens.weight': 1.03 * _embedding()}
  config = CONFIG | {'embed_requires_grad': is_trained}
  folder = folders.save(tmp_path, tensors, config)
  if is_trained:
    with pytest.raises(ValueError, match="is not the target's embedding"):
      specsample.load_drafter(folder, TARGET)
  else:
    specsample.load_drafter(folder, TARGET)


def test_the_targets_embedding_is_known_without_gemmas_factor(tmp_path):
  model = dataclasses.replace(MODEL, embedding_scale=4.0)
  target = specsample.Loaded(model, TARGET.params, None)
  tensors = eagle3_tensors() | {'embed_tokens.weight': _embedding()}
  folder = folders.save(tmp_path, tensors, CONFIG)
  assert (
    type(specsample.load_drafter(folder, target).drafter) is drafters.Eagle3
  )
