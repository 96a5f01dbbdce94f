"""Statistics replayed from held-out answers are those of decoding."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from experiments.training import held_out
import specsample
from specsample.drafters import feature_chain
from specsample.testing import trained
from specsample.training import dflash
from specsample.training import draft
from specsample.training import eagle
from specsample.training import heads

_VOCAB_SIZE = 5
_PROMPT_LENGTH = 4
_NEW_TOKENS = 60
_NOT_TRAINED = ('P-EAGLE', 'Assistant')
_NAMES = tuple(
  kind.name for kind in trained.CASES if kind.name not in _NOT_TRAINED
)


@functools.cache
def _scenes():
  return {scene.name: scene for scene in trained.scenes(_VOCAB_SIZE)}


def _objective(drafter):
  if isinstance(drafter, specsample.drafters.DraftModel):
    return draft.DraftObjective(drafter=drafter)
  if isinstance(drafter, specsample.drafters.DSpark):
    return dflash.DSparkObjective(drafter=drafter)
  if isinstance(drafter, specsample.drafters.DFlash2):
    return dflash.DFlash2Objective(drafter=drafter)
  if isinstance(drafter, specsample.drafters.DFlash):
    return dflash.DFlashObjective(drafter=drafter)
  if isinstance(drafter, feature_chain.FeatureChain):
    return eagle.FeatureObjective(drafter=drafter)
  return heads.HeadsObjective(drafter=drafter)


def _generate(case, drafter, eos_ids):
  prompts = np.random.default_rng(0).integers(
    _VOCAB_SIZE, size=(6, _PROMPT_LENGTH)
  )
  return prompts, specsample.generate(
    case.params,
    prompts,
    np.full(len(prompts), _PROMPT_LENGTH),
    jax.random.key(0),
    model=case.model,
    drafter=drafter,
    verify=specsample.verify.chain,
    sampling=specsample.Sampling(temperature=0.0),
    max_new_tokens=_NEW_TOKENS,
    stop=specsample.Stop(eos_ids=eos_ids),
  )


@pytest.mark.nightly(
  but=(
    'Hydra++-eos_ids0',
    'DSpark-eos_ids0',
    'DSpark, gated-eos_ids0',
    'DSpark, RNN-eos_ids0',
    'MTP-eos_ids0',
  )
)
@pytest.mark.parametrize('eos_ids', [(), (3,)])
@pytest.mark.parametrize('name', _NAMES)
def test_counts_are_those_of_decoding(name, eos_ids):
  case = _scenes()[name]
  prompts, output = _generate(case, case.drafter, eos_ids)
  tokens = np.concatenate([prompts, output.tokens], axis=1)
  index = np.arange(tokens.shape[1]) - _PROMPT_LENGTH
  mask = (index >= 0) & (index < output.lengths[:, None])
  # A row without an answer fills up the batch.
  tokens = np.pad(tokens, ((0, 1), (0, 3)))
  mask = np.pad(mask, ((0, 1), (0, 3)))
  loss, stats = held_out.evaluate(
    case.params,
    [{'tokens': tokens, 'mask': mask}],
    _objective(case.drafter),
    eos_ids,
  )
  assert np.isfinite(loss)
  assert stats == specsample.stats.summarize(output)
  # Some drafts are kept, but not all.
  assert stats.rounds < stats.tokens < stats.rounds * len(stats.accepted)


def test_replay_goes_from_round_to_round():
  # One row: a prompt of 2 tokens and an answer of 6.
  mask = np.arange(8)[None] >= 2
  matches = np.zeros((2, 1, 8), bool)
  matches[0, 0, [1, 4, 6]] = True
  matches[1, 0, [1, 3]] = True
  # Pending 1: both kept, emits 3; pending 4: one kept, emits 2; pending 6: the
  # limit leaves no room for a draft.
  ends = np.zeros(mask.shape, bool)
  stats = held_out.replay(matches, mask, ends)
  assert stats == specsample.stats.Stats(
    tokens=6, rounds=3, proposed=(1, 0, 2), accepted=(1, 1, 1)
  )
  # If the text ends there, the last round has room for drafts.
  ends[0, 7] = True
  stats = held_out.replay(matches, mask, ends)
  assert stats == specsample.stats.Stats(
    tokens=6, rounds=3, proposed=(0, 0, 3), accepted=(0, 2, 1)
  )


def test_replay_begins_anew_with_each_answer():
  # Two answers of 3 tokens, at 2 and at 8; the first one ends the text.
  mask = np.zeros((1, 12), bool)
  mask[0, [2, 3, 4, 8, 9, 10]] = True
  ends = np.arange(12)[None] == 4
  matches = np.zeros((2, 1, 12), bool)
  matches[0, 0, [1, 3, 8]] = True
  # Pending 1: one kept, emits 2; pending 3: drafts the end, emits it. Pending
  # 7: none kept; pending 8: the limit leaves room for one, kept, emits 2.
  stats = held_out.replay(matches, mask, ends)
  assert stats == specsample.stats.Stats(
    tokens=6, rounds=4, proposed=(0, 1, 3), accepted=(1, 3, 0)
  )


def test_counts_of_batches_are_added():
  case = _scenes()['Medusa']
  rng = np.random.default_rng(1)
  tokens = rng.integers(_VOCAB_SIZE, size=(4, 12))
  mask = np.broadcast_to(np.arange(12) >= 3, tokens.shape)
  batch = lambda rows: {'tokens': tokens[rows], 'mask': mask[rows]}
  evaluate = lambda batches: held_out.evaluate(
    case.params, batches, _objective(case.drafter)
  )
  loss, stats = evaluate([batch(slice(0, 4))])
  losses, parts = evaluate([batch(slice(0, 2)), batch(slice(2, 4))])
  # Batch means are weighted by their number of learned tokens.
  np.testing.assert_allclose(losses, loss, rtol=0.1)
  assert dataclasses.astuple(parts) == dataclasses.astuple(stats)
