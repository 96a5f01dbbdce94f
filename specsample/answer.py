"""Text in, text out: a prompt or a chat is continued, piece by piece."""

from collections.abc import Iterator, Mapping, Sequence
import time
from typing import Any

import jax

from specsample import checks
from specsample import text as text_lib
from specsample.choosing import choice as choice_lib
from specsample.choosing.choice import Choice
from specsample.loading import load
from specsample.loop import decode
from specsample.loop import request
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.types import Array, DecodeState, Output, Params
from specsample.vocabularies.stop_texts import StopTexts

# A call of the compiled loop costs the host some milliseconds, however few
# rounds it runs, and text that grows ten times per second looks continuous.
_PIECE_SECONDS = 0.1


class Answer(Iterator[str]):
  """The text that continues a prompt, generated as it is read.

  Iterating yields each piece of the text once, as soon as later tokens can no
  longer change it. The pieces, joined, are `text`.

  Attributes:
    choice: how the text is generated, and why.
  """

  def __init__(
    self,
    choice: Choice,
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    stream: text_lib.TextStream,
    stop: Stop,
  ):
    """Continues a state of one row; `generate_text` makes it."""
    self.choice = choice
    self._decoder = decoder
    self._params = params
    self._state = state
    self._stream = stream
    self._stop = stop
    self._num_read = int(state.length[0])
    self._num_rounds = 1
    self._decoded = ''
    self._num_yielded = 0
    self._is_done = False

  def __next__(self) -> str:
    while not self._is_done:
      if piece := self._next_piece():
        return piece
    raise StopIteration

  @property
  def text(self) -> str:
    """The whole text; what is missing of it is generated first."""
    for _ in self:
      pass
    return self._decoded

  @property
  def output(self) -> Output:
    """The `Output` of the one row, so far: its tokens, rounds and drafts."""
    num_slots = self._state.tokens.shape[1]
    return decode.finish(self._state, max_new_tokens=num_slots)

  def _next_piece(self) -> str:
    """Runs some rounds; returns the text that they made final."""
    before = time.perf_counter()
    self._state = decode.advance(
      self._decoder,
      self._params,
      self._state,
      stop=self._stop,
      max_rounds=self._num_rounds,
    )
    row = self._state.tokens[0], self._state.length[0], self._state.done[0]
    tokens, length, is_done = jax.device_get(row)
    seconds = time.perf_counter() - before
    self._num_rounds = max(
      1, round(self._num_rounds * _PIECE_SECONDS / seconds)
    )
    self._decoded += self._stream.push(tokens[self._num_read : length])
    self._num_read, self._is_done = int(length), bool(is_done)
    if self._is_done:
      self._decoded += self._stream.finish()
    held = 0
    if (texts := self._stop.texts) is not None:
      self._decoded = texts.before(self._decoded)
      if not self._is_done:
        # Its end may be the beginning of a stop text, which is no output.
        held = max(map(len, texts.texts)) - 1
    final = max(self._num_yielded, len(self._decoded) - held)
    piece = self._decoded[self._num_yielded : final]
    self._num_yielded = final
    return piece


def generate_text(
  loaded: load.Loaded,
  prompt: str | Sequence[Mapping[str, Any]],
  *,
  choice: Choice | None = None,
  sampling: Sampling = Sampling(),
  max_new_tokens: int = 256,
  stop: Sequence[str] = (),
  key: Array | None = None,
  chat: bool | None = None,
) -> Answer:
  """Continues a prompt, or answers a chat, by speculative decoding.

      for piece in specsample.generate_text(loaded, 'Why is the sky blue?'):
        print(piece, end='', flush=True)

  The text follows the target's distribution if `choice.verify` is lossless, as
  those that `auto` returns are. It ends before a stop text, at an end token, or
  after `max_new_tokens`.

  Args:
    loaded: the target, with its tokenizer.
    prompt: a text, or the messages of a chat, as `Tokenizer.encode_chat` takes
      them: [{'role': 'user', 'content': 'Hi'}].
    choice: the drafter and the rule; by default those that `auto` finds fastest
      on this machine.
    sampling: how tokens are sampled; the default is greedy.
    max_new_tokens: the most tokens to generate.
    stop: texts before which the answer ends.
    key: a PRNG key for sampling; the default is `jax.random.key(0)`.
    chat: whether a text is a user's message, which the target answers, and not
      the beginning of the text to continue. The default is True if the
      tokenizer has a chat template.

  Returns:
    The answer; nothing of it is generated yet, but the prompt has been read.

  Raises:
    ValueError: an argument does not fit; nothing has been compiled yet.
  """
  checks.instance(
    'loaded', loaded, load.Loaded, 'give what specsample.load returned'
  )
  tokenizer = loaded.tokenizer
  if not isinstance(prompt, str):
    if chat is False:
      raise ValueError(
        'prompt is a list of messages, but chat is False: leave chat out, or '
        'give the text to continue'
      )
    tokens = tokenizer.encode_chat(prompt)
  elif tokenizer.chat_template is not None if chat is None else chat:
    tokens = tokenizer.encode_chat([{'role': 'user', 'content': prompt}])
  else:
    tokens = tokenizer.encode(prompt)
  texts = StopTexts(tokenizer, stop) if stop else None
  conditions = Stop(eos_ids=tokenizer.eos_ids, texts=texts)
  prompts, lengths = request.pad_prompts([tokens])
  chosen = choice_lib.auto(loaded) if choice is None else choice
  decoder = Decoder(loaded.model, chosen.drafter, chosen.verify)
  params = chosen.params(loaded)
  state = decode.prefill(
    decoder,
    params,
    prompts,
    lengths,
    jax.random.key(0) if key is None else key,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    log_probs=False,
  )
  stream = text_lib.TextStream(tokenizer)
  return Answer(chosen, decoder, params, state, stream, conditions)
