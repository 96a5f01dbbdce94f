"""From timed generations to the rows of a table, and to files."""

from collections.abc import Sequence
import csv
import dataclasses
import io
import json
import os
import pathlib
from typing import Any

import numpy as np

from specsample import files
from specsample import stats

# Two log-probabilities closer than that are a tie in float32.
_TIE = 1e-4


@dataclasses.dataclass(frozen=True)
class Generation:
  """One prompt, decoded by one method.

  Prompts of a batch are decoded at once: its seconds are shared out by their
  tokens, so that each of its tokens costs the same.
  """

  batch: int  # which one, from 0; with batch size 1 the prompt's number
  category: str
  prompt_tokens: int
  tokens: list[int]
  log_probs: list[float]
  seconds: float
  stats: stats.Stats

  def to_json(self) -> dict[str, Any]:
    """As the journal keeps it."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, record: dict[str, Any]) -> 'Generation':
    """The inverse of `to_json`."""
    counts = dict(record['stats'])
    for name in ('proposed', 'accepted'):
      counts[name] = tuple(counts[name])
    return cls(**record | {'stats': stats.Stats(**counts)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One line of result.json: a method over the prompts of a category.

  Times are milliseconds; what was not measured is None. Of batches, the time a
  token is the seconds of the batches over all of their tokens (throughput, not
  what one prompt waits), the speedup is a ratio of two of those, its interval
  resamples batches, and the parts of a round are those of a whole batch.
  """

  method: str
  drafter: str
  verifier: str
  law: str  # of the drafts: types.DraftLaw
  lossless: bool
  benchmark: str
  category: str  # 'overall' for all prompts
  num_draft_tokens: int
  temperature: float
  batch_size: int
  prompts: int
  tokens: int
  rounds: int
  tokens_per_round: float
  acceptance_by_position: list[float | None]  # [K], None where never drafted
  ms_per_token: float  # prefill included
  speedup: float | None
  speedup_ci95: list[float] | None
  predicted_speedup: float | None  # by the times below, which were apart
  prefill_ms: float | None  # of a batch of typical prompts
  draft_ms: float | None  # of a round, as are the next two
  verify_ms: float | None
  overhead_ms: float | None
  percent_of_roofline: float | None  # of one pass of the target a round


@dataclasses.dataclass(frozen=True)
class Mismatches:
  """Outputs of a lossless greedy method that are not the baseline's."""

  ties: int  # both tokens were equally likely where they part
  errors: int


def measured(
  runs: Sequence[Generation], baseline: Sequence[Generation] | None
) -> dict[str, Any]:
  """The fields of a row that follow from the timed generations.

  `baseline` has the same prompts in the same order; None if it was not run.
  """
  total = runs[0].stats
  for run in runs[1:]:
    total += run.stats
  elapsed = sum(run.seconds for run in runs)
  return {
    'prompts': len(runs),
    'tokens': total.tokens,
    'rounds': total.rounds,
    'tokens_per_round': total.tokens_per_round,
    'acceptance_by_position': [
      None if np.isnan(share) else share
      for share in total.acceptance_by_position
    ],
    'ms_per_token': 1e3 * elapsed / total.tokens,
    'speedup': speedup(runs, baseline) if baseline else None,
    'speedup_ci95': speedup_interval(runs, baseline) if baseline else None,
  }


def speedup(
  runs: Sequence[Generation], baseline: Sequence[Generation]
) -> float:
  """The baseline's seconds a token over the method's, all prompts together."""
  return float(_speedups(_table(runs, baseline)[None])[0])


def speedup_interval(
  runs: Sequence[Generation],
  baseline: Sequence[Generation],
  *,
  resamples: int = 2000,
) -> list[float] | None:
  """The 95% interval of `speedup`: a bootstrap over batches, paired.

  (Over prompts, where batches hold one.) None for a single batch, which says
  nothing about others.
  """
  table = _table(runs, baseline)
  count = len(table)
  if count < 2:
    return None
  chosen = np.random.default_rng(0).integers(count, size=(resamples, count))
  speedups = _speedups(table[chosen])
  return [float(x) for x in np.percentile(speedups, [2.5, 97.5])]


def _table(runs, baseline):
  """Seconds and tokens of both, a row a batch."""
  batches: dict[int, np.ndarray] = {}
  for run, base in zip(runs, baseline, strict=True):
    row = (base.seconds, len(base.tokens), run.seconds, len(run.tokens))
    batches[run.batch] = batches.get(run.batch, 0) + np.asarray(row)
  return np.stack(list(batches.values()))


def _speedups(tables):
  base_seconds, base_tokens, seconds, tokens = tables.sum(axis=1).T
  return (base_seconds / base_tokens) / (seconds / tokens)


def mismatches(
  runs: Sequence[Generation], baseline: Sequence[Generation]
) -> Mismatches:
  """Compares greedy outputs token for token."""
  ties, errors = 0, 0
  for run, base in zip(runs, baseline, strict=True):
    if run.tokens == base.tokens:
      continue
    if _is_tie(run, base):
      ties += 1
    else:
      errors += 1
  return Mismatches(ties, errors)


def _is_tie(run: Generation, base: Generation) -> bool:
  pairs = zip(run.tokens, base.tokens, strict=False)
  parting = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
  if parting is None:  # one stopped earlier on the same tokens
    return False
  return abs(run.log_probs[parting] - base.log_probs[parting]) < _TIE


def write_json(path: pathlib.PurePath, value: Any) -> None:
  """Writes a JSON file, whole or not at all."""
  text = json.dumps(value, indent=2, allow_nan=False)
  write(path, (text + '\n').encode())


def write_csv(path: pathlib.PurePath, rows: Sequence[Any]) -> None:
  """Writes rows, dataclasses of one kind, at least one.

  A cell that is no text holds its JSON, None is empty.
  """
  names = [field.name for field in dataclasses.fields(rows[0])]
  text = io.StringIO()
  writer = csv.DictWriter(text, names, lineterminator='\n')
  writer.writeheader()
  for row in rows:
    cells = dataclasses.asdict(row).items()
    writer.writerow({name: _cell(value) for name, value in cells})
  write(path, text.getvalue().encode())


def _cell(value: Any) -> str:
  if value is None:
    return ''
  return value if isinstance(value, str) else json.dumps(value)


def write(path: pathlib.PurePath, data: bytes) -> None:
  """Writes a file that appears under its name only when it is complete.

  `path` is a `pathlib.Path` or, of a bucket too, an `epath.Path`.

  Raises:
    ValueError: it cannot be written; nothing stays behind.
  """
  if files.is_remote(path):
    # There an object appears when all of it has arrived.
    files.at(path).write_bytes(data)
    return
  # Another process may be writing the same file.
  partial = path.with_name(f'.{path.name}.{os.getpid()}.partial')
  try:
    with open(partial, 'wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  except OSError as error:
    # Of a full disk it would take the last that is left.
    pathlib.Path(partial).unlink(missing_ok=True)
    raise ValueError(
      f'{path} cannot be written ({error.strerror or error}): make room, and '
      'the same command goes on from what is there'
    ) from error
