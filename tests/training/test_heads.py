"""The objective of heads, against loops over positions, and training on it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specsample import drafters
from specsample import testing
from specsample.training import heads
from specsample.training import losses
from specsample.training import slots
from specsample.training import step

_V, _K, _T = 16, 3, 10
_TARGET = testing.tiny_llama(vocab_size=_V)
_D2T = np.asarray([9, 3, 4, 0, 12, 7])
_MEDUSA = drafters.Medusa(model=_TARGET, num_draft_tokens=_K)
_HYDRA = drafters.Hydra(
  model=_TARGET, num_draft_tokens=_K, draft_vocab_size=_D2T.size
)
_RNG = np.random.default_rng(0)
_BATCH = {
  'tokens': _RNG.integers(_V, size=(3, _T)),
  'mask': _RNG.random((3, _T)) < 0.6,
}


@functools.cache
def _params(drafter):
  target = _TARGET.init(jax.random.key(0))
  d2t = None if drafter.draft_vocab_size is None else _D2T
  own = drafter.init_params(jax.random.key(1), target, d2t)
  noisy = testing.with_noise(own, jax.random.key(2))
  # The draft vocabulary's columns are the target's.
  kept = {name: own[name] for name in own if name == 'vocabulary'}
  return {'target': target, 'drafter': noisy | kept}


def _log_softmax(logits):
  wide = np.asarray(logits, np.float64)
  return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def _by_hand(drafter, params, batch):
  """Returns the means that each head should have, and the matches."""
  tokens, mask = batch['tokens'], batch['mask']
  cache = _TARGET.init_cache(*tokens.shape)
  hidden = _TARGET.apply(params['target'], tokens, cache)[0].hidden
  kept_ids = np.arange(_V) if drafter == _MEDUSA else _D2T
  logits = _TARGET.unembed(params['target'], hidden)
  teacher = _log_softmax(logits[..., kept_ids])
  vectors = drafter.vectors(params, tokens, hidden)
  drafts = [_log_softmax(drafter.logits(params, x)) for x in vectors]
  entropies, divergences, correct, kept = (
    [[] for _ in range(_K)] for _ in range(4)
  )
  matches = np.zeros((_K, *tokens.shape), bool)
  for b, t in np.ndindex(tokens.shape):
    hits, learns = [], []
    # The token at t + 1 is pending; head i drafts the one at t + 2 + i.
    for i in range(_K):
      place = t + 2 + i
      if place >= _T or not mask[b, place]:
        learns.append(False)
        continue
      learns.append(True)
      draft, token = drafts[i][b, t], tokens[b, place]
      hits.append(kept_ids[draft.argmax()] == token)
      correct[i].append(hits[-1])
      matches[i, b, t + 1] = hits[-1]
      if all(learns):
        kept[i].append(all(hits))
      if token in kept_ids:
        entropies[i].append(-draft[kept_ids.tolist().index(token)])
      target = teacher[b, place - 1]
      divergences[i].append((np.exp(target) * (target - draft)).sum())
  mean = lambda lists: np.asarray([np.mean(values) for values in lists])
  means = [mean(x) for x in (entropies, divergences, correct, kept)]
  return *means, matches


@pytest.mark.parametrize('drafter', [_MEDUSA, _HYDRA], ids=['medusa', 'hydra'])
def test_every_head_learns_the_token_it_drafts(drafter):
  params = _params(drafter)
  objective = heads.HeadsObjective(
    drafter=drafter, decay=0.5, token_weight=2.0, teacher_weight=3.0
  )
  loss, report = jax.jit(objective)(params, _BATCH)
  expected = _by_hand(drafter, params, _BATCH)
  entropy, divergence, correct, kept, matches = expected
  of_heads = 2 * entropy + 3 * divergence
  np.testing.assert_allclose(report['head_loss'], of_heads, rtol=1e-4)
  np.testing.assert_allclose(loss, of_heads @ [1, 0.5, 0.25], rtol=1e-4)
  np.testing.assert_allclose(report['correct'], correct, atol=1e-6)
  np.testing.assert_allclose(report['kept'], kept, atol=1e-6)
  found = np.asarray(jax.jit(objective.matches)(params, _BATCH))
  assert matches.any()
  # Without a token before the pending one, a zero vector takes its place.
  np.testing.assert_array_equal(found[:, :, 1:], matches[:, :, 1:])


def test_hidden_vectors_may_be_found_before():
  params = _params(_HYDRA)
  objective = heads.HeadsObjective(drafter=_HYDRA, teacher_weight=1.0)
  cache = _TARGET.init_cache(*_BATCH['tokens'].shape)
  output, _ = _TARGET.apply(params['target'], _BATCH['tokens'], cache)
  found, _ = objective(params, _BATCH | {'hidden': output.hidden})
  np.testing.assert_allclose(found, objective(params, _BATCH)[0], rtol=1e-5)
  others, _ = objective(params, _BATCH | {'hidden': 2 * output.hidden})
  assert abs(others - found) > 1e-3


@pytest.mark.parametrize('prefix', [False, True])
def test_what_is_not_learned_may_be_left_out(prefix):
  drafter = dataclasses.replace(_HYDRA, prefix_attention=prefix)
  params = _params(drafter)
  objective = heads.HeadsObjective(drafter=drafter, teacher_weight=1.0)
  of = jax.jit(jax.value_and_grad(objective, has_aux=True, allow_int=True))
  rows = np.arange(_T) - np.asarray([[6], [5], [6]])
  batch = _BATCH | {'mask': (rows >= 0) & (rows < 4)}
  # From where the last head drafts an answer's first token on; the last of a
  # row's places may be past its end.
  places = np.asarray([[2], [1], [2]]) + np.arange(9)
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


def test_a_target_that_is_trained_has_its_own_loss():
  params = _params(_MEDUSA)
  alone = heads.HeadsObjective(drafter=_MEDUSA)
  both = dataclasses.replace(alone, target_weight=2.0)
  tokens, mask = _BATCH['tokens'], _BATCH['mask']
  cache = _TARGET.init_cache(*tokens.shape)
  output, _ = _TARGET.apply(params['target'], tokens, cache)
  log_probs = _log_softmax(output.logits)
  own = [
    -log_probs[b, t, tokens[b, t + 1]]
    for b, t in np.ndindex(3, _T - 1)
    if mask[b, t + 1]
  ]
  found = both(params, _BATCH)[0] - alone(params, _BATCH)[0]
  np.testing.assert_allclose(found, 2 * np.mean(own), rtol=1e-4)


def test_what_is_masked_out_has_no_gradient():
  params = _params(_HYDRA)
  objective = heads.HeadsObjective(drafter=_HYDRA, teacher_weight=1.0)
  nothing = _BATCH | {'mask': np.zeros_like(_BATCH['mask'])}
  gradient = jax.grad(
    lambda own: objective(params | {'drafter': own}, nothing)[0],
    allow_int=True,
  )(params['drafter'])
  for leaf in jax.tree.leaves(gradient['heads']):
    np.testing.assert_array_equal(leaf, 0)


@pytest.mark.nightly(but=('hybrid',))
@pytest.mark.parametrize(
  'settings',
  [
    {},
    {'token_weight': 0.0, 'teacher_weight': 1.0},
    {
      'token_weight': 0.0,
      'teacher_weight': 1.0,
      'teacher_loss': losses.total_variation,
    },
    {
      'token_weight': 0.0,
      'teacher_weight': 1.0,
      'teacher_loss': losses.negative_log_acceptance,
    },
    {
      'token_weight': 0.0,
      'teacher_weight': 1.0,
      'teacher_loss': losses.hybrid,
    },
    {'slot_weights': slots.d_pace},
  ],
  ids=['tokens', 'teacher', 'acceptance', 'nla', 'hybrid', 'd_pace'],
)
def test_losses_fall_and_drafts_are_kept(settings):
  target = jax.tree.map(lambda x: 2 * x, _TARGET.init(jax.random.key(3)))
  drafter = drafters.Hydra(
    model=_TARGET, num_draft_tokens=_K, prefix_attention=True
  )
  params = {
    'target': target,
    'drafter': drafter.init_params(jax.random.key(1)),
  }
  is_trained = {
    'target': jax.tree.map(lambda _: False, target),
    'drafter': drafter.is_trained(),
  }
  optimizer = optax.adam(3e-3)
  state, frozen = step.init(params, is_trained, optimizer)
  objective = heads.HeadsObjective(drafter=drafter, **settings)
  batch = {'tokens': _greedy_text(target), 'mask': np.ones((64, 32), bool)}
  reports = []
  for _ in range(120):
    state, report = step.train_step(
      state, frozen, batch, objective=objective, optimizer=optimizer
    )
    reports.append(jax.device_get(report))
  first, last = reports[0], reports[-1]
  assert last['loss'] < 0.7 * first['loss']
  assert last['kept'].sum() > first['kept'].sum() + 0.3


def _greedy_text(target):
  """Returns what the target writes after one random token per row."""
  tokens = jnp.asarray(_RNG.integers(_V, size=(64, 1)))

  @jax.jit
  def write(tokens):
    output, _ = _TARGET.apply(target, tokens, _TARGET.init_cache(64, 32))
    return output.logits.argmax(axis=-1)

  padded = jnp.pad(tokens, ((0, 0), (0, 31)))
  for t in range(31):
    padded = padded.at[:, t + 1].set(write(padded)[:, t])
  return np.asarray(padded)
