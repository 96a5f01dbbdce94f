"""DFlash and DSpark as their authors and speculators write them."""

import dataclasses

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from tests.loading.published import by_hand
from tests.loading.published import folders

_V, _D, _L, _DRAFTED, RANK, _NUM = 32, 16, 6, 12, 4, 2
_HEADS, _KV, _HEAD, _MLP, _EPS, _THETA = 4, 1, 6, 24, 1e-6, 500.0
MODEL = testing.tiny_llama(vocab_size=_V, dim=_D, num_layers=_L)
TARGET = specsample.Loaded(MODEL, by_hand.as_published(MODEL), None)
_PROMPT = [3, 1, 4, 9, 2]
_MASK = 31
IDS = np.sort(np.random.default_rng(9).permutation(_V)[:_DRAFTED])
_LAYER_CONFIG = {
  'model_type': 'qwen3',
  'hidden_act': 'silu',
  'hidden_size': _D,
  'intermediate_size': _MLP,
  'num_attention_heads': _HEADS,
  'num_key_value_heads': _KV,
  'head_dim': _HEAD,
  'num_hidden_layers': _NUM,
  'layer_types': ['full_attention'] * _NUM,
  'max_position_embeddings': 64,
  'rms_norm_eps': _EPS,
  'rope_theta': _THETA,
  'vocab_size': _V,
}
DFLASH = _LAYER_CONFIG | {
  'architectures': ['DFlashDraftModel'],
  'block_size': 4,
  'dflash_config': {'mask_token_id': _MASK, 'target_layer_ids': [1, 3]},
  'num_target_layers': _L,
}
DSPARK = _LAYER_CONFIG | {
  'architectures': ['Qwen3DSparkModel'],
  'block_size': 3,
  'mask_token_id': _MASK,
  'target_layer_ids': [1, 3],
  'enable_confidence_head': True,
  'confidence_head_with_markov': True,
  'markov_rank': RANK,
  'markov_head_type': 'vanilla',
}
_SPECULATORS = {
  'speculators_model_type': 'dflash',
  'transformer_layer_config': _LAYER_CONFIG,
  'block_size': 4,
  'mask_token_id': _MASK,
  'draft_vocab_size': _V,
  # The embedding counts as the first layer.
  'aux_hidden_state_layer_ids': [2, 4],
}


def dflash_tensors(ids=None, has_head=False, rank=0, head='vanilla'):
  rng, tensors = np.random.default_rng(0), {}
  matrices = {
    'self_attn.q_proj': (_HEADS * _HEAD, _D),
    'self_attn.k_proj': (_KV * _HEAD, _D),
    'self_attn.v_proj': (_KV * _HEAD, _D),
    'self_attn.o_proj': (_D, _HEADS * _HEAD),
    'mlp.gate_proj': (_MLP, _D),
    'mlp.up_proj': (_MLP, _D),
    'mlp.down_proj': (_D, _MLP),
  }
  norms = {
    'self_attn.q_norm': _HEAD,
    'self_attn.k_norm': _HEAD,
    'input_layernorm': _D,
    'post_attention_layernorm': _D,
  }
  for i in range(_NUM):
    for name, shape in matrices.items():
      tensors[f'layers.{i}.{name}.weight'] = by_hand.normal(rng, *shape)
    for name, size in norms.items():
      scale = 1 + by_hand.normal(rng, size)
      tensors[f'layers.{i}.{name}.weight'] = scale
  tensors['fc.weight'] = by_hand.normal(rng, _D, 2 * _D)
  for name in ('hidden_norm', 'norm'):
    tensors[f'{name}.weight'] = 1 + by_hand.normal(rng, _D)
  size = _V if ids is None else len(ids)
  if has_head or ids is not None:
    tensors['lm_head.weight'] = by_hand.normal(rng, size, _D)
    tensors['embed_tokens.weight'] = np.ascontiguousarray(
      by_hand.embedding(TARGET).astype(np.float32)
    )
  if ids is not None:
    tensors['d2t'] = ids - np.arange(len(ids))
    tensors['t2d'] = np.isin(np.arange(_V), ids)
  if rank:
    tensors |= {
      'markov_head.markov_w1.weight': by_hand.normal(rng, _V, rank),
      'markov_head.markov_w2.weight': by_hand.normal(rng, size, rank),
      'confidence_head.proj.weight': by_hand.normal(rng, 1, _D + rank),
      'confidence_head.proj.bias': by_hand.normal(rng, 1),
    }
  # Biases of both signs, so that gates are neither open nor closed.
  if head == 'gated':
    name, shape = 'markov_head.gate_proj', (rank, _D + rank)
  elif head == 'rnn':
    name, shape = 'markov_head.joint_proj', (3 * rank, 2 * rank + _D)
  else:
    return tensors
  tensors[f'{name}.weight'] = by_hand.normal(rng, *shape)
  tensors[f'{name}.bias'] = by_hand.normal(rng, shape[0])
  return tensors


# Each layer's window, whether its blocks are causal, and the base of its rope.
_FULL = (None, False, _THETA)


def _seen(start, size, window, is_causal):
  """Returns what a block sees of the text before it and of itself."""
  query = start + np.arange(size)[:, None]
  key = np.arange(start + size)
  seen = np.ones((size, start + size), bool)
  if window is not None:
    seen &= np.abs(query - key) < window
  return seen & (key <= query) if is_causal else seen


def _outputs(tensors, found, size, kinds=(_FULL,) * _NUM):
  """Returns the vectors [size, D] of a block that may be unembedded."""
  features = np.concatenate(found.features, axis=-1)
  fused = by_hand.linear(tensors, 'fc', features)
  fused = by_hand.norm(tensors, 'hidden_norm', fused, _EPS)
  ids = [found.text[-1]] + [_MASK] * (size - 1)
  x = by_hand.embedding(TARGET)[ids]
  start = len(found.text) - 1
  places = start + np.arange(size)
  everywhere = np.arange(start + size)
  for i, (window, is_causal, theta) in enumerate(kinds):
    name = f'layers.{i}.self_attn'
    read = by_hand.norm(tensors, f'layers.{i}.input_layernorm', x, _EPS)
    both = np.concatenate([fused, read])
    heads = lambda part, rows, name=name: by_hand.heads(
      by_hand.linear(tensors, f'{name}.{part}_proj', rows), _HEAD
    )
    query = by_hand.norm(tensors, f'{name}.q_norm', heads('q', read), _EPS)
    key = by_hand.norm(tensors, f'{name}.k_norm', heads('k', both), _EPS)
    mixed = by_hand.attend(
      by_hand.rotate(query, places, theta),
      by_hand.rotate(key, everywhere, theta),
      heads('v', both),
      _seen(start, size, window, is_causal),
    )
    x = x + by_hand.linear(tensors, f'{name}.o_proj', mixed)
    name = f'layers.{i}.post_attention_layernorm'
    x = x + by_hand.mlp(
      tensors, f'layers.{i}.mlp', by_hand.norm(tensors, name, x, _EPS)
    )
  return by_hand.norm(tensors, 'norm', x, _EPS)


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _latent(tensors, vectors, embedded):
  """Returns the rows [K, rank] that W2 of a Markov head multiplies."""
  if 'markov_head.gate_proj.weight' in tensors:
    read = np.concatenate([vectors, embedded], axis=-1)
    gate = by_hand.linear(tensors, 'markov_head.gate_proj', read)
    return _sigmoid(gate) * embedded
  if 'markov_head.joint_proj.weight' not in tensors:
    return embedded
  state, rows = np.zeros(embedded.shape[-1]), []
  for vector, token in zip(vectors, embedded, strict=True):
    read = np.concatenate([state, token, vector])
    joint = by_hand.linear(tensors, 'markov_head.joint_proj', read)
    update, candidate, output = np.split(joint, 3)
    update = _sigmoid(update)
    state = update * state + (1 - update) * np.tanh(candidate)
    rows.append(np.tanh(output))
  return np.stack(rows)


def _by_hand(tensors, found, from_pending=False, **kinds):
  num_drafts = len(found.drafts)
  outputs = _outputs(tensors, found, num_drafts + (not from_pending), **kinds)
  vectors = outputs[-num_drafts:]
  if 'lm_head.weight' in tensors:
    logits = by_hand.linear(tensors, 'lm_head', vectors)
  else:
    logits = vectors @ by_hand.unembedding(TARGET).T
  if 'markov_head.markov_w1.weight' in tensors:
    before = [found.text[-1], *found.drafts[:-1]]
    first = by_hand.wide(tensors['markov_head.markov_w1.weight'])[before]
    latent = _latent(tensors, vectors, first)
    logits = logits + by_hand.linear(tensors, 'markov_head.markov_w2', latent)
  if 'd2t' not in tensors:
    return logits
  of_target = np.full((num_drafts, _V), -np.inf)
  of_target[:, tensors['d2t'] + np.arange(_DRAFTED)] = logits
  return of_target


def _assert_drafts(loaded, tensors, from_pending, **kinds):
  rounds = by_hand.two_rounds(loaded, TARGET, _PROMPT, 1, 7)
  for found in rounds:
    expected = _by_hand(tensors, found, from_pending, **kinds)
    np.testing.assert_allclose(found.logits, expected, atol=1e-4)
  return rounds


@pytest.mark.parametrize('where', ['top', 'nested', 'prefixed'])
def test_dflash_drafts_as_its_tensors_say(tmp_path, where):
  tensors = dflash_tensors()
  config, saved = dict(DFLASH), tensors
  if where == 'nested':
    size = config.pop('block_size')
    config['dflash_config'] = config['dflash_config'] | {'block_size': size}
  if where == 'prefixed':
    saved = {f'model.{name}': x for name, x in tensors.items()}
  loaded = folders.load(tmp_path, saved, config, TARGET)
  drafter = loaded.drafter
  assert type(drafter) is drafters.DFlash
  assert drafter.num_draft_tokens == 3
  assert drafter.feature_layers == (1, 3)
  assert not drafter.own_unembedding
  _assert_drafts(loaded, tensors, from_pending=False)


@pytest.mark.parametrize('ids', [None, IDS])
def test_dflash_of_speculators(tmp_path, ids):
  tensors = dflash_tensors(ids, has_head=True)
  size = _V if ids is None else len(ids)
  config = _SPECULATORS | {'draft_vocab_size': size}
  loaded = folders.load(tmp_path, tensors, config, TARGET)
  assert loaded.drafter.num_draft_tokens == 3
  assert loaded.drafter.feature_layers == (1, 3)
  _assert_drafts(loaded, tensors, from_pending=False)


_SLIDING = ['sliding_attention', 'full_attention']
_ROPES = {
  'full_attention': {'rope_type': 'default', 'rope_theta': _THETA},
  'sliding_attention': {'rope_type': 'default', 'rope_theta': 30.0},
}
_of_blocks = lambda **more: {'dflash_config': DFLASH['dflash_config'] | more}
_of_speculators = lambda **more: (
  _SPECULATORS
  | more
  | {
    'transformer_layer_config': _LAYER_CONFIG
    | {'layer_types': _SLIDING, 'sliding_window': 3}
  }
)
_SPELLINGS = {
  'by layer types': (
    DFLASH
    | {
      'layer_types': _SLIDING,
      'sliding_window': 3,
      'use_sliding_window': True,
      'rope_parameters': _ROPES,
    },
    ((3, True, 30.0), _FULL),
  ),
  'both sides of all layers': (
    DFLASH
    | {
      'layer_types': ['sliding_attention'] * 2,
      'sliding_window': 2,
      'is_causal': False,
      'rope_parameters': _ROPES,
    },
    ((2, False, 30.0),) * 2,
  ),
  'speculators': (_of_speculators(), ((3, True, _THETA), _FULL)),
  'speculators, both sides': (
    _of_speculators(sliding_window_non_causal=True),
    ((3, False, _THETA), _FULL),
  ),
  'use_swa': (
    DFLASH
    | {'layer_types': None, 'sliding_window': 9}
    | _of_blocks(use_swa=True, swa_window_size=3),
    ((3, False, _THETA),) * 2,
  ),
  'ModelOpt': (
    DFLASH | _of_blocks(use_swa=True, swa_window_size=3, causal=False),
    ((3, False, _THETA),) * 2,
  ),
  'all layers causal': (
    DFLASH
    | {'layer_types': _SLIDING, 'sliding_window': 3}
    | _of_blocks(causal=True),
    ((3, True, _THETA), (None, True, _THETA)),
  ),
  'JetSpec': (
    DFLASH | _of_blocks(causal_head=True),
    ((None, True, _THETA),) * 2,
  ),
  'one rope, by layer type': (
    DFLASH
    | {
      'layer_types': _SLIDING,
      'sliding_window': 3,
      'rope_parameters': dict.fromkeys(_ROPES, _ROPES['full_attention']),
    },
    ((3, True, _THETA), _FULL),
  ),
  'windows that are not used': (
    DFLASH
    | {
      'layer_types': None,
      'sliding_window': 3,
      'use_sliding_window': False,
      'rope_parameters': _ROPES,
    },
    (_FULL,) * 2,
  ),
}


@pytest.mark.parametrize('spelling', _SPELLINGS)
def test_windows_in_every_spelling(tmp_path, spelling):
  config, kinds = _SPELLINGS[spelling]
  folder = folders.save(tmp_path, dflash_tensors(), config)
  drafter = specsample.load_drafter(folder, TARGET).drafter
  shape, found = drafter.shape, []
  for i in range(_NUM):
    window, theta = shape.window(i), shape.rope_theta
    if window is not None and shape.sliding_rope_theta is not None:
      theta = shape.sliding_rope_theta
    found.append((window, i in drafter.causal_layers, theta))
  assert tuple(found) == kinds


@pytest.mark.parametrize(
  'spelling',
  ['by layer types', 'both sides of all layers', 'all layers causal'],
)
def test_dflash_of_windows_drafts_as_its_tensors_say(tmp_path, spelling):
  config, kinds = _SPELLINGS[spelling]
  tensors = dflash_tensors()
  loaded = folders.load(tmp_path, tensors, config, TARGET)
  _assert_drafts(loaded, tensors, from_pending=False, kinds=kinds)


def test_dspark_drafts_as_its_tensors_say(tmp_path):
  tensors = dflash_tensors(has_head=True, rank=RANK)
  loaded = folders.load(tmp_path, tensors, DSPARK, TARGET)
  drafter = loaded.drafter
  assert type(drafter) is drafters.DSpark
  assert drafter.num_draft_tokens == 3
  assert drafter.rank == RANK
  first, _ = _assert_drafts(loaded, tensors, from_pending=True)

  before = np.asarray([first.text[-1], *first.drafts[:-1]])
  vectors = _outputs(tensors, first, 3)
  params = {'target': TARGET.params, 'drafter': loaded.params}
  embedded = tensors['markov_head.markov_w1.weight'][before]
  read = np.concatenate([vectors, embedded], axis=-1)
  np.testing.assert_allclose(
    drafter.confidence_logits(params, vectors.astype(np.float32), before),
    by_hand.linear(tensors, 'confidence_head.proj', read)[:, 0],
    atol=1e-4,
  )


def test_dspark_of_speculators(tmp_path):
  """The Markov term reads any token; the logits are those of drafted tokens."""
  tensors = dflash_tensors(IDS, rank=RANK)
  config = _SPECULATORS | {
    'speculators_model_type': 'dspark',
    'draft_vocab_size': _DRAFTED,
    'markov_rank': RANK,
  }
  loaded = folders.load(tmp_path, tensors, config, TARGET)
  # Files without this setting are from before drafts began at the anchor.
  assert loaded.drafter.num_draft_tokens == 3
  assert not loaded.drafter.drafts_from_pending
  config = config | {'sample_from_anchor': True}
  loaded = folders.load(tmp_path, tensors, config, TARGET)
  assert loaded.drafter.num_draft_tokens == 4
  _assert_drafts(loaded, tensors, from_pending=True)


def test_a_mask_by_another_name(tmp_path):
  config = DSPARK | {'mask_token_id': None, 'dspark_noise_token_id': _MASK}
  loaded = folders.load(tmp_path, _SPARK(), config, TARGET)
  _assert_drafts(loaded, _SPARK(), from_pending=True)


def test_dspark_of_specforge(tmp_path):
  """All its settings are in dflash_config."""
  own = ('mask_token_id', 'target_layer_ids', 'markov_rank', 'block_size')
  nested = {key: DSPARK[key] for key in (*own, 'markov_head_type')}
  config = _LAYER_CONFIG | {
    'architectures': ['DFlashDraftModel'],
    'dflash_config': nested | {'projector_type': 'dspark'},
  }
  tensors = dflash_tensors(rank=RANK)
  loaded = folders.load(tmp_path, tensors, config, TARGET)
  assert type(loaded.drafter) is drafters.DSpark
  assert loaded.drafter.num_draft_tokens == 3
  _assert_drafts(loaded, tensors, from_pending=True)


@pytest.mark.parametrize(('head', 'is_nested'), [('gated', 0), ('rnn', 1)])
def test_other_markov_heads(tmp_path, head, is_nested):
  tensors = dflash_tensors(has_head=True, rank=RANK, head=head)
  config = DSPARK | {'markov_head_type': head}
  if is_nested:
    own = {key: x for key, x in config.items() if key not in _LAYER_CONFIG}
    own['projector_type'] = 'dspark'
    config = _LAYER_CONFIG | {'dflash_config': own}
  folder = folders.save(tmp_path / 'published', tensors, config)
  loaded = specsample.load_drafter(folder, TARGET)
  assert loaded.drafter.head == head
  _assert_drafts(loaded, tensors, from_pending=True)
  specsample.save_drafter(
    tmp_path / 'own', loaded.drafter, loaded.params, target=TARGET, card={}
  )
  again = specsample.load_drafter(tmp_path / 'own', TARGET)
  assert again.drafter == loaded.drafter
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  assert shapes(again.params) == shapes(loaded.params)


def test_deepspecs_dflash_drafts_from_the_pending_token(tmp_path):
  tensors = dflash_tensors(has_head=True)
  config = DSPARK | {'markov_rank': 0, 'enable_confidence_head': False}
  loaded = folders.load(tmp_path, tensors, config, TARGET)
  assert type(loaded.drafter) is drafters.DFlash
  assert loaded.drafter.num_draft_tokens == 3
  _assert_drafts(loaded, tensors, from_pending=True)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('is_tied', [True, False])
def test_a_copy_of_the_targets_unembedding_is_not_kept(
  tmp_path, dtype, is_tied
):
  model = dataclasses.replace(MODEL, tie_embeddings=is_tied, dtype=dtype)
  params = jax.tree.map(lambda x: x.astype(dtype), dict(TARGET.params))
  if is_tied:
    del params['unembedding']
  target = specsample.Loaded(model, params, None)
  name = 'embedding' if is_tied else 'unembedding'
  copy = np.asarray(TARGET.params[name]).T
  tensors = dflash_tensors(rank=RANK) | {
    'lm_head.weight': np.ascontiguousarray(copy)
  }
  loaded = folders.load(tmp_path, tensors, DSPARK, target)
  assert not loaded.drafter.own_unembedding
  assert 'vocabulary' not in loaded.params
  tensors['lm_head.weight'][-1, -1] *= 2
  loaded = folders.load(tmp_path, tensors, DSPARK, target)
  assert loaded.drafter.own_unembedding
  np.testing.assert_array_equal(
    loaded.params['vocabulary']['unembedding'],
    tensors['lm_head.weight'].T.astype(loaded.params['mask'].dtype),
  )


@pytest.mark.parametrize('name', ['dflash', 'dspark'])
def test_what_was_loaded_is_saved_and_drafts_the_targets_text(tmp_path, name):
  tensors, config = dflash_tensors(), DFLASH
  if name == 'dspark':
    tensors, config = dflash_tensors(has_head=True, rank=RANK), DSPARK
  folder = folders.save(tmp_path / 'published', tensors, config)
  loaded = specsample.load_drafter(folder, TARGET, 2)
  again = folders.saved_again(tmp_path / 'own', loaded, TARGET)
  folders.assert_greedy_equal(again, TARGET)


_SPARK = lambda: dflash_tensors(has_head=True, rank=RANK)
_DAMAGES = {
  'norms of one layer': (
    lambda: folders.changed(
      dflash_tensors(), **{'layers.1.self_attn.q_norm.weight': None}
    ),
    DFLASH,
    r'lacks 1 tensors \(layers\.1\.self_attn\.q_norm\.weight\)',
  ),
  'more layers than the configuration': (
    dflash_tensors,
    DFLASH | {'num_hidden_layers': 1, 'layer_types': None},
    r'has 11 tensors \(layers\.1\..* unknown',
  ),
  'fewer layers than the configuration': (
    dflash_tensors,
    DFLASH | {'num_hidden_layers': 3, 'layer_types': None},
    r'lacks 11 tensors \(layers\.2\.',
  ),
  'of more features': (
    dflash_tensors,
    DFLASH | {'dflash_config': {'mask_token_id': 3, 'target_layer_ids': [1]}},
    r'fc\.weight has shape \(16, 32\), expected \(16, 16\)',
  ),
  'of a layer that is not there': (
    dflash_tensors,
    DFLASH
    | {'dflash_config': {'mask_token_id': 3, 'target_layer_ids': [1, 9]}},
    r'feature_layers are \(1, 9\), but the target has layers 0 to 5',
  ),
  'of the last layer': (
    dflash_tensors,
    DFLASH
    | {'dflash_config': {'mask_token_id': 3, 'target_layer_ids': [1, 5]}},
    'reads the output of layer 5, the last layer, after the norm',
  ),
  'no features': (
    dflash_tensors,
    DFLASH | {'dflash_config': {'mask_token_id': 3}},
    'target_layer_ids is missing, so it is not known which',
  ),
  'no mask': (
    dflash_tensors,
    DFLASH | {'dflash_config': {'target_layer_ids': [1, 3]}},
    'has no mask_token_id, and the target',
  ),
  'a mask of another vocabulary': (
    _SPARK,
    DSPARK | {'mask_token_id': 151669},
    'mask_token_id is 151669, but the target has tokens 0 to 31',
  ),
  'no size of a block': (
    dflash_tensors,
    {key: x for key, x in DFLASH.items() if key != 'block_size'},
    'block_size is None, expected an integer of at least 1',
  ),
  'layers of an unknown kind': (
    dflash_tensors,
    DFLASH | {'layer_types': ['full_attention', 'chunked_attention']},
    r"layer_types is .*, expected one of \['full_attention', 'sliding_att",
  ),
  'kinds of fewer layers': (
    dflash_tensors,
    DFLASH | {'layer_types': ['full_attention']},
    r"layer_types is \['full_attention'\], expected one of .* for each layer",
  ),
  'a window of no tokens': (
    dflash_tensors,
    DFLASH | {'layer_types': _SLIDING, 'sliding_window': 0},
    'sliding_window is 0, expected an integer of at least 1',
  ),
  'a window beyond all positions': (
    dflash_tensors,
    DFLASH | _of_blocks(use_swa=True, swa_window_size=2**31),
    'swa_window_size is 2147483648, expected an integer from 1 to 2147483647',
  ),
  'windows that are both used and not': (
    dflash_tensors,
    DFLASH
    | {
      'layer_types': _SLIDING,
      'sliding_window': 3,
      'use_sliding_window': False,
    },
    'use_sliding_window is False, but layer_types is .*: set use_sliding_wind',
  ),
  'a scaled rope of some layers': (
    dflash_tensors,
    DFLASH
    | {
      'layer_types': _SLIDING,
      'sliding_window': 3,
      'rope_parameters': _ROPES
      | {
        'sliding_attention': {
          'rope_type': 'linear',
          'factor': 2.0,
          'rope_theta': 30.0,
        }
      },
    },
    'sliding_attention is .*, expected the rope of full_attention, or one',
  ),
  'sinks': (
    dflash_tensors,
    DFLASH | {'attention_sink_bias': True},
    'attention_sink_bias is True, but only False is supported: give a check',
  ),
  'sinks in windows': (
    dflash_tensors,
    DFLASH | {'add_swa_attention_sink_bias': True},
    'add_swa_attention_sink_bias is True, but only False is supported',
  ),
  'scaled values': (
    dflash_tensors,
    DFLASH | {'attention_value_scale': 0.707},
    'attention_value_scale is 0.707, but only 1 is supported',
  ),
  'a rope of neighbouring numbers': (
    dflash_tensors,
    DFLASH | {'is_neox_style': False},
    'is_neox_style is False, but only True is supported',
  ),
  'a rope of neighbouring numbers, as SGLang names it': (
    dflash_tensors,
    DFLASH | {'rope_is_neox_style': False},
    'rope_is_neox_style is False, but only True is supported',
  ),
  'scaled logits': (
    dflash_tensors,
    DFLASH | {'logit_scale': 0.5},
    'logit_scale is 0.5, but only 1 is supported',
  ),
  'drafts at the slots before': (
    dflash_tensors,
    DFLASH | _of_blocks(causal_head=True, draft_shift=True),
    'draft_shift is True, but only False is supported',
  ),
  'a target of another width': (
    dflash_tensors,
    DFLASH | {'target_hidden_size': 32},
    'target_hidden_size is 32, but only 16 is supported',
  ),
  'layers in two spellings': (
    _SPARK,
    DSPARK | {'dspark_target_layer_ids': [1, 2]},
    r'target_layer_ids is \[1, 3\] and dspark_target_layer_ids is \[1, 2\]',
  ),
  'layers as `speculators` counts them, beside others': (
    dflash_tensors,
    _SPECULATORS | {'target_layer_ids': [2, 4]},
    r'layer_ids, less 1, is \(1, 3\) and target_layer_ids is \(2, 4\)',
  ),
  'blocks of two sizes': (
    _SPARK,
    DSPARK | {'dspark_block_size': 4},
    'block_size is 3 and dspark_block_size is 4, which mean the same',
  ),
  'another Markov head': (
    _SPARK,
    DSPARK | {'markov_head_type': 'lstm'},
    r"markov_head_type is 'lstm', expected one of \('vanilla', 'gated', 'rn",
  ),
  'another Markov head, nested': (
    _SPARK,
    _LAYER_CONFIG
    | _of_blocks(markov_rank=RANK, markov_head_type='other', block_size=3),
    "markov_head_type is 'other', expected one of",
  ),
  'a gate that is not there': (
    _SPARK,
    DSPARK | {'markov_head_type': 'gated'},
    r'lacks 2 tensors \(markov_head\.gate_proj\.bias, ',
  ),
  'a Markov head that is not there, nested': (
    dflash_tensors,
    DFLASH | _of_blocks(markov_rank=RANK),
    'markov_rank is 4, but .* has no tensor markov_head.markov_w1.weight',
  ),
  'a Markov head that is not there': (
    dflash_tensors,
    DSPARK,
    'markov_rank is 4, but .* has no tensor markov_head.markov_w1.weight',
  ),
  'a Markov head that is not meant': (
    _SPARK,
    DSPARK | {'markov_rank': 0},
    'markov_rank is 0, but .* has a tensor markov_head.markov_w1.weight',
  ),
  'a confidence that reads less': (
    _SPARK,
    DSPARK | {'confidence_head_with_markov': False},
    'confidence_head_with_markov is False, but only True is supported',
  ),
  'no confidence': (
    lambda: folders.changed(_SPARK(), **{'confidence_head.proj.bias': None}),
    DSPARK,
    r'lacks 1 tensors \(confidence_head\.proj\.bias\)',
  ),
}


def test_names_of_another_trainer_are_read(tmp_path):
  renamed = {
    f'dspark_{key}': DSPARK[key]
    for key in ('block_size', 'markov_rank', 'target_layer_ids')
  }
  others = {x: y for x, y in DSPARK.items() if f'dspark_{x}' not in renamed}
  expected = folders.load(tmp_path / 'own', _SPARK(), DSPARK, TARGET)
  found = folders.load(tmp_path / 'other', _SPARK(), others | renamed, TARGET)
  assert found.drafter == expected.drafter


@pytest.mark.slow
@pytest.mark.parametrize('damage', _DAMAGES)
def test_what_does_not_fit_is_refused(tmp_path, damage):
  make, config, message = _DAMAGES[damage]
  folder = folders.save(tmp_path, make(), config)
  with pytest.raises(ValueError, match=message) as caught:
    specsample.load_drafter(folder, TARGET)
  assert '\n' not in str(caught.value)


def test_a_file_that_was_cut_is_refused(tmp_path):
  folder = folders.save(tmp_path, dflash_tensors(), DFLASH)
  path = folder / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:-50])
  with pytest.raises(ValueError, match='not a complete safetensors file'):
    specsample.load_drafter(folder, TARGET)


def test_a_mask_of_its_own_is_refused(tmp_path):
  folder = folders.save(tmp_path, dflash_tensors(), DFLASH)
  (tmp_path / 'mask_embedding.pt').write_bytes(b'')
  with pytest.raises(ValueError, match='is a mask of its own, which is not'):
    specsample.load_drafter(folder, TARGET)
