"""What rounds cost on the machine at hand, timed once and then kept."""

from collections.abc import Mapping, Sequence
import hashlib

import jax
from jax.experimental import multihost_utils
import numpy as np

from specsample import checks
from specsample import cost
from specsample import policies
from specsample import settings
from specsample import sharding
from specsample.choosing import estimates
from specsample.choosing import measured_here
from specsample.choosing import pass_times
from specsample.choosing import tree_rounds
from specsample.drafter import Drafter
from specsample.drafters import heads
from specsample.drafters import steps
from specsample.loading import drafter as drafter_lib
from specsample.loading import load
from specsample.types import Params

# Tokens per row in the timed passes, and in the cache before them.
SIZES = (1, 2, 4, 5, 8, 16)
_CONTEXT = 128
_REPEATS = 9
# If the times of one size differ by a larger share, they cannot be compared.
_NOISE = 0.5


def costs(
  target: load.Loaded,
  num_draft_tokens: int,
  *,
  batch_size: int = 1,
  trained: drafter_lib.LoadedDrafter | None = None,
) -> tuple[float, ...]:
  """Returns the costs of rounds with 0 to K drafts per row, in plain passes.

  They have the form that `drafters.Suffix` and `policies.Fastest` take, and are
  timed once per machine, as in `auto`.

  Args:
    target: the model that scores the drafts.
    num_draft_tokens: K, at most 15.
    batch_size: number of rows that are decoded at once.
    trained: the drafter of K tokens that makes the drafts; None if drafting
      takes no time.

  Raises:
    ValueError: batch_size is not a positive integer, or K is not from 1 to 15
      or not the drafter's.
  """
  batch_size = rows(batch_size)
  most = max(SIZES) - 1
  if not (settings.is_count(num_draft_tokens) and num_draft_tokens <= most):
    raise ValueError(
      f'num_draft_tokens is {num_draft_tokens!r}: give 1 to {most}'
    )
  own = num_draft_tokens
  if trained is not None:
    own = trained.drafter.num_draft_tokens
  if own != num_draft_tokens:
    raise ValueError(
      f'num_draft_tokens is {num_draft_tokens}, but the drafter drafts {own} '
      'tokens: load it with the same number'
    )
  passes = pass_times_of(pass_seconds(target, batch_size))
  seconds = [0.0] * (num_draft_tokens + 1)
  if trained is not None:
    seconds = drafting_seconds(
      target, trained.drafter, trained.params, batch_size
    )
  return estimates.PartTimes(passes, seconds).costs()


def budget(
  target: load.Loaded,
  drafter: Drafter,
  params: Params,
  *,
  batch_size: int = 1,
) -> policies.Budget:
  """Returns the policy that sizes a drafter's trees by what they cost here.

  Its ladder is 0, 1, 3, 7, ... and N nodes. Whole rounds of each are timed once
  per machine.

  Args:
    target: the model that scores the drafts.
    drafter: drafts point masses of N nodes.
    params: the drafter's own parameters.
    batch_size: number of rows that are decoded at once.

  Raises:
    ValueError: batch_size is not a positive integer.
  """
  num_nodes = drafter.num_draft_tokens
  rungs = (2**i - 1 for i in range(num_nodes.bit_length() + 1))
  ladder = [*(n for n in rungs if n < num_nodes), num_nodes]
  found = tree_seconds(target, drafter, params, ladder, rows(batch_size))
  least = {name: min(seconds) for name, seconds in found.items()}
  plain = least['plain']
  # A round of no nodes is a plain one after a draft.
  drafting = max(0.0, least['0'] - plain)
  of_nodes = np.maximum.accumulate(
    [plain] + [least[str(n)] - drafting for n in ladder[1:]]
  )
  return policies.Budget(
    ladder=ladder,
    costs=(of_nodes / plain).tolist(),
    drafting=drafting / plain,
  )


def tree_seconds(
  target: load.Loaded,
  drafter: Drafter,
  params: Params,
  ladder: Sequence[int],
  batch_size: int,
) -> dict[str, list[float]]:
  """Returns the times of rounds of a tree by nodes; see `tree_rounds`."""

  def measure():
    return tree_rounds.seconds(
      {'target': target.params, 'drafter': params},
      target.model,
      drafter,
      ladder,
      length=_context(target, tree_rounds.ROUNDS * (drafter.depth + 1)),
      batch=batch_size,
      repeats=_REPEATS,
    )

  what = {
    'trees': repr(drafter),
    'passes': repr(target.model),
    'form': _form((target.params, params)),
    'batch': batch_size,
    'ladder': list(ladder),
  }
  return _recall(what, measure, lambda x: not is_uneven(x, 'plain'))


def pass_times_of(seconds: Mapping[str, Sequence[float]]) -> cost.PassTimes:
  """Returns the shortest times by tokens per row, made non-decreasing."""
  sizes = sorted(map(int, seconds))
  least = np.maximum.accumulate([min(seconds[str(size)]) for size in sizes])
  return cost.PassTimes(tuple(sizes), tuple(least.tolist()))


def rows(batch_size: int) -> int:
  """Returns the batch size that `generate` pads to on a mesh."""
  checks.count('batch_size', batch_size)
  parts = sharding.batch_parts()
  return -(-batch_size // parts) * parts


def pass_seconds(
  target: load.Loaded, batch_size: int
) -> dict[str, list[float]]:
  """Returns the seconds of passes over 1 to 16 tokens per row, by number."""
  length = _context(target, max(SIZES))

  def measure():
    found = pass_times.passes(
      {'target': target.params},
      target.model,
      SIZES,
      length=length,
      max_length=length,
      batch=batch_size,
      times=2,
      repeats=_REPEATS,
    )
    return {str(size): seconds for size, seconds in found.items()}

  what = {
    'passes': repr(target.model),
    'form': _form(target.params),
    'batch': batch_size,
    'sizes': SIZES,
  }
  return _recall(what, measure, lambda x: not is_uneven(x))


def _context(target, num_new):
  """Returns a context's length that leaves room for `num_new` + 1 tokens."""
  return min(_CONTEXT, target.model.max_length - num_new - 1)


def is_uneven(times: Mapping[str, Sequence[float]], least: str = '1') -> bool:
  """Returns whether times differ too much to be compared.

  Args:
    times: of passes or rounds, by name.
    least: the name of the smallest.
  """
  of_one = np.asarray(times[least])
  return bool(np.median(of_one) > (1 + _NOISE) * np.min(of_one)) or (
    min(map(min, times.values())) <= 0
  )


def drafting_seconds(
  target: load.Loaded, drafter: Drafter, params: Params, batch_size: int
) -> list[float]:
  """Returns the times of drafting 0, 1, ... K tokens for each row.

  `params` are the drafter's own.
  """

  def measure():
    seconds = pass_times.drafting(
      {'target': target.params, 'drafter': params},
      target.model,
      drafter,
      length=_context(target, drafter.num_draft_tokens),
      batch=batch_size,
      repeats=_REPEATS,
    )
    return {'draft': seconds}

  what = {
    'drafts': repr(drafter),
    'form': _form((target.params, params)),
    'batch': batch_size,
  }
  times = _recall(what, measure, lambda x: min(x['draft']) > 0)
  whole = max(0.0, min(times['draft']))
  num_draft_tokens = drafter.num_draft_tokens
  # Heads one after another cost little more for a longer draft.
  at_once = steps.OnePass | heads.Heads
  if isinstance(drafter, at_once) or not drafter.stops_early:
    return [0.0] + [whole] * num_draft_tokens
  step = whole / num_draft_tokens
  return [step * i for i in range(num_draft_tokens + 1)]


def _form(params: Params) -> str:
  """Returns a hash that tells apart the forms in which matrices are stored."""
  structure = str(jax.tree.structure(params))
  return hashlib.sha256(structure.encode()).hexdigest()[:16]


def _recall(what, measure, is_good):
  """Recalls or measures the times; several processes use those of the first."""
  if jax.process_count() == 1:
    mesh = dict(jax.sharding.get_abstract_mesh().shape)
    what = {**what, 'mesh': mesh, 'rules': str(sharding.rules.value)}
    return measured_here.recall(what, measure, is_good)
  # All processes run the same passes, and then make the same choice.
  times = measure()
  names = sorted(times)
  found = multihost_utils.broadcast_one_to_all(
    np.asarray([times[name] for name in names])
  )
  return dict(zip(names, np.asarray(found).tolist(), strict=True))
