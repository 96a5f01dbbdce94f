"""The jobs of one shard: sampled user turns, and answers to the fit ones."""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses

import numpy as np

from experiments.decoding import conversations
from experiments.training_data import dialogues as dialogues_lib
from experiments.training_data import filters
from experiments.training_data import limits as limits_lib
from experiments.training_data import pool
from experiments.training_data import template as template_lib
from experiments.training_data.dialogues import Dialogue
from experiments.training_data.dialogues import Source
from specsample import StopReason


@dataclasses.dataclass(frozen=True)
class Plan:
  """The plan for one conversation."""

  # Its user turns are answered. If it is None, one turn is sampled.
  conversation: conversations.Conversation | None
  begun: tuple[int, ...]  # the prompt for sampling a turn
  temperature: float  # of the answers


@dataclasses.dataclass
class _Talk:
  """A conversation in progress."""

  source: Source
  digest: int  # of its first user turn
  messages: list[tuple[str, str]]  # up to the turn that is being answered
  waiting: list[str]  # later user turns
  prompt: list[int]  # the tokens of `messages`
  dialogues: list[Dialogue]


class Shard:
  """A shard in progress.

  Conversation i has job (1 + max_turns) i, which samples its user turn, and the
  jobs after it, which write its answers. So the number of a job, which selects
  its random stream, does not depend on other conversations.
  """

  def __init__(
    self,
    *,
    limits: limits_lib.Limits,
    template: template_lib.Template,
    plans: Sequence[Plan],
    user_temperature: float,
    known: set[int],
    watch: Callable[[int, str], None],
  ):
    """Takes arguments as in `synthesis.Synthesis`; adds turns to `known`."""
    self._limits = limits
    self._template = template
    self._plans = plans
    self._user_temperature = user_temperature
    self._known = known
    self._watch = watch
    self._stride = 1 + limits.max_turns
    self._talks: dict[int, _Talk] = {}
    self._num_tokens = 0
    self._num_turns = 0  # sampled
    self._ends: collections.Counter[str] = collections.Counter()

  def jobs(self) -> Iterator[pool.Job]:
    """Yields the first jobs; `then` returns the others."""
    for i, plan in enumerate(self._plans):
      if plan.conversation is None:
        room = self._limits.max_prompt_tokens - len(plan.begun)
        room -= len(self._template.after)
        number = self._stride * i
        yield pool.Job(number, plan.begun, self._user_temperature, room)
      else:
        job = self._first(i, plan.conversation.turns, Source.PROMPT)
        if job is not None:
          yield job

  def then(self, done: pool.Continuation) -> pool.Job | None:
    """Takes in a finished job and returns the one that follows from it."""
    index, num_answers = divmod(done.job.number, self._stride)
    if num_answers:
      following = self._take_answer(index, num_answers, done)
    else:
      following = self._take_turn(index, done)
    self._watch(self._num_tokens, self._stage())
    return following

  def dialogues(self) -> list[Dialogue]:
    """Returns the dialogues that were kept, in the order of the plans."""
    return [x for i in sorted(self._talks) for x in self._talks[i].dialogues]

  def ends(self) -> dict[str, int]:
    """Returns counts of how turns and answers ended."""
    return dict(sorted(self._ends.items()))

  def _stage(self) -> str:
    """Returns how many user turns are written, or '' once all of them are."""
    wanted = sum(plan.conversation is None for plan in self._plans)
    if self._num_turns == wanted:
      return ''
    return f'{self._num_turns:,} of {wanted:,} questions written'

  def _take_turn(self, index, done):
    self._num_turns += 1
    tokens = self._without_stop(done)
    reason = done.stop_reason
    if reason == StopReason.RUNNING or filters.loops(tokens):
      return self._end('dropped, turn is a loop')
    if reason not in (StopReason.EOS, StopReason.SEQUENCE):
      return self._end('dropped, turn without an end')
    begun = self._plans[index].begun[len(self._template.before) :]
    tokenizer = self._limits.tokenizer
    text = tokenizer.decode([*begun, *tokens], skip_special=False)
    source = Source.OPENED if begun else Source.SAMPLED
    return self._first(index, [text.strip()], source)

  def _first(
    self, index: int, turns: Sequence[str], source: Source
  ) -> pool.Job | None:
    """Returns the job that answers the first turn, or None if it is unfit."""
    plan = self._plans[index]
    system = plan.conversation.system if plan.conversation else ()
    digest = filters.digest(turns[0])
    if digest in self._known:
      return self._end('dropped, turn known')
    messages = [*system, (conversations.USER, turns[0])]
    # Encoded like a user's text, which may differ from what the model wrote.
    try:
      prompt = self._limits.prompt(messages)
    except limits_lib.UnfitError as error:
      return self._end(f'dropped, {error}')
    self._known.add(digest)
    waiting = list(turns[1 : self._limits.max_turns])
    talk = _Talk(source, digest, messages, waiting, prompt, [])
    self._talks[index] = talk
    return self._answer(index, 1)

  def _answer(self, index: int, num_answers: int) -> pool.Job:
    """Returns the job that writes an answer; the first one is number 1."""
    return pool.Job(
      self._stride * index + num_answers,
      tuple(self._talks[index].prompt),
      self._plans[index].temperature,
      self._limits.max_answer_tokens,
    )

  def _take_answer(self, index, num_answers, done):
    ended = done.stop_reason == StopReason.EOS
    answer = done.tokens if ended else self._without_stop(done)
    if len(answer) <= ended:
      return self._end('dropped, answer is empty')
    if done.stop_reason == StopReason.INVALID_LOGITS:
      return self._end('dropped, answer of invalid logits')
    talk = self._talks[index]
    tokens = np.asarray([*talk.prompt, *answer], np.int32)
    hidden = np.zeros((tokens.size, *done.hidden.shape[1:]), done.hidden.dtype)
    # The target has not read the last token.
    given = min(tokens.size - 1, len(done.hidden))
    hidden[:given] = done.hidden[:given]
    dialogue = Dialogue(
      tokens=tokens,
      answers=((len(talk.prompt), tokens.size),),
      temperature=self._plans[index].temperature,
      source=talk.source,
      ended=ended,
      turn=talk.digest,
      hidden=hidden,
    )
    dialogues_lib.append(talk.dialogues, dialogue)
    self._num_tokens += len(answer)
    looped = done.stop_reason == StopReason.RUNNING
    cut = 'kept, cut at a loop' if looped else 'kept, cut at the limit'
    self._end('kept, with its end' if ended else cut)
    if looped or not talk.waiting:
      return None
    written = self._without_stop(done)
    text = self._limits.tokenizer.decode(written, skip_special=False)
    return self._next(index, num_answers + 1, text)

  def _next(self, index: int, number: int, answer: str) -> pool.Job | None:
    """Returns the job of the next answer, or None if the conversation ends."""
    talk = self._talks[index]
    if not self._limits.is_plain(answer):
      return self._end('not gone on with, answer with control tokens')
    talk.messages += [
      (conversations.ASSISTANT, answer),
      (conversations.USER, talk.waiting.pop(0)),
    ]
    try:
      talk.prompt = self._limits.prompt(talk.messages)
    except limits_lib.UnfitError as error:
      return self._end(f'not gone on with, {error}')
    return self._answer(index, number)

  def _without_stop(self, done: pool.Continuation) -> list[int]:
    lengths = {
      StopReason.EOS: 1,
      StopReason.SEQUENCE: len(self._template.after),
    }
    end = len(done.tokens) - lengths.get(done.stop_reason, 0)
    return done.tokens[:end]

  def _end(self, how: str) -> pool.Job | None:
    """Counts how a turn or an answer ended; no job follows."""
    self._ends[how] += 1
    return None
