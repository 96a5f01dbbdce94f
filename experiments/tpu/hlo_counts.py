"""Counts of what a round of a compiled decoding loop does, from its HLO.

All counts are per device. The compiler's own cost analysis is not used: it
counts the body of a loop once, however often the loop turns, and the time that
it estimates for these programs can be negative.
"""

from collections.abc import Iterator
import dataclasses
import functools
import itertools
import math
import re

from experiments.tpu import hlo
from experiments.tpu import hlo_loop
from experiments.tpu import hlo_origin
from experiments.tpu import hlo_work
from experiments.tpu.hlo_loop import Executed

_COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'all-to-all',
  'collective-broadcast',
  'collective-permute',
  'ragged-all-to-all',
  'reduce-scatter',
)
# Copies of smaller weights and caches cost little.
_WEIGHT_BYTES = 1 << 20
_TO_HOST = ('infeed', 'outfeed', 'recv', 'send')
_HOST_SPACE = 5  # XLA's number for the memory of the host
_HOST_CALL = re.compile(r'custom_call_target="[^"]*([Hh]ost|[Cc]allback)')


@dataclasses.dataclass(frozen=True)
class Collective:
  """Collectives of one kind and size."""

  op: str
  bytes: int  # of the whole result; for a reduce-scatter, of the whole input
  per_round: int

  @property
  def sent_bytes(self) -> int:
    """The bytes that a device sends per round, if there are many devices.

    An all-reduce sends its array twice, the other collectives once.
    """
    return (1 + (self.op == 'all-reduce')) * self.bytes * self.per_round


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
  """The counts of one round; see the functions of the same names."""

  collectives: list[Collective]
  host_transfers: int
  vocab_all_gathers: int
  weight_copies: int
  flops: int
  memory_bytes: int
  least_memory_bytes: int  # if each conditional takes its cheapest branch

  @property
  def sent_bytes(self) -> int:
    """The bytes that a device sends to others per round."""
    return sum(one.sent_bytes for one in self.collectives)


def count(text: str, vocab_size: int) -> Counts:
  """Counts a round in the text that `jax.stages.Compiled.as_text` returns."""
  module = hlo.parse(text)
  executed = hlo_loop.round_of(module)
  memory_bytes = functools.partial(hlo_work.memory_bytes, module)
  cheapest = hlo_loop.round_of(module, functools.partial(min, key=memory_bytes))
  return Counts(
    collectives=collectives(executed),
    host_transfers=host_transfers(executed),
    vocab_all_gathers=vocab_all_gathers(executed, vocab_size),
    weight_copies=weight_copies(module, executed),
    flops=hlo_work.flops(executed),
    memory_bytes=memory_bytes(executed),
    least_memory_bytes=memory_bytes(cheapest),
  )


def collectives(executed: list[Executed]) -> list[Collective]:
  """Returns the collectives of a round, grouped by kind and size."""
  found: dict[tuple[str, int], int] = {}
  for one in executed:
    op = _collective(one.instruction)
    if op:
      key = op, _size(one)
      found[key] = found.get(key, 0) + one.times
  return [Collective(op, size, n) for (op, size), n in sorted(found.items())]


def vocab_all_gathers(executed: list[Executed], vocab_size: int) -> int:
  """Returns how often a round gathers a whole vocabulary on a device.

  Counts every collective whose result has one axis, or several adjacent axes
  together, as long as the vocabulary. Sums count too, because a sum of parts
  that are zero elsewhere is a gather as well.
  """
  return sum(
    one.times
    for one in executed
    if _collective(one.instruction)
    and any(_holds(shape.dims, vocab_size) for shape in one.instruction.results)
  )


def host_transfers(executed: list[Executed]) -> int:
  """Returns how often a round exchanges values with the host."""
  return sum(one.times for one in executed if _is_with_host(one))


def weight_copies(module: hlo.Module, executed: list[Executed]) -> int:
  """Returns how often a round copies a weight or a cache.

  Counts the results of copies, transposes and all-gathers of at least 1 MiB,
  also at the root of a fusion, if the loop keeps their source; activations are
  made within the round. An update in place is not a copy. Neither is a move to
  another memory in the same layout, because TPUs read weights into on-chip
  memory ahead of time. A move that changes the layout counts.
  """
  origins = hlo_origin.Origins(module)
  return sum(
    one.times
    for one in executed
    if not one.is_fused
    and any(
      shape.size >= _WEIGHT_BYTES
      for shape in _copies(module, origins, one.computation, one.instruction)
    )
  )


def _collective(instruction):
  op = instruction.opcode.removesuffix('-start')
  return op if op in _COLLECTIVES else None


def _is_with_host(one):
  instruction = one.instruction
  if instruction.opcode == 'custom-call':
    return bool(_HOST_CALL.search(instruction.attributes))
  if instruction.opcode.removesuffix('-start') in ('copy', 'slice'):
    (source,) = one.computation.operands(instruction)[0].shapes
    return _HOST_SPACE in (source.space, instruction.results[0].space)
  return instruction.opcode in _TO_HOST


def _size(one):
  if _collective(one.instruction) == 'reduce-scatter':
    return sum(x.size for x in one.computation.operands(one.instruction))
  return sum(shape.size for shape in one.instruction.results)


def _holds(dims, size):
  ends = itertools.combinations(range(len(dims) + 1), 2)
  return any(math.prod(dims[start:end]) == size for start, end in ends)


def _copies(module, origins, computation, instruction) -> Iterator[hlo.Shape]:
  """Yields the arrays of the result that are copies of what the loop keeps."""
  op = instruction.opcode.removesuffix('-start')
  if op in ('copy', 'transpose', 'all-gather'):
    operands = computation.operands(instruction)
    for copied, source in zip(instruction.results, operands, strict=True):
      is_moved = op == 'copy' and _is_moved(copied, source.shapes[0])
      if not is_moved and origins.is_kept(computation, source):
        yield copied
  elif op == 'fusion':
    callee = module[instruction.called('calls')[0]]
    for made in _made(callee, callee.root):
      yield from _copies(module, origins, callee, made)


def _is_moved(copied, source):
  """Returns whether a copy changes only the memory, not the layout."""
  return copied.space != source.space and copied.layout == source.layout


def _made(computation, root) -> Iterator[hlo.Instruction]:
  """Yields the instructions that make the results of a fusion."""
  if root.opcode not in ('bitcast', 'tuple'):
    yield root
    return
  for operand in computation.operands(root):
    yield from _made(computation, operand)
