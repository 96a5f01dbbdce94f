"""The settings of an evaluation, and how it decodes."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import reprlib
from typing import Annotated, Any

import gin
import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.decoding import prompts as prompts_lib
from experiments.decoding import setup as setup_lib
from experiments.tasks import source as source_lib
from experiments.tasks import task as task_lib
import specsample
from specsample import checks
from specsample import settings
from specsample import types
from specsample.training import online

# See `Evaluation.repeats`.
REPEATS = 8
FEWEST_TO_TIME = 4


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation(settings.Settings):
  """A comparison of methods over prompts, which are decoded in batches.

  Under a mesh the rows of a batch are sharded over its data axis. A prompt's
  tokens do not depend on the batch.
  """

  target: specsample.Loaded
  methods: dict[str, methods_lib.Method]
  sampling: specsample.Sampling = specsample.Sampling()
  max_new_tokens: int = 128
  # The most new tokens of each prompt: prompts take these numbers in turn. ()
  # stands for `max_new_tokens`, which none of them may exceed.
  answer_limits: Sequence[int] = ()
  task: task_lib.Task | None = None  # source of the prompts; None: --prompts
  limit: settings.Count | None = None  # use this many of the first prompts
  # Decode at most this many turns of each conversation; None for all of them.
  max_turns: settings.Count | None = None
  chat: bool = True  # without a task: whether a prompt is a turn of a chat
  seed: int = 0
  num_seeds: settings.Count = 1  # samples per prompt, unless decoding is greedy
  batch_size: settings.Count = 1
  # Shorter prompts are padded to this many tokens: fewer programs are compiled.
  least_width: settings.Count = 1
  # Whether the policies of a method begin a batch with what they learned from
  # the batches before. If so, the tokens of a prompt are drawn as if it were
  # alone only at temperature 0; their distribution stays the same.
  carry_policies: bool = False
  # Whether all prompts are also decoded in `batch_size` rows that are refilled
  # as soon as they are done: see `refilled`.
  refill: bool = False
  # Makes the learner of each method that learns while it drafts, by its name in
  # `methods`: {'draft, learning': @learning.learner}.
  learners: Mapping[str, Callable[..., online.Learner]] = dataclasses.field(
    default_factory=dict
  )
  # How often the parts of a round are timed. 0 skips the timing, which saves
  # time, but then nothing is predicted. None is `REPEATS` or, for fewer than
  # `FEWEST_TO_TIME` prompts, which the timing would outlast, 0.
  repeats: Annotated[int, settings.at_least(0)] | None = None

  def _check(self):
    """Checks the settings, and fits the methods to the batch size."""
    super()._check()
    if not self.methods:
      raise ValueError('Evaluation.methods is empty: name at least one')
    checks.seed('Evaluation.seed', self.seed, self.num_seeds)
    if not all(
      settings.is_count(limit) and limit <= self.max_new_tokens
      for limit in self.answer_limits
    ):
      raise ValueError(
        f'Evaluation.answer_limits is {self.answer_limits}: give numbers from '
        f'1 to Evaluation.max_new_tokens, which is {self.max_new_tokens}'
      )
    for name in ('refill', 'answer_limits'):
      if self.learners and (value := getattr(self, name)):
        raise ValueError(
          f'Evaluation.{name} is {value}, but Evaluation.learners makes '
          f'{", ".join(self.learners)} learn, which decodes static batches of '
          'max_new_tokens: leave one of them out'
        )
    if self.refill and self.carry_policies:
      raise ValueError(
        'Evaluation.refill and Evaluation.carry_policies are both True, but '
        'the policies of a refilled row begin with what they know at first: '
        'bind one of them to False'
      )
    fitted = {
      name: methods_lib.remake(method, batch_size=self.batch_size)
      for name, method in self.methods.items()
    }
    object.__setattr__(self, 'methods', fitted)
    if self.carry_policies and jax.process_count() > 1:
      raise ValueError(
        'Evaluation.carry_policies is True, which works in one process only, '
        f'but there are {jax.process_count()}: bind it to False, after '
        'configs/runs/quickstart.gin for one'
      )

  def encode(self, path: str, prompt: prompts_lib.Prompt) -> list[int]:
    """Returns the tokens of the prompt, or of a conversation's first turn."""
    where = f'{path}, line {prompt.line}'
    try:
      tokens = prompts_lib.encode(
        self.target.tokenizer, prompt.text, self.is_chat, prompt.system
      )
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from error
    room = self.target.model.max_length
    if not tokens:
      raise ValueError(
        f'{where}: the tokenizer has no tokens for the prompt '
        f'{reprlib.repr(prompt.text)}: correct it'
      )
    if len(tokens) >= room:
      raise ValueError(
        f'{where}: a prompt of {len(tokens)} tokens is too long, because the '
        f'model takes {room}, including the answer: shorten it'
      )
    return tokens

  def check(self, tokens: Sequence[list[int]]) -> None:
    """Refuses settings that cannot decode the prompts' tokens."""
    for method in self.methods.values():
      self.setup(method).check(tokens)

  @property
  def is_chat(self) -> bool:
    """Whether a prompt is a turn of a chat."""
    return self.chat if self.task is None else self.task.chat

  @property
  def samples(self) -> int:
    """The number of times that each prompt is decoded; 1 if greedy."""
    return self.num_seeds if self.sampling.temperature != 0 else 1

  def batches(self, num_prompts: int) -> list[range]:
    """Returns the indices of the prompts in each batch."""
    return [
      range(start, min(start + self.batch_size, num_prompts))
      for start in range(0, num_prompts, self.batch_size)
    ]

  def limits(self, request_ids: Sequence[int]) -> np.ndarray:
    """Returns the most new tokens of each request, [B] int32."""
    limits = np.asarray(self.answer_limits or (self.max_new_tokens,), np.int32)
    return limits[np.asarray(request_ids) % len(limits)]

  def num_repeats(self, num_prompts: int) -> int:
    """Returns how often the parts of a round are timed; see `repeats`."""
    if self.repeats is not None:
      return self.repeats
    return REPEATS if num_prompts >= FEWEST_TO_TIME else 0

  def typical(
    self, tokens: Sequence[list[int]], shorter: float = 0.5
  ) -> list[list[int]]:
    """Returns a batch of prompts of about the same length.

    `shorter` is the share of prompts, from 0 to 1, that are shorter than these.
    """
    rows, size = sorted(tokens, key=len), self.batch_size
    middle = int(shorter * len(rows))
    start = max(0, min(middle - size // 2, len(rows) - size))
    return rows[start : start + size]

  def warm_up(
    self,
    method: methods_lib.Method,
    prompts: Sequence[list[int]],
    request_ids: Sequence[int],
  ) -> None:
    """Compiles everything that `decode` runs, by running it."""
    drafter: Any = method.drafter  # the protocol has no policies
    carries = self.carry_policies and drafter.policies
    setup = self.setup(method, policies=drafter.untaught() if carries else None)
    limits = self.limits(request_ids)
    setup_lib.warm_up(
      lambda rows: setup.prefill(rows, request_ids=request_ids, limits=limits),
      lambda state: setup.finish(setup.advance(state, 1), len(prompts)),
      prompts,
      setup.decoder.widths,
    )

  def decode(
    self,
    method: methods_lib.Method,
    prompts: Sequence[list[int]],
    request_ids: Sequence[int],
    sample: int = 0,
    policies: Any = None,
  ) -> tuple[specsample.Output, types.DecodeState]:
    """Decodes prompts as one batch; also returns the last state.

    Each sample has its own seed, counted from `seed`, and each request id
    selects a random stream. `policies` is what the method's policies already
    know.
    """
    setup = self.setup(method, sample, policies)
    limits = self.limits(request_ids)
    state = setup.prefill(prompts, request_ids=request_ids, limits=limits)
    state = setup.advance(state)
    return setup.finish(state, len(prompts)), state

  def setup(
    self, method: methods_lib.Method, sample: int = 0, policies: Any = None
  ) -> setup_lib.Setup:
    """Returns the setup for a method; the arguments are those of `decode`."""
    return setup_lib.Setup(
      target=self.target,
      method=method,
      sampling=self.sampling,
      max_new_tokens=self.max_new_tokens,
      stop=specsample.Stop(eos_ids=self.target.tokenizer.eos_ids),
      seed=self.seed + sample,
      policies=policies,
      least_width=self.least_width,
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Part:
  """One setting of a run: an evaluation, its prompts, and what is finished."""

  evaluation: Evaluation
  tokens: Sequence[list[int]]  # of each prompt, as the model reads it
  prompts: Sequence[prompts_lib.Prompt] = ()
  # A `journal.Journal`, which is opened when all parts have been checked.
  journal: Any = None
  name: str = ''  # '' for the single configured one
  benchmark: str = ''  # the name of its prompts
  configured: Any = None  # the `Evaluation` before flags changed it
  # The task's data set, as it was when it was read; None without a task.
  provenance: source_lib.Provenance | None = None
  # By the methods that learn.
  learners: Mapping[str, online.Learner] = dataclasses.field(
    default_factory=dict
  )
