"""Compares decoding methods over a set of prompts.

  python -m experiments.evaluate
  python -m experiments.evaluate --prompts=questions.jsonl --limit=20
  python -m experiments.evaluate --gin_bindings='Ngram.num_draft_tokens = 4'

Prints a table, and writes result.json, results.csv and results.png to --out.
The journal there lets the same command go on after an interruption. With
--record it also writes traces, which `python -m experiments.replay` reads
(docs/replay.md). On many devices and hosts: docs/pods.md. This file only wires:
evaluation.py measures, table.py makes the rows.
"""

from absl import flags

from experiments import cli
from experiments import config
from experiments import distributed
from experiments import environment
from experiments import evaluation as evaluation_lib
from experiments import evaluation_report
from experiments import journal as journal_lib
from experiments import mesh
from experiments import progress
from experiments import prompts as prompts_lib
from experiments import recording
from experiments import table as table_lib
from specsample import files

config.define_flags('configs/runs/quickstart.gin')
flags.adopt_module_key_flags(config)
distributed.define_flags()
flags.adopt_module_key_flags(distributed)
_OUT = flags.DEFINE_string(
  'out',
  None,
  'Folder of the results, here or in a bucket (gs://); default '
  'results/<name of the gin file>.',
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
_RECORD = flags.DEFINE_bool(
  'record',
  False,
  'Decodes all once more behind what is timed, and keeps what each round was '
  'decided over in OUT/traces/.',
)


def main() -> None:
  """Measures what the journal lacks, then reports all of it."""
  config.parse()
  with cli.bad_input():
    distributed.start()
  environment.enable_compilation_cache()
  with mesh.configured():
    _evaluate()


def _evaluate() -> None:
  with cli.bad_input():
    out = files.at(_OUT.value or f'results/{config.name()}')
    path = config.find(_PROMPTS.value)
    prompts = prompts_lib.read(path, _LIMIT.value)
    evaluation = evaluation_lib.Evaluation()
    tokens = [evaluation.encode(path, prompt) for prompt in prompts]
    evaluation.check(tokens)
    traces = []
    if _RECORD.value:
      traces = recording.units(evaluation, out, tokens)
    header = evaluation_lib.header(evaluation, prompts)
    distributed.check_same(evaluation_lib.shared(header))
    cli.make_folder(out)
    journal = None
    if distributed.is_first():
      journal = journal_lib.Journal(out, header)
  work = [*evaluation_lib.units(evaluation, prompts, tokens), *traces]
  evaluation_lib.run(work, journal, progress.bar)
  if journal is not None:
    table = table_lib.Table.of(
      evaluation, prompts_lib.name(path), len(prompts), journal
    )
    evaluation_report.write(out, table)
    evaluation_report.show(out, table)


if __name__ == '__main__':
  cli.run(main, 'interrupted: the same command goes on from here')
