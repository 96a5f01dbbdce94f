"""The time of each part of a round, by the round's number of drafts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specsample import cost

# The journal may have each of them by width.
PARTS = ('draft_ms', 'verify_ms', 'overhead_ms')


def of_lengths(
  parts: Mapping[str, Any], name: str, most_drafts: int
) -> np.ndarray:
  """Returns the milliseconds [K + 1] of a part for rounds of 0, 1, ... drafts.

  Args:
    parts: the parts of a round, as in the journal. Without times by width the
      part takes the same time in every round.
    name: one of `PARTS`.
    most_drafts: K. For a tree, its depth: a draft of depth i is then counted at
      the first width of at least i nodes.
  """
  by_width = {
    int(width): ms for width, ms in parts.get(f'{name}_by_width', {}).items()
  }
  if not by_width:
    return np.full(most_drafts + 1, parts[name])
  widths = sorted(by_width)
  of_length = [cost.width_of(i, widths) for i in range(most_drafts + 1)]
  return np.asarray([by_width[width] for width in of_length])
