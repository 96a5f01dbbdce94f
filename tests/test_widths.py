"""Which passes are compiled, and which width pays for a whole batch."""

import numpy as np
import pytest

from specsample import widths

_COSTS = (1.0, 1.2, 1.24, 1.6)


@pytest.mark.parametrize(
  ('costs', 'expected'),
  [
    ((), (0, 3)),
    # 1.24 is at least 5% below 1.6, but 1.2 is less than 5% below 1.24.
    (_COSTS, (0, 2, 3)),
    ((1, 1, 1, 1), (0, 3)),
    ((1, 2, 3, 4), (0, 1, 2, 3)),
  ],
)
def test_a_pass_is_compiled_where_it_saves_something(costs, expected):
  assert widths.ladder(costs, 3) == expected


def _best(chance, is_live=None, among=range(4)):
  chance = np.asarray(chance, np.float32)
  is_live = np.ones(len(chance), bool) if is_live is None else is_live
  return int(widths.best(chance, np.asarray(is_live), _COSTS, tuple(among)))


@pytest.mark.parametrize(
  ('chance', 'expected'),
  [
    # Tokens over costs: 1.1 / 1.2, 1.11 / 1.24, 1.111 / 1.6.
    ([0.1, 0.1, 0.1], 0),
    # 1.5 / 1.2 = 1.25, 1.75 / 1.24 = 1.41, 1.875 / 1.6 = 1.17.
    ([0.5, 0.5, 0.5], 2),
    # 1.9 / 1.2, 2.71 / 1.24 = 2.19, 3.44 / 1.6 = 2.15; without drafts 1.
    ([0.9, 0.9, 0.9], 2),
    # 3.97 / 1.6 = 2.48, 2.98 / 1.24 = 2.40.
    ([0.99, 1.0, 1.0], 3),
    ([0.3, 0.0, 0.0], 1),
    ([0.0, 0.0, 0.0], 0),
  ],
)
def test_one_row_drafts_what_promises_the_most_tokens_a_cost(chance, expected):
  assert _best([chance]) == expected


def test_one_row_that_is_sure_does_not_make_nine_others_pay():
  sure, silent = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]
  # 10 tokens for 1, 11 for 1.2, 12 for 1.24 and 13 for 1.6.
  assert _best([sure] + 9 * [silent]) == 0
  # Up to 16 tokens for 1.6, and 14 for 1.24.
  assert _best(3 * [sure] + 7 * [silent]) == 2
  # Rows that are done emit nothing: 2 tokens for 1, 4 for 1.24.
  assert _best([sure] + 9 * [silent], [True] * 2 + [False] * 8) == 2
  assert _best(8 * [sure], [False] * 8) == 0


def test_only_compiled_widths_are_chosen():
  assert _best([[0.9, 0.9, 0.9]], among=(0, 3)) == 3
