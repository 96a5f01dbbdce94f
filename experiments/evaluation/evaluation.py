"""The evaluation of methods over prompts: decoding, timing, the journal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import reprlib
from typing import Any

import gin
import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.command import clock
from experiments.command import config
from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import units as units_lib
from experiments.decoding import generation
from experiments.decoding import prompts as prompts_lib
from experiments.decoding import setup as setup_lib
from experiments.evaluation import carried_policies as carried_lib
from experiments.evaluation import learning as learning_lib
from experiments.evaluation import round_parts
from experiments.evaluation import turns as turns_lib
from experiments.reporting import result_file
from experiments.reporting import rows as rows_lib
from experiments.tasks import source as source_lib
from experiments.tasks import task as task_lib
from experiments.timing import hardware
import specsample
from specsample import checks
from specsample import types
from specsample.loop import step
from specsample.models import fingerprint
from specsample.training import online

# The journal's keys: (MEMORY, i), (round_parts.KIND, method, call) and those of
# `turns.key`, where a call decodes one sample of one batch.
MEMORY = 'memory_bandwidth'
# See `Evaluation.repeats`.
REPEATS = 8
FEWEST_TO_TIME = 4


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation:
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
  limit: int | None = None  # use at most this many prompts, the first ones
  # Decode at most this many turns of each conversation; None for all of them.
  max_turns: int | None = None
  chat: bool = True  # without a task: whether a prompt is a turn of a chat
  seed: int = 0
  num_seeds: int = 1  # samples per prompt, unless decoding is greedy
  batch_size: int = 1
  # Shorter prompts are padded to this many tokens: fewer programs are compiled.
  least_width: int = 1
  # Whether the policies of a method begin a batch with what they learned from
  # the batches before. If so, the tokens of a prompt are drawn as if it were
  # alone only at temperature 0; their distribution stays the same.
  carry_policies: bool = False
  # Whether all prompts are also decoded in `batch_size` rows that are refilled
  # as soon as they are done: see `refilled`.
  refill: bool = False
  # Makes the learner of each method that learns while it drafts, by its name in
  # `methods`: {'draft, learning': @learning.learner}.
  learners: Mapping[str, Callable[..., online.Learner]] | None = None
  # How often the parts of a round are timed. 0 skips the timing, which saves
  # time, but then nothing is predicted. None is `REPEATS` or, for fewer than
  # `FEWEST_TO_TIME` prompts, which the timing would outlast, 0.
  repeats: int | None = None

  def __post_init__(self):
    """Checks the settings, and fits the methods to the batch size."""
    if not self.methods:
      raise ValueError('Evaluation.methods is empty: name at least one')
    checks.counts(self, ('batch_size', 'num_seeds', 'least_width'))
    if self.repeats is not None:
      checks.counts(self, ('repeats',), 0)
    checks.seed('Evaluation.seed', self.seed, self.num_seeds)
    if not all(
      checks.is_count(limit) and limit <= self.max_new_tokens
      for limit in self.answer_limits
    ):
      raise ValueError(
        f'Evaluation.answer_limits is {self.answer_limits}: give numbers from '
        f'1 to Evaluation.max_new_tokens, which is {self.max_new_tokens}'
      )
    for name, value in (
      ('refill', self.refill),
      ('answer_limits', self.answer_limits),
    ):
      if value and self.learners:
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
    self.online_learners  # noqa: B018 (says what is wrong with its settings)
    for name, what in (('limit', 'prompts'), ('max_turns', 'turns')):
      value = getattr(self, name)
      if not (value is None or checks.is_count(value)):
        raise ValueError(
          f'Evaluation.{name} is {value}: give at least 1, or None for all '
          f'{what}'
        )

  @functools.cached_property
  def online_learners(self) -> dict[str, online.Learner]:
    """The learner of each method that learns, by the method's name."""
    return learning_lib.learners(
      self.learners or {}, self.methods, self.samples
    )

  def encode(self, path: str, prompt: prompts_lib.Prompt) -> list[int]:
    """Returns the tokens of the prompt, or of a conversation's first turn.

    Raises:
      ValueError: the prompt has no tokens or more than the model takes, or the
        chat template refuses it.
    """
    try:
      tokens = generation.encode(
        self.target.tokenizer, prompt.text, self.is_chat, prompt.system
      )
    except ValueError as error:
      raise ValueError(f'{path}, line {prompt.line}: {error}') from error
    room = self.target.model.max_length
    if not tokens:
      raise ValueError(
        f'{path}, line {prompt.line}: the tokenizer has no tokens for the '
        f'prompt {reprlib.repr(prompt.text)}: correct it'
      )
    if len(tokens) >= room:
      raise ValueError(
        f'{path}, line {prompt.line}: a prompt of {len(tokens)} tokens is too '
        f'long, because the model takes {room}, including the answer: shorten '
        'it'
      )
    return tokens

  def check(self, tokens: Sequence[list[int]]) -> None:
    """Refuses settings that cannot decode the prompts' tokens.

    Raises:
      ValueError: a setting does not fit; the message names it.
    """
    for method in self.methods.values():
      self.setup(method).check(tokens)

  @property
  def stop(self) -> specsample.Stop:
    """The conditions that end an answer before `max_new_tokens`."""
    return specsample.Stop(eos_ids=self.target.tokenizer.eos_ids)

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

  def num_calls(self, num_prompts: int) -> int:
    """Returns in how many calls a method decodes prompts, with all samples."""
    return self.samples * len(self.batches(num_prompts))

  def typical(
    self, tokens: Sequence[list[int]], shorter: float = 0.5
  ) -> list[list[int]]:
    """Returns a batch of prompts of about the same length.

    Args:
      tokens: the prompts to choose from.
      shorter: the share of them, from 0 to 1, that are shorter than the batch;
        by default its prompts are neither short nor long.
    """
    rows, size = sorted(tokens, key=len), self.batch_size
    middle = int(shorter * len(rows))
    start = max(0, min(middle - size // 2, len(rows) - size))
    return rows[start : start + size]

  def generate(
    self,
    method: methods_lib.Method,
    prompts: Sequence[list[int]],
    request_ids: Sequence[int],
    sample: int = 0,
  ) -> specsample.Output:
    """Decodes prompts as one batch; a request id selects a prompt's stream.

    Each sample has its own seed, counted from `seed`.
    """
    return self.decode(method, prompts, request_ids, sample)[0]

  def warm_up(
    self,
    method: methods_lib.Method,
    prompts: Sequence[list[int]],
    request_ids: Sequence[int],
  ) -> None:
    """Compiles everything that `generate` runs, by running it."""
    carried = carried_lib.Carried.of(method, None)
    policies = None
    if self.carry_policies and carried is not None:
      policies = carried.before(None)
    setup = self.setup(method, policies=policies)
    limits = self.limits(request_ids)
    setup_lib.warm_up(
      lambda rows: setup.prefill(rows, request_ids=request_ids, limits=limits),
      lambda state: setup.finish(setup.advance(state, 1), len(prompts)),
      prompts,
      step.widths(self.target.model, method.drafter),
    )

  def decode(
    self,
    method: methods_lib.Method,
    prompts: Sequence[list[int]],
    request_ids: Sequence[int],
    sample: int = 0,
    policies: Any = None,
  ) -> tuple[specsample.Output, types.DecodeState]:
    """Decodes as `generate` does; also returns the last state.

    Args:
      method, prompts, request_ids, sample: as in `generate`.
      policies: what the method's policies already know; None for nothing.
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
      stop=self.stop,
      seed=self.seed + sample,
      policies=policies,
      least_width=self.least_width,
    )


def learning_methods(
  evaluation: Evaluation, journal: journal_lib.Journal | None
) -> dict[str, learning_lib.Learning]:
  """Returns the methods that learn, with what they learned in a run so far."""
  return {
    name: learning_lib.Learning(
      name, evaluation.setup(evaluation.methods[name]), learner, journal
    )
    for name, learner in evaluation.online_learners.items()
    if journal is not None
  }


def header(
  evaluation: Evaluation,
  prompts: Sequence[prompts_lib.Prompt],
  tokens: Sequence[list[int]],
  provenance: source_lib.Provenance | None = None,
) -> dict[str, Any]:
  """Returns what a resumed run must have in common with the run it resumes.

  This includes the tokens: a chat template may have changed, or may write
  today's date. Prompts of a task have a provenance.
  """
  texts = [
    (prompt.category, prompt.system, prompt.text, *prompt.next_turns)
    for prompt in prompts
  ]
  return {
    'schema': result_file.SCHEMA,
    'configuration': config.settings(),
    'data': None if provenance is None else dataclasses.asdict(provenance),
    'prompts or limit': journal_lib.digest(texts),
    'tokens of the prompts': journal_lib.digest(tokens),
    'model': repr(evaluation.target.model),
    'target weights': evaluation.target.fingerprint,
    'drafter weights': {
      name: fingerprint.compute(method.params)
      for name, method in evaluation.methods.items()
      if method.params is not None
    },
    'notes of methods': {
      name: method.note for name, method in evaluation.methods.items()
    },
    'code of methods': {
      name: environment.source_beside(method)
      for name, method in evaluation.methods.items()
    },
    **environment.identity(),
  }


def shared(header: dict[str, Any]) -> dict[str, str]:
  """Returns the entries of a header that all processes of a run share."""
  return {
    name: repr(value) for name, value in header.items() if name != 'hardware'
  }


def label(batch: Sequence[int], num_prompts: int, method: str) -> str:
  """Returns the label of a batch of prompts in the progress display."""
  of_batch = f'prompt {batch[0] + 1}'
  if len(batch) > 1:
    of_batch = f'prompts {batch[0] + 1} to {batch[-1] + 1}'
  return f'{of_batch} of {num_prompts}, {method}'


def units(
  evaluation: Evaluation,
  prompts: Sequence[prompts_lib.Prompt],
  tokens: Sequence[list[int]],
  *,
  journal: journal_lib.Journal | None = None,
) -> Iterator[units_lib.Unit]:
  """Yields all units of work, except for later turns (`turn_units`).

  The methods take turns at each batch, so that a slowdown of the machine
  affects all of them. The parts of a round take turns too, and are timed
  between the batches, `num_repeats` times in total, because their times are
  compared with those of the generations.

  Args:
    evaluation: what is compared.
    prompts: what is decoded.
    tokens: the prompts as the model reads them.
    journal: the run's journal, from which policies that are carried resume.
  """
  yield units_lib.Unit('memory', (MEMORY, 0), _memory_bandwidth)
  turn = turns_lib.first(evaluation.methods, evaluation.samples, tokens)
  count = evaluation.num_calls(len(prompts))
  repeats = round_parts.share_out(evaluation.num_repeats(len(prompts)), count)
  lengths = iter(round_parts.spread(sum(share > 0 for share in repeats)))
  calls = _calls(evaluation, prompts, turn, journal)
  for call, decoding in enumerate(calls):
    yield from decoding
    if not repeats[call]:
      continue
    typical = evaluation.typical(tokens, next(lengths))
    for name, method in evaluation.methods.items():
      if name in evaluation.online_learners:
        continue  # the parts of its rounds have no time for updates
      measured = functools.partial(
        round_parts.measure,
        evaluation.setup(method),
        typical,
        repeats=repeats[call],
      )
      yield units_lib.Unit(
        f'parts of a round, {name}', (round_parts.KIND, name, call), measured
      )
  # Measured again, as the machine may have been slow at the beginning.
  yield units_lib.Unit('memory', (MEMORY, 1), _memory_bandwidth)


def turn_units(
  evaluation: Evaluation,
  prompts: Sequence[prompts_lib.Prompt],
  turn: turns_lib.Turn,
  journal: journal_lib.Journal | None,
) -> Iterator[units_lib.Unit]:
  """Yields the units of work of a later turn, as `units` does of the first."""
  calls = _calls(evaluation, prompts, turn, journal)
  return itertools.chain.from_iterable(calls)


def _calls(
  evaluation, prompts, turn, journal
) -> Iterator[list[units_lib.Unit]]:
  """Yields the units of each batch and sample, one for each method."""
  carried = {
    name: carried_lib.Carried.of(method, journal)
    for name, method in evaluation.methods.items()
    if evaluation.carry_policies
  }
  learning = learning_methods(evaluation, journal)
  before = None
  if turn.number:
    there = len(turns_lib.having(prompts, turn.number - 1))
    before = evaluation.num_calls(there) - 1, turn.number - 1
  samples = range(evaluation.samples)
  batches = evaluation.batches(len(turn.prompts))
  for call, (sample, batch) in enumerate(itertools.product(samples, batches)):
    numbers = [turn.prompts[j] for j in batch]
    # Each turn has random streams of its own.
    ids = [number + turn.number * len(prompts) for number in numbers]
    units = []
    for name, method in evaluation.methods.items():
      rows = [turn.tokens[name, sample][j] for j in batch]
      padded, _ = setup_lib.padded(rows, evaluation.least_width)
      run = functools.partial(evaluation.decode, method, rows, ids, sample)
      warm_up = functools.partial(evaluation.warm_up, method, rows, ids)
      if name in learning:
        run = functools.partial(learning[name].decode, rows, ids)
        warm_up = functools.partial(learning[name].warm_up, rows, ids)
      unit = units_lib.Unit(
        label(numbers, len(prompts), name)
        + (f', turn {turn.number + 1}' if turn.number else '')
        + (f', {sample + 1}' if sample else ''),
        turns_lib.key(name, call, turn.number),
        functools.partial(
          _generations,
          run,
          learning.get(name) or carried.get(name),
          turns_lib.key(name, *before) if before else None,
          [
            {
              # Conversations stay in the batch of their first turn if it holds
              # one prompt; larger ones are filled with those that go on.
              'batch': numbers[0] // evaluation.batch_size,
              'sample': sample,
              'prompt': number,
              'turn': turn.number,
              'category': prompts[number].category,
              'prompt_tokens': len(row),
            }
            for number, row in zip(numbers, rows, strict=True)
          ],
        ),
        # Limits size the caches.
        program=(name, padded.shape, max(evaluation.limits(ids))),
        warm_up=warm_up,
      )
      units.append(unit)
    yield units
    before = call, turn.number


def _memory_bandwidth():
  return {'bytes_per_second': hardware.memory_bandwidth()}


def _generations(run, carried, key_before, described):
  known = carried.before(key_before) if carried else None
  (output, after), seconds = clock.seconds(run, known)
  output = jax.tree.map(np.asarray, output)
  lengths = output.lengths.tolist()
  shares = clock.by_tokens(seconds, lengths)
  generations = []
  for i, fields in enumerate(described):
    length = lengths[i]
    generation = rows_lib.Generation(
      **fields,
      tokens=output.tokens[i, :length].tolist(),
      log_probs=rows_lib.listed(output.log_probs, i, length),
      seconds=shares[i],
      stats=specsample.stats.summarize(
        jax.tree.map(lambda x, i=i: x[i : i + 1], output)
      ),
      origins=output.origin[i, :length].tolist(),
      emit_rounds=output.emit_round[i, :length].tolist(),
    )
    generations.append(generation.to_json())
  kept = carried.learn(after) if carried else {}
  return {'generations': generations, **kept}
