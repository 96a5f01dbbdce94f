"""The settings of reinforcement learning on sums."""

from collections.abc import Callable, Mapping
import dataclasses
import functools

import gin
import numpy as np
import optax

from experiments import methods as methods_lib
from experiments.decoding import generation
from experiments.reinforcement import arm as arm_lib
from experiments.reinforcement import objective as grpo
from experiments.reinforcement import sums as sums_lib
import specsample
from specsample import checks
from specsample.training import objective as objective_lib
from specsample.training import online


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Reinforcement:
  """The settings of a run of GRPO with AdamW, at a constant rate.

  A step draws `answers` answers to each of `prompts` questions, once with each
  arm, and learns `updates` times from those of the first arm. An epoch asks all
  questions of training once, in an order of its own.
  """

  target: specsample.Loaded  # the policy
  # Ways to draw the rollouts, by name. All have the same key, and take turns.
  arms: Mapping[str, arm_lib.Arm]
  # Makes the objective of the first arm's drafter, given it as `drafter`, if it
  # is to keep learning while the policy moves. None: its weights stay.
  drafter_objective: Callable[..., objective_lib.Objective] | None = None
  steps: int = 36
  seed: int = 0  # of the sums, their order, and all sampling
  largest: int = 10  # number in a sum
  train: int = 36  # sums to train on
  held_out: int = 16  # sums whose reward is reported, at temperature 0
  prompts: int = 4
  answers: int = 4
  max_new_tokens: int = 24  # of an answer; a longer one is cut off
  temperature: float = 0.7
  updates: int = 2  # 0: the policy stays, and rollouts are only compared
  learning_rate: float = 1e-5
  b2: float = 0.99
  weight_decay: float = 0.0
  clip_norm: float = 1.0  # largest norm of the gradient
  clip: float = 0.2
  drafter_learning_rate: float = 3e-4
  evaluate_every: int = 18  # steps between two rewards of the held-out sums
  checkpoint_seconds: float = 120.0

  def __post_init__(self):
    """Refuses invalid settings; the ValueError names one."""
    if not self.arms:
      raise ValueError('Reinforcement.arms is empty: name at least one')
    checks.seed('Reinforcement.seed', self.seed)
    checks.counts(
      self,
      (
        *('steps', 'largest', 'train', 'held_out', 'prompts'),
        *('max_new_tokens', 'evaluate_every'),
      ),
    )
    checks.counts(self, ('answers',), 2)  # each is compared with the others
    checks.counts(self, ('updates',), 0)
    for name in (
      *('temperature', 'learning_rate', 'clip_norm', 'clip'),
      'drafter_learning_rate',
    ):
      checks.field(self, name, getattr(self, name) > 0, 'more than 0')
    for name in ('weight_decay', 'checkpoint_seconds'):
      checks.field(self, name, getattr(self, name) >= 0, 'at least 0')
    if self.train % self.prompts:
      raise ValueError(
        f'Reinforcement.train is {self.train}, no multiple of the '
        f'{self.prompts} prompts of a step: give a multiple'
      )
    room = self.target.model.max_length - self.max_prompt_length
    if self.max_new_tokens > room:
      raise ValueError(
        f'Reinforcement.max_new_tokens is {self.max_new_tokens}, but the '
        f'longest question leaves room for {room}: lower it'
      )
    self.learner  # noqa: B018 (says what is wrong with its settings)

  @property
  def first(self) -> str:
    """The name of the arm that is learned from."""
    return next(iter(self.arms))

  @property
  def greedy_arm(self) -> arm_lib.Arm:
    """The first arm without its drafts, for greedy answers."""
    verify = self.arms[self.first].method.verify
    return dataclasses.replace(
      self.arms[self.first],
      method=methods_lib.Method(specsample.drafters.NoDraft(), verify),
      history_tokens=0,
    )

  @property
  def are_coupled(self) -> bool:
    """Whether all arms are to have the same tokens, whatever they draft."""
    return all(arm.method.verify.positional for arm in self.arms.values())

  @property
  def learns(self) -> bool:
    """Whether steps change anything but the histories."""
    return self.updates > 0 or self.learner is not None

  @property
  def steps_per_epoch(self) -> int:
    """The number of steps that ask every question once."""
    return self.train // self.prompts

  @functools.cached_property
  def objective(self) -> grpo.Grpo:
    """The loss of a step."""
    return grpo.Grpo(
      model=self.target.model, temperature=self.temperature, clip=self.clip
    )

  @functools.cached_property
  def optimizer(self) -> optax.GradientTransformation:
    """The optimizer of the policy."""
    return self._adamw(self.learning_rate)

  @functools.cached_property
  def learner(self) -> online.Learner | None:
    """The learner of the first arm's drafter; None if its weights stay."""
    if self.drafter_objective is None:
      return None
    drafter = self.arms[self.first].method.drafter
    return online.Learner(
      objective=self.drafter_objective(drafter=drafter),
      optimizer=self._adamw(self.drafter_learning_rate),
    )

  def _adamw(self, rate):
    return optax.chain(
      optax.clip_by_global_norm(self.clip_norm),
      optax.adamw(rate, b2=self.b2, weight_decay=self.weight_decay),
    )

  @functools.cached_property
  def questions(self) -> sums_lib.Sums:
    """The sums of training and the held-out ones."""
    return sums_lib.draw(
      seed=self.seed,
      largest=self.largest,
      train=self.train,
      held_out=self.held_out,
    )

  def of_step(self, step: int) -> list[sums_lib.Sum]:
    """Returns the questions of a step; the first step is 0."""
    epoch, place = divmod(step, self.steps_per_epoch)
    order = np.random.default_rng([self.seed, epoch]).permutation(self.train)
    chosen = order[place * self.prompts :][: self.prompts]
    return [self.questions.train[i] for i in chosen]

  def encode(self, question: sums_lib.Sum) -> list[int]:
    """Returns the tokens of a question, as one user turn of a chat."""
    return generation.encode(self.target.tokenizer, question.question, True)

  @functools.cached_property
  def max_prompt_length(self) -> int:
    """The number of tokens of the longest question."""
    questions = (*self.questions.train, *self.questions.held_out)
    return max(len(self.encode(question)) for question in questions)
