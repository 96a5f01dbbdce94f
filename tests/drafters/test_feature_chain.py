"""Drafters that continue the target's features: EAGLE and MTP.

How they draft is in tests/loading/published/, against NumPy, and so is how they
are trained, in tests/training/test_eagle.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters
from specsample import testing
from specsample import tree
from specsample.training import unrolled
from tests.contract import drafters as subjects
from tests.drafters import rounds

_V, _K, _D2T, _TARGET = rounds.V, rounds.K, rounds.D2T, rounds.TARGET
_SOME = {
  'model': _TARGET,
  'num_draft_tokens': _K,
  'draft_vocab_size': _D2T.size,
}
_DRAFTERS = {
  'eagle': drafters.Eagle(**_SOME),
  'eagle3': drafters.Eagle3(
    model=_TARGET, num_draft_tokens=_K, feature_layers=(-1, 1, 0)
  ),
  'p-eagle': drafters.PEagle(
    feature_layers=(-1, 1, 0), mask_token_id=5, num_layers=2, **_SOME
  ),
  'mtp of 2': drafters.MTP(num_modules=2, **_SOME),
  # More modules than draft tokens, so one is never used.
  'mtp of 4': drafters.MTP(num_modules=4, **_SOME),
}
_TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def _with_window(drafter, window):
  model = dataclasses.replace(drafter.model, sliding_window=window)
  return dataclasses.replace(drafter, model=model)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'window'), [('eagle', 3), ('eagle3', None), ('mtp of 4', 3)]
)
def test_training_sees_what_drafting_sees(name, window):
  params = rounds.params(_DRAFTERS[name])
  drafter = _with_window(_DRAFTERS[name], window)
  text = jnp.asarray([_TEXT])
  output = rounds.read(params, text, drafter.feature_layers)
  features = drafter.features(params, output.hidden, output.features)
  outputs = unrolled.outputs(drafter, params, {'tokens': text}, features, _K)
  vectors = jnp.stack(
    [drafter.vectors(params, x, i)[0] for i, x in enumerate(outputs)]
  )
  trained = jax.nn.softmax(drafter.target_logits(params, vectors))
  # One row for every length; the last tokens are drafts.
  lengths = np.arange(2, text.size - _K + 1)
  forced = lambda probs, position: text[0][position]
  prompts = [_TEXT[:length] for length in lengths]
  draft, _ = rounds.propose(drafter, params, prompts, draw=forced)
  expected = jnp.swapaxes(trained[:, lengths - 2], 0, 1)
  np.testing.assert_allclose(draft.probs, expected, atol=1e-5)


_OF_RINGS = {
  'eagle3': ('eagle3', lambda chain: chain, [5 + _K + 1]),
  'p-eagle': ('p-eagle', lambda chain: chain, [5 + _K + 1]),
  'mtp of 2': ('mtp of 2', lambda chain: chain, [5 + _K + 2] * 2),
  'tree': (
    'eagle3',
    lambda chain: drafters.Tree(drafter=chain, topology=tree.k_ary((2, 2, 1))),
    [5 + 2 + 4],
  ),
  'dynamic tree': (
    'eagle3',
    lambda chain: drafters.DynamicTree(
      drafter=chain, num_draft_tokens=6, width=4
    ),
    [5 + 4 * (_K - 1)],
  ),
}


def _with_whole_caches(drafter):
  """Returns the drafter with room for whole sequences in all its layers."""

  class Whole(type(drafter)):
    def empty_cache(self, batch_size, max_length, dtype, max_new=None):
      del max_new
      return super().empty_cache(batch_size, max_length, dtype)

  fields = dataclasses.fields(drafter)
  return Whole(**{field.name: getattr(drafter, field.name) for field in fields})


@pytest.mark.slow
@pytest.mark.parametrize('case', _OF_RINGS)
def test_rings_draft_as_whole_caches_do(case):
  name, wrap, sizes = _OF_RINGS[case]
  chain = _with_window(_DRAFTERS[name], 5)
  drafter, whole = wrap(chain), wrap(_with_whole_caches(chain))
  params = rounds.params(_DRAFTERS[name])
  found, expected = (
    jax.eval_shape(lambda params, x=x: x.init(params, 1, 192), params).caches
    for x in (drafter, whole)
  )
  assert [cache.keys[0].shape[2] for cache in found] == sizes
  assert all(cache.keys[0].shape[2] >= 192 for cache in expected)
  one = subjects.Subject(chain.model, drafter, params)
  found, expected, kept = subjects.next_drafts(one, anew=whole)
  assert kept[1:].sum() > 6
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  np.testing.assert_allclose(
    found.signals.log_prob, expected.signals.log_prob, atol=1e-4
  )


def test_eagle3_reads_the_papers_layers_by_default():
  deep = testing.tiny_llama(num_layers=30)
  drafter = drafters.Eagle3(model=deep, num_draft_tokens=4)
  # The inputs of layers 2, 15 and 27.
  assert drafter.feature_layers == (1, 14, 26)
