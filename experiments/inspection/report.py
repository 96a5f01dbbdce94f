"""What is known of a checkpoint, and what is wrong with it, as text."""

from collections.abc import Iterator, Mapping
import dataclasses

from specsample.models import tensors


@dataclasses.dataclass(frozen=True)
class Problem:
  """What keeps a checkpoint from being loaded, and all that it is about."""

  text: str
  about: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
  """What `inspection.inspect` found.

  Attributes:
    path: where.
    what: of which kind the checkpoint is.
    facts: lines of a name and a value.
    problems: none if it can be loaded, as far as headers say.
  """

  path: str
  what: str
  facts: tuple[tuple[str, str], ...] = ()
  problems: tuple[Problem, ...] = ()

  def lines(self) -> Iterator[str]:
    """The report as text."""
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
  """A problem for each kind of differences that there are."""
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
  """'1 tensor', '2 tensors'."""
  return f'{number:,} {noun}' + 's' * (number != 1)


def size(num_bytes: int) -> str:
  """In units of 1000."""
  value = float(num_bytes)
  for unit in ('B', 'kB', 'MB'):
    if value < 1000:
      return f'{value:.4g} {unit}'
    value /= 1000
  return f'{value:.4g} GB'


def sizes(by_name: Mapping[str, int]) -> str:
  """'BF16 2.472 GB, F32 1.2 kB', the largest first."""
  ordered = sorted(by_name.items(), key=lambda item: -item[1])
  return ', '.join(f'{name} {size(number)}' for name, number in ordered)


def one_line(error: Exception) -> str:
  """An error's message."""
  return ' '.join(str(error).split())
