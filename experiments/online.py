r"""Serves prompts with a draft model that learns from its rejected drafts.

  python -m experiments.online --prompts=HumanEval.jsonl.gz --out=results/online
  python -m experiments.online --prompts=questions.jsonl --limit=96
  python -m experiments.online --prompts=questions.jsonl \
    --gin_bindings="Serving.split = 'tuning'"

Decodes the same prompts, once each, with a draft model that is updated and with
one that is not. When the model drafts for a batch, it has learned only from the
batches before and from earlier rounds of the same batch, so no draft is counted
after the model has learned from it. Prints acceptance rates by tokens served,
and writes online.json, online.png and the learned drafter to --out. A
checkpoint after each batch lets the same command resume after an interruption,
with everything that was learned.
"""

# Only the wiring is here: experiments/online_learning/ serves and reports.

from absl import flags

from experiments.command import cli
from experiments.command import config
from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import mesh
from experiments.command import run_flags
from experiments.decoding import prompts as prompts_lib
from experiments.online_learning import drafter
from experiments.online_learning import report
from experiments.online_learning import server as serving_lib
from experiments.training import train_state

config.define_flags('configs/runs/online.gin')
flags.adopt_module_key_flags(config)
_OUT = run_flags.out('the run')
_PROMPTS = flags.DEFINE_string(
  'prompts',
  None,
  'Prompts of one domain, in a file of the same formats as for evaluate.',
  required=True,
)
_LIMIT = run_flags.limit()


def main() -> None:
  """Serves what is not in the journal yet, then reports everything."""
  config.parse()
  environment.set_up()
  with mesh.configured():
    _serve()


def _serve() -> None:
  with cli.bad_input():
    out = run_flags.folder(_OUT)
    path = config.find(_PROMPTS.value)
    prompts = prompts_lib.read(path, _LIMIT.value)
    serving = serving_lib.Serving()
    batches = serving.batches(path, prompts)
    cli.make_folder(out)
    header = serving_lib.header(serving, prompts, batches)
    journal = journal_lib.Journal(out, header)
    drafter.check(out / 'drafter', journal, len(batches))
    server = serving_lib.Server(
      serving=serving,
      batches=batches,
      journal=journal,
      checkpoints=train_state.Checkpoints(out / 'checkpoints'),
    )
    learned = server.run()
    drafter.save(out / 'drafter', serving, learned, journal)
    found = report.Found.of(serving, prompts_lib.name(path), journal)
    report.write(out, found)
  report.show(out, found)


if __name__ == '__main__':
  cli.run(main, 'interrupted: run the same command again to continue')
