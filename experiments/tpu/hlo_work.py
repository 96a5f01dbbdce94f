"""Operations and memory traffic of the instructions of a round."""

import functools
import math
import re

from experiments.tpu import hlo
from experiments.tpu.hlo_loop import Executed

# They only name values, or start computations that are visited on their own.
_FREE = (
  *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast'),
  *('after-all', 'opt-barrier', 'domain', 'partition-id', 'replica-id'),
  *('while', 'call', 'conditional', 'async-start'),
)
_FREE_TARGETS = (
  *('AllocateBuffer', 'AssumeGatherIndicesInBound', 'ConcatBitcast'),
  *('Sharding', 'SPMDFullToShardShape', 'SPMDShardToFullShape'),
)
_ARITHMETIC = ('add', 'subtract', 'multiply', 'divide', 'maximum', 'minimum')
_FLOATS = ('f', 'bf')


def flops(executed: list[Executed]) -> int:
  """Returns the floating-point operations of a round.

  A matrix product counts two operations for each pair of factors. Sums and
  other arithmetic count one per element; compilers also write the products of a
  single row in this form.
  """
  return sum(
    one.times * _flops(one.computation, one.instruction) for one in executed
  )


def memory_bytes(module: hlo.Module, executed: list[Executed]) -> int:
  """Returns the bytes that a round reads from and writes to HBM.

  The padding of layouts is included. If only a part of an array is read or
  written, only that part counts. Memory on the chip does not count.
  """
  return sum(
    one.times * _memory_bytes(module, one.computation, one.instruction)
    for one in executed
    if not one.is_fused
  )


def _flops(computation, instruction):
  results = [x for x in instruction.shapes if x.dtype.startswith(_FLOATS)]
  if not results:
    return 0
  result = results[0]
  op = instruction.opcode
  if op in _ARITHMETIC:
    return math.prod(result.dims)
  if op not in ('reduce', 'dot', 'convolution'):
    return 0
  left, right, *_ = (
    one.shapes[0].dims for one in computation.operands(instruction)
  )
  if op == 'reduce':
    return math.prod(left)
  if op == 'dot':
    axes = instruction.attribute(r'lhs_contracting_dims=\{([\d,]*)\}')
    summed = math.prod(left[int(axis)] for axis in axes.split(',') if axis)
    return 2 * math.prod(result.dims) * summed
  return 2 * _pairs(instruction, left, right)


def _pairs(instruction, left, right):
  """Counts the pairs of factors in a convolution.

  TPUs write every matrix product as a convolution. A window may run over a
  batch axis, with holes, so that each element meets only its own partner.
  """
  labels = instruction.attribute(r'dim_labels=([\w>-]+)')
  of_left, of_right, of_result = re.split('_|->', labels)
  result = instruction.shapes[0].dims
  total = right[of_right.index('i')] * math.prod(
    size
    for label, size in zip(of_result, result, strict=True)
    if not label.isdigit()
  )
  window = instruction.attribute(r'\bwindow=\{([^}]*)\}')
  options = dict(option.split('=') for option in window.split())
  for axis in filter(str.isdigit, of_result):
    per_axis = {
      name: value.split('x')[int(axis)] for name, value in options.items()
    }
    total *= _partners(
      left[of_left.index(axis)],
      right[of_right.index(axis)],
      result[of_result.index(axis)],
      stride=int(per_axis.get('stride', '1')),
      padding=int(per_axis.get('pad', '0_0').split('_')[0]),
      left_step=int(per_axis.get('lhs_dilate', '1')),
      right_step=int(per_axis.get('rhs_dilate', '1')),
    )
  return total


@functools.cache
def _partners(left, right, result, *, stride, padding, left_step, right_step):
  """Counts the pairs of an output and a window tap that meet an element."""
  meets = lambda position: (
    position % left_step == 0 and 0 <= position < left * left_step
  )
  return sum(
    meets(output * stride + tap * right_step - padding)
    for output in range(result)
    for tap in range(right)
  )


def _memory_bytes(module, computation, instruction):
  op = instruction.opcode
  if op in _FREE or op.endswith(('-done', '-update')):
    return 0
  if op == 'custom-call' and any(
    f'"{target}"' in instruction.attributes for target in _FREE_TARGETS
  ):
    return 0
  if op == 'slice-start':
    (source,) = computation.operands(instruction)[0].shapes
    (moved,) = instruction.results
    return (source.space == 0) * moved.padded_size + _stored([moved])
  read = sum(
    _read(module, computation, instruction, i, operand)
    for i, operand in enumerate(computation.operands(instruction))
  )
  return read + _written(module, computation, instruction)


def _stored(shapes):
  """Returns the bytes of those arrays that are in HBM."""
  return sum(shape.padded_size for shape in shapes if shape.space == 0)


def _read(module, computation, user, index, operand):
  """Returns the bytes that an instruction reads of its operand `index`."""
  op = user.opcode
  whole = _stored(operand.shapes)
  if op in ('slice', 'dynamic-slice', 'gather') and index == 0:
    return min(whole, sum(shape.padded_size for shape in user.shapes))
  if op in ('dynamic-update-slice', 'scatter') and index == 0:
    return 0
  if op == 'fusion':
    callee = module[user.called('calls')[0]]
    return _read_within(module, callee, callee.parameters[index])
  return whole


def _read_within(module, computation, value, is_copied=False):
  """Returns the bytes of a value that the instructions of a fusion read.

  `is_copied` says that `value` is a copy made within the fusion. If it is the
  fusion's result, all of it is read.
  """
  if is_copied and value is computation.root:
    return sum(shape.padded_size for shape in value.shapes)
  total = 0
  for user in computation.users[value.name]:
    if _is_view(module, user):
      copies = is_copied or user.opcode != 'bitcast'
      total += _read_within(module, computation, user, copies)
    else:
      total += sum(
        _read(module, computation, user, i, value)
        for i, name in enumerate(user.operands)
        if name == value.name
      )
  return min(total, _stored(value.shapes))


def _is_view(module, instruction):
  """Returns whether an instruction of a fusion renames or copies its operand.

  The instruction may itself be a fusion. Copies within a fusion are stored
  nowhere: if a part of one is read, only that part counts.
  """
  if instruction.opcode != 'fusion':
    return instruction.opcode in ('bitcast', 'copy')
  callee = module[instruction.called('calls')[0]]
  return all(
    one.opcode in ('parameter', 'bitcast', 'copy')
    for one in callee.instructions.values()
  )


def _written(module, computation, instruction):
  """Returns the bytes of its result that an instruction writes."""
  op = instruction.opcode
  whole = _stored(instruction.results)
  if op in ('dynamic-update-slice', 'scatter'):
    update = computation.operands(instruction)[1 + (op == 'scatter')]
    return min(whole, update.shapes[0].padded_size)
  if op == 'fusion':
    callee = module[instruction.called('calls')[0]]
    return min(whole, _written(module, callee, callee.root))
  if op in ('bitcast', 'tuple'):
    # The root of a fusion: other instructions made what it names.
    return min(
      whole,
      sum(
        _written(module, computation, operand)
        for operand in computation.operands(instruction)
      ),
    )
  return whole
