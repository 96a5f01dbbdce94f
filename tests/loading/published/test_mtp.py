"""Modules for multi-token prediction in a target's own folder."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

import specsample
from specsample import testing
from specsample.training import unrolled
from tests.drafters import features_by_hand

_D, _HEADS, _KV, _HEAD, _MLP, _V, _L = 32, 4, 2, 8, 48, 96, 2
_CONFIG = transformers.LlamaConfig(
  vocab_size=_V,
  hidden_size=_D,
  num_hidden_layers=_L,
  num_attention_heads=_HEADS,
  num_key_value_heads=_KV,
  intermediate_size=_MLP,
  max_position_embeddings=64,
  rms_norm_eps=1e-5,
)
_SHAPES = {
  'enorm.weight': (_D,),
  'hnorm.weight': (_D,),
  'eh_proj.weight': (_D, 2 * _D),
  'input_layernorm.weight': (_D,),
  'self_attn.q_proj.weight': (_D, _D),
  'self_attn.k_proj.weight': (_KV * _HEAD, _D),
  'self_attn.v_proj.weight': (_KV * _HEAD, _D),
  'self_attn.o_proj.weight': (_D, _D),
  'post_attention_layernorm.weight': (_D,),
  'mlp.gate_proj.weight': (_MLP, _D),
  'mlp.up_proj.weight': (_MLP, _D),
  'mlp.down_proj.weight': (_D, _MLP),
  'shared_head.norm.weight': (_D,),
}
_COPIES = {
  'embed_tokens.weight': (_V, _D),
  'shared_head.head.weight': (_V, _D),
}


def _modules(count=2):
  """Returns tensors with DeepSeek's names; modules follow the last layer."""
  rng = np.random.default_rng(0)
  return {
    f'model.layers.{_L + i}.{name}': rng.normal(0.3, 0.2, shape).astype('f4')
    for i in range(count)
    for name, shape in (_SHAPES | _COPIES).items()
  }


def _write(folder, modules, count=2):
  torch.manual_seed(0)
  transformers.LlamaForCausalLM(_CONFIG).save_pretrained(folder)
  weights = folder / 'model.safetensors'
  trunk = safetensors.numpy.load_file(weights)
  of_copies = {
    'embed_tokens.weight': trunk['model.embed_tokens.weight'],
    'shared_head.head.weight': trunk['lm_head.weight'],
  }
  modules = {
    name: of_copies.get('.'.join(name.split('.')[3:]), tensor)
    for name, tensor in modules.items()
  }
  safetensors.numpy.save_file(trunk | modules, weights)
  config = json.loads((folder / 'config.json').read_text())
  config['num_nextn_predict_layers'] = count
  (folder / 'config.json').write_text(json.dumps(config))
  return folder


@pytest.fixture(scope='module', name='folder')
def fixture_folder(tmp_path_factory):
  return _write(tmp_path_factory.mktemp('deepseek'), _modules())


@pytest.mark.parametrize('name', ['embed_tokens', 'shared_head.head'])
def test_copies_that_differ_are_refused(tmp_path, name):
  _write(tmp_path, _modules())
  path = tmp_path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  tensors[f'model.layers.{_L + 1}.{name}.weight'][-1, -1] += 1
  safetensors.numpy.save_file(tensors, path)
  target = specsample.load(tmp_path)
  message = rf'tensor model.layers.{_L + 1}.{name}.weight is not a copy of'
  with pytest.raises(ValueError, match=message):
    specsample.load_drafter(tmp_path, target)


def test_the_target_is_loaded_without_them(folder):
  target = specsample.load(folder)
  assert target.model.num_layers == _L == len(target.params['layers'])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_every_tensor_is_where_it_belongs(folder, dtype):
  target = specsample.load(folder, dtype)
  loaded = specsample.load_drafter(folder, target)
  assert loaded.drafter == specsample.drafters.MTP(
    model=target.model, num_draft_tokens=2, num_modules=2
  )
  tensors = _modules()
  for i in range(2):
    module = loaded.params['layers'][i]
    attention, mlp = module['layer']['attention'], module['layer']['mlp']
    for name, found in {
      'enorm': module['embedding_norm']['scale'],
      'hnorm': module['feature_norm']['scale'],
      'eh_proj': module['project']['linear']['kernel'].T,
      'input_layernorm': module['layer']['attention_norm']['scale'],
      'self_attn.q_proj': attention['query']['kernel'].T,
      'self_attn.k_proj': attention['key']['kernel'].T,
      'self_attn.v_proj': attention['value']['kernel'].T,
      'self_attn.o_proj': attention['out']['kernel'].T,
      'post_attention_layernorm': module['layer']['mlp_norm']['scale'],
      'mlp.gate_proj': mlp['gate']['kernel'].T,
      'mlp.up_proj': mlp['up']['kernel'].T,
      'mlp.down_proj': mlp['down']['kernel'].T,
      'shared_head.norm': module['norm']['scale'],
    }.items():
      assert found.dtype == dtype
      expected = tensors[f'model.layers.{_L + i}.{name}.weight']
      expected = expected.astype(found.dtype)
      np.testing.assert_array_equal(found, expected)


def test_the_drafts_are_the_modules_own(folder):
  target = specsample.load(folder)
  loaded = specsample.load_drafter(folder, target, num_draft_tokens=3)
  params = {'target': target.params, 'drafter': loaded.params}
  text = np.asarray([5, 17, 40, 3, 90, 11, 8, 60])
  drafter = loaded.drafter

  @jax.jit
  def of_target(params):
    empty = target.model.init_cache(1, 0)
    return target.model.apply(params['target'], text[None], empty)[0]

  @jax.jit
  def of_drafter(params, hidden):
    outputs = unrolled.outputs(
      drafter, params, {'tokens': text[None]}, hidden, 3
    )
    return [drafter.vectors(params, x, i)[0, 3] for i, x in enumerate(outputs)]

  output = of_target(params)
  found = of_drafter(params, output.hidden)
  expected = features_by_hand.vectors(params, drafter, output, text, 5, 3)
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
  testing.assert_greedy_equal(
    params,
    text.reshape(2, 4),
    np.asarray([4, 2]),
    model=target.model,
    drafter=drafter,
    verify=specsample.verify.chain,
    max_new_tokens=8,
  )


@pytest.mark.parametrize('count', [0, None, -1, 'two'])
def test_a_folder_without_modules_is_refused(tmp_path, count):
  folder = _write(tmp_path, {}, count)
  target = specsample.load(_write(tmp_path / 'target', {}, 0))
  with pytest.raises(
    ValueError, match=f'num_nextn_predict_layers is {count!r}, (so|expected)'
  ):
    specsample.load_drafter(folder, target)


def _without(name):
  return {key: x for key, x in _modules().items() if name not in key}


@pytest.mark.parametrize(
  ('modules', 'message'),
  [
    (_without('enorm'), r'lacks 2 tensors \(model.layers.2.enorm.weight, '),
    (
      _modules() | {'model.layers.3.gate.bias': np.zeros(2, 'f4')},
      r'has 1 tensors \(model.layers.3.gate.bias\) unknown',
    ),
    (
      _modules() | {'model.layers.2.eh_proj.weight': np.zeros((3, 4), 'f4')},
      r'model.layers.2.eh_proj.weight has shape \(3, 4\), expected',
    ),
  ],
)
def test_modules_that_do_not_fit_are_refused(tmp_path, modules, message):
  folder = _write(tmp_path, modules)
  target = specsample.load(folder)
  with pytest.raises(ValueError, match=message):
    specsample.load_drafter(folder, target)
