"""Dialogues made from conversations whose answers were written elsewhere.

Nothing is sampled: the answers are encoded as the chat template renders them.
"""

import collections
from collections.abc import Callable, Iterable
import math

import numpy as np

from experiments.decoding import prompts as prompts_lib
from experiments.training_data import chat
from experiments.training_data import data_folder
from experiments.training_data import filters
from experiments.training_data.data_folder import Dialogue
from experiments.training_data.data_folder import Source


def make(
  found: Iterable[prompts_lib.Prompt],
  *,
  limits: chat.Limits,
  vocab_size: int,
  by_target: bool,
  known: set[int],
  watch: Callable[[int, str], None],
) -> tuple[list[Dialogue], dict[str, int]]:
  """Returns the dialogues, and counts of how turns and answers ended.

  `vocab_size` is the model's, which may have fewer tokens than its tokenizer.
  Only if the answers are by the target are temperatures kept, where 0 means
  greedy, and answers cut where they begin to loop. `known` has digests of first
  user turns that must not be repeated; `watch` is as `synthesis.Watch`.
  """
  known = set(known)
  dialogues: list[Dialogue] = []
  ends: collections.Counter[str] = collections.Counter()
  num_tokens = 0
  for conversation in found:
    turn = filters.digest(conversation.turns[0])
    if turn in known:
      ends['dropped, turn known'] += 1
      continue
    temperature = conversation.temperature if by_target else None
    made: list[Dialogue] = []
    for prompt, answer in _answers(conversation, limits, by_target, ends):
      tokens = np.asarray([*prompt, *answer], np.int32)
      if tokens.max() >= vocab_size:
        raise ValueError(
          f'the tokenizer gives token {tokens.max()}, but the model has '
          f'{vocab_size} tokens: give the model its own tokenizer'
        )
      dialogue = Dialogue(
        tokens=tokens,
        answers=((len(prompt), tokens.size),),
        temperature=math.nan if temperature is None else temperature,
        source=Source.ENGINE if by_target else Source.TEXT,
        turn=turn,
      )
      data_folder.append(made, dialogue)
    if made:
      known.add(turn)
    dialogues += made
    num_tokens += data_folder.num_answer_tokens(made)
    watch(num_tokens, '')
  return dialogues, dict(sorted(ends.items()))


def _answers(conversation, limits, by_target, ends):
  """Yields the tokens before each answer and its own; counts how they end."""
  messages = conversation.messages
  answered = [
    i for i, (role, _) in enumerate(messages) if role == prompts_lib.ASSISTANT
  ]
  if not answered and conversation.system is None:
    ends['dropped, no answer'] += 1
  for i in answered[: limits.max_turns]:
    try:
      prompt = limits.prompt(messages[:i])
      if not limits.is_plain(messages[i][1]):
        raise chat.UnfitError('answer with control tokens or broken characters')
    except chat.UnfitError as error:
      dropped = 'dropped' if i == answered[0] else 'not gone on with'
      ends[f'{dropped}, {error}'] += 1
      return
    answer, end = _encode(limits, messages[: i + 1], prompt)
    is_last = i == len(messages) - 1
    has_end = not is_last or _has_end(
      conversation, len(answer), limits.max_answer_tokens
    )
    how = 'kept, with its end' if has_end else 'kept, without its end'
    if has_end:
      answer = answer + end
    if len(answer) > limits.max_answer_tokens:
      answer = answer[: limits.max_answer_tokens]
      how = 'kept, cut at the limit'
    loop = filters.loop(answer) if by_target else None
    if loop is not None:
      answer = answer[:loop]
      how = 'kept, cut at a loop'
    ends[how] += 1
    yield prompt, answer
    if loop is not None:
      return


def _encode(
  limits: chat.Limits, messages: chat.Messages, prompt: list[int]
) -> tuple[list[int], list[int]]:
  """Returns the last message's tokens, and the token that ends it, if any."""
  tokenizer = limits.tokenizer
  eos_ids = tokenizer.eos_ids
  whole = limits.encode(messages, add_generation_prompt=False)
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


def _has_end(
  conversation: prompts_lib.Prompt, num_tokens: int, max_tokens: int
) -> bool:
  """Returns whether the last answer is complete rather than cut.

  It counts as complete if the file gives neither a reason for its end nor its
  number of tokens, and as cut if that number does not fit the text, which has
  `num_tokens` as encoded here, without an end.
  """
  if conversation.finish_reason is not None:
    return conversation.finish_reason == 'stop'
  given = conversation.num_tokens
  # A model may write a text in other tokens than the tokenizer encodes it in.
  # Missing an end only leaves it unlearned; a false one would be learned.
  return given is None or (given == num_tokens + 1 and given < max_tokens)
