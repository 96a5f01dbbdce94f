"""Scores of the answers that an evaluation decoded."""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

from experiments.command import distributed
from experiments.command import units as units_lib
from experiments.evaluation import conversations
from experiments.evaluation import evaluation as evaluation_lib
from specsample import text as text_lib


def units(part: evaluation_lib.Part) -> Iterator[units_lib.Unit]:
  """Yields a unit of work for each method, to be run when all is decoded."""
  for name in part.evaluation.methods if part.evaluation.task else ():
    score = functools.partial(_score, part, name)
    yield units_lib.Unit(f'scores, {name}', key(part.evaluation, name), score)


def key(evaluation: evaluation_lib.Evaluation, name: str) -> tuple:
  """Returns the journal's key of a method's scores for this many samples."""
  return 'scores', name, evaluation.samples


def _score(part, name) -> dict[str, Any] | None:
  evaluation = part.evaluation
  # Without scores, something is missing here that a later run may have.
  if not distributed.is_first() or evaluation.task.unscored():
    return None
  tokenizer = evaluation.target.tokenizer
  # An answer in a chat begins a text; any other answer continues its prompt.
  decode = tokenizer.decode
  if not evaluation.task.chat:
    decode = functools.partial(text_lib.continuation, tokenizer)
  answers: list[list[str]] = [[] for _ in part.prompts]
  for batch in conversations.batches(part.journal, name).values():
    for run in batch['generations']:
      if not run['turn'] and run['sample'] < evaluation.samples:
        answers[run['prompt']].append(decode(run['tokens']))
  scores = evaluation.task.score(part.prompts, answers)
  found = [dataclasses.asdict(score) for score in scores]
  return {'scores': found} if found else None
