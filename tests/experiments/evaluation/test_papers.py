"""A paper's numbers beside made-up rows."""

import dataclasses
import re
import types

import pytest

from experiments import methods
from experiments.evaluation import evaluation
from experiments.evaluation import papers
from experiments.reporting import ratios as ratios_lib
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables
from experiments.tasks import gsm8k
from experiments.tasks import human_eval
from experiments.tasks import questions
from experiments.tasks import summarization
import specsample
from tests.experiments.evaluation import made_up

_PAPER = papers.Paper(
  source='A paper: gains',
  names={'token': 'the token rule'},
  rows=[
    ('a', 'token', {'tokens_per_round': 2.0}),
    ('a', 'greedy', {'speedup': 1.5}),
  ],
  ratios=[
    ('a', 'block', 'token', {'tokens_per_round': 1.083, 'speedup': 1.065}),
    ('a', 'greedy', 'token', {'speedup': 1.5}),
    ('b', 'block', 'token', {'speedup': 1.5}),
  ],
)


def _evaluation(*names, task=None):
  method = methods.Method(specsample.drafters.NoDraft())
  own = dict.fromkeys(names, method)
  return evaluation.Evaluation(target=None, methods=own, task=task)


def _runs(*tokens_rounds_seconds):
  return [
    made_up.generation(tokens, rounds, batch=i, seconds=seconds)
    for i, (tokens, rounds, seconds) in enumerate(tokens_rounds_seconds)
  ]


def _table(part, rows=(), **generations):
  return types.SimpleNamespace(part=part, rows=rows, generations=generations)


def _row(part, method, **values):
  names = [field.name for field in dataclasses.fields(rows_lib.Row)]
  common = {'part': part, 'method': method, 'scores': {}, 'category': 'overall'}
  return rows_lib.Row(**dict.fromkeys(names) | common | values)


def test_numbers_are_beside_those_of_the_same_setting_and_method():
  rows = [
    _row('a', 'token', tokens_per_round=1.5, tokens_per_round_ci95=[1.4, 1.6]),
    _row('a', 'token', tokens_per_round=9.0, category='c'),
    _row('b', 'token', tokens_per_round=9.0),
  ]
  first, second, *_ = map(
    dataclasses.astuple, papers.compare(_PAPER, [_table('a', rows)])
  )
  number = 'tokens_per_round', 2.0, 1.5, [1.4, 1.6]
  assert first == ('a, the token rule', *number)
  # Rows that are not run here are listed for reference.
  assert second == ('a, greedy', 'speedup', 1.5, None, None)


def test_pass_at_1_stands_in_for_pass_at_100(in_terminal):
  values = {'pass@100': 0.451, 'speedup': 2.46}
  paper = papers.Paper(source='A paper', rows=[('', 'draft', values)])

  def compared(*names):
    scores = {
      name: {'value': 0.25 + i, 'ci95': [0.1, 0.4]}
      for i, name in enumerate(names)
    }
    row = _row('', 'draft', scores=scores)
    return papers.compare(paper, [_table('', [row])])

  _, measured, speedup = compared('pass@1')
  assert (measured.quantity, measured.paper) == ('pass@1', None)
  assert (measured.ours, measured.ci95) == (0.25, [0.1, 0.4])
  assert (speedup.quantity, speedup.ours) == ('speedup', None)
  _, measured, _ = compared('pass@1', 'pass@10')
  assert measured.quantity == 'pass@10'
  assert [one.ours for one in compared('pass@1', 'pass@100')] == [1.25, None]
  assert len(compared()) == 2  # nothing was scored
  found = [dataclasses.asdict(one) for one in compared('pass@1')]
  content = {'source': 'A paper', 'note': '', 'targets': '', 'rows': found}
  shown = papers.table(content)
  text = in_terminal(80, lambda: tables.console().print(shown))
  lines = [line.split() for line in text.splitlines()]
  assert ['draft', 'pass@100', '0.451', '-', '-'] in lines
  assert ['draft', 'pass@1', '-', '0.25', '0.1-0.4'] in lines


def test_gains_are_ratios_over_the_prompts_that_both_decoded():
  token = _runs((8, 4, 0.4), (8, 2, 0.2), (8, 1, 0.1))
  block = _runs((10, 4, 0.4), (10, 2, 0.2), (10, 1, 0.1))
  found = papers.compare(_PAPER, [_table('a', token=token, block=block)])
  of_block = found[2:4]
  for one in of_block:
    assert one.row == 'a, block over the token rule'
    assert one.ours == pytest.approx(1.25)
    # The gain is the same on each prompt, and the interval pairs the prompts.
    assert one.ci95 == pytest.approx([1.25, 1.25])
  assert [one.quantity for one in of_block] == ['tokens_per_round', 'speedup']
  # One method and one setting were not run.
  assert [(one.ours, one.ci95) for one in found[4:]] == [(None, None)] * 2


def test_gain_varies_with_the_prompts():
  token = _runs((8, 4, 0.4), (8, 4, 0.4), (8, 4, 0.4))
  block = _runs((8, 4, 0.4), (12, 4, 0.4), (16, 4, 0.4))
  ours, (low, high) = ratios_lib.ratio(block, token, 'tokens_per_round')
  assert ours == 1.5
  # The interval of the mean of 1, 1.5 and 2; 4.303 is Student's t for n = 3.
  half = 4.303 * 0.5 / 3**0.5
  assert (low, high) == pytest.approx((1.5 - half, 1.5 + half), abs=1e-3)


def test_columns_of_rows_are_those_of_the_table():
  for quantity, task in (
    ('ROUGE-2', summarization.articles()),
    ('accuracy', gsm8k.GSM8K()),
    ('pass@100', human_eval.HumanEval()),
    ('acceptance at 12', None),
    ('cost_ratio', None),
  ):
    paper = papers.Paper(rows=[('', 'draft', {quantity: 1})])
    papers.check(paper, {'': _evaluation('draft', task=task)})


@pytest.mark.parametrize(
  ('quantity', 'task'),
  [
    ('acceptance at one', None),
    ('acceptance at 0', None),
    ('acceptance at ', summarization.articles()),
    ('category', None),
    ('scores', None),
    ('speedup_ci95', None),
    ('lossless', gsm8k.GSM8K()),
    ('ROUGE2', summarization.articles()),
    ('ROUGE-2', None),
    ('ROUGE-2', questions.mt_bench()),
    ('pass@5', human_eval.HumanEval()),
  ],
)
def test_other_columns_are_refused(quantity, task):
  paper = papers.Paper(rows=[('', 'draft', {'speedup': 2, quantity: 1.0})])
  with pytest.raises(ValueError, match=re.escape(repr(quantity))) as error:
    papers.check(paper, {'': _evaluation('draft', task=task)})
  message = str(error.value)
  assert 'ms_per_token, speedup, ' in message
  assert 'acceptance at 1' in message
  for name in () if task is None else task.score_names:
    assert f' {name}, ' in message
  # Methods that are not run here are for reference, with their paper's columns.
  papers.check(paper, {'': _evaluation('another', task=task)})


@pytest.mark.parametrize(
  ('where', 'row', 'message'),
  [
    *(
      (where, row, f'Paper.{where} has {row!r}: give (setting, method, ')
      for where, row in (
        ('rows', ''),
        ('rows', ('', 'block')),
        ('rows', ('', 'block', 'speedup')),
        ('rows', ('', 'another', {'speedup': '1.5'})),
        ('ratios', ('', 'block', {'speedup': 1.5})),
        ('ratios', ('', 'block', 'token', {'speedup': None})),
      )
    ),
    (
      'ratios',
      ('', 'block', 'token', {'cost_ratio': 1.0}),
      "Paper.ratios has 'cost_ratio': choose one of tokens_per_round",
    ),
  ],
)
def test_other_rows_are_refused(where, row, message):
  evaluated = {'': _evaluation('block', 'token')}
  with pytest.raises(ValueError, match=re.escape(message)):
    papers.check(papers.Paper(**{where: [row]}), evaluated)


def test_methods_that_are_not_run_are_for_reference():
  papers.check(_PAPER, {'a': _evaluation('block', 'token')})
  papers.check(_PAPER, {'a': _evaluation('autoregressive')})
  message = "Paper.ratios has 'token' for 'a': choose one of block"
  with pytest.raises(ValueError, match=message):
    papers.check(_PAPER, {'a': _evaluation('block')})
