"""Scores of answers: which are missing, and which process decides."""

import contextlib
import dataclasses
import pathlib
import socket
import subprocess
import sys
import types

import pytest

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.command import units
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import scoring
from experiments.reporting import rows
from experiments.tasks import task as task_lib
import specsample
from specsample import stats

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_TIMEOUT = 300
_METHODS = ('autoregressive', 'ngram')
_PROMPT = prompts_lib.Prompt('0', prompts_lib.NO_CATEGORY, 'a', 1, 'b')
# The program of two processes; only in one of them can the task score.
_PROCESS = """
import sys, types
import jax
process = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, process)
from experiments.evaluation import scoring
for scores_in in range(2):
  missing = None if process == scores_in else 'a package is missing'
  task = types.SimpleNamespace(unscored=lambda: missing)
  evaluation = types.SimpleNamespace(
    task=task, methods={'ngram': None}, samples=1
  )
  print('units', [unit.label for unit in scoring.units(evaluation, [], None)])
"""


@dataclasses.dataclass(frozen=True)
class _Length:
  """Scores the length of answers, or fails if a word is in `broken`."""

  broken: frozenset[str] = frozenset()
  name: str = 'Length'
  chat: bool = True

  def unscored(self):
    return None

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
  opened.add((evaluation_lib.MEMORY, 0), {'bytes_per_second': 1.0})
  for name in _METHODS:
    record = _generation(name).to_json()
    opened.add(('generation', name, 0), {'generations': [record]})
  return opened


def _score(evaluation, journal):
  """Computes the scores that the journal lacks; returns their labels."""
  labels = []
  units.run(
    list(scoring.units(evaluation, [_PROMPT], journal)),
    journal,
    lambda total: contextlib.nullcontext(labels.append),
  )
  return labels


def test_what_could_not_be_scored_is_when_the_run_goes_on(journal):
  broken = _evaluation(broken=frozenset({'ngram'}))
  assert _score(broken, journal) == [f'scores, {name}' for name in _METHODS]
  keys = {name: scoring.key(broken, name) for name in _METHODS}
  assert {name: key in journal for name, key in keys.items()} == {
    'autoregressive': True,
    'ngram': False,
  }
  assert _score(_evaluation(), journal) == ['scores, ngram']
  (score,) = journal[keys['ngram']]['scores']
  assert score == {'name': 'length', 'value': 5.0, 'ci95': None}


def test_two_processes_go_by_the_first():
  with socket.create_server(('localhost', 0)) as server:
    address = f'localhost:{server.getsockname()[1]}'
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', _PROCESS, str(process), address],
      cwd=_ROOT,
      stdout=subprocess.PIPE,
      text=True,
    )
    for process in range(2)
  ]
  try:
    printed = [
      process.communicate(timeout=_TIMEOUT)[0] for process in processes
    ]
  finally:
    for process in processes:
      process.kill()
  # Gloo prints lines too.
  assert [
    [line for line in out.splitlines() if line.startswith('units')]
    for out in printed
  ] == 2 * [["units ['scores, ngram']", 'units []']]
