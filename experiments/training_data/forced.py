"""The dialogues of conversations whose answers were written elsewhere.

Nothing is sampled: the answers are encoded as the chat template renders them,
and `features` finds the target's hidden vectors when they are needed.
"""

import collections
from collections.abc import Callable, Iterable
import dataclasses
import math

import numpy as np

from experiments.training_data import conversations
from experiments.training_data import dialogues as dialogues_lib
from experiments.training_data import filters
from experiments.training_data import limits as limits_lib
from experiments.training_data.conversations import Conversation
from experiments.training_data.dialogues import Dialogue
from experiments.training_data.dialogues import Source

# After so many tokens each an answer is looked at, as often as a sampled one.
_LOOKS = 8


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Forced:
  """Makes dialogues of conversations.

  Attributes:
    limits: what user turns and answers keep to.
    vocab_size: the model's, which may have fewer tokens than its tokenizer.
    by_target: whether the target wrote the answers. Only then is a temperature
      kept, and 0 means greedy, and answers are cut where they begin to loop.
  """

  limits: limits_lib.Limits
  vocab_size: int
  by_target: bool

  def make(
    self,
    found: Iterable[Conversation],
    known: set[int],
    watch: Callable[[int, str], None],
  ) -> tuple[list[Dialogue], dict[str, int]]:
    """Returns the dialogues, and how many turns and answers ended how.

    Args:
      found: the conversations.
      known: digests of first user turns that are not to be repeated; those of
        the conversations are added.
      watch: is told the number of answer tokens so far, and an empty string.

    Raises:
      ValueError: the tokenizer has tokens that the model does not have.
    """
    dialogues: list[Dialogue] = []
    ends: collections.Counter[str] = collections.Counter()
    num_tokens = 0
    for conversation in found:
      digest = filters.digest(conversation.turns[0])
      if digest in known:
        ends['dropped, turn known'] += 1
        continue
      made = self._dialogues(conversation, digest, ends)
      if made:
        known.add(digest)
      dialogues += made
      num_tokens += dialogues_lib.answer_tokens(made)
      watch(num_tokens, '')
    return dialogues, dict(sorted(ends.items()))

  def _dialogues(self, conversation, digest, ends) -> list[Dialogue]:
    """Returns the dialogues of one conversation, mostly a single one."""
    made: list[Dialogue] = []
    num_answers = 0
    messages = conversation.messages
    for i, (role, content) in enumerate(messages):
      if role != conversations.ASSISTANT:
        continue
      if num_answers == self.limits.max_turns:
        break
      dropped = 'not gone on with' if num_answers else 'dropped'
      try:
        prompt = self.limits.prompt(messages[:i])
        if not self.limits.is_plain(content):
          raise limits_lib.UnfitError(
            'answer with control tokens or broken characters'
          )
      except limits_lib.UnfitError as error:
        ends[f'{dropped}, {error}'] += 1
        break
      answer, end = self._encode(messages[: i + 1], prompt)
      is_last = i == len(messages) - 1
      ended = not is_last or _has_end(
        conversation, len(answer), self.limits.max_answer_tokens
      )
      how = 'kept, with its end' if ended else 'kept, without its end'
      answer = answer + end if ended else answer
      if len(answer) > self.limits.max_answer_tokens:
        answer, ended = answer[: self.limits.max_answer_tokens], False
        how = 'kept, cut at the limit'
      loop = _loop(answer) if self.by_target else None
      if loop is not None:
        answer, ended = answer[:loop], False
        how = 'kept, cut at a loop'
      ends[how] += 1
      num_answers += 1
      dialogue = self._dialogue(conversation, prompt, answer, ended, digest)
      dialogues_lib.append(made, dialogue)
      if loop is not None:
        break
    if not num_answers and len(messages) == len(conversation.turns):
      ends['dropped, no answer'] += 1
    return made

  def _dialogue(self, conversation, prompt, answer, ended, digest) -> Dialogue:
    tokens = np.asarray([*prompt, *answer], np.int32)
    if tokens.max() >= self.vocab_size:
      raise ValueError(
        f'the tokenizer gives token {tokens.max()} and the model has '
        f'{self.vocab_size} tokens: give the model its own tokenizer'
      )
    temperature = conversation.temperature if self.by_target else None
    return Dialogue(
      tokens=tokens,
      answers=((len(prompt), tokens.size),),
      temperature=math.nan if temperature is None else temperature,
      source=Source.ENGINE if self.by_target else Source.TEXT,
      ended=ended,
      turn=digest,
    )

  def _encode(self, messages, prompt) -> tuple[list[int], list[int]]:
    """Returns the last message's tokens, and the token that ends it."""
    tokenizer = self.limits.tokenizer
    eos_ids = tokenizer.eos_ids
    whole = self.limits.encode(messages, add_generation_prompt=False)
    if whole[: len(prompt)] == prompt:
      rest = whole[len(prompt) :]
      for i, token in enumerate(rest):
        if token in eos_ids:
          return rest[:i], [token]
    # The template writes no end after an answer, or writes the answer in
    # another way than a model does (without its thinking, for example).
    (answer,) = tokenizer.encode_all([messages[-1][1]])
    named = tokenizer.named_tokens.get('eos_token', '')
    end = tokenizer.backend.token_to_id(named)
    return answer, list(eos_ids[:1]) if end is None else [end]


def _loop(answer: list[int]) -> int | None:
  """Returns after how many tokens a sampled answer would have been ended."""
  for size in range(_LOOKS, len(answer) + 1, _LOOKS):
    if filters.loops(answer[:size]):
      return size
  return None


def _has_end(
  conversation: Conversation, num_tokens: int, max_tokens: int
) -> bool:
  """Returns whether the last answer was not cut; False if that is doubtful.

  Args:
    conversation: what the file says about it.
    num_tokens: of the answer as it is encoded here, without an end.
    max_tokens: where answers are cut.
  """
  if conversation.finish_reason is not None:
    return conversation.finish_reason == 'stop'
  given = conversation.num_tokens
  # A model may write a text in other tokens than it is encoded in. An end that
  # was never written would be learned, a missing one is only not learned.
  return given is None or (given == num_tokens + 1 and given < max_tokens)
