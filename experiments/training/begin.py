"""The weights that a training run begins with."""

import dataclasses

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from experiments.training import training as training_lib
import specsample
from specsample import checks
from specsample import sharding
from specsample.drafters import dflash
from specsample.models import packed
from specsample.types import ArrayLike, Params

# Cut out of the target for the vocabulary of each run.
_VOCABULARY = 'vocabulary'
# Tables [rank, V'] that may have a column for each drafted token.
_OF_TOKENS = (
  *(('markov', 'before'), ('markov', 'behind')),
  ('selector', 'successor'),
)


def params(training: training_lib.Training, d2t: ArrayLike | None) -> Params:
  """Returns the drafter's own parameters before the first step.

  Args:
    training: the settings; `begin_with` names the drafter to go on from.
    d2t: [V'] the ids of the drafted tokens, None for all.
  """
  drafter = training.drafter
  own = drafter.init_params(
    jax.random.key(training.seed), training.target.params, d2t
  )
  if training.begin_with is None:
    return own
  weights, before = _weights(training)
  own, weights = map(traverse_util.flatten_dict, (own, weights))
  for name in _OF_TOKENS:
    is_of_drafted = before is not None and name in weights
    if is_of_drafted and weights[name].shape[1] == len(before):
      weights[name] = _by_token(weights[name], own[name], before, d2t)
  return traverse_util.unflatten_dict(own | weights)


def _by_token(table, fresh, before, after):
  """Returns a table's columns for other tokens; the new ones' are `fresh`."""
  places = {token: i for i, token in enumerate(np.asarray(before).tolist())}
  index = np.asarray([places.get(x, -1) for x in np.asarray(after).tolist()])
  moved = sharding.replicate(table)[:, np.maximum(index, 0)]
  return jnp.where(index >= 0, moved, fresh)


def check(training: training_lib.Training) -> None:
  """Checks that `begin_with` is a drafter that this run can go on from."""
  if training.begin_with is not None:
    _weights(training)


def _weights(training):
  """Returns the weights to begin with, and the tokens that they draft."""
  name, drafter = training.begin_with, training.drafter
  found = specsample.load_drafter(name, training.target)
  params = packed.plain(found.params)
  weights = {k: v for k, v in params.items() if k != _VOCABULARY}
  before = params.get(_VOCABULARY, {}).get('d2t')
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
  return weights, before
