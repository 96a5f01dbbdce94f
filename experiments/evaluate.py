"""Compares decoding methods over a set of prompts.

  python -m experiments.evaluate
  python -m experiments.evaluate --prompts=questions.jsonl --limit=20
  python -m experiments.evaluate --gin_bindings='Ngram.num_draft_tokens = 4'

Prints a table, and writes result.json, results.csv and results.png to --out.
The journal there lets the same command go on after an interruption. This file
only wires: evaluation.py measures, table.py makes the rows.
"""

import pathlib

from absl import flags

from experiments import cli
from experiments import config
from experiments import environment
from experiments import evaluation as evaluation_lib
from experiments import journal as journal_lib
from experiments import progress
from experiments import prompts as prompts_lib
from experiments import report
from experiments import table as table_lib

config.define_flags('configs/runs/quickstart.gin')
flags.adopt_module_key_flags(config)
_OUT = flags.DEFINE_string(
  'out', None, 'Folder of the results; default results/<name of the gin file>.'
)
_PROMPTS = flags.DEFINE_string(
  'prompts',
  'experiments/data/prompts.jsonl',
  "Prompts: Spec-Bench's jsonl (first turns), JSON lines with a prompt field, "
  'or plain text with a prompt a line.',
)
_LIMIT = flags.DEFINE_integer(
  'limit', None, 'Only the first so many prompts.', lower_bound=1
)


def main() -> None:
  """Measures what the journal lacks, then reports all of it."""
  config.parse()
  environment.enable_compilation_cache()
  out = pathlib.Path(_OUT.value or f'results/{config.name()}')
  with cli.bad_input():
    path = config.find(_PROMPTS.value)
    prompts = prompts_lib.read(path, _LIMIT.value)
    evaluation = evaluation_lib.Evaluation()
    tokens = [evaluation.encode(path, prompt) for prompt in prompts]
    evaluation.check(tokens)
    cli.make_folder(out)
    journal = journal_lib.Journal(
      out / 'journal.jsonl', evaluation_lib.header(evaluation, prompts)
    )
  work = list(evaluation_lib.units(evaluation, prompts, tokens))
  evaluation_lib.run(work, journal, progress.bar)
  table = table_lib.Table.of(
    evaluation, prompts_lib.name(path), len(prompts), journal
  )
  report.write(out, table)
  report.show(out, table)


if __name__ == '__main__':
  cli.run(main, 'interrupted: the same command goes on from here')
