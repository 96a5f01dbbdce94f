"""P-EAGLE in its published layout, against NumPy."""

import numpy as np
import pytest

import specsample
from specsample import drafters
from tests.loading.published import by_hand
from tests.loading.published import folders
from tests.loading.published import test_eagle

_V, _D, _HEAD, _EPS = 32, 16, 6, 1e-6
_MASK, _K, _DEPTH = 30, 3, 3  # the mask's id, drafts, and layers
_TARGET, _THETA = test_eagle.TARGET, 500.0
_PROMPT = [3, 1, 4, 9, 2]
_IDS = np.sort(np.random.default_rng(9).permutation(_V)[:12])
CONFIG = test_eagle.SPECULATORS | {
  'speculators_model_type': 'peagle',
  'architectures': ['PEagleSpeculator'],
  'mask_token_id': _MASK,
  'transformer_layer_config': (
    test_eagle.CONFIG | {'num_hidden_layers': _DEPTH}
  ),
}


def p_eagle_tensors(ids=_IDS):
  """Returns those of EAGLE-3, more layers, a mask and an own embedding."""
  rng = np.random.default_rng(2)
  tensors = test_eagle.eagle3_tensors('layers.0.', ids)
  for i in range(1, _DEPTH):
    name = f'layers.{i}.'
    tensors |= test_eagle.layer_tensors(rng, name, _D)
    tensors[f'{name}input_layernorm.weight'] = 1 + by_hand.normal(rng, _D)
  tensors['mask_hidden'] = by_hand.normal(rng, 1, 1, 3 * _D)
  tensors['embed_tokens.weight'] = by_hand.normal(rng, _V, _D)
  return tensors


def _by_hand(tensors, found, flags=()):
  """Returns the logits [K, V] of a pass without a cache.

  Real entry t is made of token t + 1 and of the features of token t; the masks
  follow the last of them. All see the entries before them.
  """
  embedded = tensors['embed_tokens.weight'][[*found.text[1:], _MASK, _MASK]]
  features = np.concatenate(found.features, axis=-1)
  mask = tensors['mask_hidden'].reshape(1, -1)
  features = np.concatenate([features, *[mask] * (_K - 1)])
  norm = lambda name, x: by_hand.norm(tensors, name, x, _EPS)
  if 'input_norm.weight' in tensors:
    features = norm('input_norm', features)
  hidden = by_hand.linear(tensors, 'fc', features)
  normed = norm('layers.0.hidden_norm', hidden)
  first = norm('layers.0.input_layernorm', embedded)
  x = normed if 'norm_before_residual' in flags else hidden
  for i in range(_DEPTH):
    name = f'layers.{i}'
    read = np.concatenate([first, normed], axis=-1)
    if i:
      read = norm(f'{name}.input_layernorm', x)
    x = x + by_hand.causal_attention(
      tensors, f'{name}.self_attn', read, _HEAD, _THETA
    )
    read = norm(f'{name}.post_attention_layernorm', x)
    x = x + by_hand.mlp(tensors, f'{name}.mlp', read)
  logits = by_hand.linear(tensors, 'lm_head', norm('norm', x[-_K:]))
  if 'd2t' not in tensors:
    return logits
  of_target = np.full((_K, _V), -np.inf)
  of_target[:, _IDS] = logits
  return of_target


# With all kept and one more, the next pass has K + 1 entries and K - 1 masks.
@pytest.mark.parametrize(
  ('kept', 'has_joint_norm'), [(0, False), (1, True), (3, False)]
)
def test_it_drafts_as_its_tensors_say(tmp_path, kept, has_joint_norm):
  tensors, config = p_eagle_tensors(), CONFIG
  if has_joint_norm:
    config = CONFIG | {'norm_before_fc': True}
    tensors |= test_eagle.joint_norm()
  folder = folders.save(tmp_path, tensors, config)
  loaded = specsample.load_drafter(folder, _TARGET)
  drafter = loaded.drafter
  assert type(drafter) is drafters.PEagle
  assert (drafter.num_draft_tokens, drafter.num_layers) == (_K, _DEPTH)
  assert drafter.mask_token_id == _MASK
  assert drafter.own_embedding
  # Absent, unlike in EAGLE-3 of speculators.
  assert not drafter.norm_before_residual
  for found in by_hand.two_rounds(loaded, _TARGET, _PROMPT, kept, 7):
    expected = _by_hand(tensors, found)
    np.testing.assert_allclose(found.logits, expected, atol=1e-4)


@pytest.mark.parametrize('key', ['pard_token', 'ptd_token_id'])
def test_other_spellings(tmp_path, key):
  """Without speculators' type, and with the target's embedding."""
  tensors = p_eagle_tensors(ids=None)
  embedding = by_hand.embedding(_TARGET).astype(np.float32)
  renamed = {
    name.replace('layers.0.', 'midlayer.'): x
    for name, x in tensors.items()
    if name != 'embed_tokens.weight'
  }
  config = CONFIG['transformer_layer_config'] | {
    key: _MASK,
    'norm_before_residual': True,
  }
  loaded = specsample.load_drafter(
    folders.save(tmp_path, renamed, config), _TARGET, _K
  )
  assert not loaded.drafter.own_embedding
  tensors['embed_tokens.weight'] = embedding
  for found in by_hand.two_rounds(loaded, _TARGET, _PROMPT, 1, 7):
    expected = _by_hand(tensors, found, ('norm_before_residual',))
    np.testing.assert_allclose(found.logits, expected, atol=1e-4)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'mask_token_id': _V}, 'mask_token_id is 32, .* tokens 0 to 31: the'),
    ({'mask_token_id': None}, 'has no mask_token_id, and the target'),
    ({'norm_before_fc': True}, r'lacks 1 tensors \(input_norm\.weight\)'),
  ],
)
def test_other_drafters_are_refused(tmp_path, changes, message):
  folder = folders.save(tmp_path, p_eagle_tensors(), CONFIG | changes)
  with pytest.raises(ValueError, match=message):
    specsample.load_drafter(folder, _TARGET)


def test_a_missing_mask_is_named(tmp_path):
  tensors = p_eagle_tensors()
  del tensors['mask_hidden']
  with pytest.raises(ValueError, match='has no tensor mask_hidden'):
    folders.load(tmp_path, tensors, CONFIG, _TARGET)


def test_a_loaded_drafter_can_be_saved(tmp_path):
  folder = folders.save(tmp_path, p_eagle_tensors(), CONFIG)
  loaded = specsample.load_drafter(folder, _TARGET)
  folders.saved_again(tmp_path / 'saved', loaded, _TARGET)
