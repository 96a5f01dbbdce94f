"""Dialogues that a model has with itself: what it would be asked, and answers.

After the chat template's beginning of a user's turn a chat model writes such a
turn itself (Xu et al., 2406.08464), and then answers it. So its own
distribution is learned from the model alone.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import gin
import jax
import numpy as np

from experiments import filters
from experiments import pool as pool_lib
from experiments import prompts as prompts_lib
from experiments import shard as shard_lib
from experiments import template as template_lib
from experiments.dialogues import Dialogue
import specsample
from specsample import sampling as sampling_lib


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Synthesis:
  """What is sampled, shard by shard."""

  target: specsample.Loaded
  # The temperature is each dialogue's own.
  sampling: specsample.Sampling = specsample.Sampling(min_p=0.02)
  seed: int = 0
  # Tried in a shard. The first are from the file of prompts, while it lasts.
  user_turns: int = 768
  prompts_per_shard: int = 256
  user_temperature: float = 1.0
  # First words that user turns are given, and to what share of them.
  openings: Sequence[str] = ()
  opened_share: float = 0.0
  # Of the answers so many are greedy, the others at one of these.
  greedy_share: float = 0.5
  temperatures: Sequence[float] = (0.4, 0.7, 1.0)
  # Of a cache's 256 slots one is left for the token that is pending.
  max_prompt_tokens: int = 127  # the template's counted in
  max_answer_tokens: int = 128
  batch_size: int = 48
  # Whether the target's hidden vectors are kept too, for training: 2 bytes x
  # its width x the tokens of the dialogues, on the disk.
  keep_hidden: bool = True

  def __post_init__(self):
    """Refuses what gives no dialogue; ValueError names the setting."""
    for name in ('user_turns', 'max_answer_tokens', 'batch_size'):
      _require(
        name, getattr(self, name), getattr(self, name) >= 1, 'at least 1'
      )
    _require(
      'prompts_per_shard',
      self.prompts_per_shard,
      0 <= self.prompts_per_shard <= self.user_turns,
      f'at most user_turns, {self.user_turns}',
    )
    _require('seed', self.seed, 0 <= self.seed < 2**32, 'from 0 to 2**32 - 1')
    for name in ('greedy_share', 'opened_share'):
      share = getattr(self, name)
      _require(name, share, 0 <= share <= 1, 'from 0 to 1')
    _require(
      'temperatures',
      self.temperatures,
      self.temperatures and min(self.temperatures) > 0,
      'some above 0',
    )
    _require(
      'openings',
      self.openings,
      self.openings or not self.opened_share,
      'some, or opened_share = 0',
    )

  def check(self) -> None:
    """Refuses what cannot be sampled, before anything is compiled.

    Raises:
      ValueError: names the setting.
    """
    for temperature in (*self.temperatures, self.user_temperature):
      sampling = dataclasses.replace(self.sampling, temperature=temperature)
      sampling_lib.per_row(sampling, 1, self.target.model.vocab_size)
    fixed = max(map(len, self._openings())) + len(self._template().after)
    _require(
      'max_prompt_tokens',
      self.max_prompt_tokens,
      self.max_prompt_tokens > fixed,
      f'more than the {fixed} that the chat template and an opening take',
    )
    length = self.max_prompt_tokens + self.max_answer_tokens
    room = self.target.model.max_length
    if length > room:
      raise ValueError(
        f'Synthesis.max_prompt_tokens and max_answer_tokens make {length}, and '
        f'the model takes {room}: lower one of them'
      )

  def settings(self) -> dict[str, Any]:
    """What a shard's content depends on besides the weights, as JSON."""
    own = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.name not in ('target', 'sampling', 'batch_size', 'keep_hidden')
    }
    sampling = {
      name: np.asarray(value).tolist()
      for name, value in dataclasses.asdict(self.sampling).items()
      if value is not None and name != 'temperature'
    }
    of_target = {
      'dtype': self.target.model.dtype,
      'template': dataclasses.asdict(self._template()),
    }
    if self.target.exact_fingerprint is not None:
      # Its fingerprint is the exact model's, which would write other texts.
      of_target['weights'] = 'int8'
    return own | sampling | of_target

  def make(
    self,
    number: int,
    prompts: Sequence[prompts_lib.Prompt],
    known: set[int],
    excluded: filters.Exclusion,
    watch: Callable[[int], None],
  ) -> tuple[list[Dialogue], dict[str, int]]:
    """The dialogues of a shard, and how many jobs came to what end.

    They follow from the arguments alone, as far as a batch of the same size is
    rounded alike.

    Args:
      number: of the shard.
      prompts: all of the file's.
      known: digests of user turns that are not to be repeated.
      excluded: texts that no user turn may come from.
      watch: is told the number of answers' tokens so far.
    """
    first = number * self.prompts_per_shard
    given = prompts[first : first + self.prompts_per_shard]
    shard = shard_lib.Shard(
      tokenizer=self.target.tokenizer,
      template=self._template(),
      plans=self._plans(number, given),
      user_temperature=self.user_temperature,
      max_prompt_tokens=self.max_prompt_tokens,
      max_answer_tokens=self.max_answer_tokens,
      known=set(known),
      excluded=excluded,
      watch=watch,
    )
    pool = pool_lib.Pool(
      target=self.target,
      sampling=self.sampling,
      stop=specsample.Stop(
        eos_ids=self.target.tokenizer.eos_ids,
        sequences=(self._template().after,),
      ),
      max_length=self.max_prompt_tokens + self.max_answer_tokens,
      batch_size=self.batch_size,
    )
    key = jax.random.fold_in(jax.random.key(self.seed), number)
    pool.run(shard.jobs(), key, shard.then, filters.loops)
    return shard.dialogues(), shard.ends()

  def _plans(self, number, prompts) -> list[shard_lib.Plan]:
    """What each job of a shard begins with, and how its answer is drawn."""
    rng = np.random.default_rng([self.seed, number])
    count = self.user_turns
    temperatures = np.resize(self.temperatures, count)
    temperatures[: round(self.greedy_share * count)] = 0
    openings = np.zeros(count, int)
    num_opened = round(self.opened_share * count)
    if num_opened:
      openings[:num_opened] = 1 + np.resize(
        rng.permutation(len(self.openings)), num_opened
      )
    texts = [prompt.text for prompt in prompts]
    texts += [None] * (count - len(texts))
    begun = self._openings()
    return [
      shard_lib.Plan(
        text=text, begun=begun[opening], temperature=float(temperature)
      )
      for text, opening, temperature in zip(
        texts,
        rng.permutation(openings),
        rng.permutation(temperatures),
        strict=True,
      )
    ]

  def _template(self) -> template_lib.Template:
    return template_lib.Template.of(self.target.tokenizer)

  def _openings(self) -> list[tuple[int, ...]]:
    """What a sampled turn is prompted with; the first is without words."""
    template = self._template()
    return [
      template.before,
      *(template.opened(self.target.tokenizer, x) for x in self.openings),
    ]


def _require(name, value, holds, expected):
  if not holds:
    raise ValueError(f'Synthesis.{name} is {value}: give {expected}')
