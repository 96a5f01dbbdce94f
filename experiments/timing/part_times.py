"""How long the parts of a round take, by its number of drafts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specsample import cost

# The parts of a round; the journal may have each of them by width.
PARTS = ('draft_ms', 'verify_ms', 'overhead_ms')


def of_lengths(
  parts: Mapping[str, Any], name: str, most_drafts: int
) -> np.ndarray:
  """Returns a part of a round of 0, 1, ... drafts, milliseconds [K + 1].

  Args:
    parts: of a round, as the journal has them. Without times by width, as those
      of older versions, the part takes as long in every round.
    name: one of `PARTS`.
    most_drafts: K; of a tree its depth, whose every draft is then read by the
      first width of so many nodes.
  """
  by_width = {
    int(width): ms for width, ms in parts.get(f'{name}_by_width', {}).items()
  }
  if not by_width:
    return np.full(most_drafts + 1, parts[name])
  widths = sorted(by_width)
  of_length = [cost.width_of(i, widths) for i in range(most_drafts + 1)]
  return np.asarray([by_width[width] for width in of_length])
