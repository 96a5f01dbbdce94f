"""Operations and memory traffic of the instructions of a round."""

import functools
import math
import re

from experiments.tpu import hlo
from experiments.tpu.hlo_loop import Executed

# They name values, or begin what is walked through itself.
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
  """Floating-point operations of a round.

  Of a product two for each pair of factors; of sums and other arithmetic one an
  element, as which compilers also write the products of a single row.
  """
  return sum(
    one.times * _flops(one.computation, one.instruction) for one in executed
  )


def memory_bytes(module: hlo.Module, executed: list[Executed]) -> int:
  """Bytes that a round reads from and writes to the device's large memory.

  With the padding of layouts. Of an array of which a part is read or written,
  the part counts; what is in the memory on the chip does not.
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
  """Pairs of factors in a convolution, as which TPUs write every product.

  A window may run over the axis of a batch, with holes, so that each element
  meets its own partner only.
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
  """Pairs of an output and a tap of the window that meet an element."""
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
  """Bytes of arrays in the large memory."""
  return sum(shape.padded_size for shape in shapes if shape.space == 0)


def _read(module, computation, user, index, operand):
  """Bytes that an instruction reads of its operand of that index."""
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
  """Bytes of a value that the instructions of a fusion read.

  Of a copy that it is `is_copied` says so: the fusion's result is read whole.
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
  """Whether it is its operand, in a fusion, by another name.

  That may be a fusion too. What is copied within one is stored nowhere: of a
  part that is read, that part is.
  """
  if instruction.opcode != 'fusion':
    return instruction.opcode in ('bitcast', 'copy')
  callee = module[instruction.called('calls')[0]]
  return all(
    one.opcode in ('parameter', 'bitcast', 'copy')
    for one in callee.instructions.values()
  )


def _written(module, computation, instruction):
  """Bytes of its result that an instruction writes."""
  op = instruction.opcode
  whole = _stored(instruction.results)
  if op in ('dynamic-update-slice', 'scatter'):
    update = computation.operands(instruction)[1 + (op == 'scatter')]
    return min(whole, update.shapes[0].padded_size)
  if op == 'fusion':
    callee = module[instruction.called('calls')[0]]
    return min(whole, _written(module, callee, callee.root))
  if op in ('bitcast', 'tuple'):
    # At the root of a fusion: what it names was made by others.
    return min(
      whole,
      sum(
        _written(module, computation, operand)
        for operand in computation.operands(instruction)
      ),
    )
  return whole
