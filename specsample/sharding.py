"""The placement of arrays on a mesh; the only file that names mesh axes.

Code says what the axes of an array mean; `rules` say over which mesh axes each
meaning is divided. Everything here works without a mesh, at no cost, and with
one (`jax.set_mesh`) of Explicit or Auto axes. Under Explicit axes a sharding is
part of an array's type, so one that drifts in a loop is an error when the loop
is traced.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import logging
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec
import numpy as np

from specsample import checks
from specsample.types import Array, ArrayLike

_logger = logging.getLogger(__name__)

Rules = tuple[tuple[str, tuple[str, ...]], ...]

# Weights are divided as in Megatron-LM (Shoeybi et al., 1909.08053): products
# into heads and into the feed-forward width by columns, products back by rows,
# so that each pair needs one all-reduce. If there are more devices than
# key-value heads, the remaining mesh axes divide the query heads of each.
DEFAULT_RULES: Rules = (
  ('batch', ('data',)),
  ('tokens', ('sequence',)),
  ('kv_heads', ('model',)),
  ('heads_of_kv', ('model',)),
  ('mlp', ('model',)),
  ('vocab', ('model',)),
)

# Use as `with sharding.rules(other): ...`. A program compiled under one set of
# rules is not used under another.
rules = jax.make_user_context(default_value=DEFAULT_RULES)


@dataclasses.dataclass(frozen=True)
class Axis:
  """The meaning of an array axis.

  It is divided over those mesh axes of its rule that divide it evenly, and
  replicated over the others, which is logged once.
  """

  name: str
  size: int | None = None  # None is divisible by any number
  # The axis before this one in a merged axis, as with heads [K, G]. It is
  # divided first, and this one only if the first is divided completely.
  within: 'Axis | None' = None


# None is not divided; a tuple is one axis merged from several.
Axes = Axis | str | None | tuple[Axis, ...]


def make_mesh(
  data: int = 1,
  model: int = 1,
  *,
  sequence: int = 1,
  num_slices: int = 1,
  explicit: bool = True,
  devices: Sequence[Any] | None = None,
) -> jax.sharding.Mesh:
  """Returns a mesh of data x model devices, to enter with `jax.set_mesh`.

  Its axes are 'data', 'sequence' if that has more than one part, and one
  'model_i' for each prime factor of `model`, so that an array axis that not all
  of them divide can still be divided by some. Rules may say 'model' for all of
  them.

  Args:
    data: the number of parts of the batch.
    model: the number of parts of the weights, the caches and the vocabulary.
    sequence: the number of parts of the tokens of a training batch. The mesh
      then has data x sequence x model devices.
    num_slices: the number of TPU slices, connected by a data-centre network;
      `data` is divided over them, so that `model` stays within one slice.
    explicit: whether the axes are of type Explicit; otherwise Auto.
    devices: the devices to use; default all.

  Raises:
    ValueError: if the sizes do not fit the devices or each other.
  """
  devices = jax.devices() if devices is None else devices
  checks.has('devices', devices, ('__len__',), 'give a list of jax.Device')
  sizes = {'data': data, 'model': model, 'sequence': sequence}
  for name, value in (sizes | {'num_slices': num_slices}).items():
    checks.count(name, value)
  if sequence == 1:
    del sizes['sequence']
  needed = math.prod(sizes.values())
  if needed != len(devices):
    raise ValueError(
      f'a mesh of {" x ".join(map(str, sizes.values()))} needs {needed} '
      f'devices, but there are {len(devices)}: choose {", ".join(sizes)} so '
      'that their product is the number of devices'
    )
  if sequence > 1 and explicit:
    raise ValueError(
      f'sequence is {sequence} and explicit is True, but only the compiler '
      'follows how tokens are divided: set explicit = False'
    )
  if data % num_slices:
    raise ValueError(
      f'num_slices is {num_slices} and data is {data}, but the slices hold '
      'equal parts of the data axis: make data a multiple of num_slices'
    )
  make: Any = mesh_utils.create_device_mesh
  if num_slices > 1:
    slices_shape = num_slices, 1, 1
    make = functools.partial(
      mesh_utils.create_hybrid_device_mesh, dcn_mesh_shape=slices_shape
    )
  shape = data // num_slices, sequence, model
  try:
    grid = make(shape, devices=devices, allow_split_physical_axes=True)
  except ValueError as error:
    raise ValueError(
      f'num_slices is {num_slices}, but {error}: give the number of slices '
      'that there are'
    ) from error
  axes = {name: n for name, n in sizes.items() if name != 'model'}
  axes |= {f'model_{i}': n for i, n in enumerate(_prime_factors(model))}
  kind = AxisType.Explicit if explicit else AxisType.Auto
  return jax.sharding.Mesh(
    grid.reshape(*axes.values()), tuple(axes), axis_types=(kind,) * len(axes)
  )


def is_traced() -> bool:
  """Returns whether the caller is being traced, by `jax.jit` or the like."""
  try:
    jax.sharding.get_mesh()
  except ValueError:  # JAX has no other public function that tells
    return True
  return False


def no_mesh() -> Any:
  """Returns a context without a mesh, where a single shard is a plain array."""
  return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def spec(*axes: Axes) -> PartitionSpec:
  """Returns how an array with these axes is divided over the current mesh."""
  return PartitionSpec(*(_mesh_axes(axis) or None for axis in axes))


def is_divided(axis: Axes) -> bool:
  """Returns whether the axis is divided into more than one part."""
  return _num_parts(axis) > 1


def batch_parts() -> int:
  """Returns the number of parts of a batch, which must divide its rows."""
  return _num_parts('batch')


def token_parts() -> int:
  """Returns the number of parts of a row, which must divide its tokens."""
  return _num_parts('tokens')


def constrain(x: ArrayLike, *axes: Axes) -> Array:
  """Returns the same array, divided as its axes say.

  If the mesh divides tokens, those of a training batch are divided as it is
  placed. The code does not name their axis, which may be merged with that of
  the batch; the compiler follows both, and only the other axes are constrained.
  """
  if not is_divided('tokens'):
    return _constrain(x, spec(*axes))
  free = ((), _mesh_axes('batch'))
  parts = [
    PartitionSpec.UNCONSTRAINED if part in free else part
    for part in map(_mesh_axes, axes)
  ]
  return _constrain(x, PartitionSpec(*parts))


def _constrain(x: ArrayLike, wanted: PartitionSpec) -> Array:
  mesh = _mesh()
  if mesh is None:
    return jnp.asarray(x)
  if mesh.are_all_axes_explicit:
    return jax.sharding.reshard(x, wanted)
  return jax.lax.with_sharding_constraint(x, wanted)


def einsum(subscripts: str, *operands: Array, axes: Sequence[Axes], **kwargs):
  """Computes `jnp.einsum`, with the result divided as its axes say.

  If the sum is over a divided axis, this is where the all-reduce happens.
  """
  if _is_explicit():
    return jnp.einsum(subscripts, *operands, out_sharding=spec(*axes), **kwargs)
  found = jnp.einsum(subscripts, *operands, **kwargs)
  return found if _mesh() is None else constrain(found, *axes)


def reshape(x: Array, shape: Sequence[int], *axes: Axes) -> Array:
  """Computes `jnp.reshape` into axes whose division JAX cannot infer."""
  if _is_explicit():
    return jnp.reshape(x, shape, out_sharding=spec(*axes))
  found = x.reshape(shape)
  return found if _mesh() is None else constrain(found, *axes)


def zeros(shape: Sequence[int], dtype: Any, *axes: Axes) -> Array:
  """Returns `jnp.zeros`, divided as the axes say."""
  return constrain(jnp.zeros(shape, dtype, out_sharding=of_new(*axes)), *axes)


def of_new(*axes: Axes) -> PartitionSpec | None:
  """Returns the `out_sharding` for JAX functions that create an array.

  None without Explicit axes, because only those accept it.
  """
  return spec(*axes) if _is_explicit() else None


def map_parts(
  function: Callable[..., Any],
  args: Sequence[Any],
  axes: Sequence[Any],
  *,
  result: Any,
  sum_over: Axis | None = None,
) -> Any:
  """Returns function(*args), computed by each device on its own parts.

  Args:
    function: maps arrays to arrays. Without a mesh it is simply called.
    args: arrays, or trees of them.
    axes: the axes of each argument, as for `of_tree`.
    result: the axes of what the function returns, likewise.
    sum_over: an axis over whose parts the results are summed, as in an
      all-reduce.
  """
  if _mesh() is None:
    return function(*args)
  names = _mesh_axes(sum_over)

  def of_part(*parts):
    made = function(*parts)
    return jax.lax.psum(made, names) if names else made

  put = lambda tree, of_tree: jax.tree.map(
    lambda x, of_leaf: constrain(x, *of_leaf), tree, of_tree
  )
  specs = lambda one: map_axes(lambda leaf: spec(*leaf), one)
  return jax.shard_map(
    of_part, in_specs=tuple(map(specs, axes)), out_specs=specs(result)
  )(*map(put, args, axes))


def inferred(function: Callable[..., Any], *args: Any) -> Any:
  """Returns function(*args), whole; for functions that know of no mesh.

  Under Explicit axes, JAX would ask such a function how its gathers and other
  results are divided.
  """
  if not _is_explicit():
    return function(*args)
  whole = PartitionSpec()
  return jax.sharding.auto_axes(function, out_sharding=whole)(*args)


def write_rows(x: Array, rows: Array, new: Array) -> Array:
  """Returns x [B, ...] with its rows of indices [n] replaced by new [n, ...].

  An index that is too large is skipped. The other axes of both arrays must be
  divided alike; the new rows are gathered first.
  """
  if not _is_explicit():
    return x.at[rows].set(new, mode='drop')
  of_row = jax.typeof(new).sharding.spec[1:]
  new = jax.sharding.reshard(new, PartitionSpec(None, *of_row))
  own = jax.typeof(x).sharding.spec
  return x.at[rows].set(new, mode='drop', out_sharding=own)


def replicate(tree: Any) -> Any:
  """Returns the tree with every array whole on every device."""
  return jax.tree.map(lambda x: _constrain(x, PartitionSpec()), tree)


def from_axes(*axes: Axes) -> jax.sharding.Sharding:
  """Returns the sharding of an array with these axes, to pass to JAX directly.

  Without a mesh it is that of the first device.
  """
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.NamedSharding(mesh, spec(*axes))


def of_tree(axes: Any) -> Any:
  """Returns a tree of shardings, given a tuple of axes for each array."""
  return map_axes(lambda leaf: from_axes(*leaf), axes)


def map_axes(function: Callable[[tuple], Any], axes: Any) -> Any:
  """Maps a function over a tree that has a tuple of axes for each array."""
  is_axes = lambda x: isinstance(x, tuple)
  return jax.tree.map(function, axes, is_leaf=is_axes)


def place(tree: Any, axes: Any) -> Any:
  """Puts arrays on the current mesh, or on the default device without one.

  While the caller is being traced, the result is constrained to the mesh.

  Args:
    tree: arrays, on the host or on devices. With several hosts, each of them
      passes the same values and keeps its own parts.
    axes: the same tree, with a tuple of axes for each array.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return jax.device_put(tree)
  if is_traced():
    return jax.tree.map(lambda x, of_x: constrain(x, *of_x), tree, axes)
  return jax.tree.map(_put, tree, of_tree(axes))


def move(x: Array, axes: Sequence[Axes]) -> Array:
  """Divides an array that is on the current mesh along these axes.

  Without a mesh the array is returned as it is. `device_put` to a named device
  would commit the array and everything computed from it, and every program
  would be compiled twice: for committed states and for states that no such
  array has touched yet.
  """
  if jax.sharding.get_mesh().empty:
    return x
  return jax.device_put(x, from_axes(*axes))


def _put(x, sharding):
  if sharding.is_fully_addressable:
    return jax.device_put(x, sharding)
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = _put(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  values = np.asarray(x)
  return jax.make_array_from_callback(
    values.shape, sharding, lambda index: values[index]
  )


def _mesh():
  """Returns the current mesh, or None without one (and within shard_map)."""
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty or mesh.are_all_axes_manual else mesh


def _is_explicit():
  mesh = _mesh()
  return mesh is not None and mesh.are_all_axes_explicit


def _num_parts(axis):
  mesh = _mesh()
  return math.prod(mesh.shape[name] for name in _mesh_axes(axis)) if mesh else 1


def _mesh_axes(axis: Axes) -> tuple[str, ...]:
  mesh = _mesh()
  if mesh is None or axis is None:
    return ()
  if isinstance(axis, str):
    axis = Axis(axis)
  parts = axis if isinstance(axis, tuple) else (axis,)
  sizes = tuple(mesh.shape.items())
  return sum((_divide(part, rules.value, sizes) for part in parts), ())


@functools.cache
def _divide(axis: Axis, rules: Rules, mesh: tuple) -> tuple[str, ...]:
  """Returns the mesh axes that divide the axis; cached, so it logs once."""
  sizes: Mapping[str, int] = dict(mesh)
  names = _rule(axis.name, rules, sizes)
  if axis.within is not None:
    outer = _divide(axis.within, rules, mesh)
    if math.prod(sizes[name] for name in outer) != axis.within.size:
      return ()
    names = tuple(name for name in names if name not in outer)
  taken: tuple[str, ...] = ()
  parts = 1
  for name in names:
    if axis.size is None or axis.size % (parts * sizes[name]) == 0:
      taken += (name,)
      parts *= sizes[name]
  wanted = math.prod(sizes[name] for name in names)
  if parts < wanted:
    what = 'it is replicated'
    if parts > 1:
      what = f'it is in {parts} parts, each on {wanted // parts} devices'
    _logger.warning(
      f'axis {axis.name} of size {axis.size} does not divide evenly among '
      f'{wanted} devices: {what}'
    )
  return taken


def _rule(name, rules, sizes):
  """Returns the mesh axes of a name's rule; 'model' means all 'model_i'."""
  return tuple(
    mesh_axis
    for wanted in dict(rules).get(name, ())
    for mesh_axis in sizes
    if sizes[mesh_axis] > 1
    and (mesh_axis == wanted or mesh_axis.startswith(f'{wanted}_'))
  )


def _prime_factors(number):
  factors, divisor = [], 2
  while number > 1:
    while number % divisor == 0:
      factors.append(divisor)
      number //= divisor
    divisor += 1
  return factors
