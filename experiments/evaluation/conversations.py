"""Conversations of several turns, in which each method reads its own answers.

As in Spec-Bench (Xia et al. 2401.07851), the whole conversation is prefilled
anew for each turn, and a question's tokens and seconds are those of all turns.
"""

import collections
from collections.abc import Iterator, Sequence
import itertools

import numpy as np

from experiments.command import distributed
from experiments.command import journal as journal_lib
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import turns as turns_lib


def later(
  evaluation: evaluation_lib.Evaluation, prompts: Sequence[prompts_lib.Prompt]
) -> range:
  """Returns the numbers, from 0, of the turns after the first."""
  longest = 1 + max(len(prompt.next_turns) for prompt in prompts)
  return range(1, min(longest, evaluation.max_turns or longest))


def turn(
  evaluation: evaluation_lib.Evaluation,
  prompts: Sequence[prompts_lib.Prompt],
  number: int,
  journal: journal_lib.Journal | None,
) -> turns_lib.Turn:
  """Returns a turn after the first.

  Args:
    evaluation: answers the turn.
    prompts: all prompts.
    number: of the turn, from 0.
    journal: holds all turns before; None in every process but the first, which
      tells the others.
  """
  numbers = turns_lib.having(prompts, number)
  tokens = {}
  for name in evaluation.methods:
    answers = {}
    if journal is not None:
      answers = _answers(evaluation, prompts, name, number, journal)
    for sample in range(evaluation.samples):
      rows = [
        encode(evaluation, prompts[i], answers[i, sample])
        for i in numbers
        if answers
      ]
      tokens[name, sample] = _from_first(rows, len(numbers))
  return turns_lib.Turn(number, numbers, tokens)


def check(
  evaluation: evaluation_lib.Evaluation, path: str, prompt: prompts_lib.Prompt
) -> None:
  """Refuses a conversation that cannot be decoded.

  Raises:
    ValueError: the prompts are not turns of a chat, the user's turns alone
      are too long, or a setting is for single turns; the message names the
      line.
  """
  numbers = later(evaluation, [prompt])
  if not numbers:
    return
  count = numbers[-1] + 1
  where = f'{path}, line {prompt.line}'
  for name, value in (
    ('refill', evaluation.refill),
    ('answer_limits', evaluation.answer_limits),
  ):
    if value:
      raise ValueError(
        f'{where}: {count} turns make a conversation, but Evaluation.{name} is '
        f'{value}, which is for single turns: bind Evaluation.max_turns = 1'
      )
  if not evaluation.is_chat:
    raise ValueError(
      f'{where}: {count} turns make a conversation, but chat is False: set it '
      'to True, or decode first turns only with Evaluation.max_turns = 1'
    )
  try:
    encode(evaluation, prompt, [[] for _ in numbers])
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from error


def encode(
  evaluation: evaluation_lib.Evaluation,
  prompt: prompts_lib.Prompt,
  answers: Sequence[Sequence[int]],
) -> list[int]:
  """Returns the tokens of a conversation, up to the turn after the answers.

  If they leave no room for another answer, the longest answers lose their ends.

  Raises:
    ValueError: the user's turns alone leave no room.
  """
  tokenizer = evaluation.target.tokenizer
  room = evaluation.target.model.max_length
  kept = [list(answer) for answer in answers]
  users = [prompt.text, *prompt.next_turns[: len(kept)]]
  while True:
    messages = [{'role': 'user', 'content': users[0]}]
    if prompt.system is not None:
      messages.insert(0, {'role': 'system', 'content': prompt.system})
    for answer, user in zip(kept, users[1:], strict=True):
      messages.append(tokenizer.message(answer))
      messages.append({'role': 'user', 'content': user})
    tokens = tokenizer.encode_chat(messages)
    excess = len(tokens) - (room - 1)
    if excess <= 0:
      return tokens
    longest = max(kept, key=len)
    if not longest:
      raise ValueError(
        f'{len(users)} turns of the user have {len(tokens)} tokens, but the '
        f'model takes {room}, including the answer: shorten them, or lower '
        'Evaluation.max_turns'
      )
    del longest[-excess:]


def decoded_later(
  evaluation: evaluation_lib.Evaluation, journal: journal_lib.Journal
) -> Iterator[tuple[int, int]]:
  """Yields the calls of later turns that all methods made, as (call, turn)."""
  for turn in itertools.count(1):
    for call in itertools.count():
      keys = [turns_lib.key(name, call, turn) for name in evaluation.methods]
      if not all(key in journal for key in keys):
        break
      yield call, turn
    if not call:
      return


def _answers(evaluation, prompts, name, number, journal):
  """Returns the answers before a turn, by prompt and sample."""
  found = collections.defaultdict(list)
  for turn in range(number):
    count = len(turns_lib.having(prompts, turn))
    for call in range(evaluation.num_calls(count)):
      for record in journal[turns_lib.key(name, call, turn)]['generations']:
        found[record['prompt'], record['sample']].append(record['tokens'])
  return found


def _from_first(rows, count) -> list[list[int]]:
  """Returns the rows of tokens that the first process has, in every process."""
  lengths = np.zeros(count, np.int32)
  lengths[: len(rows)] = [len(row) for row in rows]
  lengths = distributed.from_first(lengths)
  tokens = np.zeros((count, lengths.max()), np.int32)
  for row, values in zip(tokens, rows, strict=False):
    row[: len(values)] = values
  both = zip(distributed.from_first(tokens), lengths, strict=True)
  return [row[:length].tolist() for row, length in both]
