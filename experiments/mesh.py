"""The mesh of devices that a command computes on, as gin describes it."""

from collections.abc import Iterator
import contextlib
import dataclasses
import re

import gin
import jax

from experiments import cli
from experiments import distributed
from specsample import sharding


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Mesh:
  """data x model devices; 1 x 1 of one process is no mesh, the first device.

  The arguments of `sharding.make_mesh`, and the rules that say over which of
  its axes each meaning is divided (None: `sharding.DEFAULT_RULES`).
  """

  data: int = 1
  model: int = 1
  num_slices: int = 1
  explicit: bool = True
  rules: sharding.Rules | None = None

  def __post_init__(self):
    """Refuses rules over axes that no mesh has."""
    if self.rules is not None:
      _check_rules(self.rules)

  def set(self) -> contextlib.AbstractContextManager[None]:
    """Within it JAX and `sharding` use the mesh.

    Raises:
      ValueError: the devices that are there do not make such a mesh.
    """
    if self.data == self.model == self.num_slices == 1 and not (
      distributed.is_on()
    ):
      return contextlib.nullcontext()
    mesh = sharding.make_mesh(
      self.data,
      self.model,
      num_slices=self.num_slices,
      explicit=self.explicit,
    )
    return entered(mesh, self.own_rules)

  @property
  def own_rules(self) -> sharding.Rules:
    """Those that hold within it."""
    return sharding.DEFAULT_RULES if self.rules is None else self.rules


def configured() -> contextlib.AbstractContextManager[None]:
  """`Mesh().set()` of the configuration; a fault is one line, exit code 2."""
  with cli.bad_input():
    return Mesh().set()


@contextlib.contextmanager
def entered(mesh: jax.sharding.Mesh, rules: sharding.Rules) -> Iterator[None]:
  with jax.set_mesh(mesh), sharding.rules(rules):
    yield


def _check_rules(rules):
  known = [name for name, _ in sharding.DEFAULT_RULES]
  for rule in rules:
    is_rule = (
      isinstance(rule, tuple)
      and len(rule) == 2
      and isinstance(rule[0], str)
      and isinstance(rule[1], tuple)
      and all(re.fullmatch(r'data|model(_\d+)?', str(name)) for name in rule[1])
    )
    if is_rule and rule[0] not in known:
      raise ValueError(
        f'Mesh.rules has {rule[0]!r}, and no array has an axis of that name: '
        f'give rules for {", ".join(known)}'
      )
    if not is_rule:
      raise ValueError(
        f"Mesh.rules holds {rule!r}: give pairs as ('batch', ('data',)), with "
        "mesh axes 'data', 'model' and 'model_0', 'model_1', ..."
      )
