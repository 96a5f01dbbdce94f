"""`Recording` keeps the target's outputs, and where a draft was corrected."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import types
from specsample import verify
from specsample.loop.decoder import Decoder

_MODEL = testing.HashModel(vocab_size=12)
_CHAIN = drafters.Chain(
  model=dataclasses.replace(_MODEL, noise=0.4), num_draft_tokens=3
)
_TREE = drafters.Tree(drafter=_CHAIN, topology=tree.Topology((0, 0, 1, 1, 3)))
_NGRAM = drafters.Ngram(num_draft_tokens=3, min_ngram=1)


class _Reading(drafters.Ngram):
  """A drafter that has the target's features recorded, and ignores them."""

  feature_layers = (0, 1, 2)


_CASES = {
  'chain': (_CHAIN, verify.chain),
  'block': (_CHAIN, verify.block),
  'ngram': (_NGRAM, verify.chain),
  'tree': (_TREE, verify.tree),
  'features': (_Reading(num_draft_tokens=3, min_ngram=1), verify.chain),
  'none': (drafters.NoDraft(), verify.chain),
}
_PROMPTS, _LENGTHS = specsample.pad_prompts([[1, 2, 1], [5], [7, 8, 9, 7, 8]])
_NEW_TOKENS = 24
_SETTINGS = {
  'sampling': specsample.Sampling(temperature=0.7),
  'max_new_tokens': _NEW_TOKENS,
}
_STOP = specsample.Stop(eos_ids=(4,))
_PARAMS = {'target': {}, 'drafter': {}}
_ARGUMENTS = (_PARAMS, _PROMPTS, _LENGTHS, jax.random.key(3))


@functools.cache
def _decoded(case, **settings):
  """Returns the last state of the loop, on the host."""
  inner, rule = _CASES[case]
  drafter = drafters.Recording(drafter=inner, model=_MODEL, **settings)
  state = specsample.prefill(
    Decoder(_MODEL, drafter, rule), *_ARGUMENTS, **_SETTINGS
  )
  for _ in range(2):  # the second time, some rows are done already
    state = specsample.advance(
      Decoder(_MODEL, drafter, rule),
      _PARAMS,
      state,
      stop=_STOP,
      max_rounds=_NEW_TOKENS // 2,
    )
  return jax.device_get(dataclasses.replace(state, key=None))


def _positions(state, row):
  """Returns the positions of the row's tokens that are to be learned."""
  return (1 + np.flatnonzero(state.draft.recorded.learned[row])).tolist()


def _corrected(state, row):
  """Returns the positions where the loop says that a draft was replaced."""
  is_correction = state.origin[row] == specsample.Origin.CORRECTION
  return np.flatnonzero(is_correction).tolist()


@pytest.mark.slow
@pytest.mark.nightly(but=('chain', 'tree'))
@pytest.mark.parametrize('case', _CASES)
def test_positions_are_those_of_corrections(case):
  state = _decoded(case)
  total = 0
  for row, length in enumerate(state.length):
    # A draft cut off by the row's limit counts as rejected.
    end = length - (length == state.limit[row])
    found = [i for i in _positions(state, row) if i < end]
    assert found == [i for i in _corrected(state, row) if i < end]
    total += len(found)
  assert (total == 0) == (case == 'none')


@pytest.mark.slow
@pytest.mark.parametrize('case', ['chain', 'tree', 'features'])
def test_outputs_are_the_targets_own(case):
  state = _decoded(case)
  layers = _CASES[case][0].feature_layers
  assert len(layers) == (3 if case == 'features' else 0)
  for row, length in enumerate(state.length):
    tokens = state.tokens[row : row + 1, :length]
    output, _ = _MODEL.apply({}, tokens, _MODEL.init_cache(1, 0), layers)
    expected = np.concatenate([output.hidden, *output.features], axis=-1)[0]
    found = state.draft.recorded
    # The last token is pending: the target has not read it.
    assert found.length[row] == length - 1
    np.testing.assert_array_equal(
      found.outputs[row, : length - 1], expected[: length - 1]
    )


@pytest.mark.slow
@pytest.mark.parametrize('case', ['chain', 'tree', 'none'])
def test_all_positions_are_those_of_emitted_tokens(case):
  state = _decoded(case, rejected_only=False)
  for row, begin in enumerate(_LENGTHS):
    expected = list(range(begin, state.length[row]))
    assert _positions(state, row) == expected


@pytest.mark.slow
def test_drafts_are_those_of_the_drafter():
  for case in ('chain', 'tree'):
    inner, rule = _CASES[case]
    output = specsample.generate(
      *_ARGUMENTS,
      model=_MODEL,
      drafter=inner,
      verify=rule,
      stop=_STOP,
      **_SETTINGS,
    )
    found = specsample.finish(_decoded(case), max_new_tokens=_NEW_TOKENS)
    jax.tree.map(np.testing.assert_array_equal, found, output)


def test_nothing_is_left_to_learn_of_an_emptied_record():
  before = _decoded('chain').draft.recorded
  assert before.learned.any()
  after = before.emptied()
  assert not after.learned.any()
  np.testing.assert_array_equal(after.outputs, before.outputs)


@pytest.mark.slow
def test_outputs_that_are_no_number_are_not_learned():
  drafter = drafters.Recording(
    drafter=_CHAIN, model=_MODEL, rejected_only=False
  )
  state = drafter.init(_PARAMS, 2, 8)
  hidden = np.ones((2, 3, 2), np.float32)
  hidden[0, 1, 0] = np.nan
  state = drafter.observe(
    _PARAMS,
    np.zeros((2, 3), np.int32),
    np.asarray([3, 2]),
    types.ModelOutput(logits=np.zeros((2, 3, 12)), hidden=hidden),
    types.Verdict(num_accepted=np.asarray([2, 2]), next_token=np.zeros(2)),
    state,
  )
  learned = state.recorded.learned
  assert learned.tolist() == [
    [True, False, True] + 5 * [False],
    [True, True] + 6 * [False],
  ]
  assert np.isfinite(state.recorded.outputs).all()
