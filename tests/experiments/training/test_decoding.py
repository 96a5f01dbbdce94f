"""A drafter's tokens per round in training, by the decoding loop itself."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.training import held_out
from experiments.training import training as training_lib
import specsample
from specsample import testing
from specsample.training import heads


@pytest.fixture(scope='module')
def training(checkpoint):
  target = specsample.load(checkpoint)
  drafter = specsample.drafters.Medusa(model=target.model, num_draft_tokens=2)
  return training_lib.Training(
    target=target,
    objective=heads.HeadsObjective(drafter=drafter),
    decoded_prompts=3,
    decoded_prompt_tokens=5,
    decoded_new_tokens=12,
  )


_PROMPTS = [np.arange(i, i + 4 + i, dtype=np.int32) for i in range(7)]


def test_prompts_are_spread_evenly_and_cut(training):
  chosen = held_out.choose_prompts(training, _PROMPTS)
  assert chosen == [[0, 1, 2, 3], [3, 4, 5, 6, 7], [7, 8, 9, 10, 11]]
  many = dataclasses.replace(training, decoded_prompts=100)
  assert len(held_out.choose_prompts(many, _PROMPTS)) == 7
  large = dataclasses.replace(training, decoded_prompt_tokens=501)
  with pytest.raises(ValueError, match='the target takes 512 tokens: lower'):
    held_out.choose_prompts(large, _PROMPTS)


def test_other_weights_are_no_other_executable(training, num_compiled):
  drafter = training.objective.drafter
  own = drafter.init_params(jax.random.key(0))
  prompts = held_out.choose_prompts(training, _PROMPTS)

  def decode(own):
    params = {'target': training.target.params, 'drafter': own}
    return held_out.decode(held_out.setup(training, params), prompts)

  first = decode(own)
  count = num_compiled()
  other = decode(testing.with_noise(own, jax.random.key(1)))
  assert num_compiled() == count
  for found in (first, other):
    assert found.tokens == 3 * 12
    assert 12 <= found.rounds <= 3 * 12
