"""Matrices of 8-bit floats with one scale per block.

DeepSeek-V3 (2412.19437, section 3.3) and the FP8 versions of Qwen3 are
published in this format: with a matrix NAME comes NAME_scale_inv, the scales by
which its blocks are multiplied. The last blocks may be smaller.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specsample.models import config as config_lib
from specsample.models import safetensors_file
from specsample.models import tensors

KIND = 'F8_E4M3'  # in safetensors
_SCALE = '_scale_inv'
# The value of each byte; NumPy's own conversion is four times slower.
_VALUES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype('f4')

Block = tuple[int, int]  # rows and columns
_Stored = Mapping[str, safetensors_file.Tensor]


def block_size(config: config_lib.Config) -> Block | None:
  """Returns the size of a model's blocks, None if it is not quantised.

  Raises:
    ValueError: the model is quantised in another way.
  """
  part = config.part('quantization_config')
  if not part.values:
    return None
  if part.get('quant_method') != 'fp8':
    raise _unsupported(part, 'quant_method', "'fp8'")
  size = part.get('weight_block_size')
  if (
    not isinstance(size, list)
    or len(size) != 2
    or any(type(number) is not int or number < 1 for number in size)
  ):
    raise _unsupported(part, 'weight_block_size', '[rows, columns]')
  rows, columns = size
  return rows, columns


def _unsupported(part, key, supported):
  return ValueError(
    f'{part.origin}: {key} of quantization_config is {part.get(key)!r}, but '
    f'only {supported} is supported: load a version that is not quantised'
  )


def kinds(block: Block | None) -> tuple[str, ...]:
  """Returns the supported safetensors dtypes, given the block size if any."""
  return (*safetensors_file.WEIGHT_DTYPES, *([] if block is None else [KIND]))


def compare(found: _Stored, block: Block | None) -> tensors.Differences:
  """Returns how the scales differ from those that the matrices need."""
  expected = {
    name + _SCALE: tuple(
      -(-number // size)
      for number, size in zip(matrix.shape, block or (), strict=True)
    )
    for name, matrix in _matrices(found, block).items()
  }
  stored = {name: found[name].shape for name in expected if name in found}
  return tensors.differences(expected, stored)


def dequantised(
  found: _Stored, origin: str, block: Block | None, dtype: str
) -> tensors.TensorFile:
  """Returns the tensors without the scales, `KIND` matrices dequantised.

  Args:
    found: the stored tensors, which `compare` accepts unless only shapes are
      read.
    origin: `TensorFile.origin` of the result.
    block: the result of `block_size`.
    dtype: dtype to which each part is dequantised as it is read.
  """
  matrices = _matrices(found, block)
  scales = {name + _SCALE for name in matrices}

  def open_one(name):
    if block is None or name not in matrices:
      return found[name]
    scale = found[name + _SCALE]
    return _Blocks(found[name], scale, block, jnp.dtype(dtype))

  return tensors.TensorFile(
    origin=origin,
    shapes={name: found[name].shape for name in found if name not in scales},
    open=open_one,
  )


def _matrices(found, block):
  """Returns the matrices with blocks; any other scale is an unknown tensor."""
  return {
    name: tensor
    for name, tensor in found.items()
    if block is not None and tensor.kind == KIND and len(tensor.shape) == 2
  }


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """A `KIND` matrix [out, in] and its scales, dequantised as it is read."""

  matrix: safetensors_file.Tensor
  scale: safetensors_file.Tensor
  block: Block
  dtype: Any

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
      values[part] = np.take(_VALUES, coded[part]) * of_columns
    return values
