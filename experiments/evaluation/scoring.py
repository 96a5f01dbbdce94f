"""Scores of the answers that an evaluation decoded."""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

from experiments.command import distributed
from experiments.command import journal as journal_lib
from experiments.command import units as units_lib
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import conversations
from experiments.evaluation import evaluation as evaluation_lib
from specsample import text as text_lib


def units(
  evaluation: evaluation_lib.Evaluation,
  prompts: Sequence[prompts_lib.Prompt],
  journal: journal_lib.Journal,
) -> Iterator[units_lib.Unit]:
  """Yields a unit of work for each method, to be run when all is decoded."""
  for name in evaluation.methods if evaluation.task else ():
    yield units_lib.Unit(
      f'scores, {name}',
      key(evaluation, name),
      functools.partial(_score, evaluation, prompts, journal, name),
    )


def key(
  evaluation: evaluation_lib.Evaluation, name: str
) -> tuple[str, str, int]:
  """Returns the journal's key of a method's scores for this many samples."""
  return 'scores', name, evaluation.samples


def _score(evaluation, prompts, journal, name) -> dict[str, Any] | None:
  # Without scores, something is missing here that a later run may have.
  if not distributed.is_first() or evaluation.task.unscored():
    return None
  tokenizer = evaluation.target.tokenizer
  # An answer in a chat begins a text; any other answer continues its prompt.
  decode = tokenizer.decode
  if not evaluation.task.chat:
    decode = functools.partial(text_lib.continuation, tokenizer)
  answers: list[list[str]] = [[] for _ in prompts]
  for batch in conversations.batches(journal, name).values():
    for run in batch['generations']:
      if not run['turn'] and run['sample'] < evaluation.samples:
        answers[run['prompt']].append(decode(run['tokens']))
  scores = evaluation.task.score(prompts, answers)
  found = [dataclasses.asdict(score) for score in scores]
  return {'scores': found} if found else None
