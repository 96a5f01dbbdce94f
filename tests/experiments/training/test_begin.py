"""The weights and the data that a training run begins with."""

import dataclasses
import pathlib
import types

import jax
import numpy as np
import pytest

from experiments.training import begin
from experiments.training import training as training_lib
from experiments.training_data import batches
from experiments.training_data import data_folder
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


def _save(path, target, ids=None, **settings):
  """Saves a DSpark of one layer; returns it and its weights, as loaded."""
  drafter = drafters.DSpark(
    model=target.model, num_layers=1, rank=4, **_SETTINGS, **settings
  )
  own = drafter.init_params(jax.random.key(0), target.params, ids)
  vocabulary = {name: own[name] for name in own if name == 'vocabulary'}
  own = testing.with_noise(own, jax.random.key(1)) | vocabulary
  specsample.save_drafter(path, drafter, own, target=target, card={})
  return drafter, specsample.load_drafter(path, target).params


@pytest.fixture(scope='module')
def block_drafter(target, tmp_path_factory):
  """The path of a saved DSpark, and its weights."""
  path = tmp_path_factory.mktemp('begin') / 'dspark'
  _, params = _save(path, target)
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


def _only(tree, of):
  """Returns the leaves of a tree that `of` has."""
  if not isinstance(of, dict):
    return tree
  return {key: _only(tree[key], value) for key, value in of.items()}


@pytest.mark.slow
def test_block_drafter_begins_with_the_network_of_another_kind(
  target, block_drafter
):
  path, weights = block_drafter
  training = _training(target, path)
  begin.check(training)
  params = begin.params(training, None)
  # The other kind's layers have more weights than these.
  expected = {x: weights[x] for x in ('layers', 'fuse', 'mask', 'norm')}
  found = _only(params, expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  drafter = training.drafter
  assert jax.tree.structure(params) == jax.tree.structure(
    drafter.abstract_params()
  )
  # Convolutions and the selector change nothing yet.
  assert not np.any(params['selector']['successor'])


def test_weights_that_do_not_fit_are_refused(target, block_drafter):
  path, _ = block_drafter
  medusa = drafters.Medusa(model=target.model, num_draft_tokens=2)
  of_medusa = training_lib.Training(
    target=target,
    objective=heads.HeadsObjective(drafter=medusa),
    begin_with=path,
  )
  deeper = _training(target, path, num_layers=2)
  for training, message in (
    (deeper, r'layers\.1\..* is missing\): give both'),
    (of_medusa, 'is a DSpark, but this run trains a Medu'),
  ):
    with pytest.raises(ValueError, match=message):
      begin.check(training)


def test_tables_of_tokens_follow_the_draft_vocabulary(target, tmp_path):
  path = tmp_path / 'dspark'
  drafter, weights = _save(path, target, [5, 7, 9], draft_vocab_size=3)
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


_TRAINING = types.SimpleNamespace(
  held_out_every=3,
  held_out_answers=3,
  cache_hidden=True,
  objective=types.SimpleNamespace(reads_prompt=True),
)


def _folder(name, num_shards, seed=0):
  """Returns a folder with two dialogues of 4 learned tokens per shard."""

  def shard(number):
    rng = np.random.default_rng([seed, number])
    return [
      data_folder.Dialogue(
        tokens=rng.integers(100, size=6, dtype=np.int32),
        answers=((2, 6),),
        temperature=0.0,
        source=data_folder.Source.SAMPLED,
        turn=0,
      )
      for _ in range(2)
    ]

  shards = [shard(number) for number in range(num_shards)]
  entries = [{'digest': f'{seed} {number}'} for number in range(num_shards)]
  return data_folder.Data(pathlib.Path(name), {'shards': entries}, shards)


def test_some_shards_are_held_out_and_the_others_trained_on():
  a, b = _folder('a', 7), _folder('b', 4, seed=1)
  found = begin.split(_TRAINING, [a, b], None)
  tokens = lambda examples: [x.tokens.tolist() for x in examples]
  of = lambda folder, numbers: [
    d.tokens.tolist() for n in numbers for d in folder.shards[n]
  ]
  assert tokens(found.train) == of(a, [1, 2, 4, 5]) + of(b, [1, 2])
  # At most three answers of each folder.
  assert tokens(found.held_out) == of(a, [0, 3])[:3] + of(b, [0, 3])[:3]
  assert len(found.prompts) == 6 + 4
  sampled = [dataclasses.replace(d, temperature=1.0) for d in a.shards[0]]
  a.shards[0] = sampled
  found = begin.split(_TRAINING, [a], None)
  assert tokens(found.held_out) == of(a, [3, 6])[:3]


def test_other_data_have_other_digests():
  folders = [_folder('a', 4), _folder('b', 4, seed=1), _folder('a', 5)]
  assert len({folder.digest() for folder in folders}) == 3
  assert folders[0].digest() == _folder('c', 4).digest()


def test_draft_vocabulary_is_the_most_frequent_tokens():
  example = lambda *answer: batches.Example(
    np.asarray([9, 9, *answer]), ((2, 2 + len(answer)),)
  )
  split = begin.Split(
    train=[example(4, 4, 7), example(7, 4, 2, 0)],
    held_out=[],
    prompts=[],
  )
  found = begin.draft_vocabulary(split, 3, 10)
  # 0 and 2 occur once each, so the lower one is taken.
  assert found.tolist() == [0, 4, 7]
  assert begin.draft_vocabulary(split, None, 10) is None
