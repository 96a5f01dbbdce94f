"""The weights that a training run begins with."""

import jax
import numpy as np
import pytest

from experiments.training import begin
from experiments.training import training as training_lib
import specsample
from specsample import drafters
from specsample import testing
from specsample.models import packed
from specsample.training import dflash
from specsample.training import heads

_SETTINGS = {'num_draft_tokens': 2, 'feature_layers': (0, 1)}


@pytest.fixture(scope='module')
def target(checkpoint):
  return specsample.load(checkpoint)


@pytest.fixture(scope='module')
def block_drafter(target, tmp_path_factory):
  """A saved DSpark of one layer, and its weights."""
  drafter = drafters.DSpark(
    model=target.model, num_layers=1, rank=4, **_SETTINGS
  )
  own = drafter.init_params(jax.random.key(0), target.params)
  own = testing.with_noise(own, jax.random.key(1))
  path = tmp_path_factory.mktemp('begin') / 'dspark'
  specsample.save_drafter(path, drafter, own, target=target, card={})
  params = specsample.load_drafter(path, target).params
  return str(path), packed.plain(params)


def _training(target, begin_with, num_layers=1):
  drafter = drafters.DFlash2(
    **_SETTINGS,
    model=target.model,
    num_layers=num_layers,
    selector_rank=4,
    conv_group_size=4,
  )
  return training_lib.Training(
    target=target,
    objective=dflash.DFlash2Objective(drafter=drafter),
    begin_with=begin_with,
  )


def test_a_block_drafter_begins_with_the_network_of_another_kind(
  target, block_drafter
):
  path, weights = block_drafter
  training = _training(target, path)
  begin.check(training)
  params = begin.params(training, None)
  for name in ('layers', 'fuse', 'mask', 'norm'):
    jax.tree.map(
      np.testing.assert_array_equal,
      weights[name],
      _only(params[name], weights[name]),
    )
  drafter = training.drafter
  assert jax.tree.structure(params) == jax.tree.structure(
    drafter.abstract_params()
  )
  # Convolutions and the selector change nothing yet.
  assert not np.any(params['selector']['successor'])


def _only(tree, of):
  if not isinstance(of, dict):
    return tree
  return {key: _only(tree[key], value) for key, value in of.items()}


def test_block_drafters_of_other_sizes_are_refused(target, block_drafter):
  path, _ = block_drafter
  with pytest.raises(
    ValueError, match=r'layers\.1\..* is missing\): give both'
  ):
    begin.check(_training(target, path, num_layers=2))


def test_other_drafters_do_not_begin_with_a_block_drafter(
  target, block_drafter
):
  path, _ = block_drafter
  drafter = drafters.Medusa(model=target.model, num_draft_tokens=2)
  training = training_lib.Training(
    target=target,
    objective=heads.HeadsObjective(drafter=drafter),
    begin_with=path,
  )
  with pytest.raises(
    ValueError, match='is a DSpark, but this run trains a Medu'
  ):
    begin.check(training)


def test_tables_of_tokens_follow_the_draft_vocabulary(target, tmp_path):
  drafter = drafters.DSpark(
    model=target.model, num_layers=1, rank=4, draft_vocab_size=3, **_SETTINGS
  )
  own = drafter.init_params(jax.random.key(0), target.params, [5, 7, 9])
  noisy = testing.with_noise(own, jax.random.key(1))
  noisy |= {'vocabulary': own['vocabulary']}
  path = tmp_path / 'dspark'
  specsample.save_drafter(path, drafter, noisy, target=target, card={})
  weights = specsample.load_drafter(str(path), target).params
  training = training_lib.Training(
    target=target,
    objective=dflash.DSparkObjective(drafter=drafter),
    begin_with=str(path),
  )
  params = begin.params(training, [7, 8, 9])
  for name in ('before', 'behind'):
    np.testing.assert_array_equal(
      params['markov'][name][:, [0, 2]], weights['markov'][name][:, [1, 2]]
    )
  assert not np.any(params['markov']['behind'][:, 1])  # token 8 is new
