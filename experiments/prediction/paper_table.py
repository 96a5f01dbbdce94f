"""A paper's table, predicted from programs that TPU's compiler produced.

A round takes at least the time of its products, bytes and messages. No compiler
says how long a device waits for a message. A second prediction fits that wait
to a single number of the paper: its time of autoregressive decoding beyond the
roofline, divided among the collectives.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any

import gin

from specsample import cost
from specsample import files

_NAME = 'compile.json'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
  """The rounds of a program that was compiled for one topology."""

  model: str  # with a description of its weights, caches and mesh
  topology: str
  batch_size: int
  num_draft_tokens: int
  roofline_ms: float
  collectives: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A line of the table; `printed` values are the paper's, others predicted."""

  model: str
  topology: str
  batch_size: int
  benchmark: str
  num_draft_tokens: int
  tokens_per_round: float  # implied by the printed times
  printed_plain_ms: float  # per token, autoregressive
  printed_ms: float  # per token
  printed_speedup: float  # by the printed times
  plain_ms: float  # per token, at the roofline, as are the next two
  ms: float
  speedup: float
  # With a wait at each collective; None if there is no wait to explain.
  fitted_ms: float | None
  fitted_speedup: float | None


def setting(of: Rounds | Row) -> tuple[str, str, int]:
  """Returns what two compared programs or rows must have in common."""
  return of.model, of.topology, of.batch_size


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """The times that a paper prints, in milliseconds.

  Attributes:
    plain_ms: time per token of autoregressive decoding.
    draft_ms: time of a pass of the drafter.
    num_draft_tokens: K.
    printed_ms: time per token of speculative sampling, by benchmark.
  """

  plain_ms: float
  draft_ms: float
  num_draft_tokens: int
  printed_ms: Mapping[str, float]

  def rows(self, compiled: Sequence[Rounds]) -> list[Row]:
    """Returns the rows of all settings compiled with K drafts and with none.

    A setting is a model, topology and batch size; it has a row per benchmark.

    Raises:
      ValueError: there is no such setting, or one has two programs of one K.
    """
    by_size = {(*setting(one), one.num_draft_tokens): one for one in compiled}
    if len(by_size) < len(compiled):
      raise ValueError(
        '--compiled has two programs with the same model, topology, batch and '
        'K: name only one of the folders'
      )
    found = [
      self._row(by_size[*of, 0], speculative, benchmark, printed)
      for of in dict.fromkeys(map(setting, compiled))
      for speculative in [by_size.get((*of, self.num_draft_tokens))]
      if speculative and (*of, 0) in by_size
      for benchmark, printed in self.printed_ms.items()
    ]
    if not found:
      models = len({one.model for one in compiled})
      sizes = sorted({tuple(size) for _, *size in by_size})
      raise ValueError(
        f'--compiled has (topology, batch, K) {sizes} for {models} models: '
        'compile a model for one topology and batch with '
        f'K = {self.num_draft_tokens} and with NoDraft, K = 0'
      )
    return found

  def _row(self, plain, speculative, benchmark, printed):
    k = self.num_draft_tokens
    loop_ms = k * self.draft_ms + self.plain_ms
    tokens = cost.implied_tokens(loop_ms, printed)
    predicted = cost.speedup(
      tokens,
      round_seconds=speculative.roofline_ms,
      pass_seconds=plain.roofline_ms,
    )
    fitted_ms = fitted_speedup = None
    waits_ms = self.plain_ms - plain.roofline_ms
    if waits_ms > 0 and plain.collectives:
      wait_ms = waits_ms / plain.collectives
      round_ms = speculative.roofline_ms + speculative.collectives * wait_ms
      fitted_ms = round_ms / tokens
      fitted_speedup = cost.speedup(
        tokens, round_seconds=round_ms, pass_seconds=self.plain_ms
      )
    return Row(
      model=plain.model,
      topology=plain.topology,
      batch_size=plain.batch_size,
      benchmark=benchmark,
      num_draft_tokens=k,
      tokens_per_round=tokens,
      printed_plain_ms=self.plain_ms,
      printed_ms=printed,
      printed_speedup=self.plain_ms / printed,
      plain_ms=plain.roofline_ms,
      ms=speculative.roofline_ms / tokens,
      speedup=predicted,
      fitted_ms=fitted_ms,
      fitted_speedup=fitted_speedup,
    )


def read(folders: Sequence[str]) -> list[Rounds]:
  """Returns the programs that fit, from folders that `compile_tpu` wrote.

  Raises:
    ValueError: a compile.json is missing, lacks what is needed, or has no
      program that fits.
  """
  found = []
  for folder in folders:
    fitting = [one for one in _load(folder) if one.get('fits')]
    if not fitting:
      raise ValueError(
        f'--compiled={folder}: no program there fits into the memory of its '
        'devices: compile for more of them'
      )
    found += [_rounds(folder, one) for one in fitting]
  return found


def _load(folder: str) -> list[dict[str, Any]]:
  path = files.at(folder) / _NAME
  try:
    found = json.loads(path.read_bytes())
  except OSError as error:
    raise ValueError(
      f'--compiled={folder}: {path}: {error.strerror or error}: give a folder '
      'that experiments.compile_tpu wrote'
    ) from error
  except ValueError as error:
    raise ValueError(f'{path} is damaged: compile again') from error
  if not isinstance(found, list) or not all(isinstance(x, dict) for x in found):
    raise ValueError(f'{path} is not a list of programs: compile again')
  return found


def _rounds(folder, one):
  try:
    return Rounds(
      model=f'{one["model"]}, weights of {one["weights"]}, caches of '
      f'{one["max_length"]}, mesh {one["mesh"]}',
      topology=one['topology'],
      batch_size=one['batch_size'],
      num_draft_tokens=one['num_draft_tokens'],
      roofline_ms=1e3 * one['roofline_seconds_per_round'],
      collectives=sum(part['per_round'] for part in one['collectives']),
    )
  except KeyError as error:
    raise ValueError(
      f'--compiled={folder}: {_NAME} has no {error}, so it may come from an '
      'older version: compile again'
    ) from error
  except TypeError as error:
    raise ValueError(
      f'--compiled={folder}: {_NAME} is damaged ({error}): compile again'
    ) from error
