"""Drafts from remembered text: what is drafted, when, and what is learned."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import policies
from specsample import verify
from specsample.memory import store as store_lib
from specsample.sampling import Sampling
from specsample.types import DraftKind, Verdict
from tests.drafters import rounds

_K = 4
_SUFFIX = drafters.Suffix(num_draft_tokens=_K, min_kept=0.0, decay=0.5)
_OWN, _STORED = 0, 1  # the sources


def _store(*texts, capacity=128):
  return store_lib.build(texts, vocab_size=16, capacity=capacity)


def _of(*stores):
  return {'drafter': {str(i): store for i, store in enumerate(stores)}}


def _proposed(rows, params, drafter=_SUFFIX, state=None):
  return rounds.propose(drafter, params, rows, state)


def _after(rows, params, state, drafter=_SUFFIX):
  """Returns the state after a round that extended the texts to these rows."""
  tokens, lengths = rounds.rows(rows)
  count = lengths - state.length
  at = lambda index: jnp.take_along_axis(tokens, index, axis=1, mode='clip')
  verdict = Verdict(
    num_accepted=count - 1, next_token=at(lengths[:, None] - 1)[:, 0]
  )
  read = at(state.length[:, None] - 1 + jnp.arange(_K + 1))
  return drafter.observe(params, read, count, None, verdict, state)


def _expected(draft):
  """Returns how many tokens [B] the draft is expected to keep."""
  return np.cumprod(draft.signals.confidence, axis=1).sum(axis=1)


_ROW = [9, 3, 5, 6, 7, 9, 3]


def test_rows_own_text_goes_on():
  draft, _ = _proposed([_ROW, [1], [1, 2]], {})
  assert draft.tokens.tolist() == [[5, 6, 7, 9], [-1] * _K, [-1] * _K]
  assert draft.kind is DraftKind.POINT_MASS
  # The longer the matched context, the likelier a token is kept.
  assert np.all(np.diff(draft.signals.confidence[0]) > 0)
  assert np.all(draft.signals.confidence[1:] == 0)


@pytest.mark.slow
def test_below_min_kept_nothing_is_drafted():
  params = _of(_store([3, 8, 1]))
  expected = _expected(_proposed([_ROW], params)[0])[0]
  assert 0 < expected < _K
  for least, is_drafted in ((expected - 1e-3, True), (expected + 1e-3, False)):
    drafter = dataclasses.replace(_SUFFIX, min_kept=float(least))
    draft, _ = _proposed([_ROW, [1]], params, drafter)
    assert (draft.tokens[0] >= 0).tolist() == [is_drafted] * _K
    assert draft.tokens[1].tolist() == [-1] * _K


@pytest.mark.slow
def test_with_costs_the_batch_drafts_what_pays_for_all_of_it():
  expected = float(_expected(_proposed([_ROW], {})[0])[0])

  def drafted(rows, cost, lengths=None):
    drafter = dataclasses.replace(_SUFFIX, costs=(1.0, 9, 9, 9, cost))
    assert drafter.widths == (0, _K)
    # The drafts of other rows go into the same pass.
    draft, state = _proposed(rows, {}, drafter)
    if lengths is not None:
      state = dataclasses.replace(state, length=np.asarray(lengths))
      draft, _ = _proposed(rows, {}, drafter, state)
    return (np.asarray(draft.tokens) >= 0).all(axis=1).tolist()

  silent = [1, 2]
  alone, of_two = 1 + expected, 1 + expected / 2
  assert drafted([_ROW], alone - 1e-3) == [True]
  assert drafted([_ROW], alone + 1e-3) == [False]
  assert drafted([_ROW, silent], of_two - 1e-3) == [True, False]
  assert drafted([_ROW, silent], of_two + 1e-3) == [False, False]
  assert drafted([_ROW, _ROW, silent], of_two + 1e-3) == [True, True, False]
  # The second row emitted nothing in the last round, so it is done.
  lengths = [len(_ROW) - 1, len(silent)]
  assert drafted([_ROW, silent], of_two + 1e-3, lengths) == [True, False]


def test_source_that_promises_more_drafts():
  # `sure` and `unsure` match more of the row than its own text does, but only
  # `sure` always continues alike; `other` matches less.
  sure = [[5, 6, 7, 9, 3, 1, 2, 4, 8]] * 8
  unsure = [[5, 6, 7, 9, 3, i, i, i, i] for i in range(8)]
  other = [[3, 8, 8, 8, 8]] * 4
  for texts, expected in (
    (sure, [1, 2, 4, 8]),
    (unsure, [5, 6, 7, 9]),
    (other, [5, 6, 7, 9]),
  ):
    params = _of(_store(*texts))
    draft, state = _proposed([_ROW], params)
    assert draft.tokens[0].tolist() == expected
    alone = _expected(_proposed([_ROW], {})[0])
    assert _expected(draft) >= alone
    # The other source's proposal is kept in the state too.
    assert state.tokens[0, _OWN].tolist() == [5, 6, 7, 9]
    assert state.tokens[0, _STORED, 0] >= 0
  # Two stores, in either order.
  for stores in ((sure, other), (other, sure)):
    draft, _ = _proposed([_ROW], _of(*(_store(*texts) for texts in stores)))
    assert draft.tokens[0].tolist() == [1, 2, 4, 8]


@pytest.mark.parametrize('min_kept', [0.0, _K])
@pytest.mark.parametrize(
  ('emitted', 'tried', 'kept'),
  [
    # The row continues with 5 6 7 9 and the store with 8 6 7 1.
    ([5, 6, 1], [3, 1], [2, 0]),
    ([8, 6, 7, 1, 0], [1, 4], [0, 4]),
    # The outcome of tokens beyond the emitted ones is unknown.
    ([5], [1, 1], [1, 0]),
    # All tokens but the wrong one are right: nothing is learned behind it.
    ([4, 6, 7, 9, 1], [1, 1], [0, 0]),
    ([5, 6, 0, 9, 1], [3, 1], [2, 0]),
  ],
)
def test_outcomes_are_learned_of_every_source_drafted_or_not(
  emitted, tried, kept, min_kept
):
  drafter = dataclasses.replace(_SUFFIX, min_kept=float(min_kept))
  params = _of(_store([9, 3, 8, 6, 7, 1]))
  _, state = _proposed([_ROW], params, drafter)
  state = _after([_ROW + emitted], params, state, drafter)
  assert state.tried[0].sum(axis=-1).tolist() == tried
  assert state.kept[0].sum(axis=-1).tolist() == kept


def test_row_that_is_done_learns_and_forgets_nothing():
  params = _of(_store([9, 3, 8, 6, 7, 1]))
  rows = [_ROW, _ROW]
  _, state = _proposed(rows, params)
  rows = [[*_ROW, 5, 6]] * 2
  first = _after(rows, params, state)
  _, state = _proposed(rows, params, state=first)
  later = _after([rows[0], rows[1] + [7]], params, state)
  same = lambda row: [
    np.array_equal(x[row], y[row])
    for x, y in ((later.tried, first.tried), (later.kept, first.kept))
  ]
  assert same(0) == [True, True]
  assert same(1) == [False, False]


@pytest.mark.slow
def test_round_that_was_left_out_is_learned_of_once():
  params = _of(_store([9, 3, 8, 6, 7, 1]))
  _, asked = _proposed([_ROW], params)
  asked = _after([[*_ROW, 5, 1]], params, asked)
  later = [[*_ROW, 5, 1]]
  _, state = _proposed(later, params, state=asked)
  paused = _SUFFIX.pause(params, *rounds.rows(later), asked)
  rows = [[*_ROW, 5, 1, 2]]
  state, paused = (_after(rows, params, x) for x in (state, paused))
  jax.tree.map(np.testing.assert_array_equal, paused, state)


def test_older_outcomes_count_less():
  _, state = _proposed([_ROW], {})
  rows = [[*_ROW, 5]]
  state = _after(rows, {}, state)
  _, state = _proposed(rows, {}, state=state)
  state = _after([rows[0] + [6]], {}, state)
  np.testing.assert_allclose(state.tried[0].sum(), 1 + _SUFFIX.decay)


def test_estimates_are_corrected_by_what_became_of_their_like():
  strength = 2.0
  drafter = dataclasses.replace(_SUFFIX, strength=strength, decay=1.0)
  before, state = _proposed([_ROW], {}, drafter)
  estimate = np.asarray(before.signals.confidence[0])
  rows = [[*_ROW, 4]]
  state = _after(rows, {}, state, drafter)
  # The same words again, in the place of another row.
  after, _ = _proposed([_ROW], {}, drafter, state)
  assert after.tokens.tolist() == before.tokens.tolist()
  eighth = np.floor(8 * estimate)
  is_like = eighth == eighth[0]
  assert is_like.any() and not is_like.all()
  expected = np.where(is_like, strength * estimate / (1 + strength), estimate)
  np.testing.assert_allclose(after.signals.confidence[0], expected, rtol=1e-5)
  # With the lower estimate, drafting no longer pays.
  least = (_expected(before)[0] + _expected(after)[0]) / 2
  picky = dataclasses.replace(drafter, min_kept=float(least))
  assert np.all(_proposed([_ROW], {}, picky)[0].tokens >= 0)
  assert np.all(_proposed([_ROW], {}, picky, state)[0].tokens < 0)


_DRAFTER = drafters.Suffix(num_draft_tokens=_K, min_kept=0.2)


def _generate(drafter, own=None):
  params = {'target': rounds.target_params()}
  if own is not None:
    params['drafter'] = own
  return specsample.generate(
    params,
    rounds.PROMPTS[:3],
    np.asarray([6, 1, 4], np.int32),
    jax.random.key(0),
    model=rounds.TARGET,
    drafter=drafter,
    verify=verify.chain,
    sampling=Sampling(temperature=0.0),
    max_new_tokens=32,
  )


@functools.cache
def _stores():
  """Returns the plain output, a store of parts of it, and a random store."""
  plain = _generate(drafters.NoDraft())
  rng, size = np.random.default_rng(0), rounds.V
  build = functools.partial(store_lib.build, vocab_size=size, capacity=700)
  right = build([*np.asarray(plain.tokens[:2]), rng.integers(0, size, 40)])
  wrong = build([rng.integers(0, size, 60) for _ in range(10)])
  return plain, right, wrong


@pytest.mark.slow
def test_greedy_output_is_the_targets_own_whatever_the_stores_hold():
  plain, right, wrong = _stores()
  num_rounds = {}
  for name, own in (
    ('own text', None),
    ('right', {'store': right}),
    ('wrong', {'store': wrong}),
    ('both', {'a': wrong, 'b': right}),
  ):
    output = _generate(_DRAFTER, own)
    np.testing.assert_array_equal(output.tokens, plain.tokens)
    assert output.accepted[:, 1:].sum() > 0
    # There were rounds with no draft and with a full one.
    proposed = np.asarray(output.proposed).sum(axis=0)
    assert proposed[0] > 0 and proposed[-1] > 0
    num_rounds[name] = output.rounds.sum()
  own_text = num_rounds['own text']
  assert num_rounds['right'] < own_text < plain.rounds.sum()
  assert num_rounds['both'] < own_text


@pytest.mark.slow
def test_policies_read_its_chances():
  inner = dataclasses.replace(_DRAFTER, min_kept=0.0)
  least = 0.15
  drafter = drafters.Adaptive(
    drafter=inner, policies=(policies.PathProbability(least),), widths=(0,)
  )
  whole, _ = _proposed([_ROW], {}, inner)
  cut, _ = _proposed([_ROW], {}, drafter)
  chance = np.cumprod(whole.signals.confidence[0])
  keep = chance >= least
  assert keep.tolist() == [True, True, False, False]
  expected = np.where(keep, whole.tokens[0], -1)
  np.testing.assert_array_equal(cut.tokens[0], expected)
  plain, right, _ = _stores()
  output = _generate(drafter, {'store': right})
  np.testing.assert_array_equal(output.tokens, plain.tokens)
  proposed = np.asarray(output.proposed).sum(axis=0)
  assert np.all(proposed > 0), 'drafts of some length never occurred'


@pytest.mark.parametrize(
  ('own', 'message'),
  [
    ({'layers': {}}, r"\['layers'\] is of type dict, but Suffix reads"),
    (3, 'is of type int, but Suffix'),
  ],
)
def test_parameters_that_are_no_store_are_refused(own, message):
  with pytest.raises(ValueError, match=message):
    _SUFFIX.init({'drafter': own}, 1, 32)
