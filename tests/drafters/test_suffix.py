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
from specsample import testing
from specsample import verify
from specsample.memory import store as store_lib
from specsample.sampling import Sampling
from specsample.testing.sample import Group
from specsample.types import DraftKind, Verdict

_K = 4
_SUFFIX = drafters.Suffix(num_draft_tokens=_K, min_kept=0.0, decay=0.5)
_OWN, _STORED = 0, 1  # the sources
_WIDTH = 32


def _tokens(*rows):
  tokens = np.zeros((len(rows), _WIDTH), np.int32)
  for row, sequence in zip(tokens, rows, strict=True):
    row[: len(sequence)] = sequence
  return jnp.asarray(tokens), jnp.asarray([len(row) for row in rows])


def _store(*texts, capacity=128):
  return store_lib.build(texts, vocab_size=16, capacity=capacity)


def _of(*stores):
  return {'drafter': {str(i): store for i, store in enumerate(stores)}}


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, params, tokens, length, state):
  return drafter.propose(params, None, None, tokens, length, state)


def _proposed(rows, params, drafter=_SUFFIX, state=None):
  if state is None:
    state = drafter.init(params, len(rows), _WIDTH)
  return _propose(drafter, params, *_tokens(*rows), state)


def _after(rows, params, state, drafter=_SUFFIX):
  """Returns the state after a round that extended the texts to these rows."""
  tokens, lengths = _tokens(*rows)
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


def test_the_rows_own_text_goes_on():
  draft, _ = _proposed([_ROW, [1], [1, 2]], {})
  assert draft.tokens.tolist() == [[5, 6, 7, 9], [-1] * _K, [-1] * _K]
  assert draft.kind is DraftKind.POINT_MASS
  # The longer the matched context, the likelier a token is kept.
  assert np.all(np.diff(draft.signals.confidence[0]) > 0)
  assert np.all(draft.signals.confidence[1:] == 0)


def test_below_min_kept_nothing_is_drafted():
  params = _of(_store([3, 8, 1]))
  expected = _expected(_proposed([_ROW], params)[0])[0]
  assert 0 < expected < _K
  for least, is_drafted in ((expected - 1e-3, True), (expected + 1e-3, False)):
    drafter = dataclasses.replace(_SUFFIX, min_kept=float(least))
    draft, _ = _proposed([_ROW, [1]], params, drafter)
    assert (draft.tokens[0] >= 0).tolist() == [is_drafted] * _K
    assert draft.tokens[1].tolist() == [-1] * _K


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


def test_the_source_that_promises_more_drafts():
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


def _learned(emitted, state=None, drafter=_SUFFIX):
  """Returns the counts tried and kept after a round, [sources] each."""
  params = _of(_store([9, 3, 8, 6, 7, 1]))
  _, state = _proposed([_ROW], params, drafter, state)
  state = _after([_ROW + emitted], params, state, drafter)
  return state.tried[0].sum(axis=-1).tolist(), state.kept[0].sum(-1).tolist()


@pytest.mark.parametrize('min_kept', [0.0, _K])
def test_outcomes_are_learned_of_every_source_drafted_or_not(min_kept):
  drafter = dataclasses.replace(_SUFFIX, min_kept=float(min_kept))
  # The row continues with 5 6 7 9 and the store with 8 6 7 1.
  assert _learned([5, 6, 1], drafter=drafter) == ([3, 1], [2, 0])
  assert _learned([8, 6, 7, 1, 0], drafter=drafter) == ([1, 4], [0, 4])
  # The outcome of tokens beyond the emitted ones is unknown.
  assert _learned([5], drafter=drafter) == ([1, 1], [1, 0])


def test_behind_a_wrong_token_nothing_is_learned():
  # All tokens but the wrong one are right.
  assert _learned([4, 6, 7, 9, 1]) == ([1, 1], [0, 0])
  assert _learned([5, 6, 0, 9, 1]) == ([3, 1], [2, 0])


def test_a_row_that_is_done_learns_and_forgets_nothing():
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


def test_a_round_that_was_left_out_is_learned_of_once():
  params = _of(_store([9, 3, 8, 6, 7, 1]))
  _, asked = _proposed([_ROW], params)
  asked = _after([[*_ROW, 5, 1]], params, asked)
  later = _tokens([*_ROW, 5, 1])
  _, state = _propose(_SUFFIX, params, *later, asked)
  paused = _SUFFIX.pause(params, *later, asked)
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


_V = 12
_TARGET = testing.tiny_llama(vocab_size=_V, num_layers=3)
_PROMPTS = np.arange(3 * 6).reshape(3, 6) % _V
_LENGTHS = np.asarray([6, 1, 4], np.int32)
_DRAFTER = drafters.Suffix(num_draft_tokens=_K, min_kept=0.2)


@functools.cache
def _target_params():
  return jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))


def _generate(drafter, own=None, **settings):
  params = {'target': _target_params()}
  if own is not None:
    params['drafter'] = own
  return specsample.generate(
    params,
    _PROMPTS,
    _LENGTHS,
    jax.random.key(0),
    model=_TARGET,
    drafter=drafter,
    **{
      'verify': verify.chain,
      'sampling': Sampling(temperature=0.0),
      'max_new_tokens': 32,
    }
    | settings,
  )


@functools.cache
def _stores():
  """Returns the plain output, a store of parts of it, and a random store."""
  plain = _generate(drafters.NoDraft())
  rng = np.random.default_rng(0)
  build = functools.partial(store_lib.build, vocab_size=_V, capacity=700)
  right = build([*np.asarray(plain.tokens[:2]), rng.integers(0, _V, 40)])
  wrong = build([rng.integers(0, _V, 60) for _ in range(10)])
  return plain, right, wrong


def test_greedy_output_is_the_targets_own_whatever_the_stores_hold():
  plain, right, wrong = _stores()
  rounds = {}
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
    rounds[name] = output.rounds.sum()
  assert rounds['right'] < rounds['own text'] < plain.rounds.sum()
  assert rounds['both'] < rounds['own text']


def test_with_shared_noise_the_store_changes_no_token_at_any_temperature():
  _, right, wrong = _stores()
  sampling = Sampling(temperature=np.asarray([1.0, 0.5, 1.5]))
  run = functools.partial(_generate, sampling=sampling, verify=verify.coupled)
  plain = run(drafters.NoDraft())
  for store in (right, wrong):
    output = run(_DRAFTER, {'store': store})
    np.testing.assert_array_equal(output.tokens, plain.tokens)
    assert output.proposed[:, 1:].sum() > 0


@pytest.mark.nightly
def test_the_compiled_loop_follows_the_target():
  """Covers rounds after learning, which the enumeration doesn't reach."""
  model = testing.HashModel(vocab_size=3)
  store = store_lib.build([[1, 0, 1, 2, 2, 0], [0, 1, 1, 0]], vocab_size=3)
  testing.assert_follows_target(
    {'target': {}, 'drafter': {'store': store}},
    (
      Group((1, 0, 1), Sampling(temperature=1.0)),
      Group((2, 2, 0, 1, 2), Sampling(temperature=0.7, top_k=2)),
    ),
    jax.random.key(3),
    model=model,
    drafter=drafters.Suffix(num_draft_tokens=2, min_kept=0.7, strength=0.5),
    verify=verify.chain,
    num_tokens=6,
    num_rows=16384,
  )


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
  ('settings', 'message'),
  [
    ({'num_draft_tokens': 0}, 'num_draft_tokens is 0: give at least 1'),
    ({'max_match': 0}, 'max_match is 0: give an integer of at least 1'),
    ({'num_places': 1.5}, 'num_places is 1.5: give an integer'),
    ({'min_kept': -0.1}, 'min_kept is -0.1: give a number of at least 0'),
    ({'min_kept': 4.5}, 'min_kept is 4.5, but a draft has only 4 tokens'),
    (
      {'costs': (1.0, 2.0)},
      'costs has 2 numbers, but .* 4 draft tokens: give 5',
    ),
    ({'costs': (1.0, -1.0)}, 'each above 0'),
    ({'strength': 0.0}, 'strength is 0.0: give a number above 0'),
    ({'decay': 1.1}, 'decay is 1.1: give a number from 0 to 1'),
    ({'decay': float('nan')}, 'decay is nan: give a number from 0 to 1'),
  ],
)
def test_settings_out_of_range_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_SUFFIX, **settings)


def test_parameters_that_are_no_store_are_refused():
  with pytest.raises(
    ValueError, match=r"\['layers'\] is of type dict, but Suffix reads"
  ):
    _SUFFIX.init({'drafter': {'layers': {}}}, 1, _WIDTH)
  with pytest.raises(ValueError, match='is of type int, but Suffix'):
    _SUFFIX.init({'drafter': 3}, 1, _WIDTH)
