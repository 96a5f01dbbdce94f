"""Conversations of several turns, in which each method reads its own answers.

A turn begins when all prompts have been through the turn before, so that its
rows are batched, compiled, timed and journalled as those of the first turn are.
As in Spec-Bench (Xia et al. 2401.07851), the whole conversation is prefilled
again for each turn, and a question's tokens and seconds are those of all turns.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import itertools
from typing import Any

from experiments.command import journal as journal_lib
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import evaluation as evaluation_lib


@dataclasses.dataclass(frozen=True)
class Turn:
  """The prompts that have a turn, and what the model reads in it."""

  number: int  # from 0
  prompts: Sequence[int]  # their numbers, in ascending order
  # The tokens of each of them, by method and sample.
  tokens: Mapping[tuple[str, int], Sequence[list[int]]]


def key(method: str, call: int, turn: int = 0) -> tuple:
  """Returns the journal's key of a batch and sample of a turn."""
  return ('generation', method, call, *([turn] if turn else []))


def numbers(
  evaluation: evaluation_lib.Evaluation, prompts: Sequence[prompts_lib.Prompt]
) -> range:
  """Returns the numbers of the turns that are decoded, from 0."""
  longest = 1 + max(len(prompt.next_turns) for prompt in prompts)
  return range(min(longest, evaluation.max_turns or longest))


def turn(part: evaluation_lib.Part, number: int) -> Turn:
  """Returns a turn; the journal holds all turns before it.

  In the first, all methods read the same tokens.
  """
  both = itertools.product(
    part.evaluation.methods, range(part.evaluation.samples)
  )
  if not number:
    every = range(len(part.tokens))
    return Turn(0, every, dict.fromkeys(both, part.tokens))
  there = [i for i, x in enumerate(part.prompts) if len(x.next_turns) >= number]
  tokens = {}
  for name, sample in both:
    answers = _answers(part.journal, name, number)
    tokens[name, sample] = [
      encode(part.evaluation, part.prompts[i], answers[i, sample])
      for i in there
    ]
  return Turn(number, there, tokens)


def batches(
  journal: journal_lib.Journal, method: str
) -> dict[tuple, dict[str, Any]]:
  """Returns the records of a method's batches, turn by turn.

  They are mapped from the rest of their keys, after the method.
  """
  start = key(method, 0)[:2]
  found = [place for place in journal if place[:2] == start]
  # Keys of the first turn end with the call.
  found.sort(key=lambda place: (place[3:], place[2]))
  return {place[2:]: journal[place] for place in found}


def outputs(
  journal: journal_lib.Journal, turn: int, method: str
) -> list[list[int]]:
  """Returns a method's tokens for each prompt that has a turn."""
  return [
    run['tokens']
    for batch in batches(journal, method).values()
    for run in batch['generations']
    if run['turn'] == turn
  ]


def check(
  evaluation: evaluation_lib.Evaluation, path: str, prompt: prompts_lib.Prompt
) -> None:
  """Refuses a conversation that cannot be decoded."""
  count = len(numbers(evaluation, [prompt]))
  if count == 1:
    return
  where = f'{path}, line {prompt.line}'
  for name in ('refill', 'answer_limits'):
    if value := getattr(evaluation, name):
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
    encode(evaluation, prompt, [[]] * (count - 1))
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from error


def encode(
  evaluation: evaluation_lib.Evaluation,
  prompt: prompts_lib.Prompt,
  answers: Sequence[Sequence[int]],
) -> list[int]:
  """Returns the tokens of a conversation, up to the turn after the answers.

  If they leave no room for another answer, the longest answers lose their ends.
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


def _answers(journal, method, number):
  """Returns the answers before a turn, by prompt and sample."""
  found = collections.defaultdict(list)
  for batch in batches(journal, method).values():
    for run in batch['generations']:
      if run['turn'] < number:
        found[run['prompt'], run['sample']].append(run['tokens'])
  return found
