"""The weights that a training run begins with."""

import dataclasses

from flax import traverse_util
import jax

from experiments.training import training as training_lib
import specsample
from specsample import checks
from specsample.drafters import dflash
from specsample.types import ArrayLike, Params

# Cut out of the target for the vocabulary of each run.
_VOCABULARY = 'vocabulary'


def params(training: training_lib.Training, d2t: ArrayLike | None) -> Params:
  """Returns the drafter's own parameters before the first step.

  Args:
    training: the settings; `begin_with` names the drafter to go on from.
    d2t: [V'] the ids of the drafted tokens, None for all.

  Raises:
    ValueError: see `check`.
  """
  drafter = training.drafter
  own = drafter.init_params(
    jax.random.key(training.seed), training.target.params, d2t
  )
  if training.begin_with is None:
    return own
  own, weights = map(traverse_util.flatten_dict, (own, _weights(training)))
  return traverse_util.unflatten_dict(own | weights)


def check(training: training_lib.Training) -> None:
  """Checks that `begin_with` is a drafter that this run can go on from.

  Raises:
    ValueError: there is no such drafter, or it is of another kind or size.
      Block drafters may be of different kinds.
  """
  if training.begin_with is not None:
    _weights(training)


def _weights(training):
  name, drafter = training.begin_with, training.drafter
  found = specsample.load_drafter(name, training.target)
  weights = {k: v for k, v in found.params.items() if k != _VOCABULARY}
  if type(found.drafter) is not type(drafter):
    if not all(isinstance(x, dflash.DFlash) for x in (found.drafter, drafter)):
      raise ValueError(
        f'Training.begin_with is {name}, which is a '
        f'{type(found.drafter).__name__}, but this run trains a '
        f'{type(drafter).__name__}: name a drafter of that kind'
      )
    # Block drafters share their network; what a kind adds begins untrained.
    names = [x.name for x in dataclasses.fields(dflash.DFlash)]
    drafter = dflash.DFlash(**{x: getattr(drafter, x) for x in names})
    shared = drafter.abstract_params()
    weights = {k: v for k, v in weights.items() if k in shared}
  wanted = drafter.abstract_params()
  vocabulary = {k: v for k, v in wanted.items() if k == _VOCABULARY}
  different = checks.mismatch(drafter, weights | vocabulary)
  if different:
    raise ValueError(
      f'Training.begin_with is {name}, whose weights do not fit the drafter of '
      f'this run ({different}): give both the same settings'
    )
  return weights
