"""A server of prompts whose drafter learns, and a control that does not."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
import time
from typing import Any, cast

import gin
import jax
import numpy as np
import optax

from experiments import methods as methods_lib
from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import progress
from experiments.decoding import generation
from experiments.decoding import prompts as prompts_lib
from experiments.training import train_state
import specsample
from specsample import checks
from specsample.drafters import trainable
from specsample.models import fingerprint
from specsample.training import objective as objective_lib
from specsample.training import online
from specsample.types import Output

# The journal's keys are (one of these, batch).
LEARNING, CONTROL = 'learning', 'control'
ARMS = (CONTROL, LEARNING)
# Settings are chosen on prompts 0, 2, ... of a file; the others are reported.
SPLITS = ('tuning', 'reported')


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Serving:
  """The settings of the server and of its learning; see `online.Learner`.

  The optimizer is Adam at a constant rate, with the gradient clipped.
  """

  target: specsample.Loaded
  method: methods_lib.Method
  # Makes the objective, given the method's drafter as `drafter`.
  objective: Callable[..., objective_lib.Objective]
  sampling: specsample.Sampling = specsample.Sampling()
  max_new_tokens: int = 128
  chat: bool = True  # whether a prompt is one user turn of a chat
  split: str = 'reported'  # one of SPLITS, the half of the prompts to serve
  seed: int = 0  # of the order of the prompts, and of all sampling
  batch_size: int = 8
  learning_rate: float = 3e-4
  b2: float = 0.99
  clip_norm: float = 1.0
  rounds: int = 16
  rejected_only: bool = True
  window: int = 128
  num_steps: int = 1
  windows: int = 6  # equal parts of the run, each with its own acceptance

  def __post_init__(self):
    """Refuses a drafter that cannot learn, and settings that serve nothing."""
    checks.counts(self, ('batch_size', 'max_new_tokens', 'windows'))
    checks.seed('Serving.seed', self.seed)
    is_known = self.split in SPLITS
    checks.field(self, 'split', is_known, ' or '.join(map(repr, SPLITS)))
    for name in ('learning_rate', 'clip_norm'):
      checks.field(self, name, getattr(self, name) > 0, 'more than 0')
    self.learner  # noqa: B018 (says what is wrong with its settings)
    checks.instance(
      *('Serving.method.drafter', self.drafter, trainable.Trainable),
      'give one that specsample.save_drafter can save, such as DraftModel',
    )

  @property
  def drafter(self) -> trainable.Trainable:
    """The drafter that learns."""
    return cast(trainable.Trainable, self.method.drafter)

  @functools.cached_property
  def learner(self) -> online.Learner:
    """The `online.Learner` with these settings."""
    return online.Learner(
      objective=self.objective(drafter=self.drafter),
      optimizer=optax.chain(
        optax.clip_by_global_norm(self.clip_norm),
        optax.adam(self.learning_rate, b2=self.b2),
      ),
      rounds=self.rounds,
      rejected_only=self.rejected_only,
      window=self.window,
      num_steps=self.num_steps,
    )

  @property
  def params(self) -> Any:
    """The whole parameter tree, before anything is learned."""
    return methods_lib.all_params(self.target, self.method)

  def batches(
    self, path: str, prompts: Sequence[prompts_lib.Prompt]
  ) -> list['Batch']:
    """Returns the tokens of the split's prompts, in the order of serving.

    Raises:
      ValueError: the model cannot take a prompt, or there are fewer batches
        than windows.
    """
    order = np.random.default_rng(self.seed).permutation(len(prompts))
    order = order[order % len(SPLITS) == SPLITS.index(self.split)]
    rows = []
    for i in order:
      tokens = generation.encode(
        self.target.tokenizer, prompts[i].text, self.chat, prompts[i].system
      )
      room = self.target.model.max_length
      if not tokens or len(tokens) >= room:
        raise ValueError(
          f'{path}, line {prompts[i].line}: the prompt has {len(tokens)} '
          f'tokens, but the model takes 1 to {room - 1}: correct it'
        )
      rows.append(tokens)
    # One width for all, so that decoding is compiled once.
    padded, lengths = specsample.pad_prompts(rows)
    size = self.batch_size
    batches = [
      Batch(padded[i : i + size], lengths[i : i + size], order[i : i + size])
      # An incomplete last batch would need another program: it is left out.
      for i in range(0, len(rows) - size + 1, size)
    ]
    if len(batches) < self.windows:
      raise ValueError(
        f'{path} has {len(rows)} prompts of the split {self.split!r}, '
        f'{len(batches)} batches of {size}, but Serving.windows is '
        f'{self.windows}: give more prompts, smaller batches or fewer windows'
      )
    return batches


@dataclasses.dataclass(frozen=True)
class Batch:
  """Prompts that are decoded together."""

  prompts: np.ndarray  # [B, P] int32
  lengths: np.ndarray  # [B] int32
  numbers: np.ndarray  # [B], indices of the prompts in the file: request ids


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Server:
  """A server that resumes from its checkpoints and journal."""

  serving: Serving
  batches: list[Batch]
  journal: journal_lib.Journal
  checkpoints: train_state.Checkpoints

  def run(self) -> online.Learned:
    """Serves all batches; returns what was learned after the last one.

    A batch is journalled before its checkpoint is written. If a kill comes in
    between, the batch is served again, and gives the same numbers.
    """
    serving = self.serving
    learned = online.init(serving.params, serving.learner)
    found = self.checkpoints.restore(learned.train)
    if found is not None:
      learned = dataclasses.replace(learned, train=found)
    first = self._num_done(int(learned.train.step))
    total, compiled = len(self.batches), set()
    with progress.bar(total - first) as step:
      for number in range(first, total):
        step(f'batch {number + 1} of {total}')
        if (CONTROL, number) not in self.journal:
          record = self._control(number)
          record['compiled'] = CONTROL not in compiled
          compiled.add(CONTROL)
          self._write((CONTROL, number), record)
        learned, record = self._learning(number, learned)
        record['compiled'] = LEARNING not in compiled
        compiled.add(LEARNING)
        self._write((LEARNING, number), record)
        self.checkpoints.save(learned.train)
    return learned

  def _num_done(self, step: int) -> int:
    """Returns the number of batches before the checkpoint of a step."""
    if not step:
      return 0
    steps = [record['step'] for record in self.journal.of(LEARNING)]
    if step not in steps:
      train_state.refuse_step(step, 'drafter')
    return steps.index(step) + 1

  def _control(self, number) -> dict[str, Any]:
    serving = self.serving
    begin = time.monotonic()
    output = specsample.generate(
      serving.params,
      **self._arguments(number),
      drafter=serving.drafter,
    )
    return _record(output, begin)

  def _learning(self, number, learned):
    begin = time.monotonic()
    output, learned, reports = online.generate(
      learned, **self._arguments(number), learner=self.serving.learner
    )
    record = _record(output, begin)
    names = ('loss', 'loss_after', 'recorded')
    return learned, record | {
      'step': int(learned.train.step),
      'undone': sum(not report['is_finite'] for report in reports),
      'updates': [{name: _json(x[name]) for name in names} for x in reports],
    }

  def _arguments(self, number) -> dict[str, Any]:
    serving, batch = self.serving, self.batches[number]
    return {
      'prompts': batch.prompts,
      'lengths': batch.lengths,
      'key': jax.random.key(serving.seed),
      'request_ids': batch.numbers.astype(np.int32),
      'model': serving.target.model,
      'verify': serving.method.verify,
      'sampling': serving.sampling,
      'max_new_tokens': serving.max_new_tokens,
      'stop': specsample.Stop(eos_ids=serving.target.tokenizer.eos_ids),
    }

  def _write(self, key, value) -> None:
    if key not in self.journal:
      self.journal.add(key, value)


def header(
  serving: Serving,
  prompts: Sequence[prompts_lib.Prompt],
  batches: Sequence[Batch],
) -> dict[str, Any]:
  """Returns what a run that continues must share with the one before.

  This includes the tokens: a chat template may change, or write today's date.
  """
  texts = [(prompt.system, prompt.text) for prompt in prompts]
  tokens = [batch.prompts.tolist() for batch in batches]
  return {
    'configuration': gin.config_str(),
    'prompts or limit': journal_lib.digest(texts),
    'tokens of the prompts': journal_lib.digest(tokens),
    'target': serving.target.fingerprint,
    'drafter weights': fingerprint.compute(serving.method.params),
    'code of the method': environment.source_beside(serving.method),
    **environment.identity(),
  }


def _record(output: Output, begin: float) -> dict[str, Any]:
  """Returns what each row of a batch emitted, drafted and kept."""
  output = jax.device_get(output)
  drafts = np.arange(output.proposed.shape[1])
  return {
    'tokens': output.lengths.tolist(),
    'rounds': output.rounds.tolist(),
    'proposed': (output.proposed @ drafts).tolist(),
    'accepted': (output.accepted @ drafts).tolist(),
    'digest': hashlib.sha256(output.tokens.tobytes()).hexdigest()[:16],
    'seconds': round(time.monotonic() - begin, 3),
  }


def _json(value: float) -> float | None:
  """Returns None for NaN and infinity, which JSON does not have."""
  return value if np.isfinite(value) else None
