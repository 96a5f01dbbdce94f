"""The exact law of what is decided by comparing uniform numbers.

A rule that compares one uniform number with an acceptance probability, and
another one with cumulative probabilities, has the same outcome everywhere in a
box. The edges of all boxes are found by bisection, to the last of the 24 bits
of a float32 uniform. The law follows from the volumes of the boxes.
"""

from collections.abc import Callable

import numpy as np

_BITS = 24
_SIZE = 1 << _BITS

# outcome(case [n], uniforms [n, U] float32 in [0, 1)) -> integers [n] >= 0.
Outcome = Callable[[np.ndarray, np.ndarray], np.ndarray]

# Compared with the boxes in each case. They show edges between two parts of
# one outcome, of which bisection sees only one that is at the end of a box.
_PROBES = 64
_MOST_BOXES = 4096


def law(
  outcome: Outcome,
  num_cases: int,
  num_uniforms: int,
  num_outcomes: int,
  seed: int = 0,
) -> np.ndarray:
  """Returns the distribution [num_cases, num_outcomes] of every case.

  Args:
    outcome: a function of a case and its uniforms, without other randomness.
    num_cases: cases are 0 .. num_cases - 1; each has boxes of its own.
    num_uniforms: U, at least 1.
    num_outcomes: outcomes are below this.
    seed: of the points at which the boxes are tested.

  Raises:
    ValueError: an outcome depends on several uniforms at once, such as the
      largest of several sums, so it has no boxes.
  """
  rng = np.random.default_rng(seed)
  whole = np.asarray([0, _SIZE])
  edges = [[whole] * num_uniforms for _ in range(num_cases)]
  everything = todo = np.arange(num_cases)
  while True:
    segments = _differing(outcome, *_boxes(edges, todo))
    if not segments[0].size:
      segments = _missed(outcome, edges, rng)
    if not segments[0].size:
      break
    for of_case, i, value in zip(*_changes(outcome, segments), strict=True):
      edges[of_case][i] = np.union1d(edges[of_case][i], value)
    todo = np.unique(segments[0])
  case, low, high = _boxes(edges, everything)
  volumes = np.prod((high - low) / _SIZE, axis=1)
  result = np.zeros((num_cases, num_outcomes))
  np.add.at(result, (case, _at(outcome, case, (low + high) // 2)), volumes)
  return result


def _at(outcome, case, points):
  return outcome(case, (points / _SIZE).astype(np.float32))


def _boxes(edges, cases):
  """Returns the case [n] of each box, and its corners [n, U]."""
  of_case, low, high = [], [], []
  for case in cases:
    count = np.prod([len(edge) - 1 for edge in edges[case]])
    if count > _MOST_BOXES:
      raise ValueError(
        f'an outcome has more than {_MOST_BOXES} boxes of uniforms: it does '
        'not compare them one by one, so sample it (num_uniforms=None)'
      )
    grid = lambda parts: np.stack(
      [x.ravel() for x in np.meshgrid(*parts, indexing='ij')], axis=1
    )
    of_case.append(np.full(count, case))
    low.append(grid([edge[:-1] for edge in edges[case]]))
    high.append(grid([edge[1:] for edge in edges[case]]))
  return np.concatenate(of_case), np.concatenate(low), np.concatenate(high)


def _differing(outcome, case, low, high):
  """Returns segments from the middle to a side where the outcome changes.

  A segment is a case, a point, the index of a uniform, and its value at the
  other end.
  """
  middle = (low + high) // 2
  inside = _at(outcome, case, middle)
  segments = []
  for i in range(middle.shape[1]):
    for side in (low[:, i], high[:, i] - 1):
      moved = middle.copy()
      moved[:, i] = side
      differs = _at(outcome, case, moved) != inside
      which = np.full(differs.sum(), i)
      segments.append((case[differs], middle[differs], which, side[differs]))
  return [np.concatenate(parts) for parts in zip(*segments, strict=True)]


def _missed(outcome, edges, rng):
  """Returns segments to random points with another outcome than their box."""
  case = np.repeat(np.arange(len(edges)), _PROBES)
  num_uniforms = len(edges[0])
  points = rng.integers(_SIZE, size=(case.size, num_uniforms))
  middle = np.empty_like(points)
  for row, of_case in enumerate(case):
    for i, edge in enumerate(edges[of_case]):
      at = np.searchsorted(edge, points[row, i], side='right')
      middle[row, i] = (edge[at - 1] + edge[at]) // 2
  is_open = np.ones(case.size, bool)
  here, outcome_here = middle, _at(outcome, case, middle)
  segments = []
  for i in range(num_uniforms):
    moved = here.copy()
    moved[:, i] = points[:, i]
    outcome_there = _at(outcome, case, moved)
    differs = is_open & (outcome_there != outcome_here)
    which = np.full(differs.sum(), i)
    segments.append((case[differs], here[differs], which, points[differs, i]))
    is_open &= ~differs
    here, outcome_here = moved, outcome_there
  return [np.concatenate(parts) for parts in zip(*segments, strict=True)]


def _changes(outcome, segments):
  """Returns the case, the uniform and the value of a change on each segment."""
  case, point, which, end = segments
  start = np.take_along_axis(point, which[:, None], axis=1)[:, 0]
  # Boxes beside each other mostly share an edge.
  _, first = np.unique(
    np.stack([case, which, start, end]), axis=1, return_index=True
  )
  case, point, which, start, end = (
    x[first] for x in (case, point, which, start, end)
  )
  before = _at(outcome, case, point)
  while np.any(np.abs(end - start) > 1):
    half = (start + end) // 2
    np.put_along_axis(point, which[:, None], half[:, None], axis=1)
    is_before = _at(outcome, case, point) == before
    start = np.where(is_before, half, start)
    end = np.where(is_before, end, half)
  return case, which, np.maximum(start, end)
