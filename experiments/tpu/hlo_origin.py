"""A test of whether a value of a decoding loop existed before the round."""

import functools

from experiments.tpu import hlo
from experiments.tpu import hlo_loop

# Their result is their first operand: moved, in another layout, or partly
# overwritten.
_PASS = (
  *('bitcast', 'reshape', 'transpose', 'convert', 'copy', 'all-gather'),
  *('slice', 'dynamic-slice', 'pad', 'dynamic-update-slice', 'scatter'),
)


class Origins:
  """The values of a module, traced back to where they come from."""

  def __init__(self, module: hlo.Module):
    self._module = module
    self._rounds = {
      name
      for loop in hlo_loop.outermost_loops(module, module.entry)
      for name in _run_by(loop)
    }
    # The callers of each computation, with the operands that they pass to it.
    self._callers: dict[str, list[tuple[hlo.Computation, list]]] = {}
    for computation in module.computations.values():
      for instruction in computation.instructions.values():
        operands = computation.operands(instruction)
        for name in _run_by(instruction):
          found = self._callers.setdefault(name, [])
          found.append((computation, operands))
        for i, name in enumerate(hlo_loop.branches(instruction)):
          found = self._callers.setdefault(name, [])
          found.append((computation, operands[i + 1 :][:1]))

  @functools.cache  # noqa: B019  An object lives as long as a module is read.
  def is_kept(
    self,
    computation: hlo.Computation,
    value: hlo.Instruction,
    index: int | None = None,
  ) -> bool:
    """Returns whether the loop keeps a value, such as a weight or a cache.

    The value may be in another layout or dtype, or partly overwritten.

    Args:
      computation: the computation that contains the value.
      value: the instruction that makes it.
      index: which element is meant if the value is a tuple.
    """
    if value.opcode == 'parameter':
      return self._is_kept_parameter(computation, value, index)
    if value.opcode in ('fusion', 'call'):
      callee = self._module[_run_by(value)[0]]
      return self.is_kept(callee, callee.root, index)
    return any(
      self.is_kept(computation, one, element)
      for one, element in _sources(computation, value, index)
    )

  def _is_kept_parameter(self, computation, value, index):
    if computation is self._module.entry or computation.name in self._rounds:
      return True
    number = int(value.arguments)
    return any(
      self.is_kept(within, handed[number], index)
      for within, handed in self._callers.get(computation.name, ())
      if number < len(handed)
    )


def _sources(computation, value, index):
  """Returns the operands that a value comes from, with their tuple elements."""
  operands = computation.operands(value)
  op = value.opcode.removesuffix('-start').removesuffix('-done')
  if op == 'get-tuple-element':
    return [(operands[0], int(value.attribute(r'\bindex=(\d+)')))]
  if op == 'tuple':
    return [] if index is None else [(operands[index], None)]
  if op in ('while', 'opt-barrier'):
    return [(operands[0], index)]
  if op == 'select':
    return [(one, None) for one in operands[1:]]
  return [(operands[0], None)] if op in _PASS else []


def _run_by(instruction):
  """Returns the computations that an instruction runs on its operands."""
  names = ('condition', 'body', 'calls', 'to_apply')
  return tuple(
    name for attribute in names for name in instruction.called(attribute)
  )
