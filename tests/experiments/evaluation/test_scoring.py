"""Scores of answers, and which are missing."""

import contextlib
import dataclasses
import types

import pytest

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.command import units
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import decoding
from experiments.evaluation import evaluation as evaluation_lib
from experiments.reporting import rows
from experiments.tasks import task as task_lib
import specsample
from specsample import stats

_METHODS = ('autoregressive', 'ngram')
_PROMPT = prompts_lib.Prompt('0', prompts_lib.NO_CATEGORY, 'a', 1, 'b')


@dataclasses.dataclass(frozen=True)
class _Length:
  """Scores the length of answers, or fails if a word is in `broken`."""

  broken: frozenset[str] = frozenset()
  missing: str | None = None
  name: str = 'Length'
  chat: bool = True

  def unscored(self):
    return self.missing

  def score(self, prompts, answers):
    (samples,) = answers
    if self.broken & {*samples}:
      return []
    return [task_lib.Score('length', float(len(samples[0])), None)]


def _evaluation(**kwargs):
  tokenizer = types.SimpleNamespace(
    decode=lambda tokens: ''.join(map(chr, tokens))
  )
  return evaluation_lib.Evaluation(
    target=specsample.Loaded(None, None, tokenizer),
    methods=dict.fromkeys(
      _METHODS, methods.Method(specsample.drafters.NoDraft())
    ),
    task=_Length(**kwargs),
  )


def _generation(text):
  return rows.Generation(
    batch=0,
    category=prompts_lib.NO_CATEGORY,
    prompt_tokens=1,
    tokens=[ord(letter) for letter in text],
    log_probs=[-1.0] * len(text),
    seconds=1.0,
    stats=stats.Stats(len(text), len(text), (), ()),
  )


@pytest.fixture
def journal(tmp_path):
  """The journal of a run that has decoded."""
  opened = journal_lib.Journal(tmp_path, {})
  opened.add((decoding.MEMORY, 0), {'bytes_per_second': 1.0})
  for name in _METHODS:
    record = _generation(name).to_json()
    opened.add(('generation', name, 0), {'generations': [record]})
  return opened


def _score(evaluation, journal):
  """Computes the scores that the journal lacks; returns their labels."""
  labels = []
  part = evaluation_lib.Part(
    evaluation=evaluation, tokens=[[1]], prompts=[_PROMPT], journal=journal
  )
  units.run(
    list(decoding.scoring(part)),
    journal,
    lambda total: contextlib.nullcontext(labels.append),
  )
  return labels


def test_what_could_not_be_scored_is_when_the_run_goes_on(journal):
  broken = _evaluation(broken=frozenset({'ngram'}))
  unscored = _evaluation(missing='a package is missing')
  assert _score(unscored, journal) == [f'scores, {name}' for name in _METHODS]
  assert _score(broken, journal) == [f'scores, {name}' for name in _METHODS]
  keys = {name: decoding.score_key(broken, name) for name in _METHODS}
  assert {name: key in journal for name, key in keys.items()} == {
    'autoregressive': True,
    'ngram': False,
  }
  assert _score(_evaluation(), journal) == ['scores, ngram']
  (score,) = journal[keys['ngram']]['scores']
  assert score == {'name': 'length', 'value': 5.0, 'ci95': None}
