"""A report on a checkpoint, its facts and its problems, as text."""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses

from specsample.models import tensors


@dataclasses.dataclass(frozen=True)
class Problem:
  """A reason why a checkpoint cannot be loaded, and the names it concerns."""

  text: str
  about: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
  """The result of `inspection.inspect`.

  Attributes:
    path: the checkpoint's path.
    what: the kind of checkpoint.
    facts: lines, each a name and a value.
    problems: empty if the checkpoint can be loaded, as far as headers tell.
  """

  path: str
  what: str
  facts: tuple[tuple[str, str], ...] = ()
  problems: tuple[Problem, ...] = ()

  def lines(self) -> Iterator[str]:
    """Yields the lines of the report."""
    yield f'{self.path}: {self.what}'
    width = max((len(name) for name, _ in self.facts), default=0)
    for name, value in self.facts:
      yield f'  {name:{width}}  {value}'
    for problem in self.problems:
      yield f'PROBLEM {problem.text}'
      for name in problem.about:
        yield f'  {name}'
    if not self.problems:
      yield 'nothing is missing, unknown or of another shape'


def differences(found: tensors.Differences) -> list[Problem]:
  """Returns a problem for each kind of difference that was found."""
  kinds = {
    'missing': found.missing,
    'unknown': found.unknown,
    'of another shape than the configuration says': found.misshapen,
  }
  return [
    Problem(f'{count(len(names), "tensor")} {kind}', names)
    for kind, names in kinds.items()
    if names
  ]


def count(number: int, noun: str) -> str:
  """Returns '1 tensor' or '2 tensors'."""
  return f'{number:,} {noun}' + 's' * (number != 1)


def size(num_bytes: int) -> str:
  """Returns a size in units that are powers of 1000."""
  value = float(num_bytes)
  for unit in ('B', 'kB', 'MB'):
    if value < 1000:
      return f'{value:.4g} {unit}'
    value /= 1000
  return f'{value:.4g} GB'


def sizes(by_name: Mapping[str, int]) -> str:
  """Returns 'BF16 2.472 GB, F32 1.2 kB', the largest first."""
  ordered = sorted(by_name.items(), key=lambda item: -item[1])
  return ', '.join(f'{name} {size(number)}' for name, number in ordered)


def tally(pairs: Iterable[tuple[str, int]]) -> str:
  """Returns the sums of sizes by name as `sizes` writes them, or 'none'."""
  by_name: dict[str, int] = {}
  for name, number in pairs:
    by_name[name] = by_name.get(name, 0) + number
  return sizes(by_name) or 'none'


def of_error(error: Exception, place: str = '') -> Problem:
  """Returns a problem: an error's message on one line, after its place."""
  return Problem(place + ' '.join(str(error).split()))
