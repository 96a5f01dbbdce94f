"""Tokens per round of a drafter in training, counted by the decoding loop."""

from collections.abc import Sequence
from typing import cast

import jax
import numpy as np

from experiments.training import training as training_lib
import specsample
from specsample import stats as stats_lib
from specsample import types
from specsample.types import Params


def choose_prompts(
  training: training_lib.Training, prompts: Sequence[np.ndarray]
) -> list[np.ndarray]:
  """Chooses evenly spaced held-out prompts, and truncates them.

  Returns:
    At most `decoded_prompts` prompts, each cut to its last
    `decoded_prompt_tokens` tokens.

  Raises:
    ValueError: the target has no room for prompts and answers of that length.
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
  return [prompts[i][-training.decoded_prompt_tokens :] for i in chosen]


def decode(
  params: Params,
  prompts: Sequence[np.ndarray],
  training: training_lib.Training,
) -> stats_lib.Stats:
  """Decodes answers at temperature 0, all prompts as one batch.

  The parameters are arguments of the compiled loop, so it is compiled once.

  Args:
    params: the whole tree, in the dtype of the computation.
    prompts: the prompts from `choose_prompts`.
    training: the settings.
  """
  rows, lengths = specsample.pad_prompts([x.tolist() for x in prompts])
  output = specsample.generate(
    params,
    rows,
    lengths,
    jax.random.key(0),
    model=training.target.model,
    drafter=cast(types.Drafter, training.objective.drafter),
    verify=specsample.verify.chain,
    sampling=specsample.Sampling(temperature=0.0),
    max_new_tokens=training.decoded_new_tokens,
    stop=specsample.Stop(eos_ids=training.target.tokenizer.eos_ids),
  )
  return stats_lib.summarize(output)
