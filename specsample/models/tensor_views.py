"""Parts of a file's tensors, read as if they were tensors of their own.

Some layouts store one tensor for several parameters. Each view reads only the
rows that it needs.
"""

import dataclasses

import numpy as np

from specsample.models import tensors


@dataclasses.dataclass(frozen=True)
class Rows:
  """The rows `start` to `start + size` of each block of a tensor.

  Attributes:
    tensor: has `count` blocks of `block` rows.
  """

  tensor: tensors.Tensor
  start: int
  size: int
  block: int
  count: int = 1

  def __getitem__(self, index: tensors.Index, /) -> np.ndarray:
    """Returns a part, reading whole blocks if there are several."""
    of_rows, *others = index
    rows = range(*of_rows.indices(self.count * self.size))
    if self.count == 1:
      first = self.start + rows.start
      return self.tensor[slice(first, first + len(rows)), *others]
    first, end = rows.start // self.size, -(-rows.stop // self.size)
    read = self.tensor[slice(first * self.block, end * self.block), *others]
    blocks = read.reshape(end - first, self.block, *read.shape[1:])
    own = blocks[:, self.start : self.start + self.size]
    own = own.reshape(-1, *read.shape[1:])
    return own[rows.start - first * self.size :][: len(rows)]


@dataclasses.dataclass(frozen=True)
class WithoutAxis:
  """A tensor [rows, 1, ...] without its second axis."""

  tensor: tensors.Tensor

  def __getitem__(self, index: tensors.Index, /) -> np.ndarray:
    """Returns a part."""
    rows, *others = index
    return self.tensor[rows, slice(None), *others][:, 0]


@dataclasses.dataclass(frozen=True)
class Experts:
  """Matrices [E, out, in] of all experts, as `tensors.stacked` orders them.

  Attributes:
    tensor: holds them in rows `start` to `start + size` of each expert.
  """

  tensor: tensors.Tensor
  start: int
  size: int

  def __getitem__(self, index: tensors.Index, /) -> np.ndarray:
    """Returns a part of [out, in, E]."""
    of_rows, columns, experts = index
    rows = range(*of_rows.indices(self.size))
    first = self.start + rows.start
    read = self.tensor[experts, slice(first, first + len(rows)), columns]
    return np.moveaxis(read, 0, -1)
