"""Medusa and Hydra, from the files that their authors' code writes."""

import json
import os

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch

import specsample
from specsample import drafters
from specsample import testing
from tests.loading.published import by_hand
from tests.loading.published import folders

_V, _D, _K = 32, 16, 3
MODEL = testing.tiny_llama(vocab_size=_V, dim=_D)
TARGET = specsample.Loaded(MODEL, MODEL.init(jax.random.key(0)), None)
_PROMPT = [3, 1, 4, 9, 2]


def medusa_tensors(num_layers=2, is_shared=True):
  """Returns the tensors of `[ResBlock] * n`: one block under n names."""
  rng, tensors = np.random.default_rng(0), {}
  for i in range(_K):
    for j in range(num_layers):
      if j and is_shared:
        for part in ('weight', 'bias'):
          name = f'{i}.{j}.linear.{part}'
          tensors[name] = tensors[f'{i}.0.linear.{part}']
        continue
      tensors[f'{i}.{j}.linear.weight'] = by_hand.normal(rng, _D, _D)
      tensors[f'{i}.{j}.linear.bias'] = by_hand.normal(rng, _D)
    tensors[f'{i}.{num_layers}.weight'] = by_hand.normal(rng, _V, _D)
  return tensors


_SHAPES_OF_LAYER = {
  'self_attn.q_proj.weight': (32, _D),
  'self_attn.k_proj.weight': (16, _D),
  'self_attn.v_proj.weight': (16, _D),
  'self_attn.o_proj.weight': (_D, 32),
  'mlp.gate_proj.weight': (2 * _D, _D),
  'mlp.up_proj.weight': (2 * _D, _D),
  'mlp.down_proj.weight': (_D, 2 * _D),
  'input_layernorm.weight': (_D,),
  'post_attention_layernorm.weight': (_D,),
}


def hydra_tensors(is_plus=True, num_layers=3):
  rng, tensors = np.random.default_rng(1), {}
  first, step = (1, 2) if is_plus else (0, 1)
  for i in range(_K):
    for part in ('linear', 'res_connection'):
      name = f'hydra_mlp.{i}.{first}.{part}'
      tensors[f'{name}.weight'] = by_hand.normal(rng, _D, (i + 2) * _D)
      tensors[f'{name}.bias'] = by_hand.normal(rng, _D)
    block = by_hand.normal(rng, _D, _D), by_hand.normal(rng, _D)
    for j in range(1, num_layers):
      name = f'hydra_mlp.{i}.{first + j * step}.linear'
      tensors[f'{name}.weight'], tensors[f'{name}.bias'] = block
    name = f'hydra_lm_head.{i}.1' if is_plus else f'hydra_lm_head.{i}'
    tensors[f'{name}.weight'] = by_hand.normal(rng, _V, _D)
    tensors[f'{name}.bias'] = by_hand.normal(rng, _V)
  if not is_plus:
    return tensors
  prefix = 'prefix_embeding_layer'
  for name, shape in _SHAPES_OF_LAYER.items():
    values = by_hand.normal(rng, *shape)
    is_norm = len(shape) == 1
    tensors[f'{prefix}.layers.0.{name}'] = values + is_norm
  tensors[f'{prefix}.norm.weight'] = 1 + by_hand.normal(rng, _D)
  tensors[f'{prefix}.embed_tokens.weight'] = by_hand.normal(rng, _V, _D)
  frequencies = np.ones(4, np.float32)
  name = f'{prefix}.layers.0.self_attn.rotary_emb.inv_freq'
  return tensors | {name: frequencies}


def save(folder, name, tensors):
  """Saves with torch, shared arrays as one storage, or as safetensors."""
  path = folder / name
  if path.suffix == '.safetensors':
    safetensors.numpy.save_file(tensors, path)
    return folder
  unique = {id(x): torch.from_numpy(x) for x in tensors.values()}
  torch.save({key: unique[id(x)] for key, x in tensors.items()}, path)
  return folder


def _blocks(tensors, names, x):
  for name in names:
    x = x + by_hand.silu(by_hand.linear(tensors, name, x))
  return x


def _medusa_by_hand(tensors, found, num_layers):
  last = found.hidden[-1]
  return [
    by_hand.linear(
      tensors,
      f'{i}.{num_layers}',
      _blocks(tensors, [f'{i}.{j}.linear' for j in range(num_layers)], last),
    )
    for i in range(_K)
  ]


def _prefix_by_hand(tensors, hidden):
  name = 'prefix_embeding_layer.layers.0'
  normed = by_hand.norm(tensors, f'{name}.input_layernorm', hidden, 1e-5)
  x = hidden + by_hand.causal_attention(
    tensors, f'{name}.self_attn', normed, 8, 10_000.0
  )
  normed = by_hand.norm(tensors, f'{name}.post_attention_layernorm', x, 1e-5)
  x = x + by_hand.mlp(tensors, f'{name}.mlp', normed)
  return by_hand.norm(tensors, 'prefix_embeding_layer.norm', x, 1e-5)


def _hydra_by_hand(tensors, found, num_layers=3):
  is_plus = 'hydra_lm_head.0.1.weight' in tensors
  first, step = (1, 2) if is_plus else (0, 1)
  hidden = _prefix_by_hand(tensors, found.hidden) if is_plus else found.hidden
  read = [found.text[-1], *found.drafts]
  logits = []
  for i in range(_K):
    embedded = by_hand.embedding(TARGET)[read[: i + 1]]
    x = np.concatenate([hidden[-1], *embedded])
    name = f'hydra_mlp.{i}.{first}'
    x = by_hand.linear(tensors, f'{name}.res_connection', x) + by_hand.silu(
      by_hand.linear(tensors, f'{name}.linear', x)
    )
    numbers = [first + j * step for j in range(1, num_layers)]
    x = _blocks(tensors, [f'hydra_mlp.{i}.{j}.linear' for j in numbers], x)
    name = f'hydra_lm_head.{i}.1' if is_plus else f'hydra_lm_head.{i}'
    logits.append(by_hand.linear(tensors, name, x))
  return logits


def _assert_drafts(loaded, expected):
  for found in by_hand.two_rounds(loaded, TARGET, _PROMPT, 1, 7):
    np.testing.assert_allclose(found.logits, expected(found), atol=1e-4)


@pytest.mark.parametrize(
  'name', ['medusa_lm_head.pt', 'medusa_lm_head.safetensors']
)
@pytest.mark.parametrize('is_shared', [True, False])
def test_medusa_drafts_as_its_tensors_say(tmp_path, name, is_shared):
  tensors = medusa_tensors(2, is_shared)
  loaded = specsample.load_drafter(save(tmp_path, name, tensors), TARGET)
  assert loaded.drafter == drafters.Medusa(
    model=MODEL,
    num_draft_tokens=_K,
    num_layers=2,
    own_unembedding=True,
    shares_blocks=is_shared,
  )
  assert loaded.card == {}
  _assert_drafts(loaded, lambda x: _medusa_by_hand(tensors, x, 2))


def test_medusa_with_one_layer_and_its_prefix(tmp_path):
  tensors = medusa_tensors(1)
  named = {f'medusa_head.{key}': value for key, value in tensors.items()}
  folder = save(tmp_path, 'medusa_lm_head.pt', named)
  loaded = specsample.load_drafter(folder, TARGET)
  _assert_drafts(loaded, lambda x: _medusa_by_hand(tensors, x, 1))


@pytest.mark.parametrize('is_plus', [True, False])
def test_hydra_drafts_as_its_tensors_say(tmp_path, is_plus):
  tensors = hydra_tensors(is_plus)
  folder = save(tmp_path, 'hydra_lm_head.pt', tensors)
  (folder / 'config.json').write_text('{"grounded_heads": true}')
  loaded = specsample.load_drafter(folder, TARGET)
  assert loaded.drafter.prefix_attention == is_plus
  assert loaded.drafter.num_layers == 3
  assert loaded.drafter.shares_blocks
  _assert_drafts(loaded, lambda x: _hydra_by_hand(tensors, x))


@pytest.mark.parametrize('name', ['medusa', 'hydra'])
def test_the_first_heads_are_loaded_and_saved(tmp_path, name):
  tensors = {'medusa': medusa_tensors, 'hydra': hydra_tensors}[name]()
  folder = save(tmp_path, f'{name}_lm_head.pt', tensors)
  loaded = specsample.load_drafter(folder, TARGET, 2)
  whole = specsample.load_drafter(folder, TARGET)
  assert loaded.drafter.num_draft_tokens == 2
  heads = {i: whole.params['heads'][i] for i in (0, 1)}
  jax.tree.map(np.testing.assert_array_equal, loaded.params['heads'], heads)
  with pytest.raises(ValueError, match=r'is 4, but .* has 3 heads: draft at'):
    specsample.load_drafter(folder, TARGET, 4)
  folders.saved_again(tmp_path / 'saved', loaded, TARGET)


@pytest.mark.nightly(but=('hydra',))
@pytest.mark.parametrize('name', ['medusa', 'hydra'])
def test_greedy_text_and_trees_are_the_targets(tmp_path, name):
  tensors = {'medusa': medusa_tensors, 'hydra': hydra_tensors}[name]()
  folder = save(tmp_path, f'{name}_lm_head.pt', tensors)
  loaded = specsample.load_drafter(folder, TARGET)
  folders.assert_greedy_equal(loaded, TARGET)
  topology = specsample.tree.Topology((0, 0, 1, 1, 3))
  tree = drafters.Tree(drafter=loaded.drafter, topology=topology)
  folders.assert_greedy_equal(loaded, TARGET, specsample.verify.tree, tree)


_DAMAGES = {
  'a block is missing': (
    'medusa_lm_head.pt',
    lambda: folders.changed(medusa_tensors(), **{'1.0.linear.bias': None}),
    r'lacks 1 tensors \(1\.0\.linear\.bias\)',
  ),
  'an unembedding is missing': (
    'medusa_lm_head.pt',
    lambda: folders.changed(medusa_tensors(), **{'2.2.weight': None}),
    r'lacks 1 tensors \(2\.2\.weight\)',
  ),
  'more than heads': (
    'medusa_lm_head.pt',
    lambda: folders.changed(
      medusa_tensors(), **{'1.norm.weight': np.ones(_D, 'f4')}
    ),
    r'has 1 tensors \(1\.norm\.weight\) unknown',
  ),
  'of a wider target': (
    'medusa_lm_head.pt',
    lambda: folders.changed(
      medusa_tensors(), **{'0.2.weight': np.ones((_V, 24), 'f4')}
    ),
    r'0\.2\.weight has shape \(32, 24\), expected \(32, 16\)',
  ),
  'of a larger vocabulary': (
    'medusa_lm_head.safetensors',
    lambda: folders.changed(
      medusa_tensors(), **{'0.2.weight': np.ones((40, _D), 'f4')}
    ),
    r'0\.2\.weight has shape \(40, 16\), expected \(32, 16\)',
  ),
  'no heads': (
    'medusa_lm_head.pt',
    lambda: {'weight': np.ones(2, 'f4')},
    r'is not in a known drafter layout \(it has 1 tensors \(weight\)\)',
  ),
  'heads that read no drafts': (
    'hydra_lm_head.pt',
    lambda: folders.changed(
      hydra_tensors(),
      **{'hydra_mlp.0.1.linear.weight': np.ones((_D, _D), 'f4')},
    ),
    r'hydra_mlp\.0\.1\.linear\.weight has shape \(16, 16\), expected \(16, 3',
  ),
  'no norm behind the prefix': (
    'hydra_lm_head.pt',
    lambda: folders.changed(
      hydra_tensors(), **{'prefix_embeding_layer.norm.weight': None}
    ),
    r'lacks 1 tensors \(prefix_embeding_layer\.norm\.weight\)',
  ),
}


@pytest.mark.parametrize('damage', _DAMAGES)
def test_tensors_that_do_not_fit_are_refused(tmp_path, damage):
  name, make, message = _DAMAGES[damage]
  folder = save(tmp_path, name, make())
  with pytest.raises(ValueError, match=message) as caught:
    specsample.load_drafter(folder, TARGET)
  assert '\n' not in str(caught.value)


def test_scaled_logits_are_refused(tmp_path):
  folder = save(tmp_path, 'medusa_lm_head.pt', medusa_tensors())
  (folder / 'config.json').write_text('{"logit_scale": 0.5}')
  with pytest.raises(ValueError, match=r'config\.json: logit_scale is 0\.5'):
    specsample.load_drafter(folder, TARGET)


@pytest.mark.parametrize('suffix', ['pt', 'safetensors'])
def test_a_file_that_was_cut_is_refused(tmp_path, suffix):
  path = tmp_path / f'medusa_lm_head.{suffix}'
  save(tmp_path, path.name, medusa_tensors())
  path.write_bytes(path.read_bytes()[:-200])
  with pytest.raises(ValueError, match='download it again') as caught:
    specsample.load_drafter(tmp_path, TARGET)
  assert str(path) in str(caught.value)


class _MakeFolder:
  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return os.mkdir, (self.path,)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
  made = str(tmp_path / 'made')
  tensors = {'0.0.linear.weight': torch.ones(2), 'more': _MakeFolder(made)}
  torch.save(tensors, tmp_path / 'medusa_lm_head.pt')
  with pytest.raises(ValueError, match=r'asks for (posix|nt)\.mkdir, which'):
    specsample.load_drafter(tmp_path, TARGET)
  assert not os.path.exists(made)


def test_hydra_of_another_hidden_vector_is_refused(tmp_path):
  save(tmp_path, 'hydra_lm_head.pt', hydra_tensors())
  config = {'hidden_state_offset': 1}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(
    ValueError, match='hidden_state_offset is 1, but only 0 is supported'
  ):
    specsample.load_drafter(tmp_path, TARGET)
