"""The decoding loop of a compiled program, and what each turn executes."""

from collections.abc import Callable, Iterator
import dataclasses
import itertools
import logging
import re

from experiments.tpu import hlo

_logger = logging.getLogger(__name__)
# Chooses what counts of a conditional, given what each branch executes.
Taken = Callable[[list[list['Executed']]], list['Executed']]

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Executed:
  """An instruction that a round executes."""

  instruction: hlo.Instruction
  computation: hlo.Computation  # that contains it
  times: int  # per round
  is_fused: bool  # part of a fusion, so its result is not stored in memory


def every(branches: list[list[Executed]]) -> list[Executed]:
  """Returns what all branches of a conditional execute."""
  return list(itertools.chain(*branches))


def round_of(module: hlo.Module, taken: Taken = every) -> list[Executed]:
  """Returns the instructions of a round, one turn of the decoding loop.

  The decoding loop is the entry computation's loop; if there are several, the
  one with the most instructions. Instructions of a nested loop are executed
  once per turn of that loop. By default every branch counts as taken.
  """
  rounds = [
    list(_walk_loop(module, loop, 1, taken))
    for loop in outermost_loops(module, module.entry)
  ]
  if not rounds:
    raise ValueError('the program has no loop: compile `decode.advance`')
  return max(rounds, key=len)


def outermost_loops(
  module: hlo.Module, computation: hlo.Computation
) -> Iterator[hlo.Instruction]:
  """Yields the loops of a computation that are in no other loop."""
  for instruction in computation.instructions.values():
    if instruction.opcode == 'while':
      yield instruction
    else:
      for name in _followed(instruction):
        yield from outermost_loops(module, module[name])


def _walk_loop(module, loop, times, taken) -> Iterator[Executed]:
  for name in (*loop.called('condition'), *loop.called('body')):
    yield from _walk(module, module[name], times, False, taken)


def _walk(module, computation, times, is_fused, taken) -> Iterator[Executed]:
  for instruction in computation.instructions.values():
    yield Executed(instruction, computation, times, is_fused)
    if instruction.opcode == 'while':
      turns = trip_count(module, computation, instruction)
      yield from _walk_loop(module, instruction, times * turns, taken)
    within = is_fused or instruction.opcode == 'fusion'
    inner = [
      list(_walk(module, module[name], times, within, taken))
      for name in _followed(instruction)
    ]
    yield from taken(inner) if branches(instruction) else every(inner)


def _followed(instruction) -> tuple[str, ...]:
  if instruction.opcode == 'call':
    return instruction.called('to_apply')
  if instruction.opcode in ('fusion', 'async-start'):
    return instruction.called('calls')
  return branches(instruction)


def branches(instruction: hlo.Instruction) -> tuple[str, ...]:
  """Returns the computations that a conditional chooses from."""
  if instruction.opcode != 'conditional':
    return ()
  names = ('branch_computations', 'true_computation', 'false_computation')
  return sum((instruction.called(name) for name in names), ())


def trip_count(
  module: hlo.Module, computation: hlo.Computation, loop: hlo.Instruction
) -> int:
  """Returns how often a nested loop turns.

  The number comes from the compiler's annotation or from the loop's condition.
  If it depends on values, the loop counts once, with a warning.
  """
  known = _TRIP_COUNT.search(loop.attributes)
  if known:
    return int(known[1])
  condition = module[loop.called('condition')[0]]
  test = _original(condition, condition.root)
  if test.opcode == 'compare' and 'direction=LT' in test.attributes:
    counter, end = (_original(condition, x) for x in condition.operands(test))
    if end.opcode == 'constant' and counter.opcode == 'get-tuple-element':
      index = int(counter.attribute(r'\bindex=(\d+)'))
      return int(end.arguments) - _start(computation, loop, index)
  _logger.warning(
    'how often the loop %s runs depends on values: it is counted once',
    loop.name,
  )
  return 1


def _start(computation, loop, index):
  """Returns the first value of a loop's counter, 0 if it is not a constant."""
  (carry,) = computation.operands(loop)
  if carry.opcode != 'tuple':
    return 0
  first = _original(computation, computation.operands(carry)[index])
  return int(first.arguments) if first.opcode == 'constant' else 0


def _original(computation, value):
  """Follows copies and bitcasts back to the original value."""
  while value.opcode in ('copy', 'bitcast'):
    (value,) = computation.operands(value)
  return value
