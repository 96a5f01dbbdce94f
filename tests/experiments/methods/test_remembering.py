"""Methods that depend on the cost of passes at the evaluation's batch size."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments import methods
from experiments.evaluation import evaluation
from experiments.methods import remembering
import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample.choosing import round_costs

_MODEL = testing.tiny_llama(vocab_size=8, max_length=256)
_TARGET = specsample.Loaded(_MODEL, _MODEL.init(jax.random.key(0)), None)
_MTP = drafters.MTP(model=_MODEL, num_draft_tokens=2)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  """The folder of cached times, made up because a tiny model's are uneven."""
  monkeypatch.setenv('SPECSAMPLE_CACHE', str(tmp_path))
  of_sizes = lambda *_, batch, **__: {
    size: [1 + 0.1 * batch * size] for size in (1, 2, 3, 5, 8, 16)
  }
  monkeypatch.setattr(round_costs.pass_times, 'passes', of_sizes)
  monkeypatch.setattr(
    round_costs.pass_times, 'drafting', lambda *_, **__: [0.3]
  )
  return tmp_path


def _costs(batch_size, length=3):
  """Returns the costs, measured at most once per batch size."""
  return round_costs.costs(_TARGET, length, batch_size=batch_size)


def test_costs_are_of_rounds_of_a_batch(cache):
  # Passes over 1 to 4 tokens per row take 1.1 to 1.4, and with 4 rows 1.4 to
  # 2.6; a round with drafts costs .05 more.
  passes = [1.1, 1.2, 1.3, 1.4]
  expected = [1] + [x / passes[0] + 0.05 for x in passes[1:]]
  np.testing.assert_allclose(_costs(1), expected, atol=1e-3)
  assert _costs(4)[3] == pytest.approx(2.6 / 1.4 + 0.05, abs=1e-3)
  batches = [
    json.loads(path.read_text())['of']['batch'] for path in cache.iterdir()
  ]
  assert sorted(batches) == [1, 4]
  with pytest.raises(ValueError, match='num_draft_tokens is 16: give 1 to 15'):
    _costs(1, 16)


@pytest.fixture
def suffix():
  return remembering.suffix(drafters.Suffix(num_draft_tokens=3), target=_TARGET)


def test_another_length_has_costs_of_its_own(suffix):
  longer = methods.remake(suffix, 5)
  assert longer.drafter.num_draft_tokens == 5
  assert longer.drafter.costs == _costs(1, 5)
  # The length stays when the method is fitted to a batch.
  assert methods.remake(longer, batch_size=2).drafter.costs == _costs(2, 5)
  with pytest.raises(ValueError, match='num_draft_tokens is 16: give 1 to 15'):
    methods.remake(suffix, 16)


def test_evaluation_decides_for_its_own_batch(suffix):
  assert suffix.drafter.costs == _costs(1)
  trained = methods.Method(
    _MTP, params=_MTP.init_params(jax.random.key(1), _TARGET.params)
  )
  either = remembering.either(suffix, trained, target=_TARGET)
  compared = evaluation.Evaluation(
    target=_TARGET,
    methods={'suffix': suffix, 'either': either, 'mtp': trained},
    batch_size=2,
  ).methods
  of_two = _costs(2)
  assert compared['suffix'].drafter.costs == of_two
  assert compared['either'].drafter.remembered.costs == of_two
  (fastest,) = compared['either'].drafter.trained.policies
  assert fastest.whole_batch
  # Drafting two tokens takes a quarter of a pass over 2 rows, one half of that.
  drafting = np.subtract(fastest.costs[1:], of_two[1:3])
  np.testing.assert_allclose(drafting, [0.125, 0.25], atol=2e-3)
  assert compared['mtp'] is trained
  # So do two drafters without a target.
  either = remembering.either(suffix, methods.Method(_MTP))
  either = methods.remake(either, batch_size=2)
  assert either.drafter.remembered.costs == of_two


def test_method_is_fitted_to_a_batch_once():
  sizes = []

  def make(num_draft_tokens, size):
    sizes.append(size)
    return methods.Method(
      drafters.Ngram(num_draft_tokens=num_draft_tokens + size), make=make
    )

  compared = evaluation.Evaluation(
    target=_TARGET, methods={'x': make(1, 1)}, batch_size=2
  )
  again = dataclasses.replace(compared, num_seeds=3)
  assert sizes == [1, 2]
  assert again.methods['x'].drafter.num_draft_tokens == 4


def test_tree_costs_the_same_at_every_depth():
  suffix = remembering.suffix(drafters.Suffix(num_draft_tokens=3))
  of_tree = methods.tree(methods.Method(_MTP), tree.k_ary((2, 2)))
  either = remembering.either(suffix, of_tree, target=_TARGET)
  (fastest,) = either.drafter.trained.policies
  # A pass over 7 tokens takes 1.7, a plain one 1.1, and drafting .3.
  whole = 1.7 / 1.1 + 0.3 / 1.1 + 0.05
  assert fastest.costs == pytest.approx((1, whole, whole), abs=2e-3)
