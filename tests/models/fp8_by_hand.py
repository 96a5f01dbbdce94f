"""Checkpoints in 8 bits, written as DeepSeek-V3's, and their decoded values."""

import json
import re

import safetensors.torch
import torch


def quantised(matrix, block, scale_dtype=torch.float32):
  """Returns a matrix [out, in] in 8 bits, its scales and its decoded values."""
  size, (height, width) = matrix.shape, block
  # The last blocks are padded with zeros, which are cut off again.
  counts = -(-size[0] // height), -(-size[1] // width)
  padded = torch.zeros(counts[0] * height, counts[1] * width)
  padded[: size[0], : size[1]] = matrix
  blocks = padded.reshape(counts[0], height, counts[1], width)
  scale = (blocks.abs().amax((1, 3)) / 448).to(scale_dtype)
  of_each = torch.kron(scale.float(), torch.ones(block))
  of_each = of_each[: size[0], : size[1]]
  coded = (matrix / of_each).to(torch.float8_e4m3fn)
  return coded, scale, coded.float() * of_each


def write(source, folder, block, *, plain):
  """Writes a folder's model with 8-bit projections; decoded ones to `plain`."""
  stored, meant = {}, {}
  for path in source.glob('*.safetensors'):
    for name, tensor in safetensors.torch.load_file(path).items():
      stored[name] = meant[name] = tensor
      if re.search(r'_proj(_with_mqa)?\.weight$', name):
        stored[name], scale, meant[name] = quantised(tensor, block)
        stored[f'{name}_scale_inv'] = scale
  config = json.loads((source / 'config.json').read_text())
  own = {
    'activation_scheme': 'dynamic',
    'fmt': 'e4m3',
    'quant_method': 'fp8',
    'weight_block_size': list(block),
  }
  for path, tensors, more in (
    (folder, stored, {'quantization_config': own}),
    (plain, meant, {}),
  ):
    path.mkdir()
    safetensors.torch.save_file(tensors, path / 'model.safetensors')
    (path / 'config.json').write_text(json.dumps(config | more))
