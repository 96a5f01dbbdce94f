"""Progress through a file of conversations, shard by shard, as data grow."""

import collections
from collections.abc import Sequence
from typing import Any

from experiments.decoding import conversations
from experiments.training_data import data_folder
from experiments.training_data import dialogues as dialogues_lib
from experiments.training_data.dialogues import Dialogue


class Filling:
  """The state of a folder of shards, and what its next shard is made from.

  A shard records which conversations it was made from, and the next one
  continues after them. So the file may grow at its end, and only there.

  Attributes:
    number: the number of the next shard.
    num_tokens: the number of answer tokens in the shards so far.
    known: digests of the first user turns in them.
    first: the conversation that the next shard begins with.
  """

  def __init__(
    self, folder: data_folder.Folder, file: conversations.File | None
  ):
    """Starts before the first shard; `read` moves on over existing ones."""
    self.number = 0
    self.num_tokens = 0
    self.known: set[int] = set()
    self.first = 0
    self._folder = folder
    self._file = file

  def read(self, wanted: int) -> None:
    """Takes in the next existing shards, until there are the wanted tokens."""
    while self.num_tokens < wanted:
      found = self._folder.read(self.number)
      if found is None:
        return
      dialogues, origin = found
      if origin is not None:
        self._check(origin)
      self._take_in(dialogues, origin)

  def given(self, count: int) -> Sequence[conversations.Conversation]:
    """Returns the next conversations, at most `count`."""
    every = self._file.conversations if self._file else []
    return every[self.first : self.first + count]

  @property
  def left(self) -> int:
    """The number of conversations that no shard was made from yet."""
    return len(self._file.conversations) - self.first if self._file else 0

  def add(
    self,
    dialogues: list[Dialogue],
    given: Sequence[conversations.Conversation],
    notes: dict[str, Any],
  ) -> None:
    """Writes the next shard, made from the conversations `given`."""
    origin = None
    if given:
      origin = self._origin(len(given))
      categories = collections.Counter(x.category for x in given)
      notes = notes | {'categories': dict(sorted(categories.items()))}
    self._folder.add(self.number, dialogues, notes, origin)
    self._take_in(dialogues, origin)

  def _take_in(self, dialogues, origin) -> None:
    self.number += 1
    self.num_tokens += dialogues_lib.answer_tokens(dialogues)
    self.known.update(dialogue.turn for dialogue in dialogues)
    self.first += origin['count'] if origin else 0

  def _origin(self, count: int) -> dict[str, Any]:
    digest = conversations.digest(self.given(count))
    return {'first': self.first, 'count': count, 'digest': digest}

  def _check(self, origin) -> None:
    if self._file is None:
      raise ValueError(
        f'shard {self.number} was made from a file of prompts: give it again '
        'with --prompts, or give another --out'
      )
    if origin != self._origin(origin['count']):
      raise ValueError(
        f'shard {self.number} was made from other conversations than '
        f'{self._file.path} has there, but a file may only grow at its end: '
        'give the file as it was, or another --out'
      )
