"""The objective of feature drafters, against loops over positions."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from specsample import drafters
from specsample import testing
from specsample.training import eagle
from tests.drafters import features_by_hand
from tests.training import greedy

_V, _K, _T = 16, 3, 9
_TARGET = testing.tiny_llama(vocab_size=_V)
_D2T = np.asarray([9, 3, 4, 0, 12, 7])
_DRAFTERS = {
  'eagle': drafters.Eagle(model=_TARGET, num_draft_tokens=_K),
  'eagle3': drafters.Eagle3(
    model=_TARGET,
    num_draft_tokens=_K,
    draft_vocab_size=_D2T.size,
    feature_layers=(1, -1, 0),
  ),
  'mtp': drafters.MTP(model=_TARGET, num_draft_tokens=_K),
  'mtp of 2': drafters.MTP(model=_TARGET, num_draft_tokens=_K, num_modules=2),
}
_RNG = np.random.default_rng(1)
_BATCH = {
  'tokens': _RNG.integers(_V, size=(8, _T)),
  'mask': _RNG.random((8, _T)) < 0.7,
}
# DeepSeek-V3's loss with the weight 0.3, a tenth for each of three drafts.
_TOKENS_ONLY = {'token_weight': 0.1, 'teacher_weight': 0.0, 'decay': 1.0}
_OBJECTIVES = {
  'eagle': eagle.FeatureObjective(
    drafter=_DRAFTERS['eagle'],
    num_steps=2,
    feature_weight=1.0,
    teacher_weight=0.1,
  ),
  'eagle3': eagle.FeatureObjective(drafter=_DRAFTERS['eagle3'], num_steps=4),
  'mtp': eagle.FeatureObjective(
    drafter=_DRAFTERS['mtp'], num_steps=3, **_TOKENS_ONLY
  ),
  'mtp of 2': eagle.FeatureObjective(
    drafter=_DRAFTERS['mtp of 2'], num_steps=3, **_TOKENS_ONLY
  ),
}
_each = pytest.mark.parametrize('name', _DRAFTERS)


@functools.cache
def _params(name):
  drafter = _DRAFTERS[name]
  target = jax.tree.map(lambda x: 2 * x, _TARGET.init(jax.random.key(3)))
  d2t = None if drafter.draft_vocab_size is None else _D2T
  own = drafter.init_params(jax.random.key(1), target, d2t)
  noisy = testing.with_noise(own, jax.random.key(4))
  # The draft vocabulary's columns are the target's.
  kept = {name: own[name] for name in own if name == 'vocabulary'}
  return {'target': target, 'drafter': noisy | kept}


@functools.cache
def _output(name):
  """Returns the target's output for the batch."""
  layers = _DRAFTERS[name].feature_layers
  tokens = _BATCH['tokens']
  return jax.jit(_TARGET.apply, static_argnames='features')(
    _params(name)['target'],
    tokens,
    _TARGET.init_cache(len(tokens), 0),
    features=layers,
  )[0]


def _log_softmax(logits):
  wide = np.asarray(logits, np.float64)
  return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def _smooth_l1(x):
  x = np.abs(x)
  return np.where(x < 1, x**2 / 2, x - 0.5).mean()


def _by_hand(name, objective):
  """Returns the loss of each draft, and where each draft is correct."""
  params, drafter = _params(name), objective.drafter
  tokens, mask = _BATCH['tokens'], _BATCH['mask']
  output = _output(name)
  unembedding = np.asarray(params['target']['unembedding'], np.float64)
  ids = np.arange(_V)
  if drafter.draft_vocab_size is not None:
    ids = _D2T
  unembedding = unembedding[:, ids]
  num_drafts = max(objective.num_steps, _K)
  sums = {
    kind: [[] for _ in range(num_drafts)]
    for kind in ('token', 'teacher', 'feature')
  }
  matches = np.zeros((num_drafts, *tokens.shape), bool)
  rows = [
    jax.tree.map(lambda x, b=b: x[b : b + 1], output) for b in range(len(mask))
  ]
  for b, pending in np.ndindex(tokens.shape):
    if not pending:
      continue  # there is no feature before it
    drafts = min(num_drafts, _T - 1 - pending)
    if not drafts:
      continue
    vectors = features_by_hand.vectors(
      params, drafter, rows[b], tokens[b], pending + 1, drafts
    )
    for i, vector in enumerate(vectors):
      place = pending + 1 + i
      if not mask[b, place]:
        continue
      log_probs = _log_softmax(vector @ unembedding)
      hidden = np.asarray(output.hidden[b, place - 1], np.float64)
      target = _log_softmax(hidden @ unembedding)
      matches[i, b, pending] = ids[log_probs.argmax()] == tokens[b, place]
      sums['teacher'][i].append((np.exp(target) * (target - log_probs)).sum())
      sums['feature'][i].append(_smooth_l1(vector - hidden))
      if tokens[b, place] in ids:
        index = ids.tolist().index(tokens[b, place])
        sums['token'][i].append(-log_probs[index])
  of_drafts = sum(
    getattr(objective, f'{kind}_weight')
    * np.asarray([np.mean(x) for x in values[: objective.num_steps]])
    for kind, values in sums.items()
  )
  return of_drafts, matches


@pytest.mark.nightly(but=('mtp',))
@_each
def test_it_learns_drafts_made_of_drafts(name):
  objective = _OBJECTIVES[name]
  loss, report = jax.jit(objective)(_params(name), _BATCH)
  expected, matches = _by_hand(name, objective)
  np.testing.assert_allclose(report['draft_loss'], expected, rtol=1e-4)
  decays = objective.decay ** np.arange(objective.num_steps)
  np.testing.assert_allclose(loss, (decays * expected).sum(), rtol=1e-4)
  assert matches[1:].any()
  found = jax.jit(objective.matches)(_params(name), _BATCH)
  np.testing.assert_array_equal(found, matches[:_K])
  size = min(objective.num_steps, _K)
  learned = [
    np.pad(_BATCH['mask'], ((0, 0), (0, i + 1)))[:, i + 1 :][:, 1:]
    for i in range(size)
  ]
  correct = [matches[i][:, 1:][learned[i]].mean() for i in range(size)]
  np.testing.assert_allclose(report['correct'], correct, atol=1e-6)


@pytest.mark.nightly(but=('mtp',))
@_each
def test_what_it_reads_may_be_found_before(name):
  objective, output = jax.jit(_OBJECTIVES[name]), _output(name)
  stored = {'hidden': output.hidden}
  if output.features:
    stored['features'] = np.concatenate(output.features, axis=-1)
  expected, _ = objective(_params(name), _BATCH)
  found, _ = objective(_params(name), _BATCH | stored)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  others = {kind: np.roll(x, 1, axis=-1) for kind, x in stored.items()}
  assert abs(objective(_params(name), _BATCH | others)[0] - expected) > 1e-3


@pytest.mark.nightly(but=('mtp',))
@_each
def test_what_is_not_learned_may_be_left_out(name):
  params, objective = _params(name), _OBJECTIVES[name]
  of = jax.jit(jax.value_and_grad(objective, has_aux=True, allow_int=True))
  first = np.asarray([6, 5, 6, 7, 6, 5, 7, 6])[:, None]
  rows = np.arange(_T) - first
  batch = _BATCH | {'mask': (rows >= 0) & (rows < 3)}
  # From where the last draft is an answer's first token on; the last of a row's
  # places may be past its end.
  places = first - 5 + np.arange(8)
  whole = of(params, batch)
  few = of(params, batch | {'places': places})
  assert jax.tree.all(
    jax.tree.map(
      lambda x, y: (
        x.dtype == jax.dtypes.float0 or np.allclose(x, y, rtol=1e-4, atol=1e-5)
      ),
      few,
      whole,
    )
  )


@pytest.mark.nightly(but=('mtp',))
@_each
def test_only_tokens_that_are_learned_and_before_them_matter(name):
  params = _params(name)
  mask = np.zeros((8, _T), bool)
  mask[:, 4] = True
  of_own = jax.jit(
    jax.grad(
      lambda own, tokens: _OBJECTIVES[name](
        params | {'drafter': own}, {'tokens': tokens, 'mask': mask}
      )[0],
      allow_int=True,
    )
  )

  def gradient(tokens):
    own = of_own(params['drafter'], tokens)
    first = own['layers'][0] if 'layers' in own else own
    return np.asarray(first['layer']['attention']['value']['kernel'])

  tokens = _BATCH['tokens']
  expected = gradient(tokens)
  assert np.abs(expected).max() > 1e-4
  later, earlier = tokens.copy(), tokens.copy()
  later[:, 5:] = (later[:, 5:] + 1) % _V
  earlier[:, 1] = (earlier[:, 1] + 1) % _V
  np.testing.assert_allclose(gradient(later), expected, atol=1e-6)
  assert np.abs(gradient(earlier) - expected).max() > 1e-4


@pytest.mark.nightly
def test_noise_is_of_the_batch_and_not_of_what_is_measured():
  params, exact = _params('eagle'), _OBJECTIVES['eagle']
  noisy = dataclasses.replace(exact, feature_noise=0.3)
  losses = [
    float(objective(params, batch)[0])
    for objective in (exact, noisy)
    for batch in (_BATCH, _BATCH)
  ]
  assert losses[0] == losses[1] != losses[2] == losses[3]
  np.testing.assert_array_equal(
    noisy.matches(params, _BATCH), exact.matches(params, _BATCH)
  )


@pytest.mark.nightly(but=('mtp',))
@_each
def test_losses_fall_and_drafts_are_kept(name):
  drafter = dataclasses.replace(_DRAFTERS[name], draft_vocab_size=None)
  target = _params(name)['target']
  own = drafter.init_params(jax.random.key(1), target)
  params = {'target': target, 'drafter': own}
  is_trained = {
    'target': jax.tree.map(lambda _: False, target),
    'drafter': drafter.is_trained(),
  }
  optimizer = optax.adam(3e-3)
  objective = dataclasses.replace(_OBJECTIVES[name], drafter=drafter)
  text = greedy.text(_TARGET, target, 32, 16)
  first, last = greedy.train(
    params, is_trained, text, objective=objective, optimizer=optimizer
  )
  assert last['loss'] < 0.7 * first['loss']
  assert last['kept'].sum() > first['kept'].sum() + 0.2


def test_no_draft_is_refused():
  with pytest.raises(ValueError, match='num_steps is 0: give an integer'):
    eagle.FeatureObjective(drafter=_DRAFTERS['mtp'], num_steps=0)
