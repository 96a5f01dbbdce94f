"""The objective of draft models, against loops over positions."""

import functools

import jax
import numpy as np
import optax
import pytest

from specsample import drafters
from specsample import testing
from specsample.training import draft
from specsample.training import losses
from tests.training import greedy

_V, _K, _T = 16, 3, 10
_TARGET = testing.tiny_llama(vocab_size=_V)
_D2T = np.asarray([9, 3, 4, 0, 12, 7])
_DRAFTER = drafters.DraftModel(
  model=_TARGET, num_draft_tokens=_K, layers=(1,), draft_vocab_size=_D2T.size
)
_RNG = np.random.default_rng(0)
_BATCH = {
  'tokens': _RNG.integers(_V, size=(4, _T)),
  'mask': _RNG.random((4, _T)) < 0.7,
}


@functools.cache
def _params():
  target = jax.tree.map(lambda x: 2 * x, _TARGET.init(jax.random.key(3)))
  own = _DRAFTER.init_params(jax.random.key(1), target, _D2T)
  noisy = testing.with_noise(own, jax.random.key(4))
  # The draft vocabulary's columns are the target's.
  kept = {name: own[name] for name in own if name == 'vocabulary'}
  return {'target': target, 'drafter': noisy | kept}


def _log_softmax(logits):
  wide = np.asarray(logits, np.float64)
  return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@jax.jit
def _hidden(params, tokens):
  output, _ = _TARGET.apply(
    params['target'], tokens, _TARGET.init_cache(*tokens.shape)
  )
  return output.hidden


@jax.jit
def _draft_logits(params, tokens):
  """Returns the logits of the draft vocabulary, as in decoding."""
  model = _DRAFTER.draft_model
  output, _ = model.apply(params, tokens, model.init_cache(*tokens.shape))
  return output.logits[..., _D2T]


def _by_hand(params, batch):
  """Returns the loss, the rates of correct and kept drafts, and the matches."""
  tokens, mask = batch['tokens'], batch['mask']
  hidden = _hidden(params, tokens)
  teacher = _log_softmax(_TARGET.unembed(params['target'], hidden)[..., _D2T])
  drafts = _log_softmax(_draft_logits(params, tokens))
  entropies, divergences = [], []
  correct, kept = ([[] for _ in range(_K)] for _ in range(2))
  matches = np.zeros((_K, *tokens.shape), bool)
  for b, t in np.ndindex(tokens.shape):
    # Token t is pending.
    hits, learns = [], []
    for i in range(_K):
      place = t + 1 + i
      learns.append(place < _T and mask[b, place])
      if not learns[-1]:
        continue
      log_probs = drafts[b, place - 1]
      hits.append(_D2T[log_probs.argmax()] == tokens[b, place])
      matches[i, b, t] = hits[-1]
      correct[i].append(hits[-1])
      if all(learns):
        kept[i].append(all(hits))
    if learns[0]:
      token, log_probs = tokens[b, t + 1], drafts[b, t]
      if token in _D2T:
        entropies.append(-log_probs[_D2T.tolist().index(token)])
      target = teacher[b, t]
      divergences.append((np.exp(target) * (target - log_probs)).sum())
  mean = lambda lists: np.asarray([np.mean(values) for values in lists])
  loss = 2 * np.mean(entropies) + 3 * np.mean(divergences)
  return loss, mean(correct), mean(kept), matches


def test_it_learns_the_token_behind_each():
  params = _params()
  objective = draft.DraftObjective(
    drafter=_DRAFTER, token_weight=2.0, teacher_weight=3.0
  )
  loss, report = jax.jit(objective)(params, _BATCH)
  expected, correct, kept, matches = _by_hand(params, _BATCH)
  assert matches.any()
  np.testing.assert_allclose(loss, expected, rtol=1e-4)
  np.testing.assert_allclose(report['correct'], correct, atol=1e-6)
  np.testing.assert_allclose(report['kept'], kept, atol=1e-6)
  np.testing.assert_array_equal(
    jax.jit(objective.matches)(params, _BATCH), matches
  )


def test_hidden_vectors_may_be_found_before():
  params = _params()
  objective = jax.jit(
    draft.DraftObjective(drafter=_DRAFTER, teacher_weight=1.0)
  )
  hidden = _hidden(params, _BATCH['tokens'])
  found, _ = objective(params, _BATCH | {'hidden': hidden})
  np.testing.assert_allclose(found, objective(params, _BATCH)[0], rtol=1e-5)
  others, _ = objective(params, _BATCH | {'hidden': 2 * hidden})
  assert abs(others - found) > 1e-3


def test_what_is_not_learned_may_be_left_out():
  params = _params()
  objective = draft.DraftObjective(drafter=_DRAFTER, teacher_weight=1.0)
  of = jax.jit(jax.value_and_grad(objective, has_aux=True, allow_int=True))
  rows = np.arange(_T) - np.asarray([[6], [3], [5], [1]])
  batch = _BATCH | {'mask': (rows >= 0) & (rows < 4)}
  places = np.asarray([[4], [1], [3], [0]]) + np.arange(7)
  whole = of(params, batch)
  few = of(params, batch | {'places': places})
  assert jax.tree.all(
    jax.tree.map(
      lambda x, y: (
        x.dtype == jax.dtypes.float0 or np.allclose(x, y, rtol=1e-4, atol=1e-6)
      ),
      few,
      whole,
    )
  )


def test_only_learned_tokens_are_learned():
  params = _params()
  objective = draft.DraftObjective(drafter=_DRAFTER, teacher_weight=1.0)
  # Position 0 follows no token.
  mask = np.zeros((4, _T), bool)
  mask[:, 0] = True
  gradient = jax.grad(
    lambda own: objective(params | {'drafter': own}, _BATCH | {'mask': mask})[
      0
    ],
    allow_int=True,
  )(params['drafter'])
  for name in ('layers', 'norm'):
    for leaf in jax.tree.leaves(gradient[name]):
      np.testing.assert_array_equal(leaf, 0)


@pytest.mark.nightly(but=('tokens',))
@pytest.mark.parametrize(
  'teacher_loss',
  [None, losses.total_variation],
  ids=['tokens', 'total variation'],
)
def test_losses_fall_and_drafts_are_kept(teacher_loss):
  # The draft model has one layer, and learns what the rest of the target does.
  target = _params()['target']
  drafter = drafters.DraftModel(model=_TARGET, num_draft_tokens=_K, layers=(0,))
  own = drafter.init_params(jax.random.key(1), target)
  params = {'target': target, 'drafter': own}
  is_trained = {
    'target': jax.tree.map(lambda _: False, target),
    'drafter': drafter.is_trained(),
  }
  optimizer = optax.adam(3e-3)
  settings = {}
  if teacher_loss is not None:
    settings = {
      'token_weight': 0.0,
      'teacher_weight': 1.0,
      'teacher_loss': teacher_loss,
    }
  objective = draft.DraftObjective(drafter=drafter, **settings)
  text = greedy.text(_TARGET, target, 64, 24)
  first, last = greedy.train(
    params, is_trained, text, objective=objective, optimizer=optimizer
  )
  assert last['loss'] < 0.7 * first['loss']
  assert last['kept'].sum() > first['kept'].sum() + 0.2


def test_the_loss_of_a_chain_is_that_of_both_models_laws():
  small = testing.tiny_llama(vocab_size=_V, num_layers=1, dim=8)
  objective = draft.ChainObjective(
    drafter=drafters.Chain(model=small, num_draft_tokens=_K),
    target=_TARGET,
    token_weight=0.0,
    teacher_weight=1.0,
  )
  own = testing.with_noise(small.init(jax.random.key(1)), jax.random.key(4))
  params = {'target': _params()['target'], 'drafter': own}
  tokens, mask = _BATCH['tokens'], _BATCH['mask'][:, 1:]

  def by_hand(params):
    log_probs = lambda model, own: jax.nn.log_softmax(
      model.apply(own, tokens, model.init_cache(len(tokens), 0))[0].logits
    )[:, :-1]
    of_all = losses.forward_kl(
      log_probs(small, params['drafter']), log_probs(_TARGET, params['target'])
    )
    return of_all[mask].mean()

  with_slope = lambda loss: jax.jit(jax.value_and_grad(loss))(params)
  loss, slope = with_slope(lambda params: objective(params, _BATCH)[0])
  expected, expected_slope = with_slope(by_hand)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  # That of the draft model's own unembedding is part of it.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
    *(slope['drafter'], expected_slope['drafter']),
  )


def test_matches_of_a_chain_are_its_greedy_tokens():
  small = testing.tiny_llama(vocab_size=_V, num_layers=1, dim=8)
  objective = draft.ChainObjective(
    drafter=drafters.Chain(model=small, num_draft_tokens=1), target=_TARGET
  )
  own = testing.with_noise(small.init(jax.random.key(1)), jax.random.key(4))
  params = {'target': _params()['target'], 'drafter': own}
  tokens = _BATCH['tokens']
  output, _ = small.apply(own, tokens, small.init_cache(len(tokens), 0))
  best = np.argmax(output.logits, axis=-1)[:, :-1]
  (found,) = jax.jit(objective.matches)(params, _BATCH)
  expected = (best == tokens[:, 1:]) & _BATCH['mask'][:, 1:]
  assert expected.any()
  np.testing.assert_array_equal(found[:, :-1], expected)
