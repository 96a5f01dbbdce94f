"""gpt-oss in 4 bits and its drafters; `test_families` compares its logits."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import specsample
from specsample import files
from specsample import testing
from specsample.models import config as config_lib
from specsample.models import experts
from specsample.models import huggingface
from specsample.models import matrices
from specsample.models import quantised
from specsample.models import rotary
from specsample.models import safetensors_file
from tests.loading.published import folders
from tests.loading.published import test_dflash
from tests.loading.published import test_eagle
from tests.models import mxfp4_by_hand

_CONFIG = transformers.GptOssConfig(
  vocab_size=32,
  hidden_size=32,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  intermediate_size=64,
  max_position_embeddings=64,
  sliding_window=7,
  num_local_experts=4,
  num_experts_per_tok=2,
  initializer_range=0.3,
)
_EXPERTS = 'model.layers.1.mlp.experts.'


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  """A random model, with experts in full precision."""
  torch.manual_seed(0)
  folder = tmp_path_factory.mktemp('gpt_oss')
  transformers.GptOssForCausalLM(_CONFIG).save_pretrained(folder)
  return folder


def test_parts_of_4_bits_are_those_of_the_matrices(tmp_path):
  torch.manual_seed(0)
  blocks, scales, meant = mxfp4_by_hand.packed(3, 6, 96)
  path = tmp_path / 'model.safetensors'
  stored = {'x_blocks': blocks, 'x_scales': scales, 'y': torch.arange(3.0)}
  safetensors.torch.save_file(stored, path)
  found = safetensors_file.read_header(files.at(path))
  coding = {'quantization_config': {'quant_method': 'mxfp4'}}
  config = config_lib.Config(coding, 'config.json')
  for dtype in ('float32', 'bfloat16'):
    file = quantised.opened(config, found, 'folder', dtype).tensors()
    shapes = {name: tensor.shape for name, tensor in file.items()}
    assert shapes == {'x': (3, 96, 6), 'y': (3,)}
    np.testing.assert_array_equal(file['y'][slice(1, 3),], [1, 2])
    expected = meant.numpy()
    for inputs in (slice(None), slice(5, 9), slice(40, 90), slice(64, 96)):
      for outputs in (slice(None), slice(1, 6, 2), slice(2, 4)):
        index = slice(1, 3), inputs, outputs
        part = file['x'][index]
        assert part.dtype == dtype
        np.testing.assert_array_equal(part, expected[index])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_model_of_4_bits_is_the_decoded_one(tmp_path, source, dtype):
  mxfp4_by_hand.write(source, tmp_path / 'mxfp4', plain=tmp_path / 'plain')
  found = specsample.load(tmp_path / 'mxfp4', dtype=dtype)
  expected = specsample.load(tmp_path / 'plain', dtype=dtype)
  assert found.model == expected.model
  jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize(
  ('tensors', 'settings', 'words'),
  [
    (
      {_EXPERTS + 'down_proj_scales': torch.zeros(4, 32, 3).byte()},
      {},
      [_EXPERTS + 'down_proj_scales has shape (4, 32, 3), expected (4, 32, 2)'],
    ),
    (
      {
        _EXPERTS + 'down_proj_blocks': torch.zeros(4, 32, 3, 16).byte(),
        _EXPERTS + 'down_proj_scales': torch.zeros(4, 32, 3).byte(),
      },
      {},
      [_EXPERTS + 'down_proj has shape (32, 96, 4), expected (32, 64, 4)'],
    ),
    (
      {_EXPERTS + 'gate_up_proj_blocks': torch.zeros(4, 128, 1, 8).byte()},
      {},
      [_EXPERTS + 'gate_up_proj_blocks has shape (4, 128, 1, 8), expected (4,'],
    ),
    (
      {_EXPERTS + 'gate_up_proj_scales': None},
      {},
      [f'lacks 1 tensors ({_EXPERTS}gate_up_proj_scales)'],
    ),
    (
      {'model.norm.weight': torch.ones(32).byte()},
      {},
      ['has 1 tensors (model.norm.weight) unknown'],
    ),
    (
      {'model.layers.0.self_attn.sinks': None},
      {},
      ['lacks 1 tensors (model.layers.0.self_attn.sinks)'],
    ),
    (
      {},
      {'layer_types': ['sliding_attention', 'full_attention']},
      [
        'layer_types is [',
        "one of ['full_attention', 'sliding_attention'] for",
      ],
    ),
    (
      {},
      {'layer_types': ['full_attention', 'linear_attention', 'full_attention']},
      ['layer_types is [', "'linear_attention'", 'for another architecture'],
    ),
    ({}, {'quantization_config': None}, ['stored as U8, but the supported']),
  ],
)
def test_what_is_wrong_is_named(tmp_path, source, tensors, settings, words):
  folder = tmp_path / 'mxfp4'
  mxfp4_by_hand.write(source, folder, plain=tmp_path / 'plain')
  path = folder / 'model.safetensors'
  stored = safetensors.torch.load_file(path) | tensors
  stored = {name: x for name, x in stored.items() if x is not None}
  safetensors.torch.save_file(stored, path)
  config = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps(config | settings))
  with pytest.raises(ValueError) as caught:
    specsample.load(folder)
  for word in (str(folder), *words):
    assert word in str(caught.value)


@pytest.mark.parametrize('given', ['rope_parameters', 'rope_scaling'])
def test_without_a_rope_it_is_that_of_transformers(given):
  written = transformers.GptOssConfig().to_dict()
  rope = written.pop('rope_parameters')

  def model_of(**changes):
    config = config_lib.Config(written | changes, 'config.json')
    return huggingface.family_of(config).model(config, 'bfloat16')

  assert isinstance(model_of().rope_scaling, rotary.YarnRope)
  assert model_of() == model_of(**{given: rope})
  other = model_of(**{given: {'rope_type': 'default'}})
  assert other.rope_scaling is None


@pytest.mark.parametrize('kind', ['eagle3', 'dflash'])
def test_a_drafter_of_plain_layers_drafts_for_it(tmp_path, kind):
  """Its own layers have neither sinks nor experts."""
  model = dataclasses.replace(
    test_eagle.MODEL,
    attention_bias=True,
    has_sinks=True,
    sliding_window=3,
    sliding_layers=(0, 2, 4),
    experts=experts.Experts(
      num_experts=4,
      num_per_token=2,
      mlp_dim=24,
      has_linear_biases=True,
      limit=1.0,
    ),
  )
  params = model.init(jax.random.key(0))
  params = testing.with_noise(params, jax.random.key(1), 0.3)
  target = specsample.Loaded(model, params, None)
  if kind == 'eagle3':
    folder = folders.save(
      tmp_path, test_eagle.eagle3_tensors(), test_eagle.CONFIG
    )
  else:
    folder = folders.save(
      tmp_path, test_dflash.dflash_tensors(), test_dflash.DFLASH
    )
  loaded = specsample.load_drafter(folder, target, 2)
  shape = loaded.drafter.layer_config
  assert (shape.has_sinks, shape.experts) == (False, None)
  testing.assert_greedy_equal(
    {'target': params, 'drafter': loaded.params},
    np.asarray([[3, 1, 4, 9, 2], [8, 5, 0, 0, 0]]),
    np.asarray([5, 2]),
    model=model,
    drafter=loaded.drafter,
    verify=specsample.verify.chain,
    max_new_tokens=8,
  )


@pytest.mark.parametrize(
  ('dtype', 'precision'), [('bfloat16', 'DEFAULT'), ('float32', 'HIGHEST')]
)
def test_products_of_experts_ask_for_no_more_than_their_factors_have(
  dtype, precision
):
  """A TPU's compiler refuses a precision above that of bfloat16 factors."""
  rows, kernels = jnp.zeros((4, 8), dtype), jnp.zeros((2, 8, 8), dtype)
  with jax.default_matmul_precision('highest'):
    program = jax.make_jaxpr(matrices.product_by_group)(
      rows, kernels, jnp.asarray([0, 0, 1, 1])
    )
  (found,) = [x for x in program.eqns if x.primitive.name.startswith('ragged')]
  assert {x.name for x in found.params['precision']} == {precision}
