"""Dialogues of a model that answers its own questions or those of people.

A chat model that is prompted with the part of its chat template that begins a
user's turn writes such a turn itself (Xu et al., 2406.08464), and then answers
it. So its own distribution can be learned from the model alone, or from real
user turns.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import Any

import gin
import jax
import numpy as np

from experiments.decoding import prompts as prompts_lib
from experiments.training_data import chat
from experiments.training_data import data_folder
from experiments.training_data import filters
from experiments.training_data.data_folder import Dialogue
from experiments.training_data.data_folder import Source
import specsample
from specsample import checks
from specsample import sampling as sampling_lib
from specsample import settings as settings_lib
from specsample import StopReason

# Called with the number of answer tokens so far, and what is under way.
Watch = Callable[[int, str], None]
_GROUP_SIZE = 4  # prompts that are prefilled together


@dataclasses.dataclass(kw_only=True)
class _Talk:
  """A conversation whose user turns are answered one after another."""

  number: int  # among those of the shard; selects the random streams
  source: Source
  temperature: float  # of the answers
  begun: tuple[int, ...] = ()  # the tokens after which its turn is sampled
  messages: list[tuple[str, str]]  # up to the turn that is being answered
  waiting: list[str]  # later user turns
  prompt: list[int] = dataclasses.field(default_factory=list)  # of `messages`
  turn: int = 0  # `filters.digest` of the first user turn
  dialogues: list[Dialogue] = dataclasses.field(default_factory=list)


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Synthesis(settings_lib.Settings):
  """A sampler of dialogues, shard by shard."""

  target: specsample.Loaded
  # Each conversation sets its own temperature.
  sampling: specsample.Sampling = specsample.Sampling(min_p=0.02)
  seed: int = 0
  # Conversations tried per shard; fewer if few tokens are wanted, as
  # `for_tokens` says. The first `prompts_per_shard` come from the file of
  # prompts while it lasts. If the two numbers are equal and there is a file, no
  # user turn is sampled, and the data end with the file.
  user_turns: settings_lib.Count = 768
  prompts_per_shard: int = 256
  user_temperature: float = 1.0
  # First words for sampled user turns, and the share of turns that begin with
  # them.
  openings: Sequence[str] = ()
  opened_share: settings_lib.Share = 0.0
  # The share of conversations whose answers are greedy. The others use one of
  # these temperatures.
  greedy_share: settings_lib.Share = 0.5
  temperatures: Sequence[float] = (0.4, 0.7, 1.0)
  # A conversation ends before a turn that makes the prompt longer than this.
  max_prompt_tokens: int = 512  # all before an answer, including the template
  max_answer_tokens: settings_lib.Count = 320
  max_turns: settings_lib.Count = 8  # of a conversation
  # The least share of ASCII characters in a user turn: about 0.95 keeps English
  # text and code.
  min_ascii_share: settings_lib.Share = 0.0
  batch_size: settings_lib.Count = 64

  def _check(self):
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
    fixed = max(map(len, self._openings)) + len(self._template.after)
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
    """Returns the sampler of shards for so many answer tokens in total.

    A shard tries as many conversations as have the wanted tokens if each has
    one answer of the greatest length, so that most often a second shard
    follows, which `train` needs.
    """
    tried = min(self.user_turns, -(-wanted // self.max_answer_tokens))
    of_file = round(tried * self.prompts_per_shard / self.user_turns)
    return dataclasses.replace(
      self, user_turns=tried, prompts_per_shard=max(1, of_file)
    )

  def settings(self, answers: str | None = None) -> dict[str, Any]:
    """Returns what shards depend on besides the weights and files, as JSON.

    `answers` says who wrote those in a file; None if they are sampled.
    """
    of_limits = ('max_prompt_tokens', 'max_answer_tokens', 'max_turns')
    names = [*of_limits, 'min_ascii_share']
    found: dict[str, Any] = {'answers': answers}
    if answers is None:
      ignored = ('target', 'sampling', 'batch_size')
      every = [field.name for field in dataclasses.fields(self)]
      names = [name for name in every if name not in ignored]
      found['dtype'] = self.target.model.dtype
      found |= {
        name: np.asarray(value).tolist()
        for name, value in dataclasses.asdict(self.sampling).items()
        if value is not None and name != 'temperature'
      }
    found |= {name: getattr(self, name) for name in names}
    found['template'] = self._template.to_json()
    if self.target.exact_fingerprint is not None:
      # The fingerprint is the exact model's, which would write other texts.
      found['weights'] = 'int8'
    return found

  def make(
    self,
    number: int,
    given: Sequence[prompts_lib.Prompt],
    known: set[int],
    excluded: filters.Exclusion,
    watch: Watch,
  ) -> tuple[list[Dialogue], dict[str, Any]]:
    """Samples the shard of a number; returns its dialogues, and notes.

    Both depend on the arguments alone, as far as batches of the same size are
    rounded in the same way: on the conversations whose user turns are answered
    first, the digests of the user turns that are `known` and must not be
    repeated, and the texts that are excluded. The notes are `ends`, which
    counts how turns and answers ended, and `rows`, the number of tokens that
    the target read or wrote.
    """
    limits = self.limits(excluded)
    key = jax.random.fold_in(jax.random.key(self.seed), number)
    talks = self._talks(number, given)
    ends: collections.Counter[str] = collections.Counter()
    num_rows = num_tokens = 0
    sampled = [talk for talk in talks if talk.begun]
    for i, (talk, tokens, reason) in enumerate(self._continued(key, sampled)):
      num_rows += len(talk.begun) + len(tokens)
      self._take_turn(talk, tokens, reason, ends)
      watch(0, f'{i + 1:,} of {len(sampled):,} questions written')
    known = set(known)
    for talk in talks:
      if not talk.waiting:
        continue
      talk.turn = filters.digest(talk.waiting[0])
      if talk.turn in known:
        ends['dropped, turn known'] += 1
      elif _ask(talk, limits, ends):
        known.add(talk.turn)
    for turn in range(1, 1 + self.max_turns):
      asked = [talk for talk in talks if talk.prompt]
      for talk, tokens, reason in self._continued(key, asked, turn):
        num_rows += len(talk.prompt) + len(tokens)
        num_tokens += self._take_answer(talk, tokens, reason, limits, ends)
        watch(num_tokens, '')
    found = [dialogue for talk in talks for dialogue in talk.dialogues]
    return found, {'ends': dict(sorted(ends.items())), 'rows': num_rows}

  def limits(self, excluded: filters.Exclusion) -> chat.Limits:
    """Returns the limits of conversations, given texts to leave out."""
    return chat.Limits(
      tokenizer=self.target.tokenizer,
      excluded=excluded,
      max_prompt_tokens=self.max_prompt_tokens,
      max_answer_tokens=self.max_answer_tokens,
      max_turns=self.max_turns,
      min_ascii_share=self.min_ascii_share,
    )

  def _talks(self, number, given) -> list[_Talk]:
    """Returns a shard's conversations, before anything is sampled."""
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
    openings = rng.permutation(openings)
    temperatures = rng.permutation(temperatures).tolist()
    talks = [
      _Talk(
        number=i,
        source=Source.PROMPT,
        temperature=temperatures[i],
        messages=list(conversation.messages[: conversation.system is not None]),
        waiting=list(conversation.turns[: self.max_turns]),
      )
      for i, conversation in enumerate(given)
    ]
    return talks + [
      _Talk(
        number=i,
        source=Source.OPENED if openings[i] else Source.SAMPLED,
        temperature=temperatures[i],
        begun=self._openings[openings[i]],
        messages=[],
        waiting=[],
      )
      for i in range(len(given), count)
    ]

  def _continued(
    self, key: jax.Array, talks: Sequence[_Talk], turn: int = 0
  ) -> Iterator[tuple[_Talk, list[int], StopReason]]:
    """Yields conversations, each with its next tokens and how they ended.

    Turn 0 is the user's own, and each later one is an answer. Random streams
    depend on the numbers of the turn and of the conversation alone.
    """
    if not talks:
      return
    # Prompts that are prefilled together have similar lengths.
    size_of = lambda talk: len(talk.prompt if turn else talk.begun)
    talks = sorted(talks, key=size_of)
    # Small batches have few sizes, each of which is compiled.
    size = self.batch_size
    while size >= 2 * len(talks) and size % 2 == 0:
      size //= 2
    padded = talks + talks[-1:] * (size - len(talks))
    prompts = [talk.prompt if turn else talk.begun for talk in padded]
    numbers = [(1 + self.max_turns) * talk.number + turn for talk in padded]
    temperatures = [
      talk.temperature if turn else self.user_temperature for talk in padded
    ]
    room = self.max_prompt_tokens - len(self._template.after)
    most = [
      self.max_answer_tokens if turn else room - len(talk.begun)
      for talk in padded
    ]
    outputs = specsample.generate_all(
      {'target': self.target.params},
      prompts,
      key,
      request_ids=np.asarray(numbers),
      model=self.target.model,
      drafter=specsample.drafters.NoDraft(),
      verify=specsample.verify.chain,
      sampling=dataclasses.replace(
        self.sampling, temperature=np.asarray(temperatures, np.float32)
      ),
      max_new_tokens=np.asarray(most),
      stop=specsample.Stop(
        eos_ids=self.target.tokenizer.eos_ids,
        sequences=(self._template.after,),
      ),
      max_length=self.max_prompt_tokens + self.max_answer_tokens,
      batch_size=size,
      group_size=_GROUP_SIZE,
      log_probs=False,
    )
    for talk, output in zip(talks, outputs, strict=False):
      tokens = output.tokens[0, : output.lengths[0]].tolist()
      yield talk, tokens, StopReason(int(output.stop_reason[0]))

  def _take_turn(self, talk, tokens, reason, ends) -> None:
    """Takes in a sampled user turn, unless it has no end or loops."""
    written = self._without_stop(tokens, reason)
    if filters.loop(written) is not None or filters.loops(written):
      ends['dropped, turn is a loop'] += 1
    elif reason not in (StopReason.EOS, StopReason.SEQUENCE):
      ends['dropped, turn without an end'] += 1
    else:
      opening = talk.begun[len(self._template.before) :]
      decode = self.target.tokenizer.decode
      talk.waiting = [decode([*opening, *written], skip_special=False).strip()]

  def _take_answer(self, talk, tokens, reason, limits, ends) -> int:
    """Takes in an answer and asks the next turn; returns its kept tokens."""
    prompt, talk.prompt = talk.prompt, []
    written = self._without_stop(tokens, reason)
    loop = filters.loop(written)
    ended = reason == StopReason.EOS and loop is None
    answer = tokens if ended else written[:loop]
    if not written:
      ends['dropped, answer is empty'] += 1
      return 0
    if reason == StopReason.INVALID_LOGITS:
      ends['dropped, answer of invalid logits'] += 1
      return 0
    whole = np.asarray([*prompt, *answer], np.int32)
    dialogue = Dialogue(
      tokens=whole,
      answers=((len(prompt), whole.size),),
      temperature=talk.temperature,
      source=talk.source,
      turn=talk.turn,
    )
    data_folder.append(talk.dialogues, dialogue)
    cut = 'cut at the limit' if loop is None else 'cut at a loop'
    ends[f'kept, {"with its end" if ended else cut}'] += 1
    if loop is None and talk.waiting:
      text = self.target.tokenizer.decode(written, skip_special=False)
      if limits.is_plain(text):
        talk.messages.append((prompts_lib.ASSISTANT, text))
        _ask(talk, limits, ends)
      else:
        ends['not gone on with, answer with control tokens'] += 1
    return len(answer)

  def _without_stop(self, tokens, reason) -> list[int]:
    lengths = {
      StopReason.EOS: 1,
      StopReason.SEQUENCE: len(self._template.after),
    }
    return tokens[: len(tokens) - lengths.get(reason, 0)]

  @functools.cached_property
  def _template(self) -> chat.Template:
    return chat.Template.of(self.target.tokenizer)

  @functools.cached_property
  def _openings(self) -> list[tuple[int, ...]]:
    """The prompts for sampled turns; the first has no opening words."""
    opened = functools.partial(self._template.opened, self.target.tokenizer)
    return [self._template.before, *map(opened, self.openings)]


def _ask(talk: _Talk, limits: chat.Limits, ends: collections.Counter) -> bool:
  """Moves on to the next user turn; returns whether it will be answered."""
  talk.messages.append((prompts_lib.USER, talk.waiting.pop(0)))
  try:
    talk.prompt = limits.prompt(talk.messages)
  except chat.UnfitError as error:
    how = 'not gone on with' if talk.dialogues else 'dropped'
    ends[f'{how}, {error}'] += 1
  return bool(talk.prompt)
