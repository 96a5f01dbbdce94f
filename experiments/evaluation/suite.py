"""A table of several settings, each with an evaluation, run in sequence."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import pathlib
import re

import gin

from experiments.command import config
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import conversations
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import learning
from experiments.tasks import human_eval

# The prompts that are decoded if there is neither a task nor --prompts.
_PROMPTS = 'experiments/data/prompts.jsonl'


@gin.configurable
def evaluations(
  parts: Mapping[str, Callable[[], evaluation_lib.Evaluation]] | None = None,
) -> dict[str, evaluation_lib.Evaluation]:
  """Returns the evaluations by the names of their settings.

  `parts` makes the evaluation of each setting, for example {'XSum, greedy':
  @xsum/evaluation.Evaluation}. If it is None, the single evaluation that is
  configured has the name ''.
  """
  if parts is None:
    return {'': evaluation_lib.Evaluation()}
  folders = {folder(pathlib.PurePath(), name) for name in parts}
  if len(folders) < len(parts) or pathlib.PurePath() in folders:
    raise ValueError(
      f'suite.evaluations.parts are {list(parts)}: each needs a folder of its '
      'own, so give them other names'
    )
  return {name: make() for name, make in parts.items()}


def parts(
  *,
  path: str | None,
  limit: int | None,
  num_seeds: int | None,
  allow_code_execution: bool,
) -> Iterator[evaluation_lib.Part]:
  """Reads the prompts of each evaluation, and checks that they can be decoded.

  The arguments are flags of `evaluate`: what they give replaces an evaluation's
  own task, limit and number of samples.
  """
  for name, configured in evaluations().items():
    task = configured.task if path is None else None
    if isinstance(task, human_eval.HumanEval):
      task = dataclasses.replace(
        task, allow_code_execution=allow_code_execution
      )
    evaluation = dataclasses.replace(
      configured, task=task, num_seeds=num_seeds or configured.num_seeds
    )
    limit_here = evaluation.limit if limit is None else limit
    if task is None:
      where = config.find(_PROMPTS if path is None else path)
      prompts = prompts_lib.read(where, limit_here)
      benchmark = prompts_lib.name(where)
    else:
      where = benchmark = task.name
      prompts = task.prompts()[:limit_here]
    tokens = [evaluation.encode(where, prompt) for prompt in prompts]
    for prompt in prompts:
      conversations.check(evaluation, where, prompt)
    evaluation.check(tokens)
    yield evaluation_lib.Part(
      evaluation=evaluation,
      tokens=tokens,
      prompts=prompts,
      name=name,
      benchmark=benchmark,
      configured=configured,
      provenance=None if task is None else task.source.provenance(),
      learners=learning.learners(evaluation),
    )


def folder(out: pathlib.PurePath, part: str) -> pathlib.PurePath:
  """Returns the folder of a part's journal and figure, within `out`."""
  return out / re.sub(r'[^a-z0-9]+', '_', part.lower()).strip('_')
