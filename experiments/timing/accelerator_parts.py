"""The measurements of an accelerator, in parts that fit a time budget.

Each part is a command in a process of its own, which gives the device's memory
back when it ends. A part that has ended is in the journal and is not run again.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import datetime
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

from experiments.command import cli
from experiments.command import journal as journal_lib
from experiments.command import progress as progress_lib

# The trained drafters that ship, the most promising ones first.
_DRAFTERS = ('mtp', 'eagle3', 'dspark', 'hydra', 'medusa', 'draft')
_BFLOAT16 = "target/specsample.load.dtype = 'bfloat16'"
# The entries of a result file that the journal keeps.
_KEPT = (
  *('hardware', 'versions', 'git_commit', 't_ms', 'ar_tokens_per_s'),
  *('ar_round_ms', 'memory_gb_per_s', 'percent_of_roofline', 'methods'),
  'weight_bytes',
  'rows',
)


@dataclasses.dataclass(frozen=True)
class Part:
  """A command that writes a file of results.

  Attributes:
    name: also the name of its folder and of its log.
    what: what it measures, for the page.
    command: Python's arguments; the folder follows as --out.
    result: the name of the file.
  """

  name: str
  what: str
  command: Sequence[str]
  result: str = 'benchmark.json'


def parts(num_tokens: int, bindings: Sequence[str]) -> list[Part]:
  """Returns all parts, the most important ones first.

  Args:
    num_tokens: the new tokens of each answer.
    bindings: gin bindings for all of them.
  """

  def command(name, configuration, *own):
    settings = [*own, *bindings]
    return (
      *('-m', f'experiments.{name}'),
      f'--gin_file=configs/runs/{configuration}.gin',
      *(f'--gin_bindings={setting}' for setting in settings),
    )

  def benchmark(configuration, *own):
    most = f'Benchmark.max_new_tokens = {num_tokens}'
    return command('benchmark', configuration, most, *own)

  of_drafter = {
    name: Part(
      name,
      f'SmolLM2 135M, bfloat16, {name}',
      benchmark(
        'benchmark_drafters',
        _BFLOAT16,
        f"Benchmark.methods = {{'{name}': @{name}/methods.trained()}}",
      ),
    )
    for name in _DRAFTERS
  }
  best, *others = of_drafter.values()
  return [
    Part('target', 'SmolLM2 135M, bfloat16', benchmark('benchmark', _BFLOAT16)),
    Part('8b_bfloat16', '8B shape, bfloat16', benchmark('benchmark_8b')),
    best,
    Part(
      '8b_int8',
      '8B shape, int8',
      benchmark('benchmark_8b', "random_weights.params.weights = 'int8'"),
    ),
    *others,
    Part(
      'prompts',
      'SmolLM2 135M, bfloat16, all drafters over 12 prompts',
      command(
        *('evaluate', 'all', _BFLOAT16, 'Evaluation.repeats = 0'),
        f'Evaluation.max_new_tokens = {num_tokens}',
      ),
      'result.json',
    ),
  ]


def chosen(all_parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
  """Returns the named parts in their order; all of them if none is named.

  Raises:
    ValueError: a name is unknown.
  """
  known = [part.name for part in all_parts]
  for name in names:
    if name not in known:
      raise ValueError(
        f'--parts={name} is unknown: choose from {", ".join(known)}'
      )
  return [part for part in all_parts if not names or part.name in names]


def run(
  work: Sequence[Part],
  out: pathlib.Path,
  journal: journal_lib.Journal,
  *,
  minutes: float,
  progress: progress_lib.Bar,
  after_each: Callable[[Mapping[str, str]], None],
  in_child: Callable[[], None] | None = None,
) -> None:
  """Runs the parts that are not in the journal, for at most `minutes`.

  All but the last part get at most half of the time that is left, so that one
  that hangs does not keep the others out.

  Args:
    work: the parts, the most important ones first.
    out: the folder that gets a folder and a log for each part.
    journal: gets each part's results under ('part', name).
    minutes: the time budget of this run.
    progress: shows the progress.
    after_each: called before the first part and after each one; takes the
      reasons, by name, why parts were left out so far.
    in_child: called in each part's process before it begins.
  """
  missing = [part for part in work if ('part', part.name) not in journal]
  end = time.monotonic() + 60 * minutes
  left_out: dict[str, str] = {}
  after_each(left_out)
  with progress(len(missing)) as step:
    for part in missing:
      left = end - time.monotonic()
      share = left if part is missing[-1] else left / 2
      clock = datetime.timedelta(seconds=max(0, round(left)))
      step(f'{part.what} ({clock} of the budget left)')
      found, why = None, 'no time was left'
      if share > 1:
        found, why = _run_one(part, out, share, in_child)
      if found is None:
        left_out[part.name] = why
      else:
        journal.add(('part', part.name), found)
      after_each(left_out)


def _run_one(part, out, seconds, in_child):
  """Returns a part's results, or None and why there are none."""
  begin = time.monotonic()
  log = out / f'{part.name}.log'
  command = [sys.executable, *part.command, f'--out={out / part.name}']
  with log.open('ab') as file:
    try:
      done = subprocess.run(
        command,
        cwd=pathlib.Path(__file__).resolve().parents[2],
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        timeout=seconds,
        preexec_fn=in_child,
        check=False,
      )
    except subprocess.TimeoutExpired:
      return (
        None,
        f'it was stopped after {seconds:.0f} s, its share of the time',
      )
  if done.returncode:
    last = [*log.read_text('utf-8', 'replace').split('\n'), ''][-3:]
    said = ' '.join(' '.join(last).split())[-300:]
    return None, f'it failed ({said}): see {log.name}'
  result = json.loads((out / part.name / part.result).read_bytes())
  kept = {name: result[name] for name in _KEPT if name in result}
  return kept | {'seconds': time.monotonic() - begin}, ''


def open_journal(
  out: pathlib.Path, header: Mapping[str, Any]
) -> journal_lib.Journal:
  """Returns the journal in a folder, which is made.

  Raises:
    ValueError: it belongs to other settings or other code, or is in use.
  """
  cli.make_folder(out)
  return journal_lib.Journal(out, dict(header))
