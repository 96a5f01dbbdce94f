"""Matrices of 4-bit floats with one scale for each 32 values (MXFP4).

OCP Microscaling Formats (MX), version 1.0, section 5; gpt-oss is published so.
The matrices of all experts, NAME [E, in, out], are stored as NAME_blocks
[E, out, in / 32, 16], two values in a byte, the first in the low bits, and
NAME_scales [E, out, in / 32], the exponents of powers of 2.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specsample.models import safetensors_file
from specsample.models import tensors

_KIND = 'U8'  # in safetensors
_BLOCKS, _SCALES = '_blocks', '_scales'
_AXES = 'experts', 'out', 'blocks', 'bytes'
_NUM_BYTES, _NUM_VALUES = 16, 32  # of a block
_BIAS = 127  # of the scales' exponents
_MAGNITUDES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NIBBLES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# The two values of each byte.
_PAIRS = np.stack([np.tile(_NIBBLES, 16), np.repeat(_NIBBLES, 16)], axis=-1)


@dataclasses.dataclass(frozen=True)
class Mxfp4:
  """A `quantised.Form`."""

  kinds: tuple[str, ...] = (_KIND,)

  def describe(self) -> str:
    return f'MXFP4, each {_NUM_VALUES} values with a scale'

  def compare(self, found: safetensors_file.Tensors) -> tensors.Differences:
    expected: dict[str, tuple[int, ...]] = {}
    for name in _names(found):
      shape = found[name + _BLOCKS].shape[:-1]
      expected[name + _BLOCKS] = *shape, _NUM_BYTES
      expected[name + _SCALES] = shape
    bytes_of = {
      name: tensor.shape
      for name, tensor in found.items()
      if tensor.kind == _KIND
    }
    return tensors.differences(expected, bytes_of)

  def dequantised(
    self, found: safetensors_file.Tensors, origin: str, dtype: str
  ) -> tensors.TensorFile:
    names = _names(found)
    packed = {name + end for name in names for end in (_BLOCKS, _SCALES)}
    shapes = {x: found[x].shape for x in found if x not in packed}
    shapes |= {x: _shape(found[x + _BLOCKS]) for x in names}

    def open_one(name):
      if name not in names:
        return found[name]
      blocks, scales = found[name + _BLOCKS], found[name + _SCALES]
      return _Matrices(blocks, scales, jnp.dtype(dtype))

    return tensors.TensorFile(origin, shapes, open_one)


def _names(found):
  """Returns the names of the tensors that are stored as blocks."""
  return [
    name.removesuffix(_BLOCKS)
    for name, tensor in found.items()
    if name.endswith(_BLOCKS)
    and tensor.kind == _KIND
    and len(tensor.shape) == len(_AXES)
  ]


def _shape(blocks):
  count, num_out, num_blocks, _ = blocks.shape
  return count, num_blocks * _NUM_VALUES, num_out


@dataclasses.dataclass(frozen=True)
class _Matrices:
  """Blocks [E, out, in / 32, 16] and scales, as a tensor [E, in, out]."""

  blocks: safetensors_file.Tensor
  scales: safetensors_file.Tensor
  dtype: Any

  def __getitem__(self, index: tensors.Index, /) -> np.ndarray:
    """Returns a part, dequantising only the blocks that it meets."""
    experts, of_in, of_out = index
    first, last, _ = of_in.indices(_shape(self.blocks)[1])
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
