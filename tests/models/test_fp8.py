"""Matrices in 8 bits with a scale per block, and faults in them.

`test_mtp_of_deepseek` tests that a model of them equals the decoded one.
"""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import specsample
from specsample import files
from specsample.models import config as config_lib
from specsample.models import quantised
from specsample.models import safetensors_file
from tests.models import fp8_by_hand

_NAME = 'model.layers.0.mlp.up_proj.weight'
_SCALE = f'{_NAME}_scale_inv'


# DeepSeek's scales are float32, Qwen's bfloat16.
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_parts_are_those_of_the_matrix(tmp_path, dtype):
  torch.manual_seed(0)
  coded, scale, meant = fp8_by_hand.quantised(
    torch.randn(23, 19), (5, 7), getattr(torch, dtype)
  )
  assert scale.shape == (5, 3)
  path = tmp_path / 'model.safetensors'
  stored = {'x': coded, 'x_scale_inv': scale, 'y': torch.arange(3.0)}
  safetensors.torch.save_file(stored, path)
  found = safetensors_file.read_header(files.at(path))
  coding = {'quant_method': 'fp8', 'weight_block_size': [5, 7]}
  config = config_lib.Config({'quantization_config': coding}, 'config.json')
  file = quantised.opened(config, found, 'folder', dtype).tensors()
  shapes = {name: tensor.shape for name, tensor in file.items()}
  assert shapes == {'x': (23, 19), 'y': (3,)}
  np.testing.assert_array_equal(file['y'][slice(1, 3),], [1, 2])
  expected = meant.to(getattr(torch, dtype)).float()
  for start in range(23):
    for stop in range(start + 1, 24, 3):
      for columns in (slice(None), slice(0, 7), slice(6, 8), slice(9, None)):
        part = file['x'][slice(start, stop), columns]
        assert part.dtype == dtype
        found_part = part.astype(np.float32)
        np.testing.assert_array_equal(found_part, expected[start:stop, columns])


@pytest.mark.parametrize(
  ('tensors', 'settings', 'words'),
  [
    ({_SCALE: None}, {}, [f'lacks 1 tensors ({_SCALE})']),
    (
      {_SCALE: torch.ones(6, 4)},
      {},
      [f'{_SCALE} has shape (6, 4), expected (5, 4)'],
    ),
    ({_SCALE: torch.ones(5, 4).char()}, {}, [_SCALE, 'stored as I8', 'F8_E4M']),
    (
      {'model.norm.weight': torch.ones(32).to(torch.float8_e4m3fn)}
      | {'model.norm.weight_scale_inv': torch.ones(4)},
      {},
      ['has 1 tensors (model.norm.weight_scale_inv) unknown'],
    ),
    ({}, {'weight_block_size': [16, 8]}, ['_scale_inv has shape', '(3, 4)']),
    (
      {},
      {'weight_block_size': None},
      ['weight_block_size of quantization_config is None', '[rows, columns]'],
    ),
    ({}, {'weight_block_size': [128]}, ['is [128], but only [rows, c']),
    ({}, {'weight_block_size': [0, 8]}, ['is [0, 8], but only [rows, c']),
    (
      {},
      {'quant_method': 'gptq'},
      ["is 'gptq', but only 'fp8' or 'mxfp4' is supported: load a"],
    ),
    (
      {},
      None,
      ['stored as F8_E4M3, but the supported types are F64', 'not quantised'],
    ),
  ],
)
def test_what_is_wrong_is_named(tmp_path, tensors, settings, words):
  config = transformers.LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=48,
  )
  transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / 'wide')
  folder = tmp_path / 'fp8'
  plain = tmp_path / 'plain'
  fp8_by_hand.write(tmp_path / 'wide', folder, (10, 8), plain=plain)
  path = folder / 'model.safetensors'
  stored = safetensors.torch.load_file(path) | tensors
  stored = {name: x for name, x in stored.items() if x is not None}
  safetensors.torch.save_file(stored, path)
  content = json.loads((folder / 'config.json').read_text())
  own = content.pop('quantization_config')
  if settings is not None:
    content['quantization_config'] = own | settings
  (folder / 'config.json').write_text(json.dumps(content))
  with pytest.raises(ValueError) as caught:
    specsample.load(folder)
  for word in (str(folder), *words):
    assert word in str(caught.value)
