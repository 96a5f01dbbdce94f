"""Traces: the rounds of a real run, with the inputs of each decision.

A trace is a folder of files, one per batch of prompts, in NumPy's .npz format
without pickles. A file of R rounds with N drafts each holds (M as in `types`):

  header        text, JSON: what was run, and where
  prompt, round [R] int32, from 0; a round has one row per prompt
  tokens        [R, N] int32, the drafts, -1 where there is none
  parents       [R, N] int32, the parent of each node, only for trees
  ids           [R, N + 1, C] int32, the tokens of the columns of each node
  target_probs  [R, N + 1, C + E] float32, warped, for the token after each node
  draft_probs   [R, N, C + E] float32, in the columns of the parent, only for
                drawn drafts
  log_prob, max_log_prob, rank, entropy, confidence
                [R, N], `types.Signals`, as far as the drafter gives them
  num_accepted, num_emitted
                [R] int32, the drafts and tokens that the run emitted
  output        [prompts, M] int32, the emitted tokens, -1 after the last

The columns of a node are its children and the tokens that are most likely under
the target or the draft. All other tokens share E more columns, grouped by the
ratio of their probabilities. Rules compare r times the target's probability
with the draft's; the overlap of the sums is that of the single tokens unless
1 / r lies within a group. If siblings have different distributions, the largest
probability counts. Probabilities are kept, not their logarithms, so that rules
get exactly the same bits as in the run.
"""

from collections.abc import Sequence
import dataclasses
import io
import json
import os
import pathlib
from typing import Any
import urllib.parse
import zipfile
import zlib

import numpy as np

from experiments.reporting import files as reporting_files
from specsample import files

FORMAT = 1
# Bounds of target / draft between the groups of tokens without columns of their
# own. The token rule is exact because 1 is one of them.
RATIOS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
NUM_GROUPS = len(RATIOS) + 1  # E
_ALWAYS = {
  **{'prompt': 1, 'round': 1, 'num_accepted': 1, 'num_emitted': 1},
  **{'tokens': 2, 'output': 2, 'ids': 3, 'target_probs': 3},
}
SIGNALS = ('log_prob', 'max_log_prob', 'rank', 'entropy', 'confidence')
_SOMETIMES = {'parents': 2, 'draft_probs': 3} | dict.fromkeys(SIGNALS, 2)
# The command that records missing files, whatever the journal says.
COMMAND = 'the same `python -m experiments.evaluate --record`'
# Header entries that differ between the files of a trace.
_OF_A_FILE = ('batch', 'command', 'git_commit')


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
  """Rounds and where they are from; see the module for the arrays."""

  header: dict[str, Any]
  arrays: dict[str, np.ndarray]


def folder(out: pathlib.PurePath, method: str) -> pathlib.PurePath:
  """Returns the folder of a method's trace, for an evaluation in `out`."""
  return out / 'traces' / urllib.parse.quote(method, safe=' ,')


def write(path: pathlib.PurePath, trace: Trace) -> None:
  """Writes a file, whole or not at all, and creates its folder.

  Raises:
    ValueError: the file cannot be written.
  """
  data = io.BytesIO()
  header = json.dumps(trace.header | {'format': FORMAT})
  arrays: dict[str, Any] = trace.arrays | {'header': np.asarray(header)}
  # No other arguments: before NumPy 2.2 every keyword is an array.
  np.savez_compressed(data, **arrays)
  files.at(path.parent).mkdir(parents=True, exist_ok=True)
  reporting_files.write(path, data.getvalue())


def read(path: str | os.PathLike[str]) -> Trace:
  """Reads the trace in a folder.

  Raises:
    ValueError: it is not a trace, or of another version, damaged or unfinished.
  """
  at = files.at(path)
  if not files.is_folder(at):
    raise ValueError(
      f'{path} is not a folder: give the folder of a method, such as '
      'OUT/traces/draft, which `python -m experiments.evaluate --record` writes'
    )
  parts = [_read(one) for one in sorted(at.glob('*.npz'))]
  if not parts:
    names = sorted(one.name for one in at.iterdir() if one.is_dir())
    raise ValueError(
      f'{path} has no .npz file: give the folder of one method'
      + (f', such as {path}/{names[0]}' if names else '')
    )
  return _joined(path, parts)


def outside(trace: Trace) -> tuple[float, float | None]:
  """Returns the most probability without a column, of target and draft."""
  rest = lambda x: float(np.max(np.sum(x[..., -NUM_GROUPS:], -1), initial=0))
  draft_probs = trace.arrays.get('draft_probs')
  of_draft = None if draft_probs is None else rest(draft_probs)
  return rest(trace.arrays['target_probs']), of_draft


def _joined(path, parts: Sequence[Trace]) -> Trace:
  of_run = lambda header: {
    name: x for name, x in header.items() if name not in _OF_A_FILE
  }
  first = parts[0]
  for part in parts[1:]:
    if (
      of_run(part.header) != of_run(first.header)
      or part.arrays.keys() != first.arrays.keys()
    ):
      raise ValueError(
        f'{path} has files from different runs: delete the folder and run '
        f'{COMMAND} again'
      )
  arrays = {
    name: np.concatenate([part.arrays[name] for part in parts])
    for name in first.arrays
  }
  count, there = first.header['num_prompts'], len(arrays['output'])
  if there != count:
    raise ValueError(
      f'{path} has {there} of {count} prompts: let {COMMAND} finish; if there '
      'are too many, delete the folder first'
    )
  return Trace(of_run(first.header), arrays)


def _read(path) -> Trace:
  damaged = (
    f'{path} is not a trace, or was cut short: to record it again, delete the '
    f'file and run {COMMAND} again'
  )
  try:
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as found:
      header = json.loads(str(found['header']))
      version = header.get('format')
      arrays = {name: found[name] for name in found if name != 'header'}
  # A file of one array is not a context manager, and a text is not a zip file.
  except (
    *(ValueError, TypeError, AttributeError, KeyError, EOFError),
    *(OSError, zipfile.BadZipFile, zlib.error),
  ) as error:
    raise ValueError(damaged) from error
  if version != FORMAT:
    raise ValueError(
      f'{path} is a trace of format {version}, but this version reads {FORMAT}:'
      ' record with this version, into another --out'
    )
  known = _ALWAYS | _SOMETIMES
  num_rounds = len(arrays.get('round', ()))
  if not _ALWAYS.keys() <= arrays.keys() <= known.keys() or any(
    x.ndim != known[name] or (name != 'output' and len(x) != num_rounds)
    for name, x in arrays.items()
  ):
    raise ValueError(damaged)
  return Trace(header, arrays)
