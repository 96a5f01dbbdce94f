"""`Recording` keeps the target's own law where the loop corrected a draft."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import verify

_MODEL = testing.HashModel(vocab_size=12)
_CHAIN = drafters.Chain(
  model=dataclasses.replace(_MODEL, noise=0.4), num_draft_tokens=3
)
_TREE = drafters.Tree(drafter=_CHAIN, topology=tree.Topology((0, 0, 1, 1, 3)))
_NGRAM = drafters.Ngram(num_draft_tokens=3, min_ngram=1)
_CASES = {
  'chain': (_CHAIN, verify.chain),
  'block': (_CHAIN, verify.block),
  'ngram': (_NGRAM, verify.chain),
  'tree': (_TREE, verify.tree),
  'none': (drafters.NoDraft(), verify.chain),
}
_PROMPTS, _LENGTHS = specsample.pad_prompts([[1, 2, 1], [5], [7, 8, 9, 7, 8]])
_NEW_TOKENS = 24
_SETTINGS = {
  'model': _MODEL,
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
  drafter = drafters.Recording(
    drafter=inner, **{'num_positions': 32, 'top_k': 5} | settings
  )
  state = specsample.prefill(*_ARGUMENTS, drafter=drafter, **_SETTINGS)
  for _ in range(2):  # the second time, some rows are done already
    state = specsample.advance(
      _PARAMS,
      state,
      model=_MODEL,
      drafter=drafter,
      verify=rule,
      stop=_STOP,
      max_rounds=_NEW_TOKENS // 2,
    )
  return jax.device_get(dataclasses.replace(state, key=None))


def _written(state, row):
  """Returns the contents of the row's ring, ordered by position."""
  ring = jax.tree.map(lambda x: x[row], state.draft.ring)
  order = np.argsort(ring.position)
  order = order[ring.position[order] >= 0]
  return jax.tree.map(lambda x: x[order] if x.ndim else x, ring)


def _corrected(state, row):
  """Returns the positions where the loop says that a draft was replaced."""
  is_correction = state.origin[row] == specsample.Origin.CORRECTION
  return np.flatnonzero(is_correction).tolist()


@pytest.mark.parametrize('case', _CASES)
def test_positions_are_those_of_corrections(case):
  state = _decoded(case)
  total = 0
  for row, length in enumerate(state.length):
    # A draft cut off by the row's limit counts as rejected.
    end = length - (length == state.limit[row])
    found = [i for i in _written(state, row).position.tolist() if i < end]
    assert found == [i for i in _corrected(state, row) if i < end]
    total += len(found)
  assert (total == 0) == (case == 'none')


@pytest.mark.parametrize('case', ['chain', 'tree'])
def test_logits_are_the_targets_own(case):
  state = _decoded(case)
  for row in range(len(_LENGTHS)):
    ring = _written(state, row)
    length = state.length[row]
    tokens = state.tokens[row : row + 1, :length]
    output, _ = _MODEL.apply({}, tokens, _MODEL.init_cache(1, 0))
    logits = np.asarray(output.logits[0], np.float64)
    for i, position in enumerate(ring.position):
      behind = logits[position - 1]
      best = np.argsort(-behind)[:5]
      assert ring.ids[i].tolist() == best.tolist()
      np.testing.assert_allclose(ring.logits[i], behind[best], rtol=1e-6)
      np.testing.assert_allclose(
        ring.log_sum_exp[i], np.log(np.exp(behind).sum()), rtol=1e-6
      )


def test_of_more_positions_the_last_ones_are_kept():
  few, many = _decoded('chain', num_positions=3), _decoded('chain')
  for row in range(len(_LENGTHS)):
    last = jax.tree.map(lambda x: x[-3:] if x.ndim else x, _written(many, row))
    jax.tree.map(np.testing.assert_array_equal, _written(few, row), last)
  assert few.draft.ring.count.max() > 3


@pytest.mark.parametrize('case', ['chain', 'tree', 'none'])
def test_all_positions_are_those_of_emitted_tokens(case):
  state = _decoded(case, rejected_only=False)
  for row, begin in enumerate(_LENGTHS):
    expected = list(range(begin, state.length[row]))
    assert _written(state, row).position.tolist() == expected


def test_drafts_are_those_of_the_drafter():
  for case in ('chain', 'tree'):
    inner, rule = _CASES[case]
    output = specsample.generate(
      *_ARGUMENTS, drafter=inner, verify=rule, stop=_STOP, **_SETTINGS
    )
    found = specsample.finish(_decoded(case), max_new_tokens=_NEW_TOKENS)
    jax.tree.map(np.testing.assert_array_equal, found, output)


def test_an_empty_ring_is_written_again():
  state = _decoded('chain')
  ring = state.draft.ring.emptied()
  assert (ring.position == -1).all()
  np.testing.assert_array_equal(ring.count, state.draft.ring.count)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'num_positions': 0}, 'num_positions is 0: record at least 1'),
    ({'top_k': 1.5}, 'top_k is 1.5: record at least 1'),
    ({'rejected_only': 1}, 'rejected_only is 1: give True or False'),
  ],
)
def test_a_ring_that_holds_nothing_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    drafters.Recording(drafter=_CHAIN, **settings)


# 'ngram' has no vocabulary of its own.
@pytest.mark.parametrize('case', ['chain', 'ngram'])
def test_more_tokens_than_there_are_cannot_be_recorded(case):
  with pytest.raises(ValueError, match='top_k is 13, but the target has 12'):
    _decoded(case, top_k=13)
