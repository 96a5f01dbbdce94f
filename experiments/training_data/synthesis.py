"""Dialogues of a model that answers its own questions or those of people.

A chat model that is prompted with the part of its chat template that begins a
user's turn writes such a turn itself (Xu et al., 2406.08464), and then answers
it. So its own distribution can be learned from the model alone, or from real
user turns.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import gin
import jax
import numpy as np

from experiments.decoding import conversations
from experiments.training_data import filters
from experiments.training_data import forced
from experiments.training_data import limits as limits_lib
from experiments.training_data import pool as pool_lib
from experiments.training_data import shard as shard_lib
from experiments.training_data import template as template_lib
from experiments.training_data.dialogues import Dialogue
import specsample
from specsample import checks
from specsample import sampling as sampling_lib
from specsample import sharding


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Synthesis:
  """A sampler of dialogues, shard by shard."""

  target: specsample.Loaded
  # Each conversation sets its own temperature.
  sampling: specsample.Sampling = specsample.Sampling(min_p=0.02)
  seed: int = 0
  # Conversations tried per shard; fewer if few tokens are wanted, as
  # `for_tokens` says. The first `prompts_per_shard` come from the file of
  # prompts while it lasts. If the two numbers are equal and there is a file, no
  # user turn is sampled, and the data end with the file.
  user_turns: int = 768
  prompts_per_shard: int = 256
  user_temperature: float = 1.0
  # First words for sampled user turns, and the share of turns that begin with
  # them.
  openings: Sequence[str] = ()
  opened_share: float = 0.0
  # The share of conversations whose answers are greedy. The others use one of
  # these temperatures.
  greedy_share: float = 0.5
  temperatures: Sequence[float] = (0.4, 0.7, 1.0)
  # A conversation ends before a turn that makes the prompt longer than this.
  max_prompt_tokens: int = 512  # all before an answer, including the template
  max_answer_tokens: int = 320
  max_turns: int = 8  # of a conversation
  # The least share of ASCII characters in a user turn: about 0.95 keeps English
  # text and code.
  min_ascii_share: float = 0.0
  batch_size: int = 64
  # Whether to store the target's hidden vectors for training. On the disk, they
  # take 2 bytes x the target's width x the tokens of the dialogues.
  keep_hidden: bool = True

  def __post_init__(self):
    """Raises ValueError, naming the setting, if no dialogue could be made."""
    positive = ('user_turns', 'max_answer_tokens', 'max_turns', 'batch_size')
    checks.counts(self, positive)
    checks.shares(self, ('greedy_share', 'opened_share', 'min_ascii_share'))
    checks.field(
      self,
      'prompts_per_shard',
      1 <= self.prompts_per_shard <= self.user_turns,
      f'a number from 1 to user_turns, {self.user_turns}',
    )
    checks.seed('Synthesis.seed', self.seed)
    are_above = bool(self.temperatures) and min(self.temperatures) > 0
    checks.field(
      self, 'temperatures', are_above, 'at least one number, each above 0'
    )
    are_enough = bool(self.openings) or not self.opened_share
    checks.field(
      self, 'openings', are_enough, 'at least one, or set opened_share = 0'
    )

  def check(self) -> None:
    """Checks that sampling is possible, before anything is compiled."""
    for temperature in (*self.temperatures, self.user_temperature):
      sampling = dataclasses.replace(self.sampling, temperature=temperature)
      sampling_lib.per_row(sampling, 1, self.target.model.vocab_size)
    fixed = max(map(len, self._openings())) + len(self._template().after)
    checks.field(
      self,
      'max_prompt_tokens',
      self.max_prompt_tokens > fixed,
      f'more than the {fixed} tokens of the chat template and an opening',
    )
    length = self.max_prompt_tokens + self.max_answer_tokens
    room = self.target.model.max_length
    if length > room:
      raise ValueError(
        'Synthesis.max_prompt_tokens and max_answer_tokens add up to '
        f'{length}, but the model takes {room}: lower one of them'
      )

  def for_tokens(self, wanted: int) -> 'Synthesis':
    """Returns the sampler of shards that are no larger than what is wanted.

    A shard tries as many conversations as have the wanted tokens if each has
    one answer of the greatest length, so that most often a second shard
    follows, which `train` needs. Rows of the batch that would stay empty are
    left out, except on a mesh, where rows stay where they are.

    Args:
      wanted: answer tokens in total, at least 1.
    """
    tried = min(self.user_turns, -(-wanted // self.max_answer_tokens))
    of_file = round(tried * self.prompts_per_shard / self.user_turns)
    size = self.batch_size
    while size >= 2 * tried and size % 2 == 0 and sharding.batch_parts() == 1:
      size //= 2
    return dataclasses.replace(
      self,
      user_turns=tried,
      prompts_per_shard=max(1, of_file),
      batch_size=size,
    )

  def settings(self, answers: str | None = None) -> dict[str, Any]:
    """Returns what shards depend on besides the weights and files, as JSON.

    Args:
      answers: who wrote the answers in a file; None if they are sampled.
    """
    of_limits = ('max_prompt_tokens', 'max_answer_tokens', 'max_turns')
    names = [*of_limits, 'min_ascii_share']
    found: dict[str, Any] = {'answers': answers}
    if answers is None:
      ignored = ('target', 'sampling', 'batch_size', 'keep_hidden')
      every = [field.name for field in dataclasses.fields(self)]
      names = [name for name in every if name not in ignored]
      found['dtype'] = self.target.model.dtype
      found |= {
        name: np.asarray(value).tolist()
        for name, value in dataclasses.asdict(self.sampling).items()
        if value is not None and name != 'temperature'
      }
    found |= {name: getattr(self, name) for name in names}
    found['template'] = dataclasses.asdict(self._template())
    if self.target.exact_fingerprint is not None:
      # The fingerprint is the exact model's, which would write other texts.
      found['weights'] = 'int8'
    return found

  def make(
    self,
    number: int,
    given: Sequence[conversations.Conversation],
    known: set[int],
    excluded: filters.Exclusion,
    watch: Callable[[int, str], None],
  ) -> tuple[list[Dialogue], dict[str, Any]]:
    """Samples a shard; returns its dialogues, and notes about them.

    Both depend on the arguments alone, as far as batches of the same size are
    rounded in the same way. The notes are `ends`, which counts how jobs ended,
    and `rows`, the number of tokens that the target read or wrote.

    Args:
      number: the shard's number.
      given: the conversations whose user turns are answered first.
      known: digests of user turns that must not be repeated.
      excluded: texts that no user turn may overlap.
      watch: called with the number of answer tokens so far, and the current
        stage, which is empty while answers are written.
    """
    shard = shard_lib.Shard(
      limits=self._limits(excluded),
      template=self._template(),
      plans=self._plans(number, given),
      user_temperature=self.user_temperature,
      known=set(known),
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
    rows = pool.run(shard.jobs(), key, shard.then, filters.loops)
    return shard.dialogues(), {'ends': shard.ends(), 'rows': rows}

  def force(
    self,
    given: Sequence[conversations.Conversation],
    by_target: bool,
    known: set[int],
    excluded: filters.Exclusion,
    watch: Callable[[int, str], None],
  ) -> tuple[list[Dialogue], dict[str, Any]]:
    """Makes a shard from conversations that already have answers.

    Returns the dialogues and the notes, which are only `ends`, since nothing is
    sampled.

    Args:
      given: the conversations.
      by_target: whether the target wrote their answers, in another engine.
      known: digests of user turns that must not be repeated.
      excluded: texts that no user turn may overlap.
      watch: called with the number of answer tokens so far.
    """
    maker = forced.Forced(
      limits=self._limits(excluded),
      vocab_size=self.target.model.vocab_size,
      by_target=by_target,
    )
    dialogues, ends = maker.make(given, set(known), watch)
    return dialogues, {'ends': ends}

  def _limits(self, excluded) -> limits_lib.Limits:
    return limits_lib.Limits(
      tokenizer=self.target.tokenizer,
      excluded=excluded,
      max_prompt_tokens=self.max_prompt_tokens,
      max_answer_tokens=self.max_answer_tokens,
      max_turns=self.max_turns,
      min_ascii_share=self.min_ascii_share,
    )

  def _plans(self, number, given) -> list[shard_lib.Plan]:
    """Returns the plans of a shard's conversations."""
    rng = np.random.default_rng([self.seed, number])
    only_given = given and self.prompts_per_shard == self.user_turns
    count = len(given) if only_given else self.user_turns
    temperatures = np.resize(self.temperatures, count)
    temperatures[: round(self.greedy_share * count)] = 0
    openings = np.zeros(count, int)
    num_opened = round(self.opened_share * count)
    if num_opened:
      openings[:num_opened] = 1 + np.resize(
        rng.permutation(len(self.openings)), num_opened
      )
    begun = self._openings()
    return [
      shard_lib.Plan(
        conversation=conversation,
        begun=begun[opening],
        temperature=float(temperature),
      )
      for conversation, opening, temperature in zip(
        [*given, *[None] * (count - len(given))],
        rng.permutation(openings),
        rng.permutation(temperatures),
        strict=True,
      )
    ]

  def _template(self) -> template_lib.Template:
    return template_lib.Template.of(self.target.tokenizer)

  def _openings(self) -> list[tuple[int, ...]]:
    """Returns the prompts for sampled turns; the first has no opening words."""
    template = self._template()
    return [
      template.before,
      *(template.opened(self.target.tokenizer, x) for x in self.openings),
    ]
