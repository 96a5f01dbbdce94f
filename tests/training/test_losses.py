"""The losses against their definitions, in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample.training import losses

_SHAPE = (3, 5, 7)


def _softmax(logits):
  weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def _random(seed, shape=_SHAPE):
  return np.random.default_rng(seed).normal(size=shape) * 2


_DRAFT, _TARGET = _random(0), _random(1)


def _kl(probs, other):
  return (probs * np.log(probs / other)).sum(axis=-1)


def _kept(target, draft):
  return np.minimum(target, draft).sum(axis=-1)


def _hybrid(target, draft, weight=None):
  variation = 1 - _kept(target, draft)
  if weight is None:
    weight = np.exp(-3 * _kept(target, draft))
  return weight * _kl(target, draft) + (1 - weight) * variation


def _jsd(target, draft, weight=0.5):
  mixture = weight * target + (1 - weight) * draft
  return weight * _kl(target, mixture) + (1 - weight) * _kl(draft, mixture)


_DEFINITIONS = {
  losses.forward_kl: _kl,
  losses.reverse_kl: lambda target, draft: _kl(draft, target),
  losses.jsd: _jsd,
  losses.total_variation: lambda target, draft: (
    np.abs(target - draft).sum(axis=-1) / 2
  ),
  losses.negative_log_acceptance: lambda target, draft: (
    -np.log(_kept(target, draft))
  ),
  losses.hybrid: _hybrid,
}


@pytest.mark.parametrize('loss', _DEFINITIONS)
def test_is_its_definition(loss):
  target, draft = _softmax(_TARGET), _softmax(_DRAFT)
  expected = _DEFINITIONS[loss](target, draft)
  found = loss(jnp.asarray(_DRAFT), jnp.log(target))
  assert found.shape == _SHAPE[:-1]
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  # The loss of a distribution against itself.
  zero = loss(jnp.asarray(_TARGET), jnp.log(target))
  np.testing.assert_allclose(zero, 0, atol=1e-6)


def test_cross_entropy_is_minus_the_log_probability_of_the_token():
  tokens = np.random.default_rng(2).integers(_SHAPE[-1], size=_SHAPE[:-1])
  found = losses.cross_entropy(jnp.asarray(_DRAFT), jnp.asarray(tokens))
  probs = np.take_along_axis(_softmax(_DRAFT), tokens[..., None], axis=-1)
  np.testing.assert_allclose(found, -np.log(probs[..., 0]), rtol=1e-5)


def test_teacher_gradient_is_that_of_cross_entropy_with_its_distribution():
  target = _softmax(_TARGET)
  soft = jax.grad(
    lambda logits: losses.forward_kl(logits, jnp.log(target)).sum()
  )(jnp.asarray(_DRAFT))
  np.testing.assert_allclose(soft, _softmax(_DRAFT) - target, atol=1e-6)


def _differences(function, logits, step=1e-6):
  """Returns the gradient of the sum of function(probs), by differences."""
  found = np.empty_like(logits)
  for place in np.ndindex(logits.shape):
    ends = []
    for sign in (1, -1):
      moved = logits.copy()
      moved[place] += sign * step
      ends.append(function(_softmax(moved)).sum())
    found[place] = (ends[0] - ends[1]) / (2 * step)
  return found


@pytest.mark.parametrize('loss', _DEFINITIONS)
def test_gradient_is_that_of_differences(loss):
  target, draft = _softmax(_TARGET), _softmax(_DRAFT)
  definition = _DEFINITIONS[loss]
  if loss is losses.hybrid:
    # The gradient treats the weight as a constant.
    weight = np.exp(-3 * _kept(target, draft))
    definition = lambda target, draft: _hybrid(target, draft, weight)
  expected = _differences(lambda draft: definition(target, draft), _DRAFT)
  found = jax.grad(lambda logits: loss(logits, jnp.log(target)).sum())
  np.testing.assert_allclose(
    found(jnp.asarray(_DRAFT)), expected, rtol=1e-3, atol=1e-5
  )


def test_gradient_of_cross_entropy_is_that_of_differences():
  tokens = np.random.default_rng(2).integers(_SHAPE[-1], size=_SHAPE[:-1])
  place = tokens[..., None]
  expected = _differences(
    lambda probs: -np.log(np.take_along_axis(probs, place, axis=-1)), _DRAFT
  )
  found = jax.grad(lambda x: losses.cross_entropy(x, tokens).sum())
  np.testing.assert_allclose(
    found(jnp.asarray(_DRAFT)), expected, rtol=1e-3, atol=1e-5
  )


def test_losses_of_acceptance_by_hand():
  target, logits = jnp.log(jnp.asarray([0.7, 0.3])), jnp.zeros(2)
  of = lambda loss: jax.value_and_grad(loss)(logits, target)
  variation, gradient = of(losses.total_variation)
  np.testing.assert_allclose(variation, 0.2, rtol=1e-5)
  np.testing.assert_allclose(gradient, [-0.25, 0.25], rtol=1e-5)
  value, gradient = of(losses.negative_log_acceptance)
  np.testing.assert_allclose(value, 0.223144, rtol=1e-5)
  np.testing.assert_allclose(gradient, [-0.3125, 0.3125], rtol=1e-5)
  value, gradient = of(losses.hybrid)
  weight = 0.090718  # exp(-3 * 0.8)
  np.testing.assert_allclose(value, 0.189321, rtol=1e-5)
  expected = weight * 0.2 + (1 - weight) * 0.25
  np.testing.assert_allclose(gradient, [-expected, expected], rtol=1e-5)


def test_hybrid_without_sharpness_is_the_divergence():
  logits, target = jnp.asarray(_DRAFT), jnp.log(_softmax(_TARGET))
  np.testing.assert_allclose(
    losses.hybrid(logits, target, 0.0),
    losses.forward_kl(logits, target),
    rtol=1e-5,
  )
  with pytest.raises(ValueError, match='sharpness is -1: give at least 0'):
    losses.hybrid(logits, target, -1)


def test_where_nothing_is_accepted_its_logarithm_has_an_end():
  logits, target = jnp.asarray([40.0, 0.0]), jnp.asarray([-40.0, 0.0])
  value, gradient = jax.value_and_grad(losses.negative_log_acceptance)(
    logits, target
  )
  np.testing.assert_allclose(value, -np.log(1e-5), rtol=1e-5)
  np.testing.assert_array_equal(gradient, 0)


def test_jsd_with_another_weight():
  target, draft = _softmax(_TARGET), _softmax(_DRAFT)
  found = losses.jsd(jnp.asarray(_DRAFT), jnp.log(target), 0.1)
  np.testing.assert_allclose(found, _jsd(target, draft, 0.1), rtol=1e-4)
  with pytest.raises(ValueError, match=r'weight is 1.0: .* between 0 and 1'):
    losses.jsd(jnp.asarray(_DRAFT), jnp.log(target), 1.0)


@pytest.mark.parametrize(
  'loss',
  [
    losses.reverse_kl,
    losses.jsd,
    losses.total_variation,
    losses.negative_log_acceptance,
  ],
)
def test_of_a_part_of_the_vocabulary_is_that_of_a_draft_with_zeros(loss):
  target = _softmax(_TARGET)
  kept = np.asarray([0, 2, 3, 6])
  draft = np.zeros(_SHAPE)
  draft[..., kept] = _softmax(_DRAFT[..., kept])
  with np.errstate(all='ignore'):
    term = lambda probs, other: np.nan_to_num(probs * np.log(probs / other))
    mixture = (target + draft) / 2
    expected = {
      losses.reverse_kl: term(draft, target).sum(axis=-1),
      losses.jsd: (term(target, mixture) + term(draft, mixture)).sum(-1) / 2,
      losses.total_variation: np.abs(target - draft).sum(axis=-1) / 2,
      losses.negative_log_acceptance: -np.log(_kept(target, draft)),
    }[loss]
  found = loss(jnp.asarray(_DRAFT[..., kept]), jnp.log(target[..., kept]))
  np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize('loss', _DEFINITIONS)
def test_tokens_that_cannot_be_have_no_part_in_value_or_gradient(loss):
  padded = lambda logits: jnp.pad(
    jnp.asarray(logits), ((0, 0), (0, 0), (0, 2)), constant_values=-jnp.inf
  )
  log_probs = jnp.log(_softmax(_TARGET))
  value = lambda logits, target: loss(logits, target).sum()
  expected = jax.value_and_grad(value)(jnp.asarray(_DRAFT), log_probs)
  found = jax.value_and_grad(value)(padded(_DRAFT), padded(log_probs))
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
  np.testing.assert_allclose(found[1][..., :-2], expected[1], atol=1e-6)
  np.testing.assert_array_equal(found[1][..., -2:], 0)


def test_bfloat16_logits_are_computed_on_in_float32():
  rounded = jnp.asarray(_DRAFT, jnp.bfloat16)
  log_probs = jnp.log(_softmax(_TARGET))
  for loss in _DEFINITIONS:
    found = loss(rounded, log_probs)
    assert found.dtype == jnp.float32
    expected = loss(rounded.astype(jnp.float32), log_probs)
    np.testing.assert_array_equal(found, expected)


def test_masked_mean_reads_nothing_where_the_mask_is_not_set():
  values = jnp.asarray([[1.0, jnp.inf, 2.0], [jnp.nan, 6.0, jnp.nan]])
  mask = jnp.asarray([[1, 0, 1], [0, 1, 0]], bool)
  assert losses.masked_mean(values, mask) == 3
  assert losses.masked_mean(values, jnp.zeros_like(mask)) == 0
