"""The jobs of one shard: user turns, and the answers to those that are fit."""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses

import numpy as np

from experiments import dialogues as dialogues_lib
from experiments import filters
from experiments import pool
from experiments import template as template_lib
from experiments.dialogues import Dialogue
from experiments.dialogues import Source
from specsample import StopReason
from specsample import text as text_lib


@dataclasses.dataclass(frozen=True)
class Plan:
  """One dialogue that is tried."""

  text: str | None  # the user's turn, None to sample it
  begun: tuple[int, ...]  # what it is then prompted with
  temperature: float  # of the answer


@dataclasses.dataclass(frozen=True)
class _Turn:
  prompt: list[int]
  source: Source
  digest: int


class Shard:
  """A shard in the making; job 2 i is dialogue i's turn, 2 i + 1 its answer."""

  def __init__(
    self,
    *,
    tokenizer: text_lib.Tokenizer,
    template: template_lib.Template,
    plans: Sequence[Plan],
    user_temperature: float,
    max_prompt_tokens: int,
    max_answer_tokens: int,
    known: set[int],
    excluded: filters.Exclusion,
    watch: Callable[[int], None],
  ):
    """Arguments as in `synthesis.Synthesis`; `known` is added to."""
    self._tokenizer = tokenizer
    self._template = template
    self._plans = plans
    self._user_temperature = user_temperature
    self._max_prompt_tokens = max_prompt_tokens
    self._max_answer_tokens = max_answer_tokens
    self._known = known
    self._excluded = excluded
    self._watch = watch
    self._turns: dict[int, _Turn] = {}
    self._found: dict[int, Dialogue] = {}
    self._ends: collections.Counter[str] = collections.Counter()

  def jobs(self) -> Iterator[pool.Job]:
    """The first ones; `then` makes the others."""
    for i, plan in enumerate(self._plans):
      if plan.text is None:
        room = self._max_prompt_tokens - len(plan.begun)
        room -= len(self._template.after)
        yield pool.Job(2 * i, plan.begun, self._user_temperature, room)
      else:
        job = self._answer(i, plan.text, Source.PROMPT)
        if job is not None:
          yield job

  def then(self, done: pool.Continuation) -> pool.Job | None:
    """Takes in a finished job; a user turn that is fit is answered next."""
    index, is_answer = divmod(done.job.number, 2)
    if is_answer:
      self._keep(index, done)
      following = None
    else:
      following = self._take_turn(index, done)
    self._watch(dialogues_lib.answer_tokens(self._found.values()))
    return following

  def dialogues(self) -> list[Dialogue]:
    """Those that were kept, in the order of the plans."""
    return [self._found[i] for i in sorted(self._found)]

  def ends(self) -> dict[str, int]:
    """How many dialogues came to what end."""
    return dict(sorted(self._ends.items()))

  def _take_turn(self, index, done):
    tokens = self._without_stop(done)
    reason = done.stop_reason
    if reason == StopReason.RUNNING or filters.loops(tokens):
      return self._drop('turn is a loop')
    if reason not in (StopReason.EOS, StopReason.SEQUENCE):
      return self._drop('turn without an end')
    begun = self._plans[index].begun[len(self._template.before) :]
    text = self._tokenizer.decode([*begun, *tokens], skip_special=False)
    source = Source.OPENED if begun else Source.SAMPLED
    return self._answer(index, text.strip(), source)

  def _answer(self, index: int, text: str, source: Source) -> pool.Job | None:
    """The job to answer a turn, None if it is not fit."""
    digest = filters.digest(text)
    if not text.strip():
      return self._drop('turn is empty')
    if not self._is_plain(text):
      return self._drop('turn with control tokens or broken characters')
    if digest in self._known:
      return self._drop('turn known')
    if text in self._excluded:
      return self._drop('turn excluded')
    # As a user's text is encoded, which may not be how the model wrote it.
    prompt = self._tokenizer.encode_chat([{'role': 'user', 'content': text}])
    if len(prompt) > self._max_prompt_tokens:
      return self._drop('turn too long')
    self._known.add(digest)
    self._turns[index] = _Turn(prompt, source, digest)
    return pool.Job(
      2 * index + 1,
      tuple(prompt),
      self._plans[index].temperature,
      self._max_answer_tokens,
    )

  def _is_plain(self, text):
    encode = self._tokenizer.encode
    return '\ufffd' not in text and encode(text) == encode(text, True)

  def _keep(self, index: int, done: pool.Continuation) -> None:
    turn = self._turns[index]
    ended = done.stop_reason == StopReason.EOS
    tokens = done.tokens if ended else self._without_stop(done)
    if len(tokens) <= ended:
      self._drop('answer is empty')
    elif done.stop_reason == StopReason.INVALID_LOGITS:
      self._drop('answer of invalid logits')
    else:
      whole = np.asarray([*turn.prompt, *tokens], np.int32)
      hidden = np.zeros((whole.size, *done.hidden.shape[1:]), done.hidden.dtype)
      # The last token was not given to the target.
      given = min(whole.size - 1, len(done.hidden))
      hidden[:given] = done.hidden[:given]
      self._found[index] = Dialogue(
        tokens=whole,
        answer=len(turn.prompt),
        temperature=self._plans[index].temperature,
        source=turn.source,
        ended=ended,
        turn=turn.digest,
        hidden=hidden,
      )
      looped = done.stop_reason == StopReason.RUNNING
      cut = 'kept, cut at a loop' if looped else 'kept, cut at the limit'
      self._ends['kept, with its end' if ended else cut] += 1

  def _without_stop(self, done: pool.Continuation) -> list[int]:
    lengths = {
      StopReason.EOS: 1,
      StopReason.SEQUENCE: len(self._template.after),
    }
    end = len(done.tokens) - lengths.get(done.stop_reason, 0)
    return done.tokens[:end]

  def _drop(self, why: str) -> pool.Job | None:
    """Notes why a dialogue ends here; no job follows."""
    self._ends[f'dropped, {why}'] += 1
    return None
