"""Scores of the answers that an evaluation decoded."""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from experiments.command import distributed
from experiments.command import journal as journal_lib
from experiments.command import units as units_lib
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import turns
from experiments.reporting import rows
from specsample import text as text_lib


def units(
  evaluation: evaluation_lib.Evaluation,
  prompts: Sequence[prompts_lib.Prompt],
  journal: journal_lib.Journal | None,
) -> Iterator[units_lib.Unit]:
  """Yields a unit of work for each method, to be run when all is decoded.

  Args:
    evaluation: has the task that scores.
    prompts: the prompts that were decoded.
    journal: holds the generations, of which first turns are scored; None in
      processes that have no journal.
  """
  if not _is_scored(evaluation):
    return
  for name in evaluation.methods:
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


def _is_scored(evaluation) -> bool:
  """Returns, in every process, whether process 0 can score with a task."""
  task = evaluation.task
  if task is None:
    return False
  here = distributed.is_first() and not task.unscored()
  return bool(distributed.from_first(np.asarray([here]))[0])


def _score(evaluation, prompts, journal, name) -> dict[str, Any] | None:
  if journal is None:
    return None
  tokenizer = evaluation.target.tokenizer
  # An answer in a chat begins a text; any other answer continues its prompt.
  decode = tokenizer.decode
  if not evaluation.task.chat:
    decode = functools.partial(text_lib.continuation, tokenizer)
  answers: list[list[str]] = [[] for _ in prompts]
  batches = evaluation.batches(len(prompts))
  for i in range(evaluation.samples * len(batches)):
    generations = journal[turns.key(name, i)]['generations']
    for j, record in zip(batches[i % len(batches)], generations, strict=True):
      tokens = rows.Generation.from_json(record).tokens
      answers[j].append(decode(tokens))
  scores = evaluation.task.score(prompts, answers)
  # Without scores, something is missing here that a later run may have.
  if not scores:
    return None
  return {'scores': [dataclasses.asdict(score) for score in scores]}
