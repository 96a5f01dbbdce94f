"""Matrices of 8-bit floats with one scale per block.

DeepSeek-V3 (2412.19437, section 3.3) and the FP8 versions of Qwen3 are
published in this format: with a matrix NAME comes NAME_scale_inv, the scales by
which its blocks are multiplied. The last blocks may be smaller.
"""

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


def block_size(part: config_lib.Config) -> Block:
  """Returns the size of the blocks that a quantization_config names."""
  size = part.get('weight_block_size')
  if (
    not isinstance(size, list)
    or len(size) != 2
    or any(type(number) is not int or number < 1 for number in size)
  ):
    raise unsupported(part, 'weight_block_size', '[rows, columns]')
  rows, columns = size
  return rows, columns


def unsupported(
  part: config_lib.Config, key: str, supported: str
) -> ValueError:
  """Returns the error for a setting that is not among the supported ones."""
  return ValueError(
    f'{part.origin}: {key} of quantization_config is {part.get(key)!r}, but '
    f'only {supported} is supported: load a version that is not quantised'
  )


@dataclasses.dataclass(frozen=True)
class Fp8:
  """A `quantised.Form` with blocks of this size."""

  block: Block
  kinds: tuple[str, ...] = (KIND,)

  def describe(self) -> str:
    rows, columns = self.block
    return f'{KIND}, each block of {rows} x {columns} with a scale'

  def compare(self, found: safetensors_file.Tensors) -> tensors.Differences:
    expected = {
      name + _SCALE: tuple(
        -(-number // size)
        for number, size in zip(matrix.shape, self.block, strict=True)
      )
      for name, matrix in _matrices(found).items()
    }
    stored = {name: found[name].shape for name in expected if name in found}
    return tensors.differences(expected, stored)

  def dequantised(
    self, found: safetensors_file.Tensors, origin: str, dtype: str
  ) -> tensors.TensorFile:
    matrices = _matrices(found)
    scales = {name + _SCALE for name in matrices}

    def open_one(name):
      if name not in matrices:
        return found[name]
      scale = found[name + _SCALE]
      return _Blocks(found[name], scale, self.block, jnp.dtype(dtype))

    return tensors.TensorFile(
      origin=origin,
      shapes={name: found[name].shape for name in found if name not in scales},
      open=open_one,
    )


def _matrices(found):
  """Returns the matrices with blocks; any other scale is an unknown tensor."""
  return {
    name: tensor
    for name, tensor in found.items()
    if tensor.kind == KIND and len(tensor.shape) == 2
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
