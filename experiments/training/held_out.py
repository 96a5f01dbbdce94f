"""Evaluation of a drafter on prompts and answers that it was not trained on.

The decoding loop answers prompts (`decode`), and answers of the target are
replayed (`evaluate`): at temperature 0 the target's own answer determines which
draft tokens it keeps. So one pass over the answer yields every draft token that
would be right, and walking through them round by round gives the counts of
decoding, without decoding.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from experiments import methods
from experiments.decoding import setup as setup_lib
from experiments.training import training as training_lib
import specsample
from specsample import sharding
from specsample import stats as stats_lib
from specsample.training import objective as objective_lib
from specsample.types import Params


def evaluate(
  params: Any,
  batches: Iterable[Mapping[str, np.ndarray]],
  objective: objective_lib.Objective,
  eos_ids: Sequence[int] = (),
) -> tuple[float, stats_lib.Stats]:
  """Returns the mean loss, and the counts of greedy decoding.

  Args:
    params: the whole tree, in the dtype of the computation.
    batches: batches of greedy answers.
    objective: the objective that is trained.
    eos_ids: the tokens that end an answer; other answers end at their limit.
  """
  losses, weights, counts = [], [], []
  for batch in batches:
    loss, matches = _evaluate(params, place(batch), objective=objective)
    losses.append(float(loss))
    weights.append(batch['mask'].sum())
    ends = np.isin(batch['tokens'], eos_ids)
    counts.append(replay(np.asarray(matches), batch['mask'], ends))
  total = functools.reduce(lambda a, b: a + b, counts)
  return float(np.average(losses, weights=weights)), total


def replay(
  matches: np.ndarray, mask: np.ndarray, ends: np.ndarray
) -> stats_lib.Stats:
  """Counts the rounds in which greedy decoding writes the answers.

  Args:
    matches: [K, B, T] bool, as `objective.Objective.matches`.
    mask: [B, T] bool, the tokens of the answers; each contiguous run in a row
      is an answer.
    ends: [B, T] bool, the tokens that end a text. An answer that ends with any
      other token was cut at its limit.
  """
  num_drafts = len(matches)
  leading = np.cumprod(matches, axis=0, dtype=np.int32).sum(axis=0)
  proposed = np.zeros(num_drafts + 1, int)
  accepted = np.zeros(num_drafts + 1, int)
  edges = np.diff(mask.astype(int), axis=1, prepend=0, append=0)
  for kept, edge, is_end in zip(leading, edges, ends, strict=True):
    starts, stops = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
    for pending, last in zip(starts - 1, stops - 1, strict=True):
      while pending < last:
        # A round emits the kept drafts and one more token, up to the limit.
        room = num_drafts if is_end[last] else last - pending - 1
        drafted = min(num_drafts, room)
        emitted = min(kept[pending], drafted)
        proposed[drafted] += 1
        accepted[emitted] += 1
        pending += emitted + 1
  return stats_lib.Stats(
    tokens=int(mask.sum()),
    rounds=int(proposed.sum()),
    proposed=tuple(proposed.tolist()),
    accepted=tuple(accepted.tolist()),
  )


def place(batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Returns the batch on the devices, with its rows and tokens sharded."""
  tokens = lambda name: None if name == 'starts' else 'tokens'
  axes = {
    k: ('batch', tokens(k), *[None] * (x.ndim - 2)) for k, x in batch.items()
  }
  return sharding.place(dict(batch), axes)


@functools.partial(jax.jit, static_argnames=('objective',))
def _evaluate(params, batch, *, objective):
  loss, _ = objective(params, batch)
  return sharding.replicate((loss, objective.matches(params, batch)))


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
