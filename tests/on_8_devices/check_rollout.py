"""Rollouts on a mesh are those of one device, whatever the weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import sharding
from specsample import verify
from specsample.loop import decode
from specsample.models import transformer

_TARGET = transformer.Transformer(
  vocab_size=64,
  num_layers=1,
  dim=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  mlp_dim=24,
  max_length=128,
)
_DRAFT = dataclasses.replace(_TARGET, num_heads=2, mlp_dim=8)
_AXES = {'target': _TARGET.param_axes(), 'drafter': _DRAFT.param_axes()}
_PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [6]]


def _params(seed):
  keys = jax.random.split(jax.random.key(seed))
  return {'target': _TARGET.init(keys[0]), 'drafter': _DRAFT.init(keys[1])}


def _rollout(params, key, num_samples=4):
  return specsample.rollout(
    params,
    _PROMPTS,
    jax.random.key(key),
    model=_TARGET,
    drafter=drafters.Chain(model=_DRAFT, num_draft_tokens=2),
    verify=verify.chain,
    sampling=specsample.Sampling(temperature=0.8, top_p=0.9),
    num_samples=num_samples,
    max_prompt_length=8,
    max_new_tokens=11,
    batch_size=8,
    stop=specsample.Stop(eos_ids=(7,)),
  )


def _num_compiled():
  # Not the small programs that write rows: on Auto axes the compiler decides
  # how a state is divided, and they are compiled for each of its choices.
  parts = (decode._advance, decode._emitted, decode._prefill)
  return [part._cache_size() for part in parts]


@pytest.mark.slow
@pytest.mark.nightly(but=('1x8-auto', '2x4-explicit'))
def test_other_weights_compile_nothing_and_draw_as_on_one_device(mesh):
  expected = [_rollout(_params(seed), seed) for seed in (0, 1)]
  with jax.set_mesh(mesh):
    params = sharding.place(_params(0), _AXES)
    # It gives the old weights away, as a training step does.
    step = jax.jit(
      lambda old, new: jax.tree.map(lambda x, y: 0 * x + y, old, new),
      donate_argnums=0,
      out_shardings=sharding.of_tree(_AXES),
    )
    found = [_rollout(params, 0)]
    before = _num_compiled()
    params = step(params, sharding.place(_params(1), _AXES))
    found.append(_rollout(params, 1))
    assert _num_compiled() == before
  for rollouts, alone in zip(found, expected, strict=True):
    rounded = {
      name: getattr(alone, name)
      for name in ('warped_log_probs', 'model_log_probs')
    }
    for name, values in rounded.items():
      # Sums over a sharded axis are taken in another order.
      np.testing.assert_allclose(getattr(rollouts, name), values, atol=1e-4)
    # Wall time, which no two calls have in common.
    rounded['seconds'] = alone.seconds
    rollouts = dataclasses.replace(rollouts, **rounded)
    jax.tree.map(np.testing.assert_array_equal, rollouts, alone)
  assert np.any(found[0].tokens != found[1].tokens)


@pytest.mark.slow
@pytest.mark.nightly(but=('1x8-auto', '2x4-explicit'))
def test_scores_and_their_gradients_are_those_of_one_device(mesh):
  # The three prompts and their samples are no multiple of the devices.
  rollouts = _rollout(_params(0), 0, num_samples=3)
  target = _params(1)['target']
  temperature = np.asarray([0.8, 1.0, 1.5], np.float32)

  def total(target):
    scores = rollouts.score(target, _TARGET, temperature)
    return jnp.sum(scores), scores

  score = jax.jit(jax.grad(total, has_aux=True))
  expected = score(target)
  with jax.set_mesh(mesh):
    found = score(sharding.place(target, _TARGET.param_axes()))
    found = jax.device_get(found)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), found, expected
  )
