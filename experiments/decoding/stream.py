"""Decoding of one row, a few rounds at a time, so that it can be shown."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from experiments.command import clock
from experiments.command import distributed
from experiments.decoding import rounds as rounds_lib
from experiments.decoding import setup as setup_lib
import specsample
from specsample import sharding
from specsample.loop import request
from specsample.types import DecodeState


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class OneRow(setup_lib.Setup):
  """A setup for one row at a time that reuses its compiled programs.

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
    widths = self.decoder.widths
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
  ) -> tuple[dict[str, Any] | None, DecodeState]:
    """Runs rounds; also returns what `rounds.of_row` reads, if it is kept."""
    if self.keeps_rounds:
      return rounds_lib.step(self, state)
    return None, self.advance(state, num_rounds)

  def extend(self, state: DecodeState, tokens: list[int]) -> DecodeState:
    """Appends tokens to a row; the given state is donated."""
    return specsample.extend(
      self.decoder,
      self.params,
      state,
      np.asarray([tokens], np.int32).reshape(1, -1),
      np.asarray([len(tokens)], np.int32),
      max_new_tokens=self.max_new_tokens,
    )


@dataclasses.dataclass(frozen=True)
class Chunk:
  """The tokens of a few rounds, and the counts up to the last of them."""

  tokens: list[int]
  origins: list[specsample.Origin]
  stats: specsample.stats.Stats
  stop_reason: specsample.StopReason
  seconds: float  # of all rounds so far, without the time of showing them
  first_seconds: float = 0.0  # of the prefill and the first round
  rounds: Sequence[rounds_lib.Round] = ()  # only if they are kept


def chunks(
  setup: OneRow, begin: Callable[[], DecodeState]
) -> Iterator[tuple[DecodeState, Chunk]]:
  """Decodes until the row stops; yields chunks and the state after each.

  The first chunk is one round; each later one takes about `chunk_seconds`.
  `begin` returns the state to continue, with the prompt in its cache. The row's
  programs are compiled before, so that this is not timed.
  """
  state, first_seconds = clock.seconds(begin)
  before = _first_row(state)
  shown = start = int(before['length'])
  seconds = 0.0
  num_rounds = 1
  done = False
  while not done:
    # Only decoding is timed, not what the caller does with the chunk.
    (found, state), elapsed = clock.seconds(setup.run, state, num_rounds)
    if not seconds:
      first_seconds += elapsed
    seconds += elapsed
    row = _first_row(state)
    length, done = int(row['length']), bool(row['done'])
    count = lambda name, row=row: tuple((row[name] - before[name]).tolist())
    yield (
      state,
      Chunk(
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
        rounds=rounds_lib.of_row(setup, found, 0) if found else (),
      ),
    )
    shown = length
    num_rounds = max(1, round(setup.chunk_seconds * num_rounds / elapsed))


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


def metrics(last: Chunk) -> dict[str, Any]:
  """Returns the metrics of a generation, given its last chunk.

  The prefill counts only towards `time_to_first_token`. For a tree, `drafted`
  counts the tokens of its longest path.
  """
  stats = last.stats
  return {
    'tokens': stats.tokens,
    'rounds': stats.rounds,
    'tokens_per_round': stats.tokens_per_round,
    'drafted': sum(i * count for i, count in enumerate(stats.proposed)),
    'kept': stats.kept,
    # None for a drafter that never drafts.
    'plain_rounds': stats.plain_rounds if len(stats.proposed) > 1 else None,
    'acceptance_by_position': [
      None if math.isnan(share) else share
      for share in stats.acceptance_by_position
    ],
    'time_to_first_token': last.first_seconds if stats.tokens else None,
    'seconds': last.seconds,
    # Logits that are NaN or infinite stop a row before its first token.
    'ms_per_token': 1e3 * last.seconds / stats.tokens if stats.tokens else None,
    'tokens_per_second': stats.tokens / last.seconds if stats.tokens else None,
    'stop_reason': last.stop_reason.name.lower(),
  }
