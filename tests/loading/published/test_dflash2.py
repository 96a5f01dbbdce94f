"""DFlash 2 in the layout in which its authors publish it, against NumPy."""

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from tests.loading.published import by_hand
from tests.loading.published import folders
from tests.loading.published import test_dflash
from tests.loading.published.test_dflash import TARGET

_V, _D, _HEAD, _EPS, _THETA = 32, 16, 6, 1e-6, 500.0
_NUM, _WINDOW, _MASK, _K = 2, 3, 31, 3
_GROUP, _TAPS, _RANK, _TOP_K = 4, 3, 5, 6
_PROMPT = [3, 1, 4, 9, 2]
_OF_BLOCKS = {
  'block_size': _K + 1,
  'mask_token_id': _MASK,
  'target_layer_ids': [1, 3],
  'conv_group_size': _GROUP,
  'conv_kernel_size': _TAPS,
  'selector_rank': _RANK,
  'selector_top_k': _TOP_K,
}
_SCALED = {
  'output_multiplier': 0.5,
  'final_logit_softcapping': 2.0,
  'input_embedding_scale': 3.0,
}
_SELECTOR = 'candidate_selector.hidden_projection.weight'
_CODEBOOKS = (
  'candidate_selector.predecessor_codebook',
  'candidate_selector.successor_codebook',
)


def config(**of_blocks):
  """Returns a configuration with more or other settings of blocks."""
  shape = {
    key: value
    for key, value in test_dflash.DFLASH.items()
    if key not in ('block_size', 'rope_theta', 'dflash_config')
  }
  return shape | {
    'architectures': ['DFlash2DraftModel'],
    'is_causal': False,
    'layer_types': ['sliding_attention'] * _NUM,
    'sliding_window': _WINDOW,
    'use_sliding_window': True,
    'rope_parameters': {'rope_theta': _THETA, 'rope_type': 'default'},
    'dflash_config': _OF_BLOCKS | of_blocks,
  }


def tensors():
  """Returns all tensors of a file."""
  rng, found = np.random.default_rng(1), test_dflash.dflash_tensors()
  for i in range(_NUM):
    for conv in ('attention_conv', 'mlp_conv'):
      base = by_hand.normal(rng, 2, _TAPS, _D)
      base[:, 0] += 1
      found[f'layers.{i}.{conv}.base_kernel'] = base
      name = f'layers.{i}.{conv}.kernel_projection.weight'
      found[name] = by_hand.normal(rng, 2 * _TAPS * _D // _GROUP, _D)
  found[_SELECTOR] = by_hand.normal(rng, _RANK, _D)
  for name in _CODEBOOKS:
    found[name] = 2 * by_hand.normal(rng, _V, _RANK)
  return found


def _conv(found, name, normed, side, rows):
  """Applies a convolution to the rows [T, D] of a block, number by number."""
  base = by_hand.wide(found[f'{name}.base_kernel'])
  changes = by_hand.linear(found, f'{name}.kernel_projection', normed)
  changes = changes.reshape(len(rows), 2, _TAPS, _D // _GROUP)
  mixed = np.zeros_like(rows)
  for t, c in np.ndindex(rows.shape):
    for tap in range(min(_TAPS, t + 1)):
      weight = base[side, tap, c] + changes[t, side, tap, c // _GROUP]
      mixed[t, c] += weight * rows[t - tap, c]
  return mixed


def _vectors(found, of_round, scale):
  """Returns the vectors [K, D] of the masks."""
  features = np.concatenate(of_round.features, axis=-1)
  fused = by_hand.linear(found, 'fc', features)
  fused = by_hand.norm(found, 'hidden_norm', fused, _EPS)
  ids = [of_round.text[-1]] + [_MASK] * _K
  x = scale * by_hand.embedding(TARGET)[ids]
  start = len(of_round.text) - 1
  places, everywhere = start + np.arange(_K + 1), np.arange(start + _K + 1)
  seen = np.abs(places[:, None] - everywhere) < _WINDOW
  for i in range(_NUM):
    layer = f'layers.{i}'
    conv, name = f'{layer}.attention_conv', f'{layer}.self_attn'
    normed = by_hand.norm(found, f'{layer}.input_layernorm', x, _EPS)
    read = _conv(found, conv, normed, 0, normed)
    heads = lambda part, rows, name=name: by_hand.heads(
      by_hand.linear(found, f'{name}.{part}_proj', rows), _HEAD
    )
    both = np.concatenate([fused, read])
    query = by_hand.norm(found, f'{name}.q_norm', heads('q', read), _EPS)
    key = by_hand.norm(found, f'{name}.k_norm', heads('k', both), _EPS)
    mixed = by_hand.attend(
      by_hand.rotate(query, places, _THETA),
      by_hand.rotate(key, everywhere, _THETA),
      heads('v', both),
      seen,
    )
    mixed = by_hand.linear(found, f'{name}.o_proj', mixed)
    x = x + _conv(found, conv, normed, 1, mixed)
    conv = f'{layer}.mlp_conv'
    normed = by_hand.norm(found, f'{layer}.post_attention_layernorm', x, _EPS)
    read = _conv(found, conv, normed, 0, normed)
    fed = by_hand.mlp(found, f'{layer}.mlp', read)
    x = x + _conv(found, conv, normed, 1, fed)
  return by_hand.norm(found, 'norm', x, _EPS)[1:]


def _logits(found, of_round, settings):
  """Returns the logits [K, V], -inf for all tokens but the candidates."""
  vectors = _vectors(found, of_round, settings.get('input_embedding_scale', 1))
  block = vectors @ by_hand.unembedding(TARGET).T
  block *= settings.get('output_multiplier', 1)
  cap = settings.get('final_logit_softcapping')
  if cap is not None:
    block = cap * np.tanh(block / cap)
  gates = vectors @ by_hand.wide(found[_SELECTOR]).T
  before, after = (by_hand.wide(found[name]) for name in _CODEBOOKS)
  logits = np.full((_K, _V), -np.inf)
  previous = [of_round.text[-1], *of_round.drafts[:-1]]
  for i, token in enumerate(previous):
    for candidate in np.argsort(-block[i])[:_TOP_K]:
      term = np.sum(before[token] * gates[i] * after[candidate])
      logits[i, candidate] = block[i, candidate] + term
  return logits


@pytest.mark.parametrize('settings', [{}, _SCALED], ids=['plain', 'scaled'])
def test_drafts_are_as_its_tensors_say(tmp_path, settings):
  found = tensors()
  folder = folders.save(tmp_path, found, config(**settings))
  loaded = specsample.load_drafter(folder, TARGET)
  drafter = loaded.drafter
  assert type(drafter) is drafters.DFlash2
  assert drafter.num_draft_tokens == _K
  assert drafter.selector_rank == _RANK
  assert drafter.causal_layers == ()
  for of_round in by_hand.two_rounds(loaded, TARGET, _PROMPT, 1, 7):
    expected = _logits(found, of_round, settings)
    np.testing.assert_allclose(of_round.logits, expected, atol=1e-4)


def test_that_of_speculators_is_the_same(tmp_path):
  """It has a copy of the target's unembedding, and settings at the top."""
  head = by_hand.unembedding(TARGET).astype(np.float32)
  layers = config()
  own = layers.pop('dflash_config')
  # The embedding counts as the first layer.
  ids = [i + 1 for i in own.pop('target_layer_ids')]
  settings = own | {
    'speculators_model_type': 'dflash2',
    'transformer_layer_config': layers,
    'aux_hidden_state_layer_ids': ids,
    'sliding_window_non_causal': True,
    'sample_from_anchor': False,
    'draft_vocab_size': _V,
  }

  def load(name, more, settings):
    (tmp_path / name).mkdir()
    folder = folders.save(tmp_path / name, tensors() | more, settings)
    return specsample.load_drafter(folder, TARGET)

  expected = load('own', {}, config())
  head = {'lm_head.weight': np.ascontiguousarray(head)}
  found = load('speculators', head, settings)
  assert found.drafter == expected.drafter
  jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def test_what_was_loaded_is_saved_and_drafts_the_targets_text(tmp_path):
  folder = folders.save(tmp_path / 'published', tensors(), config(**_SCALED))
  loaded = specsample.load_drafter(folder, TARGET, 2)
  again = folders.saved_again(tmp_path / 'own', loaded, TARGET)
  assert again.drafter.output_multiplier == 0.5
  folders.assert_greedy_equal(again, TARGET)


_DAMAGES = {
  'no codebooks': (
    dict.fromkeys(_CODEBOOKS),
    {},
    r'lacks 2 tensors \(candidate_selector\.predecessor_codebook, candidate_s',
  ),
  'no convolution': (
    {'layers.1.mlp_conv.base_kernel': None},
    {},
    r'lacks 1 tensors \(layers\.1\.mlp_conv\.base_kernel\)',
  ),
  'another rank': (
    {},
    {'selector_rank': 4},
    r'hidden_projection\.weight has shape \(5, 16\), expected \(4, 16\)',
  ),
  'other groups': (
    {},
    {'conv_group_size': 8},
    r'kernel_projection\.weight has shape \(24, 16\), expected \(12, 16\)',
  ),
  'groups that do not divide': (
    {},
    {'conv_group_size': 3},
    'conv_group_size is 3: give a divisor of 16',
  ),
  'more candidates than tokens': (
    {},
    {'selector_top_k': 33},
    'selector_top_k is 33: give at most 32',
  ),
  'candidates that are no number': (
    {},
    {'selector_top_k': 'all'},
    "selector_top_k is 'all', expected an integer",
  ),
  'a multiplier that is no number': (
    {},
    {'output_multiplier': 0},
    'output_multiplier is 0, expected a number above 0',
  ),
  'a mask of another vocabulary': (
    {},
    {'mask_token_id': 32},
    'mask_token_id is 32, but the target has tokens 0 to 31',
  ),
}


@pytest.mark.parametrize('damage', _DAMAGES)
def test_what_does_not_fit_is_refused(tmp_path, damage):
  changes, settings, message = _DAMAGES[damage]
  found = {k: x for k, x in (tensors() | changes).items() if x is not None}
  folder = folders.save(tmp_path, found, config(**settings))
  with pytest.raises(ValueError, match=message) as caught:
    specsample.load_drafter(folder, TARGET)
  assert '\n' not in str(caught.value)
