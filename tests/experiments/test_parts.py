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
  for i, ms in enumerate((1.0, 2.0, 6.0)):
    journal.add((parts.KIND, 'mtp', i), {'draft_ms': ms, 'law': 'sampled'})
    # Of another method, whose name begins alike.
    journal.add((parts.KIND, 'mtp, tree', i), {'draft_ms': 9.0, 'law': 'x'})
  assert parts.of(journal, 'mtp') == {'draft_ms': 3.0, 'law': 'sampled'}
