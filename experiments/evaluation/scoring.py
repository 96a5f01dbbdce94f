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
from experiments.reporting import rows
from specsample import text as text_lib


def units(
  evaluation: evaluation_lib.Evaluation,
  prompts: Sequence[prompts_lib.Prompt],
  journal: journal_lib.Journal | None,
) -> Iterator[units_lib.Unit]:
  """A unit of work for each method, after all of it is decoded.

  Args:
    evaluation: whose task scores.
    prompts: what was decoded.
    journal: has the generations, in the process that has one.
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
  """A method's scores in the journal: other ones of more samples."""
  return 'scores', name, evaluation.samples


def _is_scored(evaluation) -> bool:
  """Whether there is a task, and it scores in process 0, on all."""
  task = evaluation.task
  if task is None:
    return False
  here = distributed.is_first() and not task.unscored()
  return bool(distributed.from_first(np.asarray([here]))[0])


def _score(evaluation, prompts, journal, name) -> dict[str, Any] | None:
  if journal is None:
    return None
  tokenizer = evaluation.target.tokenizer
  # An answer of a chat begins a text; any other one continues its prompt.
  decode = tokenizer.decode
  if not evaluation.task.chat:
    decode = functools.partial(text_lib.continuation, tokenizer)
  answers: list[list[str]] = [[] for _ in prompts]
  batches = evaluation.batches(len(prompts))
  for i in range(evaluation.samples * len(batches)):
    generations = journal['generation', name, i]['generations']
    for j, record in zip(batches[i % len(batches)], generations, strict=True):
      tokens = rows.Generation.from_json(record).tokens
      answers[j].append(decode(tokens))
  scores = evaluation.task.score(prompts, answers)
  # Without any something is missing here that may be there another time.
  if not scores:
    return None
  return {'scores': [dataclasses.asdict(score) for score in scores]}
