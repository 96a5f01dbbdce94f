"""Weights that were trained apart have different fingerprints."""

import dataclasses

import jax
import jax.numpy as jnp

from specsample.models import fingerprint


def test_other_weights_have_another(tiny_llama):
  model, params = tiny_llama
  found = fingerprint.compute(params)
  assert fingerprint.compute(model.init(jax.random.key(1))) != found
  changed = jax.tree.map(lambda x: x, params)
  norm = changed['layers'][1]['mlp_norm']
  norm['scale'] = norm['scale'].at[0].multiply(1.1)
  assert fingerprint.compute(changed) != found


def test_of_the_same_weights_it_is_the_same(tiny_llama):
  _, params = tiny_llama
  found = fingerprint.compute(params)
  assert len(found) == 16
  assert int(found, 16) >= 0
  assert fingerprint.compute(jax.tree.map(jnp.array, params)) == found
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  assert fingerprint.compute(rounded) == found


def test_the_number_of_layers_counts(tiny_llama):
  model, params = tiny_llama
  fewer = model.keep_params(params, (0,))
  assert dataclasses.replace(model, num_layers=1) == model.keep_layers((0,))
  assert fingerprint.compute(fewer) != fingerprint.compute(params)
