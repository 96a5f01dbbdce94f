"""Checkpoints in 4 bits, written as gpt-oss's, and their decoded values."""

import json

import safetensors.torch
import torch
from transformers.integrations import mxfp4


def packed(count, num_out, num_in):
  """Returns random blocks and scales, and the matrices that they mean."""
  blocks = torch.randint(0, 256, (count, num_out, num_in // 32, 16))
  scales = torch.randint(122, 127, blocks.shape[:-1])
  blocks, scales = blocks.to(torch.uint8), scales.to(torch.uint8)
  meant = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
  return blocks, scales, meant


def write(source, folder, *, plain):
  """Writes a folder's model with experts in 4 bits; decoded ones to `plain`."""
  stored, meant = {}, {}
  for path in source.glob('*.safetensors'):
    for name, tensor in safetensors.torch.load_file(path).items():
      if not name.endswith(('.gate_up_proj', '.down_proj')):
        stored[name] = meant[name] = tensor
        continue
      count, num_in, num_out = tensor.shape
      blocks, scales, meant[name] = packed(count, num_out, num_in)
      stored[f'{name}_blocks'], stored[f'{name}_scales'] = blocks, scales
  config = json.loads((source / 'config.json').read_text())
  own = {'quant_method': 'mxfp4', 'modules_to_not_convert': ['lm_head']}
  for path, tensors, more in (
    (folder, stored, {'quantization_config': own}),
    (plain, meant, {}),
  ):
    path.mkdir()
    safetensors.torch.save_file(tensors, path / 'model.safetensors')
    (path / 'config.json').write_text(json.dumps(config | more))
