"""GRPO's loss against numbers and gradients worked out in another way."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reinforcement import objective as objective_lib
import specsample

_TEMPERATURE = 0.7
_LENGTHS = ((3, 2), (1, 3))


@pytest.fixture(scope='module')
def policy(tiny_llama):
  model, params = tiny_llama
  grpo = objective_lib.Grpo(model=model, temperature=_TEMPERATURE, clip=0.2)
  return grpo, {'target': params}


@pytest.fixture(scope='module')
def batch(policy):
  """Two answers to each of two prompts, at the weights that drew them."""
  objective, params = policy
  rollouts = specsample.rollout(
    params,
    [[3, 1, 4, 1], [5, 9]],
    jax.random.key(0),
    model=objective.model,
    drafter=specsample.drafters.NoDraft(),
    verify=specsample.verify.chain,
    sampling=specsample.Sampling(temperature=_TEMPERATURE),
    num_samples=2,
    max_prompt_length=4,
    max_new_tokens=3,
    batch_size=4,
  )
  # As if three of them had ended early.
  rollouts = dataclasses.replace(rollouts, lengths=np.asarray(_LENGTHS))
  advantages = jnp.asarray([[1.0, -1.0], [0.5, -0.5]])
  return {'rollouts': rollouts, 'advantages': advantages}


def _shifted(batch, shift):
  """Returns the batch as if tokens had been drawn with other probabilities."""
  rollouts = batch['rollouts']
  log_probs = rollouts.warped_log_probs + shift
  return batch | {
    'rollouts': dataclasses.replace(rollouts, warped_log_probs=log_probs)
  }


def _gradient(policy, batch):
  objective, params = policy
  return jax.grad(lambda x: objective(x, batch)[0])(params)


def test_advantages_are_of_mean_0_and_deviation_1_within_a_group():
  found = objective_lib.advantages([[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
  third = 1 / np.sqrt(3)
  expected = [[1, -1, -1, 1], [0] * 4, [-third, -third, -third, 3 * third]]
  np.testing.assert_allclose(found, expected, atol=1e-3)


def test_at_the_weights_that_drew_it_the_gradient_is_the_policy_gradient(
  policy, batch
):
  objective, params = policy
  rollouts = batch['rollouts']

  def reinforce(params):
    losses = []
    for n, g in np.ndindex(2, 2):
      prompt = rollouts.prompts[n, : rollouts.prompt_lengths[n]]
      answer = rollouts.tokens[n, g, : _LENGTHS[n][g]]
      tokens = np.concatenate([prompt, answer])[None]
      cache = objective.model.init_cache(1, 0)
      output, _ = objective.model.apply(params['target'], tokens, cache)
      logits = objective.model.unembed(params['target'], output.hidden)[0]
      log_probs = jax.nn.log_softmax(logits / _TEMPERATURE)
      before = np.arange(prompt.size - 1, tokens.size - 1)
      mean = jnp.mean(log_probs[before, answer])
      losses.append(-batch['advantages'][n, g] * mean)
    return jnp.mean(jnp.stack(losses))

  loss, report = objective(params, batch)
  np.testing.assert_allclose(loss, 0, atol=1e-5)  # as are all advantages
  assert report['clipped'] == 0
  expected = jax.tree.leaves(jax.grad(reinforce)(params))
  found = jax.tree.leaves(_gradient(policy, batch))
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


# How probable tokens are, relative to when they were drawn, and which advantage
# still has a gradient then.
@pytest.mark.parametrize(
  ('ratio', 'moving', 'clipped'), [(1.5, -1, 4 / 9), (0.5, 1, 5 / 9)]
)
def test_a_token_that_moved_far_enough_moves_no_further(
  policy, batch, ratio, moving, clipped
):
  objective, params = policy
  batch = _shifted(batch, -np.log(ratio))
  loss, report = objective(params, batch)
  # Per unit of advantage, the same in all answers: their tokens are averaged.
  gain = {1: min(ratio, 1.2), -1: max(ratio, 0.8)}
  expected = -(1 * gain[1] - 1 * gain[-1] + 0.5 * gain[1] - 0.5 * gain[-1]) / 4
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  np.testing.assert_allclose(report['clipped'], clipped)
  for sign in (1, -1):
    advantages = jnp.maximum(sign * batch['advantages'], 0) * sign
    gradient = _gradient(policy, batch | {'advantages': advantages})
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient))
    assert (largest > 1e-4) == (sign == moving)


def test_what_comes_after_an_answer_changes_nothing(policy, batch):
  objective, params = policy
  rollouts = batch['rollouts']
  log_probs, tokens = rollouts.warped_log_probs.copy(), rollouts.tokens.copy()
  log_probs[1, 0, 1:], tokens[1, 0, 1:] = -np.inf, 7
  other = batch | {
    'rollouts': dataclasses.replace(
      rollouts, warped_log_probs=log_probs, tokens=tokens
    )
  }
  loss, _ = objective(params, _shifted(batch, 0.1))
  changed, _ = objective(params, _shifted(other, 0.1))
  np.testing.assert_array_equal(changed, loss)
  for leaf in jax.tree.leaves(_gradient(policy, other)):
    assert jnp.isfinite(leaf).all()
