"""A target's own greedy text, and training on it."""

import jax
import numpy as np

import specsample
from specsample import drafters
from specsample import verify
from specsample.training import step


def text(model, target_params, num_rows, length):
  """Returns the target's text [B, length] after one random token per row."""
  prompts = np.random.default_rng(1).integers(
    model.vocab_size, size=(num_rows, 1)
  )
  output = specsample.generate(
    {'target': target_params},
    prompts,
    np.ones(num_rows, int),
    jax.random.key(0),
    model=model,
    drafter=drafters.NoDraft(),
    verify=verify.chain,
    sampling=specsample.Sampling(),
    max_new_tokens=length - 1,
  )
  return np.concatenate([prompts, output.tokens], axis=1)


def train(params, is_trained, tokens, *, objective, optimizer, steps=60):
  """Returns the reports of the first and the last step on one batch."""
  batch = {'tokens': tokens, 'mask': np.ones(tokens.shape, bool)}
  state, frozen = step.init(params, is_trained, optimizer)
  reports = []
  for _ in range(steps):
    state, report = step.train_step(
      state, frozen, batch, objective=objective, optimizer=optimizer
    )
    reports.append(jax.device_get(report))
  return reports[0], reports[-1]
