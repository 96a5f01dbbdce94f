"""A table of several settings from one command, beside a paper's numbers."""

import json
import re
import shutil

import pytest

_NEW_TOKENS = 96  # as in other files, so that they share compiled programs
_TABLE = """
from __gin__ import dynamic_registration

from experiments import evaluation
from experiments import methods
from experiments.evaluation import papers
from experiments.evaluation import suite
from experiments.tasks import summarization
import specsample

include 'configs/runs/evaluate.gin'

suite.evaluations.parts = {
  'Prompts, greedy': @greedy/evaluation.Evaluation,
  'Articles, T = 1': @drawn/evaluation.Evaluation,
}
evaluation.Evaluation.max_new_tokens = 96
evaluation.Evaluation.repeats = 1
evaluation.Evaluation.limit = 2
evaluation.Evaluation.methods = {
  'autoregressive': @autoregressive/methods.Method(),
  'ngram': @ngram/methods.Method(),
}
drawn/evaluation.Evaluation.task = @summarization.articles()
drawn/evaluation.Evaluation.sampling = @drawn/specsample.Sampling()
drawn/specsample.Sampling.temperature = 1.0

papers.Paper.source = 'A paper, table 1: a chip'
papers.Paper.note = 'Another pair stands in.'
papers.Paper.names = {'ngram': 'PLD'}
papers.Paper.rows = (
  ('Prompts, greedy', 'ngram', {'speedup': 2.5, 'acceptance at 1': 0.5}),
  ('Articles, T = 1', 'ngram', {'ROUGE-2': 0.112}),
  ('Articles, T = 1', 'REST', {'speedup': 1.48}),
)
"""
_GREEDY, _DRAWN = 'prompts_greedy', 'articles_t_1'


@pytest.fixture(scope='module')
def table(tmp_path_factory):
  """A configuration of two settings and a paper's numbers."""
  folder = tmp_path_factory.mktemp('table')
  # The first is the prompt's example; the model takes 512 tokens, a byte each.
  articles = [
    {'document': f'{thing} fell.', 'summary': f'A {thing} fell.'}
    for thing in ('Rain', 'Snow', 'Hail')
  ]
  text = ''.join(json.dumps(article) + '\n' for article in articles)
  (folder / 'articles.jsonl').write_text(text)
  path = folder / 'table.gin'
  path.write_text(
    f"{_TABLE}summarization.articles.path = '{folder}/articles.jsonl'\n"
  )
  return path


_FAULTS = {
  'each needs a folder of its own': (
    "evaluations.parts = {'A b': @greedy/Evaluation, 'a-B': @drawn/Evaluation}"
  ),
  "'speed' for 'Prompts, greedy': choose one of num_draft_tokens, ": (
    "Paper.rows = (('Prompts, greedy', 'ngram', {'speed': 2.5}),)"
  ),
  'absent.jsonl': "articles.path = 'absent.jsonl'",
}


@pytest.fixture(scope='module')
def calls(table, tiny_methods, commands, tmp_path_factory):
  """Outcomes as it is, with other prompts, and with one fault each."""
  out = tmp_path_factory.mktemp('suite')
  prompts = out / 'prompts.txt'
  prompts.write_text('Why?\n')
  flags = {
    'table': ['--num_seeds=2'],
    'prompts': [f'--prompts={prompts}', '--limit=1'],
  }
  for i, fault in enumerate(_FAULTS.values()):
    flags[str(i)] = [f'--gin_bindings={fault}']
  common = ['evaluate', f'--gin_file={table}', *tiny_methods]
  outcomes = commands.run_all(
    [[*common, *own, f'--out={out}/{name}'] for name, own in flags.items()]
  )
  return out, outcomes


@pytest.fixture(scope='module')
def result(calls):
  folder, outcomes = calls
  assert outcomes[0].code == 0, outcomes[0].err
  return json.loads((folder / 'table' / 'result.json').read_text())


def test_rows_say_of_which_setting_they_are(result):
  overall = [row for row in result['rows'] if row['category'] == 'overall']
  fields = ('part', 'method', 'samples', 'prompts')
  assert [tuple(row[name] for name in fields) for row in overall] == [
    ('Prompts, greedy', 'autoregressive', 1, 2),
    ('Prompts, greedy', 'ngram', 1, 2),
    ('Articles, T = 1', 'autoregressive', 2, 2),
    ('Articles, T = 1', 'ngram', 2, 2),
  ]
  tokens = [row['tokens'] for row in overall]
  assert tokens[:2] == [2 * _NEW_TOKENS] * 2
  # Four sampled texts, some of which end early.
  assert min(tokens[2:]) > 2 * _NEW_TOKENS
  scores = [[*row['scores']] for row in overall]
  assert scores == [[], [], ['ROUGE-2'], ['ROUGE-2']]


def _records(folder):
  """Returns the journal's values of the drawn setting, by key."""
  lines = (folder / _DRAWN / 'journal.jsonl').read_text().splitlines()[1:]
  records = map(json.loads, lines)
  return {tuple(record['key']): record['value'] for record in records}


def test_samples_are_drawn_with_seeds_of_their_own(calls):
  found = {
    key: value['generations'][0]['tokens']
    for key, value in _records(calls[0] / 'table').items()
    if key[0] == 'generation'
  }
  # Two prompts, each sampled twice.
  assert set(found) == {
    ('generation', name, i)
    for name in ('autoregressive', 'ngram')
    for i in range(4)
  }
  assert found['generation', 'ngram', 0] != found['generation', 'ngram', 2]


def test_scores_are_of_the_samples_that_are_asked_for(
  calls, table, tiny_methods, commands
):
  fewer = calls[0] / 'fewer'
  shutil.copytree(calls[0] / 'table', fewer)
  (outcome,) = commands.run_all(
    [['evaluate', f'--gin_file={table}', *tiny_methods, f'--out={fewer}']]
  )
  assert outcome.code == 0, outcome.err
  assert 'generation' not in outcome.err
  assert [key for key in _records(fewer) if key[0] == 'scores'] == [
    ('scores', name, samples)
    for samples in (2, 1)
    for name in ('autoregressive', 'ngram')
  ]
  rows = json.loads((fewer / 'result.json').read_text())['rows']
  assert [row['samples'] for row in rows if row['scores']] == [1, 1]


def test_ours_is_beside_the_papers(calls, result):
  greedy, drawn = (
    row
    for row in result['rows']
    if row['method'] == 'ngram' and row['category'] == 'overall'
  )
  rouge = drawn['scores']['ROUGE-2']
  first = greedy['acceptance_by_position'][0]
  fields = ('row', 'quantity', 'paper', 'ours', 'ci95')
  rows = [tuple(row[x] for x in fields) for row in result['paper']['rows']]
  settings = ('Prompts, greedy, PLD', 'Articles, T = 1, PLD')
  assert rows == [
    (settings[0], 'speedup', 2.5, greedy['speedup'], greedy['speedup_ci95']),
    (settings[0], 'acceptance at 1', 0.5, first, None),
    (settings[1], 'ROUGE-2', 0.112, rouge['value'], rouge['ci95']),
    ('Articles, T = 1, REST', 'speedup', 1.48, None, None),
  ]
  assert result['data']['Articles']['sha256']
  out = calls[1][0].out
  assert 'A paper, table 1: a chip' in out
  assert 'Another pair stands in.' in out
  assert (calls[0] / 'table' / _GREEDY / 'results.png').is_file()
  assert f'and in its folders {_GREEDY}, {_DRAWN}: generations.jsonl' in out


def test_prompts_for_a_task_leave_its_score_without_ours(calls):
  folder, (_, replaced, *_) = calls
  assert replaced.code == 0, replaced.err
  path = folder / 'prompts' / 'result.json'
  paper = json.loads(path.read_text())['paper']
  found = paper['rows']
  # Settings keep their names, so a note says what was decoded instead.
  assert paper['note'] == (
    'Ours are for prompts, which --prompts put in place of that data. Another '
    'pair stands in.'
  )
  assert 'Ours are for prompts, which --prompts' in replaced.out
  (rouge,) = (row for row in found if row['quantity'] == 'ROUGE-2')
  assert (rouge['paper'], rouge['ours'], rouge['ci95']) == (0.112, None, None)
  (speedup,) = (row['ours'] for row in found if row['paper'] == 2.5)
  assert speedup > 0
  assert re.search(r'Articles, T = 1, PLD +ROUGE-2 +0\.112 +- +-', replaced.out)


def test_faults_come_before_anything_is_written(calls):
  folder, (_, _, *faults) = calls
  for i, (outcome, message) in enumerate(zip(faults, _FAULTS, strict=True)):
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert not (folder / str(i)).exists()
