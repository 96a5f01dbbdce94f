"""ROUGE-2, the score of summaries (Lin, 2004)."""

from collections.abc import Sequence

from experiments.decoding import prompts as prompts_lib
from experiments.tasks import task

NAME = 'ROUGE-2'


def missing() -> str | None:
  """Returns why ROUGE-2 is not available here; None if it is."""
  try:
    _scorer()
  except ImportError as error:
    return f'{NAME} is left out ({error}): pip install rouge-score'
  return None


def score(
  prompts: Sequence[prompts_lib.Prompt], answers: Sequence[Sequence[str]]
) -> list[task.Score]:
  """Returns the mean F1 over bigrams of stems; [] if the package is `missing`.

  Args:
    prompts: prompts with references.
    answers: the summaries; the mean is taken over the samples of a prompt.
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
