"""When the parts of rounds are timed, and what is computed from the times."""

import itertools
import types

import pytest

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.evaluation import Evaluation
from experiments.evaluation import round_parts
from experiments.timing import round_times
import specsample
from specsample.types import DraftKind


@pytest.mark.parametrize(
  ('repeats', 'batches', 'each', 'after'),
  [
    (25, 12, 3, range(12)),
    (4, 10, 1, [1, 4, 6, 9]),
    (1, 3, 1, [2]),
    (5, 1, 5, [0]),
    (0, 3, None, []),
  ],
)
def test_visits_are_spread_over_the_batches(repeats, batches, each, after):
  found = round_parts.visits(repeats, batches)
  assert list(found) == list(after)
  assert {count for count, _ in found.values()} == ({each} if each else set())


@pytest.mark.parametrize('count', [1, 2, 5, 25])
def test_lengths_are_spread_over_those_of_the_prompts(count):
  found = [share for _, share in round_parts.visits(count, count).values()]
  assert found[0] == 0.5
  bounds = [0.0, *sorted(found), 1.0]
  gaps = [after - before for before, after in itertools.pairwise(bounds)]
  # The golden ratio leaves no gap of more than 1.9 times the even one.
  assert max(gaps) < 1.9 / count


def test_a_batch_has_prompts_of_about_the_length_asked_for():
  evaluation = types.SimpleNamespace(batch_size=2)
  tokens = [[0] * length for length in (5, 1, 4, 2, 6, 3)]
  lengths = lambda *shorter: [
    len(row) for row in Evaluation.typical(evaluation, tokens, *shorter)
  ]
  assert lengths(0.0) == [1, 2]
  assert lengths() == [3, 4]
  assert lengths(0.99) == [5, 6]


@pytest.mark.parametrize(
  ('bound', 'num_prompts', 'expected'),
  [(None, 3, 0), (None, 4, 8), (None, 80, 8), (2, 1, 2), (0, 80, 0)],
)
def test_parts_are_timed_where_there_are_enough_prompts(
  bound, num_prompts, expected
):
  method = methods.Method(specsample.drafters.NoDraft())
  made = Evaluation(target=None, methods={'a': method}, repeats=bound)
  assert made.num_repeats(num_prompts) == expected


def test_times_are_means_over_the_visits(tmp_path):
  journal = journal_lib.Journal(tmp_path, {})
  add = lambda name, i, ms, kind: journal.add(
    (round_parts.KIND, name, i),
    {'draft_ms': ms, 'overhead_ms': {'3': 1.0}, 'kind': kind},
  )
  for i, ms in enumerate((1.0, 2.0, 6.0)):
    add('mtp', i, ms, 'sampled')
    # Another method whose name begins with the same words.
    add('mtp, tree', i, 9.0, 'x')
  assert round_parts.means(journal, 'mtp') == {
    'draft_ms': 3.0,
    'overhead_ms': {'3': 1.0},
    'kind': 'sampled',
  }


def test_passes_of_each_width_have_a_mean(tmp_path):
  journal = journal_lib.Journal(tmp_path, {})
  for i, (plain, wide) in enumerate(((10.0, 14.0), (12.0, 18.0))):
    times = {'draft_ms': -2.0, 'verify_ms': {'0': plain, '4': wide}}
    times['overhead_ms'] = {'0': 3.0, '4': 5.0}
    journal.add((round_parts.KIND, 'ngram', i), times)
  found = round_parts.means(journal, 'ngram')
  assert found['verify_ms'] == {'0': 11.0, '4': 16.0}
  # The negative drafting time is taken off the overhead of every width.
  assert found['overhead_ms'] == {'0': 1.0, '4': 3.0}


def test_whole_rounds_are_as_wide_as_they_were():
  # One round of four drafted: 40 ms less 25 for passes and 4 for drafting.
  turn = dict.fromkeys(('prefill', 'plain prefill'), 0.0)
  turn |= dict.fromkeys(('call', 'plain call', 'pass call'), 0.0)
  turn |= dict.fromkeys((('rule call', 0), ('rule call', 4)), 0.0)
  # Times are for sixteen decisions.
  turn |= {('rule', 0): 0.008, ('rule', 4): 0.016}
  turn |= {'drafted call': 0.0, 'plain rounds': 0.02, 'plain done': 4}
  turn |= {'drafted': 0.044, 'drafted width': 2, 'rounds': 0.04, 'done': 4}
  turn |= {('passes', 0): 0.02, ('passes', 4): 0.04}
  found = round_times.medians(
    [turn] * 3, 4, (0, 4), (0, 0, 4, 0), kind=DraftKind.POINT_MASS
  )
  assert found.verify_ms == pytest.approx({'0': 5, '4': 10})
  # The pass over four tokens read the draft of two.
  assert found.draft_ms == pytest.approx(1)
  # In three rounds of four the rule took half a millisecond less.
  rest = 10 - 1 - 25 / 4
  expected = {'0': rest - 0.125, '4': rest + 0.375}
  assert found.overhead_ms == pytest.approx(expected)
  always = round_times.medians([turn], 4, (4,), (4,), kind=DraftKind.SAMPLED)
  assert always.verify_ms == pytest.approx({'4': 10})
  assert always.overhead_ms == pytest.approx({'4': 10 - 1 - 10})


def test_noise_around_nothing_is_nothing(tmp_path):
  journal = journal_lib.Journal(tmp_path, {})
  for i, ms in enumerate((-3.0, 1.0, 0.5)):
    times = {'draft_ms': ms, 'overhead_ms': {'0': 2.0}}
    journal.add((round_parts.KIND, 'ngram', i), times)
  # The total time of a round stays the same.
  found = round_parts.means(journal, 'ngram')
  assert (found['draft_ms'], found['overhead_ms']) == (0.0, {'0': 1.5})
