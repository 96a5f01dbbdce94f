"""Filling a model with the named tensors of a foreign format.

`gguf` and `huggingface` open their files as a `TensorFile`; `fill` checks it
against what the model expects before any weight is read. Some families store
several matrices as one tensor, or rows in another order: see `Part`.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import math
import re
from typing import Any, Protocol

import jax
import numpy as np

from specsample import sharding
from specsample.types import Array, ArrayLike, Params

Index = tuple[slice, ...]
# The most tensors that a message names.
_NUM_LISTED = 8
# The number of a matrix's rows that are compared at a time.
_BLOCK_ROWS = 4096


class Tensor(Protocol):
  """A tensor that can be read in parts, such as an array."""

  @property
  def shape(self) -> tuple[int, ...]: ...

  def __getitem__(self, index: Index, /) -> np.ndarray:
    """Returns the part that is selected by one slice per axis."""


Tensors = Mapping[str, Tensor]


class Described(Protocol):
  """An object that describes its parameters: a model or a drafter."""

  def abstract_params(self) -> Params:
    """Returns the parameters' shapes and dtypes without allocating them."""

  def param_axes(self) -> Params:
    """Returns a tuple of `sharding.Axes` per parameter, one for each axis."""


# Converts a parameter that was read to the form that is kept. Takes the model,
# the parameter's name, as by `key`, and the parameter: an array on the mesh or,
# without a mesh, a view of host memory that nothing else uses.
Convert = Callable[[Any, str, ArrayLike], Any]


def as_read(model: Described, name: str, leaf: ArrayLike) -> Array:
  """A `Convert` that keeps parameters as they are."""
  del model, name
  if isinstance(leaf, jax.Array):
    return leaf
  # The transfer transposes; waiting for it frees the copy in the file's layout.
  return jax.device_put(leaf).block_until_ready()


@dataclasses.dataclass(frozen=True)
class TensorFile:
  """Tensors by name, read one at a time; matrices are [out, in]."""

  origin: str  # the file or folder, for messages
  shapes: dict[str, tuple[int, ...]]
  open: Callable[[str], Tensor]

  def tensors(self) -> dict[str, Tensor]:
    """Returns the tensors; each is opened only when it is read."""
    return {name: _Unopened(self, name) for name in self.shapes}


def file_of(origin: str, tensors: Tensors) -> TensorFile:
  """Returns tensors as a file."""
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  return TensorFile(origin, shapes, tensors.__getitem__)


@dataclasses.dataclass(frozen=True)
class _Unopened:
  file: TensorFile
  name: str

  @property
  def shape(self):
    return self.file.shapes[self.name]

  def __getitem__(self, index: Index, /) -> np.ndarray:
    return self.file.open(self.name)[index]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """Some of a tensor's entries along one axis.

  Attributes:
    order: the tensor's axes in the order of the part's. Those that it leaves
      out have size 1.
    axis: the tensor's axis that is divided.
    entries: the numbers of that axis's entries, in the order of the part's;
      None for all. Arrays are read from the first number to the last one.
  """

  order: tuple[int, ...]
  axis: int = 0
  entries: range | np.ndarray | None = None


# By the end of a tensor's name: parts that take its place, by their own ends.
Parts = Mapping[str, Mapping[str, Part]]


def divided(tensors: Tensors, parts: Parts, origin: str) -> dict[str, Tensor]:
  """Returns the tensors with each that has parts replaced by these.

  A tensor of another rank than its parts is left as it is.

  Raises:
    ValueError: a tensor has more or fewer entries than its parts.
  """
  found: dict[str, Tensor] = {}
  for name, tensor in tensors.items():
    end = next((end for end in parts if name.endswith(end)), None)
    of_tensor = parts.get(end or '', {})
    ranks = {1 + max(part.order) for part in of_tensor.values()}
    if ranks != {len(tensor.shape)}:
      found[name] = tensor
      continue
    _check_whole(name, tensor.shape, [*of_tensor.values()], origin)
    for own_end, part in of_tensor.items():
      found[name.removesuffix(end or '') + own_end] = _View(tensor, part)
  return found


def _check_whole(name, shape, parts, origin):
  expected, axis = [*shape], parts[0].axis
  if parts[0].entries is not None:
    expected[axis] = sum(len(part.entries) for part in parts)
  check_shapes({name: tuple(expected)}, {name: shape}, origin)
  for i in {*range(len(shape))}.difference(parts[0].order):
    if shape[i] != 1:
      raise ValueError(
        f'{origin}: tensor {name} has shape {shape}, expected size 1 along '
        f'axis {i}: the checkpoint was converted for another library; load the '
        'original one'
      )


@dataclasses.dataclass(frozen=True)
class _View:
  """A part of a tensor, cut out as it is read."""

  tensor: Tensor
  part: Part

  @property
  def shape(self) -> tuple[int, ...]:
    sizes = [*self.tensor.shape]
    sizes[self.part.axis] = len(self._entries())
    return tuple(sizes[axis] for axis in self.part.order)

  def __getitem__(self, index: Index, /) -> np.ndarray:
    order, axis = self.part.order, self.part.axis
    wanted = [slice(None)] * len(self.tensor.shape)
    for of_tensor, of_part in zip(order, index, strict=True):
      wanted[of_tensor] = of_part
    entries = self._entries()[wanted[axis]]
    if isinstance(entries, range):
      wanted[axis] = slice(entries.start, entries.stop, entries.step)
      read = self.tensor[tuple(wanted)]
    else:
      first = int(entries.min())
      wanted[axis] = slice(first, int(entries.max()) + 1)
      read = self.tensor[tuple(wanted)].take(entries - first, axis)
    left_out = {*range(read.ndim)}.difference(order)
    whole = read.transpose(*order, *left_out)
    return whole.reshape(whole.shape[: len(order)])

  def _entries(self) -> range | np.ndarray:
    entries = self.part.entries
    return (
      range(self.tensor.shape[self.part.axis]) if entries is None else entries
    )


@dataclasses.dataclass(frozen=True)
class _Stack:
  """Matrices [out, in] of all experts, as a tensor [out, in, E]."""

  matrices: tuple[Tensor, ...]

  @property
  def shape(self):
    return *self.matrices[0].shape, len(self.matrices)

  def __getitem__(self, index: Index, /) -> np.ndarray:
    parts = [matrix[index[:2]] for matrix in self.matrices[index[2]]]
    return np.moveaxis(np.stack(parts), 0, -1)


def stacked(tensors: Tensors) -> dict[str, Tensor]:
  """Returns the tensors with those of all experts of a layer stacked.

  In a stack's name, '.experts.*.' stands for their numbers, which are 0 to
  E - 1. Incomplete sets and those of several shapes are left as they are.
  """
  of_experts = re.compile(r'(.*\.experts\.)(\d+)(\..*)')
  stacks: dict[str, dict[int, str]] = {}
  for name in tensors:
    match = of_experts.fullmatch(name)
    if match:
      stacks.setdefault(f'{match[1]}*{match[3]}', {})[int(match[2])] = name
  found = dict(tensors)
  for name, by_number in stacks.items():
    numbers = sorted(by_number)
    shapes = {tensors[source].shape for source in by_number.values()}
    if numbers == list(range(len(numbers))) and len(shapes) == 1:
      found[name] = _Stack(tuple(found.pop(by_number[i]) for i in numbers))
  return found


def fill(
  model: Described,
  tensors: TensorFile,
  names: Mapping[str, str],
  ignored: Collection[str],
  convert: Convert | None,
) -> Params:
  """Reads the model's parameters from `tensors`, the largest first.

  On a mesh each process reads what its devices hold, once. Besides the
  parameters, host memory holds one tensor at a time, which takes at most three
  times its size; the largest come first, while there are few parameters.

  Args:
    model: describes the parameters: their shapes, dtypes and axes.
    tensors: holds their values.
    names: the name in the file of each parameter; one with '{}' for the layer's
      number serves all layers.
    ignored: names that may be in the file and are not read.
    convert: converts a parameter to the form that is kept. It is called as soon
      as one is read, the largest first; without a mesh it is still on the host.
      None reads nothing, and the parameters are their shapes.
  """
  tree = model.abstract_params()
  expected, axes = by_name(tree), by_name(model.param_axes())
  sources = {name: source_name(name, names) for name in expected}
  shapes = {sources[name]: x.shape[::-1] for name, x in expected.items()}
  check_shapes(shapes, tensors.shapes, tensors.origin, ignored)
  if convert is None:
    return tree
  found: dict[str, Any] = {}
  by_size = lambda name: -math.prod(expected[name].shape)
  place = _on_host if jax.sharding.get_mesh().empty else _on_mesh
  for name in sorted(expected, key=by_size):
    tensor = tensors.open(sources[name])
    found[name] = convert(
      model, name, place(tensor, expected[name], axes[name])
    )
  return map_named(lambda name, _: found[name], tree)


def check_shapes(
  expected: Mapping[str, tuple[int, ...]],
  found: Mapping[str, tuple[int, ...]],
  origin: str,
  ignored: Collection[str] = (),
) -> None:
  """Raises ValueError unless tensors have the expected names and shapes.

  The names in `ignored` may be there too.
  """
  missing = expected.keys() - found.keys()
  if missing:
    raise ValueError(
      f'{origin} lacks {listed(missing)}: the checkpoint is incomplete or has '
      'another architecture'
    )
  unknown = found.keys() - expected.keys() - set(ignored)
  if unknown:
    raise ValueError(
      f'{origin} has {listed(unknown)} unknown to the model: the '
      "checkpoint's architecture only resembles the model's"
    )
  misshapen = [
    f'tensor {name} has shape {found[name]}, expected {shape}'
    for name, shape in sorted(expected.items())
    if found[name] != shape
  ]
  if misshapen:
    shown = '; '.join(misshapen[:_NUM_LISTED])
    num_more = len(misshapen) - _NUM_LISTED
    more = f'; and {num_more} more' if num_more > 0 else ''
    raise ValueError(
      f'{origin}: {shown}{more} according to the configuration: the weights '
      'and the configuration belong to different models'
    )


def are_equal(one: Tensor, other: Tensor) -> bool:
  """Returns whether two matrices have the same shape and values.

  The first is compared in the dtype of the second.
  """
  if one.shape != other.shape:
    return False
  for first in range(0, one.shape[0], _BLOCK_ROWS):
    index = slice(first, first + _BLOCK_ROWS), slice(None)
    expected = other[index]
    if not np.array_equal(one[index].astype(expected.dtype), expected):
      return False
  return True


def key(path: tuple[Any, ...]) -> str:
  """Returns the name of a parameter, made from its path in the tree."""
  return '.'.join(str(entry.key) for entry in path)


def by_name(
  tree: Any, is_leaf: Callable[[Any], bool] = lambda x: isinstance(x, tuple)
) -> dict[str, Any]:
  """Returns a tree's leaves by their names; by default axes are leaves."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
  return {key(path): leaf for path, leaf in leaves}


def map_named(
  function: Callable[..., Any],
  tree: Any,
  *others: Any,
  is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
  """Maps a function of a leaf's name and leaves over trees."""
  return jax.tree_util.tree_map_with_path(
    lambda path, *leaves: function(key(path), *leaves),
    tree,
    *others,
    is_leaf=is_leaf,
  )


def is_of_router(name: str) -> bool:
  """Returns whether a parameter, named as by `key`, belongs to a router.

  Routers tell nearly equal experts apart (`models.experts`), so they are
  float32 in every model.
  """
  *_, above, own = ['', *name.split('.')]
  return 'router' in above or 'router' in own


def is_matrix(name: str, leaf: Any, is_tied: bool) -> bool:
  """Returns whether a parameter, named as by `key`, is a matrix of products.

  An embedding is one only if it is tied to the unembedding: a step reads only a
  few columns of any other, and compilers copy all of it for them if it is int8.
  A router's matrix does not count.
  """
  *_, own = name.split('.')
  names = ('kernel', 'unembedding', *(['embedding'] if is_tied else []))
  return leaf.ndim > 1 and own in names and not is_of_router(name)


def source_name(name: str, names: Mapping[str, str]) -> str:
  """Returns the name in a file of a parameter; see `fill`."""
  layer = re.match(r'layers\.(\d+)\.', name)
  if layer is None or name in names:
    return names[name]
  return names[f'layers.{{}}.{name[layer.end() :]}'].format(layer[1])


def listed(names: Collection[str]) -> str:
  """Returns the number of tensors and their first names, for messages."""
  shown = sorted(names)[:_NUM_LISTED]
  if len(names) > len(shown):
    shown.append(f'and {len(names) - len(shown)} more')
  return f'{len(names)} tensors ({", ".join(shown)})'


def _on_host(tensor, leaf, axes) -> np.ndarray:
  del axes
  everything = (slice(None),) * leaf.ndim
  return tensor[everything].astype(leaf.dtype, copy=False).T


def _on_mesh(tensor, leaf, axes) -> Array:
  parts: dict[str, np.ndarray] = {}

  def read(index):
    # The key is text because slices have no hash before Python 3.12. Devices
    # that hold the same part share what was read.
    name = str(index)
    if name not in parts:
      values = tensor[index[::-1]]
      parts[name] = values.astype(leaf.dtype, copy=False).T
    return parts[name]

  wanted = sharding.from_axes(*axes)
  array = jax.make_array_from_callback(
    leaf.shape, _by_rows(wanted, leaf.shape, axes), read, dtype=leaf.dtype
  )
  return jax.device_put(array, wanted).block_until_ready()


def _by_rows(wanted, shape, axes):
  """Returns a sharding into whole rows [out] of a file's matrix [out, in].

  If parts of every row are wanted, each process would read the whole matrix to
  cut them out. Rows are read instead, and exchanged between the devices.
  """
  if len(shape) < 2:
    return wanted
  num_parts = [
    size // part
    for size, part in zip(shape, wanted.shard_shape(shape), strict=True)
  ]
  if num_parts[0] == 1 or num_parts[1] > 1 or shape[1] % num_parts[0]:
    return wanted
  return sharding.from_axes(*axes[::-1])
