"""ROUGE-2, the score of summaries: Lin 2004."""

from collections.abc import Sequence

from experiments.decoding import prompts as prompts_lib
from experiments.tasks import task

NAME = 'ROUGE-2'


def missing() -> str | None:
  """Why there is no ROUGE-2 here; None where there is."""
  try:
    _scorer()
  except ImportError as error:
    return f'{NAME} is left out ({error}): pip install rouge-score'
  return None


def score(
  prompts: Sequence[prompts_lib.Prompt], answers: Sequence[Sequence[str]]
) -> list[task.Score]:
  """The mean F1 over bigrams of stems; [] where it is `missing`.

  Args:
    prompts: with references.
    answers: summaries; of several samples of a prompt the mean is taken.
  """
  if missing():
    return []
  scorer = _scorer()
  values = []
  for prompt, samples in zip(prompts, answers, strict=True):
    found = [
      scorer.score(prompt.reference, answer)['rouge2'].fmeasure
      for answer in samples
    ]
    values.append(sum(found) / len(found))
  return [task.average(NAME, values)]


def _scorer():
  from rouge_score import rouge_scorer  # noqa: PLC0415

  return rouge_scorer.RougeScorer(['rouge2'], use_stemmer=True)
