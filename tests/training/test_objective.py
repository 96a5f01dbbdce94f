"""Drafters that an objective cannot train are refused by name."""

import dataclasses

import pytest

from specsample import drafters
from specsample import testing
from specsample.training import dflash
from specsample.training import draft
from specsample.training import eagle
from specsample.training import heads

_V, _K = 16, 3
_TARGET = testing.tiny_llama(vocab_size=_V)
_MAKE = {'model': _TARGET, 'num_draft_tokens': _K}
_OBJECTIVES = (
  dflash.DFlashObjective,
  dflash.DFlash2Objective,
  draft.DraftObjective,
  dflash.DSparkObjective,
  eagle.FeatureObjective,
  heads.HeadsObjective,
)


@pytest.mark.parametrize(
  'drafter',
  [
    drafters.Ngram(num_draft_tokens=_K),
    drafters.NoDraft(),
    drafters.PARD(mask_token_id=0, **_MAKE),
    drafters.Skip(layers=(0,), **_MAKE),
    drafters.Suffix(num_draft_tokens=_K),
  ],
)
def test_drafters_that_are_not_trained_are_refused(drafter):
  name = type(drafter).__name__
  for objective in _OBJECTIVES:
    with pytest.raises(ValueError, match=f'drafter is {name}, which is not t'):
      objective(drafter=drafter)
  with pytest.raises(ValueError, match=f'drafter is {name}, which is not t'):
    draft.ChainObjective(drafter=drafter, target=_TARGET)


@pytest.mark.parametrize(
  ('objective', 'drafter', 'message'),
  [
    (
      heads.HeadsObjective,
      drafters.Eagle(**_MAKE),
      'drafter is Eagle, but HeadsObjective trains a Heads: give the objective',
    ),
    (
      draft.DraftObjective,
      drafters.Chain(**_MAKE),
      'drafter is Chain, but DraftObjective trains a DraftModel',
    ),
    (
      dflash.DSparkObjective,
      drafters.DFlash(feature_layers=(0,), **_MAKE),
      'drafter is DFlash, but DSparkObjective trains a DSpark',
    ),
    (
      dflash.DFlashObjective,
      drafters.DFlash2(feature_layers=(0,), **_MAKE),
      'drafter is DFlash2, but DFlashObjective trains a DFlash: give a DFlash2',
    ),
  ],
)
def test_drafters_of_another_objective_are_refused(objective, drafter, message):
  with pytest.raises(ValueError, match=message):
    objective(drafter=drafter)


@pytest.mark.parametrize(
  ('model', 'message'),
  [
    (testing.HashModel(vocab_size=_V), 'drafter.model is of type HashModel: g'),
    (
      testing.tiny_llama(vocab_size=8),
      'model has 8 tokens in float32, but the target has 16',
    ),
    (
      dataclasses.replace(_TARGET, dtype='bfloat16'),
      'tokens in bfloat16, but the target has 16 in float32',
    ),
  ],
)
def test_draft_models_that_cannot_be_trained_are_refused(model, message):
  chain = drafters.Chain(model=model, num_draft_tokens=_K)
  with pytest.raises(ValueError, match=message):
    draft.ChainObjective(drafter=chain, target=_TARGET)
