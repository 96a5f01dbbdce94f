"""Parts of stored tensors that are parameters of their own, and their axes.

Some families store several matrices as one tensor, such as the gates of all
experts beside their other inputs, with the axes in an order of their own.
"""

from collections.abc import Mapping
import dataclasses

import numpy as np

from specsample.models import tensors


@dataclasses.dataclass(frozen=True)
class Part:
  """Some of a tensor's entries along one axis.

  Attributes:
    order: the tensor's axes in the order of the part's.
    axis: the tensor's axis that is divided.
    start, stop, step: the entries of that axis that belong to the part, as in
      a slice.
  """

  order: tuple[int, ...]
  axis: int = 0
  start: int = 0
  stop: int | None = None
  step: int = 1

  def entries(self, size: int) -> range:
    """Returns the entries among those of an axis of this size."""
    return range(size)[self.start : self.stop : self.step]


# By the end of a stored tensor's name: the part with each suffix to that name.
Parts = Mapping[str, Mapping[str, Part]]


def divided(file: tensors.TensorFile, parts: Parts) -> tensors.TensorFile:
  """Returns the tensors with each that has parts replaced by these.

  A part is called as the whole, followed by its suffix. Tensors of another rank
  than their parts are left as they are.
  """
  shapes: dict[str, tuple[int, ...]] = {}
  sources: dict[str, tuple[str, Part]] = {}
  for name, shape in file.shapes.items():
    end = next((end for end in parts if name.endswith(end)), None)
    found = {} if end is None else parts[end]
    if any(len(part.order) != len(shape) for part in found.values()):
      found = {}
    for suffix, part in found.items():
      shapes[name + suffix] = _shape(part, shape)
      sources[name + suffix] = name, part
    if not found:
      shapes[name] = shape

  def open_one(name):
    if name not in sources:
      return file.open(name)
    source, part = sources[name]
    return View(file.open(source), file.shapes[source], part)

  return tensors.TensorFile(file.origin, shapes, open_one)


def _shape(part, whole):
  sizes = list(whole)
  sizes[part.axis] = len(part.entries(whole[part.axis]))
  return tuple(sizes[axis] for axis in part.order)


@dataclasses.dataclass(frozen=True)
class View:
  """A part of a tensor, cut out as it is read."""

  tensor: tensors.Tensor
  shape: tuple[int, ...]  # of the whole tensor
  part: Part

  def __getitem__(self, index: tensors.Index, /) -> np.ndarray:
    part = self.part
    wanted = [slice(None)] * len(index)
    for axis, of_axis in zip(part.order, index, strict=True):
      wanted[axis] = of_axis
    entries = part.entries(self.shape[part.axis])[wanted[part.axis]]
    wanted[part.axis] = slice(entries.start, entries.stop, entries.step)
    return self.tensor[tuple(wanted)].transpose(part.order)


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
