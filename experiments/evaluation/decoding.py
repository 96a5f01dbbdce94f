"""The units of work that decode and time: their order, and what they record.

The methods take turns at each batch, so that a slowdown of the machine affects
all of them. The parts of a round take turns too, and are timed between the
batches, because their times are compared with those of the generations.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np

from experiments.command import clock
from experiments.command import config
from experiments.command import distributed
from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import units as units_lib
from experiments.decoding import setup as setup_lib
from experiments.evaluation import conversations
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import learning as learning_lib
from experiments.evaluation import round_parts
from experiments.reporting import result_file
from experiments.reporting import rows as rows_lib
from experiments.timing import roofline
import specsample
from specsample import text as text_lib
from specsample.models import fingerprint
from specsample.types import DecodeState

# The journal's keys: (MEMORY, i), (round_parts.KIND, method, call) and those of
# `conversations.key`, where a call decodes one sample of one batch.
MEMORY = 'memory_bandwidth'


def header(part: evaluation_lib.Part) -> dict[str, Any]:
  """Returns what a resumed run must have in common with the run it resumes.

  This includes the tokens: a chat template may have changed, or may write
  today's date.
  """
  target, methods = part.evaluation.target, part.evaluation.methods
  texts = [
    (prompt.category, prompt.system, prompt.text, *prompt.next_turns)
    for prompt in part.prompts
  ]
  data = part.provenance
  return {
    'schema': result_file.SCHEMA,
    'configuration': config.settings(),
    'data': None if data is None else dataclasses.asdict(data),
    'prompts or limit': journal_lib.digest(texts),
    'tokens of the prompts': journal_lib.digest(part.tokens),
    'model': repr(target.model),
    'target weights': target.fingerprint,
    'drafter weights': {
      name: fingerprint.compute(method.params)
      for name, method in methods.items()
      if method.params is not None
    },
    'notes of methods': {name: x.note for name, x in methods.items()},
    'code of methods': {
      name: environment.source_beside(x) for name, x in methods.items()
    },
    **environment.identity(),
  }


@dataclasses.dataclass(eq=False)
class Policies:
  """What the policies of a method have learned so far.

  The journal keeps it with each batch, so that a resumed run draws the same
  tokens as an uninterrupted one.
  """

  name: str  # of the method
  drafter: Any  # has policies, as `drafters.Adaptive` does
  journal: journal_lib.Journal
  known: Any = dataclasses.field(init=False)

  def __post_init__(self):
    """Begins with what is known after all batches that the journal has."""
    self.known = self.drafter.untaught()
    batches = conversations.batches(self.journal, self.name)
    for batch in list(batches.values())[-1:]:
      leaves, structure = jax.tree.flatten(self.known)
      pairs = zip(batch['policies'], leaves, strict=True)
      self.known = jax.tree.unflatten(
        structure, [np.asarray(x, leaf.dtype) for x, leaf in pairs]
      )

  def learn(self, state: DecodeState) -> dict[str, list[Any]]:
    """Keeps what is known after a batch; returns what the journal records."""
    self.known = self.drafter.learned(state.draft)
    leaves = jax.tree.leaves(self.known)
    return {'policies': [np.asarray(x).tolist() for x in leaves]}


def units(
  part: evaluation_lib.Part,
  turn: conversations.Turn,
  learning: Mapping[str, learning_lib.Learning],
) -> Iterator[units_lib.Unit]:
  """Yields the units of work of a turn; only in the first are parts timed."""
  evaluation, prompts = part.evaluation, part.prompts
  carried: dict[str, Policies | learning_lib.Learning] = {**learning}
  carried |= {
    name: Policies(name, method.drafter, part.journal)
    for name, method in evaluation.methods.items()
    if evaluation.carry_policies and method.drafter.policies
  }
  batches = evaluation.batches(len(turn.prompts))
  calls = list(itertools.product(range(evaluation.samples), batches))
  visits = {}
  if not turn.number:
    yield units_lib.Unit('memory', (MEMORY, 0), _memory_bandwidth)
    repeats = evaluation.num_repeats(len(prompts))
    visits = round_parts.visits(repeats, len(calls))
  for call, (sample, batch) in enumerate(calls):
    numbers = [turn.prompts[j] for j in batch]
    # Each turn has random streams of its own.
    ids = [number + turn.number * len(prompts) for number in numbers]
    for name, method in evaluation.methods.items():
      rows = [turn.tokens[name, sample][j] for j in batch]
      padded, _ = setup_lib.padded(rows, evaluation.least_width)
      run: Callable[[Any], Any]
      if name in learning:
        run = functools.partial(learning[name].decode, rows, ids)
        warm_up = functools.partial(learning[name].warm_up, rows, ids)
      else:
        run = functools.partial(evaluation.decode, method, rows, ids, sample)
        warm_up = functools.partial(evaluation.warm_up, method, rows, ids)
      first, last = numbers[0] + 1, numbers[-1] + 1
      shown = (
        f'prompt {first}' if first == last else f'prompts {first} to {last}'
      )
      yield units_lib.Unit(
        f'{shown} of {len(prompts)}, {name}'
        + (f', turn {turn.number + 1}' if turn.number else '')
        + (f', {sample + 1}' if sample else ''),
        conversations.key(name, call, turn.number),
        functools.partial(
          _generations,
          run,
          carried.get(name),
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
    if call in visits:
      repeats, shorter = visits[call]
      tokens = turn.tokens[next(iter(evaluation.methods)), sample]
      typical = evaluation.typical(tokens, shorter)
      for name, method in evaluation.methods.items():
        if name in learning:
          continue  # the parts of its rounds have no time for updates
        setup = evaluation.setup(method)
        yield units_lib.Unit(
          f'parts of a round, {name}',
          (round_parts.KIND, name, call),
          functools.partial(round_parts.measure, setup, typical, repeats),
        )
  if not turn.number:
    # Measured again, as the machine may have been slow at the beginning.
    yield units_lib.Unit('memory', (MEMORY, 1), _memory_bandwidth)


def _memory_bandwidth():
  return {'bytes_per_second': roofline.memory_bandwidth()}


def _generations(run, carried, described):
  known = carried.known if carried else None
  (output, after), seconds = clock.seconds(run, known)
  output = jax.tree.map(np.asarray, output)
  lengths, log_probs = output.lengths.tolist(), output.log_probs
  shares = clock.by_tokens(seconds, lengths)
  generations = []
  for i, (fields, length) in enumerate(zip(described, lengths, strict=True)):
    generation = rows_lib.Generation(
      **fields,
      tokens=output.tokens[i, :length].tolist(),
      log_probs=[] if log_probs is None else log_probs[i, :length].tolist(),
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


def scoring(part: evaluation_lib.Part) -> Iterator[units_lib.Unit]:
  """Yields a unit of work for each method, to be run when all is decoded."""
  for name in part.evaluation.methods if part.evaluation.task else ():
    score = functools.partial(_score, part, name)
    yield units_lib.Unit(
      f'scores, {name}', score_key(part.evaluation, name), score
    )


def score_key(evaluation: evaluation_lib.Evaluation, name: str) -> tuple:
  """Returns the journal's key of a method's scores for this many samples."""
  return 'scores', name, evaluation.samples


def _score(part, name) -> dict[str, Any] | None:
  evaluation = part.evaluation
  # Without scores, something is missing here that a later run may have.
  if not distributed.is_first() or evaluation.task.unscored():
    return None
  tokenizer = evaluation.target.tokenizer
  # An answer in a chat begins a text; any other answer continues its prompt.
  decode = tokenizer.decode
  if not evaluation.task.chat:
    decode = functools.partial(text_lib.continuation, tokenizer)
  answers: list[list[str]] = [[] for _ in part.prompts]
  for batch in conversations.batches(part.journal, name).values():
    for run in batch['generations']:
      if not run['turn'] and run['sample'] < evaluation.samples:
        answers[run['prompt']].append(decode(run['tokens']))
  scores = evaluation.task.score(part.prompts, answers)
  found = [dataclasses.asdict(score) for score in scores]
  return {'scores': found} if found else None
