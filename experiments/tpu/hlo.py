"""Counts of what one execution of a compiled program does, from its HLO.

XLA counts the operations itself (`Compiled.cost_analysis`), but its bytes are
of no use for TPUs: these move weights piece by piece into on-chip memory ahead
of time, and XLA counts the whole weight for each piece, and on-chip memory too.
"""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import logging
import math
import re

_logger = logging.getLogger(__name__)

_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.-]+) \(.*\{$')
_INSTRUCTION = re.compile(
  r' +(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<shapes>.*?) '
  r'(?P<opcode>[a-z][\w-]*)\((?P<arguments>.*?)\)(?P<attributes>.*)'
)
_SHAPE = re.compile(r'\b([a-z]+\d*\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?')
_SPACE = re.compile(r'S\((\d+)\)')
_CALLED = re.compile(
  r'\b(?:calls|condition|body|to_apply|branch_computations|true_computation|'
  r'false_computation)=(\{[^}]*\}|%?[\w.-]+)'
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_HOST_CALL = re.compile(r'custom_call_target="[^"]*([Hh]ost|[Cc]allback)')
_HOST_SPACE = 5  # XLA's number for the memory of the host; HBM is 0
_COLLECTIVES = (
  *('all-gather', 'all-reduce', 'all-to-all', 'collective-broadcast'),
  *('collective-permute', 'ragged-all-to-all', 'reduce-scatter'),
)
# They only name values, or run computations that are counted on their own.
_FREE = (
  *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast'),
  *('after-all', 'opt-barrier', 'partition-id', 'replica-id'),
  *('while', 'call', 'conditional', 'async'),
)
_SLICES = ('slice', 'dynamic-slice', 'gather')
_UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}  # the update's operand
# Copies of smaller weights and caches cost little.
_LARGE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Shape:
  """One array; an instruction that returns a tuple has several."""

  dtype: str
  dims: tuple[int, ...]
  layout: str  # the order and tiles of its axes
  space: int  # number of the memory that holds it

  @property
  def size(self) -> int:
    """Bytes of its elements; tokens and opaque values have none."""
    bits = re.search(r'\d+', self.dtype)
    itemsize = max(int(bits[0]) // 8, 1) if bits else self.dtype == 'pred'
    return itemsize * math.prod(self.dims)


@dataclasses.dataclass(eq=False)
class Instruction:
  """One line; an asynchronous operation counts where it is done."""

  opcode: str
  is_root: bool
  shapes: list[Shape]
  arguments: str  # the text in the parentheses
  attributes: str  # the text after them
  called: list[str]  # the computations that it runs
  operands: list['Instruction']
  # Who reads its result, and as which operand.
  users: list[tuple['Instruction', int]] = dataclasses.field(
    default_factory=list
  )


class Program:
  """A compiled program, from the text of `jax.stages.Compiled.as_text`."""

  def __init__(self, text: str):
    self._computations: dict[str, list[Instruction]] = {}
    found: dict[str, Instruction] = {}  # a name is used once in a program
    for line in text.splitlines():
      if header := _COMPUTATION.match(line):
        inside = self._computations[header[2]] = []
        if header[1]:
          self._entry = header[2]
      elif match := _INSTRUCTION.match(line):
        found[match['name']] = one = _instruction(match, found)
        inside.append(one)
        for i, operand in enumerate(one.operands):
          operand.users.append((one, i))

  def collectives(self) -> int:
    """Returns how many collectives the devices wait for."""
    return self._sum(lambda one: one.opcode in _COLLECTIVES)

  def sent_bytes(self) -> int:
    """Returns the bytes that a device sends, if there are many devices.

    An all-reduce sends its array twice, the other collectives once.
    """

    def sent(one):
      if one.opcode not in _COLLECTIVES:
        return 0
      sources = one.operands if one.opcode == 'reduce-scatter' else [one]
      arrays = [shape for source in sources for shape in source.shapes]
      return (1 + (one.opcode == 'all-reduce')) * sum(x.size for x in arrays)

    return self._sum(sent)

  def vocab_gathers(self, vocab_size: int) -> int:
    """Returns how often a device gets a whole vocabulary from the others.

    Sums count too: a sum of parts that are zero elsewhere is a gather as well.
    """

    def is_gather(one):
      return one.opcode in _COLLECTIVES and any(
        math.prod(shape.dims[start:end]) == vocab_size
        for shape in one.shapes
        for start in range(len(shape.dims))
        for end in range(start + 1, len(shape.dims) + 1)
      )

    return self._sum(is_gather)

  def host_transfers(self) -> int:
    """Returns how often values are exchanged with the host."""

    def is_with_host(one):
      if one.opcode == 'custom-call':
        return bool(_HOST_CALL.search(one.attributes))
      if one.opcode in ('copy', 'slice'):
        shapes = one.shapes[0], one.operands[0].shapes[0]
        return any(shape.space == _HOST_SPACE for shape in shapes)
      return one.opcode in ('infeed', 'outfeed', 'recv', 'send')

    return self._sum(is_with_host)

  def weight_copies(self) -> int:
    """Returns how often a weight or a cache is copied.

    Counts copies, transposes and all-gathers of at least 1 MiB of arrays that
    have the shape of an argument. A move to another memory in the same layout
    is none, because TPUs read weights into on-chip memory ahead of time.
    """
    kept = {
      tuple(sorted(shape.dims))
      for one in self._computations[self._entry]
      for shape in one.shapes
      if one.opcode == 'parameter'
    }

    def is_copy(one):
      if one.opcode not in ('copy', 'transpose', 'all-gather'):
        return False
      source, copied = one.operands[0].shapes[0], one.shapes[0]
      is_move = one.opcode == 'copy' and (
        source.space != copied.space and source.layout == copied.layout
      )
      is_kept = tuple(sorted(source.dims)) in kept
      return is_kept and not is_move and copied.size >= _LARGE

    def copies(one):
      return one.opcode not in _FREE and any(map(is_copy, self._made(one)))

    return self._sum(copies, fused=False)

  def memory_bytes(self, pick: Callable[[Iterable[int]], int] = max) -> int:
    """Returns the bytes that are read from and written to HBM, without padding.

    If only a part of an array is read or written, only that part counts. `pick`
    says which branch of a conditional counts.
    """

    def moved(one):
      if one.opcode in _FREE or one.opcode.endswith(('-start', '-update')):
        return 0
      read = sum(self._read(one, i) for i in range(len(one.operands)))
      written = sum(map(_written, self._made(one)))
      return read + min(written, _stored(one))

    return self._sum(moved, pick, fused=False)

  def _sum(self, count, pick=max, *, fused=True) -> int:
    """Returns the sum of a count over all instructions that are executed."""

    def of(name):
      return sum(count(one) + called(one) for one in self._computations[name])

    def called(one):
      if one.opcode == 'fusion' and not fused:
        return 0
      if one.opcode == 'conditional':
        return pick(map(of, one.called))
      return self._turns(one) * sum(map(of, one.called))

    return of(self._entry)

  def _turns(self, one) -> int:
    """Returns how often an instruction runs what it calls.

    A loop counts up from 0. It runs once if its end depends on values.
    """
    if one.opcode != 'while':
      return 1
    if known := _TRIP_COUNT.search(one.attributes):
      return int(known[1])
    condition = self._computations[one.called[0]]
    ends = [x.arguments for x in condition if x.opcode == 'constant']
    work = [x.opcode for x in condition if x.opcode not in (*_FREE, 'copy')]
    if len(ends) == 1 and work == ['compare']:
      return int(ends[0])
    _logger.warning('how often a loop runs depends on values: it counts once')
    return 1

  def _made(self, one) -> Iterator[Instruction]:
    """Yields what makes the results, in a fusion as well."""
    if one.opcode == 'fusion':
      inside = self._computations[one.called[0]]
      yield from self._made(next(x for x in inside if x.is_root))
    elif one.opcode in ('bitcast', 'tuple'):
      for operand in one.operands:
        yield from self._made(operand)
    else:
      yield one

  def _read(self, user, index) -> int:
    """Returns the bytes that an instruction reads of an operand in HBM."""
    value = user.operands[index]
    whole = _stored(value)
    if user.opcode == 'fusion':
      return min(whole, self._read_within(user, index))
    if index == 0 and user.opcode in _SLICES:
      return min(whole, sum(shape.size for shape in user.shapes))
    if index == 0 and user.opcode in _UPDATES:
      return 0
    return whole

  def _read_within(self, fusion, index) -> int:
    (parameter,) = (
      one
      for one in self._computations[fusion.called[0]]
      if one.opcode == 'parameter' and one.arguments == str(index)
    )
    return sum(self._read(*user) for user in parameter.users)


def _written(one) -> int:
  update = _UPDATES.get(one.opcode)
  return _stored(one if update is None else one.operands[update])


def _instruction(line, found) -> Instruction:
  opcode, attributes = line['opcode'], line['attributes']
  names = re.findall(r'%([\w.-]+)', line['arguments'])
  operands = [found[name] for name in names]
  if opcode.endswith('-done') and operands[0].opcode.endswith('-start'):
    (start,) = operands
    opcode, attributes = start.opcode.removesuffix('-start'), start.attributes
    operands = start.operands
  is_begun = opcode.endswith(('-start', '-update'))
  called = ' '.join(_CALLED.findall(attributes))
  return Instruction(
    opcode=opcode,
    is_root=line['root'] is not None,
    shapes=[_shape(*one) for one in _SHAPE.findall(line['shapes'])],
    arguments=line['arguments'],
    attributes=attributes,
    called=[] if is_begun else re.findall(r'[\w.-]+', called),
    operands=operands,
  )


def _shape(dtype, dims, layout) -> Shape:
  space = _SPACE.search(layout)
  return Shape(
    dtype=dtype,
    dims=tuple(map(int, re.findall(r'\d+', dims))),
    layout=_SPACE.sub('', layout),
    space=int(space[1]) if space else 0,
  )


def _stored(one) -> int:
  """Returns the bytes of an instruction's arrays that are in HBM."""
  return sum(shape.size for shape in one.shapes if shape.space == 0)
