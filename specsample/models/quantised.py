"""Quantised safetensors, dequantised as they are read.

FP8 (DeepSeek-V3, 2412.19437, section 3.3): with a matrix NAME of 8-bit floats
comes NAME_scale_inv, the scales by which its blocks are multiplied. The last
blocks may be smaller.

MXFP4 (OCP Microscaling Formats, version 1.0, section 5), as in gpt-oss: the
matrices of all experts, NAME [E, in, out], are stored as NAME_blocks
[E, out, in / 32, 16], two 4-bit floats in a byte, the first in the low bits,
and NAME_scales [E, out, in / 32], the exponents of powers of 2.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specsample.models import config as config_lib
from specsample.models import safetensors_file
from specsample.models import tensors

Found = Mapping[str, safetensors_file.Tensor]
# How safetensors calls the dtypes of quantised matrices, by quant_method.
_KINDS = {'fp8': ('F8_E4M3',), 'mxfp4': ('U8',)}
# The value of each byte; NumPy's own conversion is four times slower.
_FP8_VALUES = np.arange(256, dtype='u1').view(jnp.float8_e4m3fn).astype('f4')
_NUM_BYTES, _NUM_VALUES = 16, 32  # of a block of MXFP4
_BIAS = 127  # of the scales' exponents
_MAGNITUDES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NIBBLES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# The two values of each byte.
_PAIRS = np.stack([np.tile(_NIBBLES, 16), np.repeat(_NIBBLES, 16)], axis=-1)


def opened(
  config: config_lib.Config, found: Found, origin: str, dtype: str
) -> tensors.TensorFile:
  """Returns a folder's tensors, dequantised to `dtype` as config.json says.

  Args:
    config: that of the model.
    found: the tensors as they are stored.
    origin: the folder, for messages.
    dtype: the dtype to which each part is dequantised.
  """
  part = config.part('quantization_config')
  method = part.get('quant_method', str)
  if part.values and method not in _KINDS:
    raise _unsupported(part, 'quant_method', "'fp8' or 'mxfp4'")
  kinds = _KINDS[method] if part.values else ()
  supported = (*safetensors_file.WEIGHT_DTYPES, *kinds)
  safetensors_file.check_kinds(origin, found, supported)
  made: dict[str, tensors.Tensor] = {}
  if part.values:
    dequantised = _fp8 if method == 'fp8' else _mxfp4
    made, used = dequantised(part, found, origin, jnp.dtype(dtype))
    found = {name: x for name, x in found.items() if name not in used}
  return tensors.file_of(origin, {**found, **made})


def _unsupported(part, key, supported):
  value = part.values.get(key)
  return ValueError(
    f'{part.origin}: {key} of quantization_config is {value!r}, but only '
    f'{supported} is supported: load a version that is not quantised'
  )


def _fp8(part, found, origin, dtype):
  """Returns the matrices that have blocks, and the names of their scales.

  Any other scale is a tensor that the model does not know.
  """
  block = part.get('weight_block_size', list[int], [])
  if len(block) != 2 or min(block) < 1:
    raise _unsupported(part, 'weight_block_size', '[rows, columns]')
  matrices = {
    f'{name}_scale_inv': (name, tensor)
    for name, tensor in found.items()
    if tensor.kind in _KINDS['fp8'] and len(tensor.shape) == 2
  }
  expected = {
    scale: tuple(
      -(-number // size)
      for number, size in zip(matrix.shape, block, strict=True)
    )
    for scale, (_, matrix) in matrices.items()
  }
  stored = {name: found[name].shape for name in expected if name in found}
  tensors.check_shapes(expected, stored, origin)
  made = {
    name: _Fp8Matrix(matrix, found[scale], tuple(block), dtype)
    for scale, (name, matrix) in matrices.items()
  }
  return made, expected


@dataclasses.dataclass(frozen=True)
class _Fp8Matrix:
  """A matrix [out, in] and its scales, dequantised as it is read."""

  matrix: safetensors_file.Tensor
  scale: safetensors_file.Tensor
  block: tuple[int, int]
  dtype: Any

  @property
  def shape(self):
    return self.matrix.shape

  def __getitem__(self, index: tensors.Index, /) -> np.ndarray:
    """Returns a part, reading only the scales of its blocks."""
    height, width = self.block
    rows, columns = (
      range(*part.indices(size))
      for part, size in zip(index, self.matrix.shape, strict=True)
    )
    scale = self.scale[
      slice(rows.start // height, -(-rows.stop // height)),
      slice(columns.start // width, -(-columns.stop // width)),
    ]
    # One row per row of blocks, with the scale of each column.
    scale = np.repeat(scale.astype(np.float32), width, axis=1)
    scale = scale[:, columns.start % width :][:, : len(columns)]
    coded = self.matrix[index].view(np.uint8)
    values = np.empty(coded.shape, self.dtype)
    before = rows.start % height  # rows of the first block before the part
    for i, of_columns in enumerate(scale):
      part = slice(max(0, i * height - before), (i + 1) * height - before)
      values[part] = np.take(_FP8_VALUES, coded[part]) * of_columns
    return values


def _mxfp4(part, found, origin, dtype):
  """Returns the matrices, and the names of their blocks and scales."""
  del part
  coded = {name: x for name, x in found.items() if x.kind in _KINDS['mxfp4']}
  names = [
    name.removesuffix('_blocks')
    for name, tensor in coded.items()
    if name.endswith('_blocks') and len(tensor.shape) == 4
  ]
  expected: dict[str, tuple[int, ...]] = {}
  for name in names:
    shape = found[f'{name}_blocks'].shape[:-1]
    expected[f'{name}_blocks'] = *shape, _NUM_BYTES
    expected[f'{name}_scales'] = shape
  stored = {name: tensor.shape for name, tensor in coded.items()}
  tensors.check_shapes(expected, stored, origin)
  made = {
    name: _Mxfp4Matrices(
      found[f'{name}_blocks'], found[f'{name}_scales'], dtype
    )
    for name in names
  }
  return made, expected


@dataclasses.dataclass(frozen=True)
class _Mxfp4Matrices:
  """Blocks [E, out, in / 32, 16] and scales, as a tensor [E, in, out]."""

  blocks: safetensors_file.Tensor
  scales: safetensors_file.Tensor
  dtype: Any

  @property
  def shape(self):
    count, num_out, num_blocks, _ = self.blocks.shape
    return count, num_blocks * _NUM_VALUES, num_out

  def __getitem__(self, index: tensors.Index, /) -> np.ndarray:
    """Returns a part, dequantising only the blocks that it meets."""
    experts, of_in, of_out = index
    first, last, _ = of_in.indices(self.shape[1])
    blocks = slice(first // _NUM_VALUES, -(-last // _NUM_VALUES))
    values = self.blocks[experts, of_out, blocks, slice(None)]
    powers = self.scales[experts, of_out, blocks].astype(np.int32) - _BIAS
    before = first - blocks.start * _NUM_VALUES
    inputs = slice(before, before + last - first)
    count, num_out = values.shape[:2]
    made = np.empty((count, last - first, num_out), self.dtype)
    for i, (of_expert, power) in enumerate(zip(values, powers, strict=True)):
      wide = _PAIRS[of_expert].reshape(*power.shape, _NUM_VALUES)
      wide *= np.ldexp(np.float32(1), power)[..., None]
      made[i] = wide.reshape(num_out, -1)[:, inputs].T
    return made
