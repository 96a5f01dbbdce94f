"""Compares decoding methods over a set of prompts.

  python -m experiments.evaluate
  python -m experiments.evaluate --prompts=questions.jsonl --limit=20
  python -m experiments.evaluate --gin_bindings='Evaluation.batch_size = 8'

Prints a table, and writes result.json, results.csv, results.png and
generations.jsonl (each method's text, with every token's origin) to --out.
The journal there lets the same command resume after an interruption.
`python -m experiments.report` makes a page of these files (docs/evaluation.md).
For many devices and hosts, see docs/scaling.md. Greedy outputs that differ from
the baseline's are audited (docs/exactness.md).

Configurations for other questions, by --gin_file=configs/runs/NAME.gin:
throughput refills the rows of a batch, online has drafters that learn while
they draft, vocabularies has a draft model with other tokens, trees compares
chains and trees, and all has every method.
"""

# Only the wiring is here: experiments/evaluation/ decodes, measures and makes
# the rows.

import dataclasses
import sys

from absl import flags

from experiments.command import cli
from experiments.command import distributed
from experiments.command import frame
from experiments.command import journal as journal_lib
from experiments.command import progress
from experiments.command import units as units_lib
from experiments.evaluation import audits
from experiments.evaluation import conversations
from experiments.evaluation import decoding
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import generations
from experiments.evaluation import learning as learning_lib
from experiments.evaluation import papers
from experiments.evaluation import profiling
from experiments.evaluation import refilled
from experiments.evaluation import results
from experiments.evaluation import suite
from experiments.evaluation import table as table_lib
from experiments.reporting import result_file

frame.define_flags('configs/runs/quickstart.gin', on_hosts=True)
_OUT = frame.out()
_PROMPTS = flags.DEFINE_string(
  'prompts',
  None,
  "Prompts in place of the configuration's: Spec-Bench's jsonl (all turns), "
  'JSON lines with a prompt field, or plain text with one prompt per line. '
  'Default, if the configuration has no task: experiments/data/prompts.jsonl.',
)
_LIMIT = flags.DEFINE_integer(
  'limit', None, 'How many of the first prompts to use.', lower_bound=1
)
_NUM_SEEDS = flags.DEFINE_integer(
  'num_seeds',
  None,
  'How often to decode each prompt above temperature 0, each time with its own '
  'seed.',
  lower_bound=1,
)
_ALLOW_CODE_EXECUTION = flags.DEFINE_bool(
  'allow_code_execution',
  False,
  'Runs the decoded code in a sandbox if a score needs it.',
)
_PROFILE_DIR = flags.DEFINE_string(
  'profile_dir',
  None,
  'Decodes a typical prompt once more with each method and writes a profile of '
  'it to this local folder (docs/performance.md).',
)


def main() -> None:
  """Measures what is not in the journal yet, then reports everything."""
  with cli.bad_input():
    out = frame.folder(_OUT)
    parts = list(
      suite.parts(
        path=_PROMPTS.value,
        limit=_LIMIT.value,
        num_seeds=_NUM_SEEDS.value,
        allow_code_execution=_ALLOW_CODE_EXECUTION.value,
      )
    )
    paper = papers.Paper()
    # The names of a task's scores stay valid if --prompts replaces the task.
    papers.check(paper, {part.name: part.configured for part in parts})
    if _PROMPTS.value and any(part.configured.task for part in parts):
      paper = papers.of_other_prompts(paper, parts[0].benchmark)
    if distributed.is_first():
      result_file.check_settings(
        out / result_file.EVALUATION, [part.name for part in parts]
      )
    root = _PROFILE_DIR.value
    profiles = [profiling.check(root, part) for part in parts] if root else []
    headers = list(map(decoding.header, parts))
    for header in headers:
      distributed.check_same(
        {name: repr(x) for name, x in header.items() if name != 'hardware'}
      )
    for i, (part, header) in enumerate(zip(parts, headers, strict=True)):
      folder = suite.folder(out, part.name)
      cli.make_folder(folder)
      journal = journal_lib.Journal(folder, header)
      parts[i] = dataclasses.replace(part, journal=journal)
    learning = list(map(learning_lib.methods, parts))
  for part, methods in zip(parts, learning, strict=True):
    _run(part, methods)
  if distributed.is_first():
    _report(out, parts, paper)
  # Profiles come last: if one fails, the result files are already written.
  for part, profile in zip(parts, profiles, strict=False):
    profiling.write(profile, part)


def _run(part, learning):
  if distributed.is_first():
    _say_what_is_measured(part)
  run = lambda work: units_lib.run(work, part.journal, progress.bar)
  turns = []
  for number in conversations.numbers(part.evaluation, part.prompts):
    turns.append(conversations.turn(part, number))
    # Refilled rows are of conversations of one turn.
    before, after = (
      refilled.units(part, i) if not number else [] for i in range(2)
    )
    run([*before, *decoding.units(part, turns[-1], learning), *after])
  work = [
    *decoding.scoring(part),
    *(method.saving() for method in learning.values()),
    *audits.units(part, turns),
  ]
  if work:
    run(work)


def _say_what_is_measured(part):
  if part.name:
    print(f'\n{part.name}')
  for method in part.evaluation.methods.values():
    if method.note:
      print(method.note, file=sys.stderr)
  count = len(part.prompts)
  if part.evaluation.repeats is None and not part.evaluation.num_repeats(count):
    print(
      'the parts of rounds are not timed, and nothing is predicted, for fewer '
      f'than {evaluation_lib.FEWEST_TO_TIME} prompts; here are {count}: '
      f'to time them, bind Evaluation.repeats = {evaluation_lib.REPEATS}',
      file=sys.stderr,
    )


def _report(out, parts, paper):
  tables = table_lib.on_one_machine(list(map(table_lib.Table.of, parts)))
  results.write(out, tables, paper)
  for part, table in zip(parts, tables, strict=True):
    generations.write(
      suite.folder(out, part.name),
      part.evaluation.target.tokenizer,
      part.prompts,
      table.generations,
    )
  results.show(out, tables, paper)


if __name__ == '__main__':
  frame.run(main, resumes=True)
