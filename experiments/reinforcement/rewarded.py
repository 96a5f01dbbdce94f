"""Rollouts of the policy, with their rewards and what they took."""

from collections.abc import Sequence
import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np

from experiments.command import clock
from experiments.reinforcement import arm as arm_lib
from experiments.reinforcement import reinforcement as reinforcement_lib
from experiments.reinforcement import sums as sums_lib
import specsample
from specsample.types import Array, Params

# The tail of a call is the time in which at most this many answers are missing.
_TAIL = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Rewarded:
  """Answers to questions, with the reward of each."""

  rollouts: specsample.Rollouts
  rewards: np.ndarray  # [N, G] float32
  seconds: float

  def record(self) -> dict[str, Any]:
    """Returns what a journal keeps of them."""
    rollouts = self.rollouts
    stats = specsample.stats.summarize(rollouts)
    tokens = np.asarray(rollouts.tokens).tobytes()
    ends = np.sort(np.ravel(rollouts.seconds))
    begin = ends[-1 - _TAIL] if len(ends) > _TAIL else 0
    return {
      'reward': float(self.rewards.mean()),
      'answers': self.rewards.size,
      'tokens': stats.tokens,
      'rounds': stats.rounds,
      'kept': stats.kept,
      'judged': stats.judged,
      'digest': hashlib.sha256(tokens).hexdigest()[:16],
      'seconds': round(self.seconds, 3),
      'tail_seconds': round(float(ends[-1] - begin), 3),
    }


def draw(
  settings: reinforcement_lib.Reinforcement,
  arm: arm_lib.Arm,
  params: Params,
  questions: Sequence[sums_lib.Sum],
  key: Array,
  *,
  num_answers: int,
  temperature: float,
  history: specsample.History | None = None,
) -> Rewarded:
  """Draws answers to each question, and rewards them.

  Args:
    settings: the sizes and the policy.
    arm: how they are drawn.
    params: the policy's parameters, and those of the arm's drafter if it has
      any.
    questions: N questions.
    key: a key of its own for each call.
    num_answers: G.
    temperature: 0 is greedy.
    history: what is drafted from, if anything; see `specsample.rollout`.
  """
  tokenizer = settings.target.tokenizer
  jax.block_until_ready(params)  # an update may still compute them
  rollouts, seconds = clock.seconds(
    specsample.rollout,
    params,
    [settings.encode(question) for question in questions],
    key,
    model=settings.target.model,
    drafter=arm.method.drafter,
    verify=arm.method.verify,
    sampling=specsample.Sampling(temperature=temperature),
    num_samples=num_answers,
    max_prompt_length=settings.max_prompt_length,
    max_new_tokens=settings.max_new_tokens,
    stop=specsample.Stop(eos_ids=tokenizer.eos_ids),
    batch_size=arm.num_rows,
    fewest_rows=arm.fewest_rows,
    history=history,
  )
  rewards = [
    [
      question.reward(tokenizer.decode(tokens[:length].tolist()))
      for tokens, length in zip(*answers, strict=True)
    ]
    for question, *answers in zip(
      questions,
      *jax.device_get((rollouts.tokens, rollouts.lengths)),
      strict=True,
    )
  ]
  return Rewarded(rollouts, np.asarray(rewards, np.float32), seconds)
