"""Compares static batches with refilled rows, in tokens per second.

  python -m experiments.throughput
  python -m experiments.throughput --prompts=questions.jsonl --limit=48
  python -m experiments.throughput --gin_bindings='Comparison.repeats = 5'

Decodes requests of mixed lengths in successive batches, each of which waits for
its longest row, and with rows that are refilled when they are done. Prints a
table, and writes throughput.json to --out. The journal there lets the same
command resume after an interruption.
"""

# Only the wiring is here: experiments/batching/ measures and writes.

from absl import flags

from experiments.batching import audits as audits_lib
from experiments.batching import comparison as comparison_lib
from experiments.batching import report
from experiments.command import cli
from experiments.command import config
from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import mesh
from experiments.command import progress
from experiments.command import run_flags
from experiments.command import units as units_lib
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import audits
from experiments.evaluation import evaluation as evaluation_lib

config.define_flags('configs/runs/throughput.gin')
flags.adopt_module_key_flags(config)
_OUT = run_flags.out()
_PROMPTS = run_flags.prompts()
_LIMIT = run_flags.limit()


def main() -> None:
  """Measures what is not in the journal yet, then reports everything."""
  config.parse()
  environment.set_up()
  with mesh.configured():
    _compare()


def _compare() -> None:
  with cli.bad_input():
    out = run_flags.folder(_OUT)
    path = config.find(_PROMPTS.value)
    prompts = prompts_lib.read(path, _LIMIT.value)
    comparison = comparison_lib.Comparison()
    evaluation = comparison.evaluation
    evaluation_lib.refuse_unused(evaluation, 'num_seeds', 'carry_policies')
    tokens = [evaluation.encode(path, prompt) for prompt in prompts]
    comparison.check(tokens)
    header = evaluation_lib.header(evaluation, prompts, tokens)
    cli.make_folder(out)
    journal = journal_lib.Journal(out, header)
  work = list(comparison_lib.units(comparison, tokens))
  units_lib.run(work, journal, progress.bar)
  parted = audits_lib.units(comparison, tokens, journal)
  if parted:
    units_lib.run(parted, journal, progress.bar)
  rows = report.rows(comparison, journal)
  divergences = journal.of(audits.KIND)
  report.write(out, rows, divergences)
  report.show(out, rows, divergences, prompts_lib.name(path))


if __name__ == '__main__':
  cli.run(main, 'interrupted: run the same command again to continue')
