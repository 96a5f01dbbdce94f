"""Whether a value of a decoding loop was there before the round."""

import functools

from experiments.tpu import hlo
from experiments.tpu import hlo_loop

# What they give is their first operand: moved, laid out anew, or with a part
# of it written over.
_PASS = (
  *('bitcast', 'reshape', 'transpose', 'convert', 'copy', 'all-gather'),
  *('slice', 'dynamic-slice', 'pad', 'dynamic-update-slice', 'scatter'),
)


class Origins:
  """Follows values of a module to where they come from."""

  def __init__(self, module: hlo.Module):
    self._module = module
    self._rounds = {
      name
      for loop in hlo_loop.outermost_loops(module, module.entry)
      for name in _run_by(loop)
    }
    # Of each computation what is handed to it, by parameter, and where.
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
    """Whether a value is one that the loop keeps: a weight, a cache.

    Or is one in another layout, of another dtype, or in part written over.

    Args:
      computation: that it is in.
      value: the instruction that makes it.
      index: of a tuple, which element is meant.
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
  """Of which operands a value is, and of a tuple of which element."""
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
  """The computations that an instruction runs on its operands."""
  names = ('condition', 'body', 'calls', 'to_apply')
  return tuple(
    name for attribute in names for name in instruction.called(attribute)
  )
