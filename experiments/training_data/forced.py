"""Dialogues made from conversations whose answers were written elsewhere.

Nothing is sampled: the answers are encoded as the chat template renders them,
and `features` computes the target's hidden vectors when they are needed.
"""

import collections
from collections.abc import Callable, Iterable
import dataclasses
import math

import numpy as np

from experiments.decoding import conversations
from experiments.decoding.conversations import Conversation
from experiments.training_data import dialogues as dialogues_lib
from experiments.training_data import filters
from experiments.training_data import limits as limits_lib
from experiments.training_data.dialogues import Dialogue
from experiments.training_data.dialogues import Source

# Answers are checked for loops every this many tokens, like sampled ones.
_LOOKS = 8


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Forced:
  """A maker of dialogues from conversations.

  Attributes:
    limits: the limits on user turns and answers.
    vocab_size: the model's, which may have fewer tokens than its tokenizer.
    by_target: whether the target wrote the answers. Only then are temperatures
      kept, where 0 means greedy, and answers cut where they begin to loop.
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
    """Returns the dialogues, and counts of how turns and answers ended.

    Args:
      found: the conversations.
      known: digests of first user turns that must not be repeated; those of the
        dialogues are added.
      watch: called with the number of answer tokens so far and an empty string.
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
    """Returns the dialogues of one conversation, usually a single one."""
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
        f'the tokenizer gives token {tokens.max()}, but the model has '
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
    """Returns the last message's tokens, and the token that ends it, if any."""
    tokenizer = self.limits.tokenizer
    eos_ids = tokenizer.eos_ids
    whole = self.limits.encode(messages, add_generation_prompt=False)
    if whole[: len(prompt)] == prompt:
      rest = whole[len(prompt) :]
      for i, token in enumerate(rest):
        if token in eos_ids:
          return rest[:i], [token]
    # The template writes no end after an answer, or renders the answer
    # differently from how a model writes it (for example without its thinking).
    (answer,) = tokenizer.encode_all([messages[-1][1]])
    named = tokenizer.named_tokens.get('eos_token', '')
    end = tokenizer.backend.token_to_id(named)
    return answer, list(eos_ids[:1]) if end is None else [end]


def _loop(answer: list[int]) -> int | None:
  """Returns the length at which a loop would have ended sampling, or None."""
  for size in range(_LOOKS, len(answer) + 1, _LOOKS):
    if filters.loops(answer[:size]):
      return size
  return None


def _has_end(
  conversation: Conversation, num_tokens: int, max_tokens: int
) -> bool:
  """Returns whether the last answer is complete rather than cut.

  It counts as complete if the file gives neither a reason for its end nor its
  number of tokens, and as cut if that number does not fit the text.

  Args:
    conversation: what the file says about the answer.
    num_tokens: the answer's tokens as encoded here, without an end.
    max_tokens: the limit at which answers are cut.
  """
  if conversation.finish_reason is not None:
    return conversation.finish_reason == 'stop'
  given = conversation.num_tokens
  # A model may write a text in other tokens than the tokenizer encodes it in.
  # Missing an end only leaves it unlearned; a false one would be learned.
  return given is None or (given == num_tokens + 1 and given < max_tokens)
