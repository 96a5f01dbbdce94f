"""Decoding of one row, a few rounds at a time, so that it can be shown."""

from collections.abc import Callable, Iterator
import dataclasses

import jax
import numpy as np

from experiments.command import clock
from experiments.command import distributed
from experiments.decoding import generation
from experiments.decoding import round_recorder
from experiments.decoding import setup as setup_lib
import specsample
from specsample import sharding
from specsample.loop import request
from specsample.loop import step
from specsample.types import DecodeState


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Decoder(setup_lib.Setup):
  """A decoder of one row at a time that reuses its compiled programs.

  With `max_length`, the programs serve prompts of every length that leaves room
  and rows that are extended; without it, prompts of one bucket (`pad_prompts`).
  """

  # A call of the compiled loop costs the host some milliseconds, however few
  # rounds it runs, and text that grows ten times per second looks continuous.
  # 0 means one round per call, as several processes need: their clocks differ.
  chunk_seconds: float = 0.1
  # Whether chunks have their rounds, which are then run one per call.
  keeps_rounds: bool = False

  def compile(self, tokens: list[int]) -> None:
    """Compiles the programs for this prompt and runs them on another one."""
    widths = step.widths(self.target.model, self.method.drafter)
    begin = lambda rows: self.begin(rows[0])
    setup_lib.warm_up(begin, lambda state: self.run(state, 1), [tokens], widths)
    is_chat = self.max_length is not None
    if is_chat and self.method.drafter.can_pause:
      jax.block_until_ready(self.extend(self.begin(tokens), []))

  def begin(self, tokens: list[int]) -> DecodeState:
    """Prefills the prompt; raises ValueError if it cannot be decoded."""
    # Prompts of this width or more are prefilled in chunks of the same size.
    least = 1 if self.max_length is None else request.PREFILL_CHUNK
    return dataclasses.replace(self, least_width=least).prefill([tokens])

  def run(
    self, state: DecodeState, num_rounds: int
  ) -> tuple[round_recorder.Found | None, DecodeState]:
    """Runs rounds; also returns what `round_recorder` reads, if it is kept."""
    if self.keeps_rounds:
      return round_recorder.step(self, state)
    return None, self.advance(state, num_rounds)

  def extend(self, state: DecodeState, tokens: list[int]) -> DecodeState:
    """Appends tokens to a row; the given state is donated."""
    return specsample.extend(
      self.params,
      state,
      np.asarray([tokens], np.int32).reshape(1, -1),
      np.asarray([len(tokens)], np.int32),
      model=self.target.model,
      drafter=self.method.drafter,
      max_new_tokens=self.max_new_tokens,
    )


def chunks(
  decoder: Decoder, begin: Callable[[], DecodeState]
) -> Iterator[tuple[DecodeState, generation.Chunk]]:
  """Decodes until the row stops; yields chunks and the state after each.

  The first chunk is one round; each later one takes about `chunk_seconds`.

  Args:
    decoder: compiled, so that compilation is not timed.
    begin: returns the state to continue, with the prompt in its cache.
  """
  state, first_seconds = clock.seconds(begin)
  before = _first_row(state)
  shown = start = int(before['length'])
  seconds = 0.0
  num_rounds = 1
  done = False
  while not done:
    # Only decoding is timed, not what the caller does with the chunk.
    (found, state), elapsed = clock.seconds(decoder.run, state, num_rounds)
    if not seconds:
      first_seconds += elapsed
    seconds += elapsed
    row = _first_row(state)
    length, done = int(row['length']), bool(row['done'])
    count = lambda name, row=row: tuple((row[name] - before[name]).tolist())
    yield (
      state,
      generation.Chunk(
        tokens=row['tokens'][shown:length].tolist(),
        origins=[specsample.Origin(i) for i in row['origin'][shown:length]],
        stats=specsample.stats.Stats(
          tokens=length - start,
          rounds=int(row['round'] - before['round']),
          proposed=count('proposed'),
          accepted=count('accepted'),
        ),
        stop_reason=specsample.StopReason(int(row['stop_reason'])),
        seconds=seconds,
        first_seconds=first_seconds,
        rounds=round_recorder.of_row(decoder, found, 0)
        if found is not None
        else (),
      ),
    )
    shown = length
    num_rounds = max(1, round(decoder.chunk_seconds * num_rounds / elapsed))


def _first_row(state: DecodeState) -> dict[str, np.ndarray]:
  """Returns what is shown of the first row, on the host."""
  names = (
    *('length', 'done', 'tokens', 'origin', 'round', 'proposed', 'accepted'),
    'stop_reason',
  )
  shown = {name: getattr(state, name) for name in names}
  if distributed.is_on():
    shown = _replicate(shown)
  return {name: x[0] for name, x in jax.device_get(shown).items()}


# Gives each host a whole copy of arrays that no host holds whole.
_replicate = jax.jit(sharding.replicate)
