"""The turns of conversations: what is decoded in each, and its place.

A turn begins when all prompts have been through the turn before, so that its
rows are batched, compiled, timed and journalled as those of the first turn are.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses

from experiments.decoding import prompts as prompts_lib
from experiments.reporting import rows as rows_lib


@dataclasses.dataclass(frozen=True)
class Turn:
  """The prompts that have a turn, and what the model reads in it.

  Attributes:
    number: of the turn, from 0.
    prompts: the numbers of the prompts, in ascending order.
    tokens: the tokens of each of them, by method and sample.
  """

  number: int
  prompts: Sequence[int]
  tokens: Mapping[tuple[str, int], Sequence[list[int]]]


def key(method: str, call: int, turn: int = 0) -> tuple:
  """Returns the journal's key of a batch and sample of a turn."""
  return ('generation', method, call, *([turn] if turn else []))


def first(
  methods: Iterable[str], samples: int, tokens: Sequence[list[int]]
) -> Turn:
  """Returns the first turn, in which all methods read the same tokens."""
  same = {(name, i): tokens for name in methods for i in range(samples)}
  return Turn(0, range(len(tokens)), same)


def having(prompts: Sequence[prompts_lib.Prompt], turn: int) -> list[int]:
  """Returns the numbers of the prompts that have a turn."""
  return [i for i, one in enumerate(prompts) if len(one.next_turns) >= turn]


def comparable(
  runs: Sequence[rows_lib.Generation], others: Sequence[rows_lib.Generation]
) -> list[bool]:
  """Returns which generations read the same as another method's, by index.

  Those of a later turn do if all earlier answers are equal. Both sequences
  have the same prompts in the same order, turn by turn.
  """
  parted = set()
  found = []
  for run, other in zip(runs, others, strict=True):
    conversation = run.prompt, run.sample
    found.append(not run.turn or conversation not in parted)
    if run.tokens != other.tokens:
      parted.add(conversation)
  return found
