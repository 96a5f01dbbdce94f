"""Tokens per round of a drafter in training, counted by the decoding loop."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from experiments import methods
from experiments.decoding import setup as setup_lib
from experiments.training import training as training_lib
import specsample
from specsample import stats as stats_lib
from specsample.types import Params


def choose_prompts(
  training: training_lib.Training, prompts: Sequence[np.ndarray]
) -> list[list[int]]:
  """Chooses evenly spaced held-out prompts, and truncates them.

  Returns:
    At most `decoded_prompts` prompts, each cut to its last
    `decoded_prompt_tokens` tokens.
  """
  count = min(training.decoded_prompts, len(prompts))
  room = training.target.model.max_length - training.decoded_new_tokens
  if training.decoded_prompt_tokens > room:
    raise ValueError(
      f'Training.decoded_prompt_tokens is {training.decoded_prompt_tokens} and '
      f'decoded_new_tokens is {training.decoded_new_tokens}, but the target '
      f'takes {training.target.model.max_length} tokens: lower one of them'
    )
  chosen = [i * len(prompts) // count for i in range(count)]
  most = training.decoded_prompt_tokens
  return [prompts[i][-most:].tolist() for i in chosen]


def setup(training: training_lib.Training, params: Params) -> setup_lib.Setup:
  """Returns what decodes with a drafter in training, at temperature 0.

  Args:
    training: the settings.
    params: the whole tree, in the dtype of the computation.
  """
  target = dataclasses.replace(training.target, params=params['target'])
  return setup_lib.Setup(
    target=target,
    method=methods.Method(training.drafter, params=params['drafter']),
    sampling=specsample.Sampling(temperature=0.0),
    max_new_tokens=training.decoded_new_tokens,
    stop=specsample.Stop(eos_ids=target.tokenizer.eos_ids),
  )


def decode(
  setup: setup_lib.Setup, prompts: Sequence[list[int]]
) -> stats_lib.Stats:
  """Decodes all prompts as one batch, and counts tokens and drafts.

  The parameters are arguments of the compiled loop, so it is compiled once.
  """
  return stats_lib.summarize(setup.generate(prompts))
