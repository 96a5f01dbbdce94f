"""A parser for the text of a compiled program.

It reads what `jax.stages.Compiled.as_text` returns: the HLO of one device after
all of XLA's passes. It keeps only what the counting in hlo_counts.py needs.
"""

from collections.abc import Iterator
import dataclasses
import functools
import math
import re

_BYTES = {
  **{name: 1 for name in ('pred', 's8', 'u8', 's4', 'u4', 's2', 'u2')},
  **{name: 2 for name in ('s16', 'u16', 'f16', 'bf16')},
  **{name: 4 for name in ('s32', 'u32', 'f32')},
  **{name: 8 for name in ('s64', 'u64', 'f64', 'c64')},
  'c128': 16,
}
_ARRAY = re.compile(r'([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\](\{[^{}]*\})?')
_TILE = re.compile(r'T\(([0-9,]+)\)')
_SPACE = re.compile(r'S\(([0-9]+)\)')
_NAME = re.compile(r'%([\w.-]+)')
_HEADER = re.compile(r'(ENTRY )?%?([\w.-]+) \(.*\{$')


@dataclasses.dataclass(frozen=True)
class Shape:
  """One array; an instruction that returns a tuple has several shapes."""

  dtype: str
  dims: tuple[int, ...]
  minor_to_major: tuple[int, ...] = ()
  tile: tuple[int, ...] = ()  # of the most minor axes, which are padded to it
  space: int = 0  # number of the memory: 0 is the device's large one (HBM)

  @property
  def size(self) -> int:
    """Bytes of its elements."""
    return self._itemsize * math.prod(self.dims)

  @property
  def padded_size(self) -> int:
    """Bytes that it takes in memory, with the padding of its tiles."""
    order = self.minor_to_major or range(len(self.dims))[::-1]
    dims = [self.dims[axis] for axis in order]
    for i, tile in enumerate(self.tile[::-1][: len(dims)]):
      dims[i] = -(-dims[i] // tile) * tile
    return self._itemsize * math.prod(dims)

  @property
  def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The arrangement of its elements, whichever memory holds them."""
    return self.minor_to_major, self.tile

  @property
  def _itemsize(self) -> int:
    # Small floats (f8e4m3fn, ...) take a byte; tokens and opaque values, none.
    return _BYTES.get(self.dtype, 1 if self.dtype.startswith('f8') else 0)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation."""

  name: str
  opcode: str
  shapes: tuple[Shape, ...]  # of the result; a nested tuple is flattened
  operands: tuple[str, ...]  # names of instructions of the same computation
  arguments: str  # the text in the parentheses
  attributes: str  # the text after them

  def attribute(self, pattern: str) -> str:
    """Returns a pattern's first group in the attributes, '' if not found."""
    match = re.search(pattern, self.attributes)
    return match[1] if match else ''

  def called(self, attribute: str) -> tuple[str, ...]:
    """Returns the names of the computations that an attribute holds."""
    names = self.attribute(rf'\b{attribute}=(\{{[^}}]*\}}|%[\w.-]+)')
    return tuple(_NAME.findall(names))

  @property
  def results(self) -> tuple[Shape, ...]:
    """The arrays that the instruction makes.

    The start of an asynchronous operation also lists its operands and contexts
    in `shapes`; they are left out here.
    """
    count = len(self.operands)
    match self.opcode:
      case 'all-gather-start' | 'collective-permute-start':
        return self.shapes[count : 2 * count]
      case 'slice-start':
        return self.shapes[1:2]
      case 'copy-start':
        return self.shapes[:1]
    return self.shapes

  @property
  def size(self) -> int:
    """Bytes of the elements of the result."""
    return sum(shape.size for shape in self.shapes)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
  """A function of the program, with its instructions in order."""

  name: str
  instructions: dict[str, Instruction]
  root: Instruction

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """The instructions that read the result of each instruction."""
    users: dict[str, list[Instruction]] = {
      name: [] for name in self.instructions
    }
    for instruction in self.instructions.values():
      for operand in dict.fromkeys(instruction.operands):
        users[operand].append(instruction)
    return users

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    """The parameters by their number."""
    return {
      int(instruction.arguments): instruction
      for instruction in self.instructions.values()
      if instruction.opcode == 'parameter'
    }

  def operands(self, instruction: Instruction) -> list[Instruction]:
    """Returns the instructions whose results an instruction reads."""
    return [self.instructions[name] for name in instruction.operands]


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
  """A compiled program."""

  computations: dict[str, Computation]
  entry: Computation

  def __getitem__(self, name: str) -> Computation:
    return self.computations[name]


def parse(text: str) -> Module:
  """Parses a module."""
  computations: dict[str, Computation] = {}
  entry = None
  name, is_entry = '', False
  lines: list[str] = []
  for line in text.splitlines():
    header = _HEADER.match(line)
    if header:
      name, lines, is_entry = header[2], [], bool(header[1])
    elif line.startswith('}'):
      computations[name] = _computation(name, lines)
      if is_entry:
        entry = computations[name]
    elif line.startswith(' ') and ' = ' in line:
      lines.append(line)
  if entry is None:
    raise ValueError('this is not an HLO module: it has no ENTRY computation')
  return Module(computations, entry)


def _computation(name, lines):
  instructions = {}
  root = None
  for line in lines:
    instruction = _instruction(line)
    instructions[instruction.name] = instruction
    if line.lstrip().startswith('ROOT '):
      root = instruction
  # The root is not always last: instructions without users may follow it.
  return Computation(name, instructions, root or instruction)


def _instruction(line):
  left, _, right = line.partition(' = ')
  end = _end_of_word(right)
  opcode, _, rest = right[end + 1 :].partition('(')
  close = _end_of_parenthesis(rest)
  arguments = rest[:close]
  return Instruction(
    name=left.split()[-1].lstrip('%'),
    opcode=opcode,
    shapes=tuple(_shapes(right[:end])),
    operands=tuple(_NAME.findall(arguments)),
    arguments=arguments,
    attributes=rest[close + 1 :],
  )


def _end_of_word(text):
  """Returns the index of the first space that is outside of all brackets."""
  depth = 0
  for i, character in enumerate(text):
    if character in '({[':
      depth += 1
    elif character in ')}]':
      depth -= 1
    elif character == ' ' and depth == 0:
      return i
  return len(text)


def _end_of_parenthesis(text):
  depth = 1
  for match in re.finditer(r'[()]', text):
    depth += 1 if match[0] == '(' else -1
    if depth == 0:
      return match.start()
  return len(text)


def _shapes(text) -> Iterator[Shape]:
  for dtype, dims, layout in _ARRAY.findall(text):
    yield _shape(dtype, dims, layout)


@functools.lru_cache(maxsize=4096)
def _shape(dtype, dims, layout):
  order, _, rest = layout.strip('{}').partition(':')
  tile = _TILE.search(rest)
  space = _SPACE.search(rest)
  return Shape(
    dtype=dtype,
    dims=_numbers(dims.replace('<=', '')),
    minor_to_major=_numbers(order),
    tile=_numbers(tile[1]) if tile else (),
    space=int(space[1]) if space else 0,
  )


def _numbers(text):
  return tuple(int(number) for number in text.split(',') if number)
