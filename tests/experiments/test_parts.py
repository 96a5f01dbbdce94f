"""When the parts of rounds are timed, and what is made of the times."""

import pytest

from experiments import journal as journal_lib
from experiments import parts


@pytest.mark.parametrize(
  ('repeats', 'visits', 'batches', 'shares'),
  [
    (25, 12, 12, [2] * 11 + [3]),
    (4, 10, 10, [0, 1, 0, 0, 1, 0, 1, 0, 0, 1]),
    (25, 1, 3, [0, 0, 25]),
    (1, 3, 3, [0, 0, 1]),
    (5, 2, 1, [5]),
  ],
)
def test_repeats_are_spread_over_the_batches(repeats, visits, batches, shares):
  found = parts.share_out(repeats, visits, batches)
  assert sum(found) == repeats
  assert sorted(found) == sorted(shares)
  assert [bool(share) for share in found] == [bool(share) for share in shares]


def test_times_are_means_over_the_visits(tmp_path):
  journal = journal_lib.Journal(tmp_path, {})
  add = lambda name, i, ms, law: journal.add(
    (parts.KIND, name, i), {'draft_ms': ms, 'overhead_ms': 1.0, 'law': law}
  )
  for i, ms in enumerate((1.0, 2.0, 6.0)):
    add('mtp', i, ms, 'sampled')
    # Of another method, whose name begins alike.
    add('mtp, tree', i, 9.0, 'x')
  assert parts.of(journal, 'mtp') == {
    'draft_ms': 3.0,
    'overhead_ms': 1.0,
    'law': 'sampled',
  }


def test_noise_around_nothing_is_nothing(tmp_path):
  journal = journal_lib.Journal(tmp_path, {})
  for i, ms in enumerate((-3.0, 1.0, 0.5)):
    times = {'draft_ms': ms, 'overhead_ms': 2.0}
    journal.add((parts.KIND, 'ngram', i), times)
  # What a round takes in all is as before.
  assert parts.of(journal, 'ngram') == {'draft_ms': 0.0, 'overhead_ms': 1.5}
