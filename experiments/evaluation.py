"""Methods x prompts: what is decoded, timed and written to the journal."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import hashlib
from typing import Any

import gin
import jax
import numpy as np

from experiments import environment
from experiments import generation
from experiments import journal as journal_lib
from experiments import measure
from experiments import methods as methods_lib
from experiments import progress as progress_lib
from experiments import prompts as prompts_lib
from experiments import results
import specsample

# The journal's keys: this one, ('generation', method, i), ('parts', method).
COPY = ('copy_bandwidth',)


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation:
  """What is compared. Every prompt is decoded alone: batch size 1."""

  target: specsample.Loaded
  methods: dict[str, methods_lib.Method]
  sampling: specsample.Sampling = specsample.Sampling()
  max_new_tokens: int = 128
  chat: bool = True  # whether a prompt is one user turn of a chat
  seed: int = 0

  def __post_init__(self):
    """Refuses an empty comparison."""
    if not self.methods:
      raise ValueError('Evaluation.methods is empty: name at least one')

  def encode(self, path: str, prompt: prompts_lib.Prompt) -> list[int]:
    """The prompt's tokens.

    Raises:
      ValueError: there is none, or more of them than the model takes.
    """
    tokens = generation.encode(self.target.tokenizer, prompt.text, self.chat)
    room = self.target.model.max_length
    if not tokens:
      raise ValueError(
        f'{path}, line {prompt.line}: the tokenizer knows nothing of the '
        f'prompt {prompt.text!r}: correct it'
      )
    if len(tokens) >= room:
      raise ValueError(
        f'{path}, line {prompt.line}: a prompt of {len(tokens)} tokens, but '
        f'the model takes {room}, its answer included: shorten it'
      )
    return tokens

  def check(self, tokens: Sequence[list[int]]) -> None:
    """Refuses settings that cannot decode the prompts' tokens.

    Raises:
      ValueError: names the setting.
    """
    for method in self.methods.values():
      methods_lib.check(
        method,
        tokens,
        model=self.target.model,
        target=self.target.params,
        sampling=self.sampling,
        max_new_tokens=self.max_new_tokens,
      )

  def generate(
    self, method: methods_lib.Method, prompt: list[int], request_id: int
  ) -> specsample.Output:
    """Decodes one prompt; `request_id` selects its random stream."""
    tokens, lengths = specsample.pad_prompts([prompt])
    return specsample.generate(
      methods_lib.all_params(self.target.params, method),
      tokens,
      lengths,
      jax.random.key(self.seed),
      request_ids=np.asarray([request_id], np.int32),
      model=self.target.model,
      drafter=method.drafter,
      verify=method.verify,
      sampling=self.sampling,
      max_new_tokens=self.max_new_tokens,
      stop=specsample.Stop(eos_ids=self.target.tokenizer.eos_ids),
    )


@dataclasses.dataclass(frozen=True)
class Unit:
  """A piece of work that is journalled when it is done."""

  label: str
  key: tuple
  run: Callable[[], dict[str, Any]]
  # What has to be compiled before `run` can be timed, and how.
  program: tuple = ()
  warm_up: Callable[[], Any] = lambda: None


def header(
  evaluation: Evaluation, prompts: Sequence[prompts_lib.Prompt]
) -> dict[str, Any]:
  """What a resumed run must have in common with the one it goes on from."""
  texts = repr([(prompt.category, prompt.text) for prompt in prompts])
  described = environment.describe()
  return {
    'configuration': gin.config_str(),
    'prompts or limit': hashlib.sha256(texts.encode()).hexdigest(),
    'model': repr(evaluation.target.model),
    'git commit': described['git_commit'],
    'versions': described['versions'],
    'hardware': described['hardware'],
  }


def units(
  evaluation: Evaluation,
  prompts: Sequence[prompts_lib.Prompt],
  tokens: Sequence[list[int]],
) -> Iterator[Unit]:
  """All the work, `tokens` being the prompts as the model reads them.

  The methods take turns at each prompt, so that a machine that slows down
  slows them all.
  """
  yield Unit('memory', COPY, _copy_bandwidth)
  for i, (prompt, row) in enumerate(zip(prompts, tokens, strict=True)):
    padded, _ = specsample.pad_prompts([row])
    for name, method in evaluation.methods.items():
      generate = functools.partial(evaluation.generate, method, row, i)
      yield Unit(
        f'prompt {i + 1} of {len(prompts)}, {name}',
        ('generation', name, i),
        functools.partial(_generation, generate, prompt.category, len(row)),
        program=(name, padded.shape),
        warm_up=generate,
      )
  typical = sorted(tokens, key=len)[len(tokens) // 2]
  for name, method in evaluation.methods.items():
    yield Unit(
      f'parts of a round, {name}',
      ('parts', name),
      functools.partial(_parts, evaluation, method, typical),
    )


def run(
  work: Sequence[Unit],
  journal: journal_lib.Journal,
  progress: progress_lib.Bar,
) -> None:
  """Does what the journal lacks; `progress` shows it, see `progress.bar`."""
  missing = [unit for unit in work if unit.key not in journal]
  # The first unit of each program warms it up.
  programs = {unit.program: unit for unit in reversed(missing) if unit.program}
  with progress(len(programs) + len(missing)) as step:
    for unit in reversed(programs.values()):
      step(f'warm-up, {unit.label}')
      jax.block_until_ready(unit.warm_up())
    for unit in missing:
      step(unit.label)
      journal.add(unit.key, unit.run())


def _copy_bandwidth():
  return {'bytes_per_second': measure.copy_bandwidth()}


def _generation(generate, category, prompt_tokens):
  output, seconds = measure.seconds(generate)
  length = int(output.lengths[0])
  return results.Generation(
    category=category,
    prompt_tokens=prompt_tokens,
    tokens=np.asarray(output.tokens)[0, :length].tolist(),
    log_probs=np.asarray(output.log_probs)[0, :length].tolist(),
    seconds=seconds,
    stats=specsample.stats.of(output),
  ).to_json()


def _parts(evaluation, method, tokens):
  params = methods_lib.all_params(evaluation.target.params, method)
  prompts, lengths = specsample.pad_prompts([tokens])
  common = {
    'model': evaluation.target.model,
    'drafter': method.drafter,
    'verify': method.verify,
    'sampling': evaluation.sampling,
  }
  times = measure.round_times(
    params,
    prompts,
    lengths,
    max_new_tokens=evaluation.max_new_tokens,
    **common,
  )
  law = measure.draft_law(params, prompts, lengths, **common)
  return {
    'draft_ms': times.draft_ms,
    'verify_ms': times.verify_ms,
    'overhead_ms': times.overhead_ms,
    'law': law.value,
  }
