"""The mesh of devices that a command computes on, as gin describes it."""

from collections.abc import Iterator
import contextlib
import dataclasses
import re

import gin
import jax

from experiments.command import distributed
from specsample import sharding

_MESH_AXIS = r'data|sequence|model(_\d+)?'


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Mesh:
  """A mesh of data x sequence x model devices.

  In a single process with all sizes 1 there is no mesh, and the first device
  computes. The fields are the arguments of `sharding.make_mesh`, and the rules
  that say over which mesh axes each kind of array axis is divided.
  """

  data: int = 1
  model: int = 1
  num_slices: int = 1
  explicit: bool = True
  sequence: int = 1
  rules: sharding.Rules = sharding.DEFAULT_RULES

  def __post_init__(self):
    """Refuses rules over axes that no mesh has."""
    check_rules('Mesh.rules', self.rules)

  def set(self) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which JAX and `sharding` use the mesh."""
    sizes = (self.data, self.model, self.sequence, self.num_slices)
    if all(size == 1 for size in sizes) and not distributed.is_on():
      return contextlib.nullcontext()
    mesh = sharding.make_mesh(
      self.data,
      self.model,
      sequence=self.sequence,
      num_slices=self.num_slices,
      explicit=self.explicit,
    )
    return entered(mesh, self.rules)


@contextlib.contextmanager
def entered(mesh: jax.sharding.Mesh, rules: sharding.Rules) -> Iterator[None]:
  with jax.set_mesh(mesh), sharding.rules(rules):
    yield


def check_rules(name: str, rules: sharding.Rules) -> None:
  """Refuses rules over axes that no array or no mesh has."""
  wanted = (
    "give pairs such as ('batch', ('data',)), with mesh axes 'data', 'model', "
    "'sequence' and 'model_0', 'model_1', ..."
  )
  if not isinstance(rules, tuple):
    raise ValueError(f'{name} is {rules!r}, which is not a tuple: {wanted}')
  known = [axis for axis, _ in sharding.DEFAULT_RULES]
  for rule in rules:
    match rule:
      case (str(axis), tuple(mesh_axes)) if all(
        re.fullmatch(_MESH_AXIS, str(mesh_axis)) for mesh_axis in mesh_axes
      ):
        if axis not in known:
          raise ValueError(
            f'{name} has {axis!r}, but no array has an axis of that name: '
            f'give rules for {", ".join(known)}'
          )
      case _:
        raise ValueError(f'{name} holds {rule!r}: {wanted}')
