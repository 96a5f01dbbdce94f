"""A chat of several turns that keeps its cache from turn to turn."""

from collections.abc import Iterator, Sequence
import contextlib
import io
import signal
import sys
import threading

import jax

from experiments.command import cli
from experiments.decoding import display
from experiments.decoding import stream
from specsample.loop import request
from specsample.types import DecodeState


class Conversation:
  """The turns and answers so far, and the row that holds them.

  A new turn is appended to the row if the template renders the earlier turns
  exactly as the row has them, token by token; the target then reads only the
  new tokens. If it does not (some templates leave thinking out of earlier
  answers), the whole conversation is prefilled again.

  Attributes:
    num_read: tokens that the target read for the last turn.
  """

  def __init__(self, decoder: stream.OneRow):
    """Starts a conversation that must fit in the decoder's `max_length`."""
    self.num_read = 0
    self._decoder = decoder
    self._tokenizer = decoder.target.tokenizer
    self._messages: list[dict[str, str]] = []
    self._tokens: list[int] = []  # of the row
    self._state: DecodeState | None = None

  def answer(self, turn: str) -> Iterator[stream.Chunk]:
    """Yields the chunks of the answer to a turn of the user.

    The caller may stop early; the answer is then what has been yielded so far.
    """
    messages = [*self._messages, {'role': 'user', 'content': turn}]
    tokens = self._row(messages)
    answer: list[int] = []
    for state, one in stream.chunks(self._decoder, lambda: self._begin(tokens)):
      answer += one.tokens
      self._state = state
      self._tokens = [*tokens, *answer]
      self._messages = [*messages, self._tokenizer.message(answer)]
      yield one

  def _row(self, messages) -> list[int]:
    """Returns a row's tokens: the old and new ones, or all encoded again."""
    tokenizer = self._tokenizer
    text = tokenizer.chat(messages)
    known = tokenizer.decode(self._tokens, skip_special=False)
    rest = text.removeprefix(known)
    no_text = tokenizer.encode('')  # BOS, if the model family adds it
    new = tokenizer.encode(rest, parse_special=True)[len(no_text) :]
    tokens = [*self._tokens, *new]
    # Only the template may write control tokens, not the turn.
    is_plain = not tokenizer.has_control_tokens(messages[-1]['content'])
    if is_plain and tokenizer.decode(tokens, skip_special=False) == text:
      return tokens
    return tokenizer.encode_chat(messages)

  def _begin(self, tokens: list[int]) -> DecodeState:
    """Returns a state of the row with these tokens; uses up the old state."""
    count = len(self._tokens)
    new = tokens[count:]
    is_longer = bool(new) and tokens[:count] == self._tokens
    state = self._state
    if state is not None and is_longer and self._extends(state, len(new)):
      self.num_read = len(new)
      return self._decoder.extend(state, new)
    self.num_read = len(tokens)
    return self._decoder.begin(tokens)

  def _extends(self, state: DecodeState, num_new: int) -> bool:
    """Returns whether to extend the row instead of prefilling it again.

    If the drafter has a state, a long text would take many short passes.
    """
    has_state = bool(jax.tree.leaves(state.draft))
    is_short = num_new <= request.PREFILL_CHUNK
    can_extend = self._decoder.method.drafter.can_pause
    return can_extend and (is_short or not has_state)


def hold(
  conversation: Conversation, first: str, views: Sequence[display.View]
) -> None:
  """Answers turns until there are no more, or until a second Ctrl-C.

  If `first` is '', the first turn is read like the others.
  """
  if isinstance(sys.stdin, io.TextIOWrapper):
    # One turn that is not UTF-8 is no reason to end the chat.
    sys.stdin.reconfigure(errors='surrogateescape')
  metrics = lambda last: display.turn_text(last, conversation.num_read)
  try:
    for turn in _turns(first):
      try:
        cli.check_utf8('the turn', turn)
        with _first_interrupt() as pressed:
          chunks = _until(pressed, conversation.answer(turn))
          display.show(chunks, views, metrics)
      except ValueError as error:
        display.note(str(error))
  except KeyboardInterrupt:
    pass
  if sys.stdin.isatty():
    print(file=sys.stderr)  # ends the line of an unanswered prompt


def _until(pressed, chunks) -> Iterator[stream.Chunk]:
  for one in chunks:
    yield one
    if pressed.is_set():
      return


@contextlib.contextmanager
def _first_interrupt() -> Iterator[threading.Event]:
  """Yields an event that the first Ctrl-C sets; a second Ctrl-C interrupts.

  An interrupt in the middle of a round would lose the row.
  """
  pressed = threading.Event()

  def handle(number, frame):
    del number, frame
    if pressed.is_set():
      raise KeyboardInterrupt
    pressed.set()

  before = signal.signal(signal.SIGINT, handle)
  try:
    yield pressed
  finally:
    signal.signal(signal.SIGINT, before)


def _turns(first: str) -> Iterator[str]:
  """Yields the turns that are not empty, until standard input ends."""
  if first:
    yield first
  while True:
    if sys.stdin.isatty():
      print('you: ', end='', file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
      return
    if line.strip():
      yield line.strip()
