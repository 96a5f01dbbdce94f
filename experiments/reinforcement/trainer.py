"""The loop of reinforcement learning: rollouts, rewards, updates, a checkpoint.

A run gives the same numbers however often it is interrupted: a step's questions
and key follow from its number, and what earlier steps left in the histories is
journalled. Steps that a kill lost are taken again. `auto` and costs of rounds
are timed once per machine and may choose other drafters on another one; the
header has the drafters, so that such a run is refused.
"""

from collections.abc import Mapping
import dataclasses
import time
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np

from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import progress
from experiments.reinforcement import arm as arm_lib
from experiments.reinforcement import objective as grpo
from experiments.reinforcement import reinforcement as reinforcement_lib
from experiments.reinforcement import rewarded
from experiments.training import train_state
from experiments.training import trainer as trainer_lib
from specsample import types
from specsample.models import fingerprint
from specsample.models import packed
from specsample.training import online
from specsample.training import step as step_lib
from specsample.types import Array, Params

# The journal's keys are (one of these, steps taken before).
STEP, HELD_OUT = 'step', 'held out'

_Histories = Mapping[str, arm_lib.History | None]


@types.pytree
class State:
  """All that a checkpoint has to hold."""

  step: Array  # [] int32, steps taken
  policy: step_lib.TrainState | None  # of a policy that learns
  drafter: step_lib.TrainState | None  # of a drafter that learns


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trainer:
  """A run that resumes from its checkpoints and journal."""

  settings: reinforcement_lib.Reinforcement
  journal: journal_lib.Journal
  checkpoints: train_state.Checkpoints

  def run(self) -> Params:
    """Takes all steps that are left; returns the policy's parameters.

    A step is journalled before its checkpoint is written. If a kill comes in
    between, the step is taken again, and gives the same numbers.

    Raises:
      LossError: names the step; the checkpoint before it stays.
      ValueError: a checkpoint cannot be read or written.
    """
    settings = self.settings
    state, frozen = self._begin()
    state = self.checkpoints.restore(state) or state
    first = int(state.step)
    if not settings.learns:  # so that no checkpoints are kept
      first = len(self.journal.of(STEP))
    elif first and (STEP, first - 1) not in self.journal:
      train_state.refuse_step(first, 'policy')
    histories = self._histories(first)
    saved_at = time.monotonic()
    with progress.bar(settings.steps - first) as step:
      for number in range(first, settings.steps):
        step(self._description(number))
        if number % settings.evaluate_every == 0:
          self._evaluate(number, state, frozen)
        state, record = self._step(number, state, frozen, histories)
        self._write((STEP, number), record | {'begins': number == first})
        is_last = number + 1 == settings.steps
        age = time.monotonic() - saved_at
        if settings.learns and (is_last or age >= settings.checkpoint_seconds):
          self.checkpoints.save(state)
          saved_at = time.monotonic()
    self._evaluate(settings.steps, state, frozen)
    return self._policy(state, frozen)

  def _begin(self) -> tuple[State, '_Frozen']:
    """Returns the state before the first step, and what no step changes."""
    settings = self.settings
    params = {'target': settings.target.params}
    policy, frozen = None, None
    if settings.updates:
      policy, frozen = step_lib.init(
        params,
        jax.tree.map(lambda _: True, params),
        settings.optimizer,
        settings.target.model.dtype,
      )
    step = jnp.zeros((), jnp.int32)
    if settings.learner is None:
      return State(step=step, policy=policy, drafter=None), _Frozen(frozen)
    params |= {'drafter': settings.arms[settings.first].method.params}
    learned = online.init(params, settings.learner)
    state = State(step=step, policy=policy, drafter=learned.train)
    return state, _Frozen(frozen, learned.frozen)

  def _histories(self, num_steps: int) -> _Histories:
    """Returns the history of each arm as that many steps left it."""
    histories = {}
    for name, arm in self.settings.arms.items():
      history = arm.new_history(self.settings.target.model.vocab_size)
      if history is not None:
        for record in self.journal.of(STEP)[:num_steps]:
          for text in record['arms'][name]['history']:
            history.add(text)
      histories[name] = history
    return histories

  def _description(self, number: int) -> str:
    text = f'step {number + 1} of {self.settings.steps}'
    if number == 0:
      return text
    arms = self.journal[STEP, number - 1]['arms']
    return f'{text}, reward {arms[self.settings.first]["reward"]:.2f}'

  def _step(
    self, number: int, state: State, frozen: '_Frozen', histories: _Histories
  ) -> tuple[State, dict[str, Any]]:
    """Takes a step; returns the state, and what is journalled."""
    settings = self.settings
    drawn = {}
    # The arms take turns at being first.
    names = list(settings.arms)
    turn = number % len(names)
    for name in names[turn:] + names[:turn]:
      drawn[name] = self._draw(name, number, state, frozen, histories[name])
    begin = time.monotonic()
    found, _ = drawn[settings.first]
    policy, updates = self._learn(number, state.policy, frozen, found)
    state = dataclasses.replace(state, step=state.step + 1, policy=policy)
    state, report = self._teach(state, frozen, found)
    return state, {
      'arms': {name: drawn[name][1] for name in names},
      'updates': updates,
      'drafter': report,
      'update_seconds': round(time.monotonic() - begin, 3),
    }

  def _draw(self, name, number, state, frozen, history):
    """Draws a step's rollouts with an arm; returns them and their record."""
    settings = self.settings
    num_texts = len(history.texts) if history else 0
    found = rewarded.draw(
      settings,
      settings.arms[name],
      self._params(name, state, frozen),
      settings.of_step(number),
      jax.random.fold_in(jax.random.key(settings.seed), number),
      num_answers=settings.answers,
      temperature=settings.temperature,
      history=history,
    )
    texts = history.texts[num_texts:] if history else []
    return found, found.record() | {'history': texts}

  def _learn(self, number, policy, frozen, found):
    """Moves the policy; returns its state, and a report of each update."""
    settings = self.settings
    batch: dict[str, Any] = {
      'rollouts': found.rollouts,
      'advantages': grpo.advantages(found.rewards),
    }
    reports = []
    for _ in range(settings.updates):
      policy, report = step_lib.train_step(
        policy,
        frozen.policy,
        batch,
        objective=settings.objective,
        optimizer=settings.optimizer,
        dtype=settings.target.model.dtype,
      )
      trainer_lib.check_finite(report, number + 1)
      reports.append({name: float(x) for name, x in report.items()})
    return policy, reports

  def _teach(self, state, frozen, found):
    """Updates a drafter that learns; returns the state, and a report."""
    learner = self.settings.learner
    if learner is None:
      return state, {}
    learned, report = online.learn(
      found.rollouts.documents(),
      online.Learned(train=state.drafter, frozen=frozen.drafter),
      learner,
      target=self._policy(state, frozen),
    )
    state = dataclasses.replace(state, drafter=learned.train)
    return state, {name: np.asarray(x).tolist() for name, x in report.items()}

  def _policy(self, state: State, frozen: '_Frozen') -> Params:
    """Returns the policy's parameters, stored as decoding reads them."""
    target = self.settings.target
    if state.policy is None:
      return target.params
    params = step_lib.join(
      state.policy.trained, frozen.policy, target.model.dtype
    )
    return packed.like(params['target'], target.params)

  def _params(self, name: str, state: State, frozen: '_Frozen') -> Params:
    """Returns the parameters that an arm decodes with."""
    params = {'target': self._policy(state, frozen)}
    own = self.settings.arms[name].method.params
    if own is None:
      return params
    learner = self.settings.learner
    if name == self.settings.first and learner and state.drafter:
      learned = online.Learned(train=state.drafter, frozen=frozen.drafter)
      now = online.params_of(learned, learner)['drafter']
      own = packed.like(now, own)
    return params | {'drafter': own}

  def _evaluate(self, number: int, state: State, frozen: '_Frozen') -> None:
    """Journals the reward of greedy answers to the held-out questions."""
    if (HELD_OUT, number) in self.journal:
      return
    settings = self.settings
    found = rewarded.draw(
      settings,
      settings.greedy_arm,
      {'target': self._policy(state, frozen)},
      settings.questions.held_out,
      jax.random.key(settings.seed),
      num_answers=1,
      temperature=0.0,
    )
    self._write((HELD_OUT, number), {'steps': number, **found.record()})

  def _write(self, key: tuple, value: dict[str, Any]) -> None:
    if key not in self.journal:
      self.journal.add(key, value)


class _Frozen(NamedTuple):
  """The parameters that no step changes; see `training.step`."""

  policy: Params = None
  drafter: Params = None


def header(settings: reinforcement_lib.Reinforcement) -> dict[str, Any]:
  """Returns what a run that continues must share with the one before.

  This includes the questions' tokens, because a chat template may change.
  """
  questions = (*settings.questions.train, *settings.questions.held_out)
  tokens = [settings.encode(question) for question in questions]
  return {
    'configuration': gin.config_str(),
    'tokens of the questions': journal_lib.digest(tokens),
    'target': settings.target.fingerprint,
    'drafters': journal_lib.digest(
      [arm.method.drafter for arm in settings.arms.values()]
    ),
    'drafter weights': [
      fingerprint.compute(arm.method.params) for arm in settings.arms.values()
    ],
    'code of the arms': {
      name: environment.source_beside(arm.method)
      for name, arm in settings.arms.items()
    },
    **environment.identity(),
  }
