"""Trains a model on sums with GRPO, whose rollouts are drawn speculatively.

  python -m experiments.grpo --out=results/grpo
  python -m experiments.grpo --gin_file=configs/runs/grpo_mtp.gin
  python -m experiments.grpo --gin_file=configs/runs/rollouts.gin

Each step draws a group of answers to each of a few sums, rewards those that are
right, and moves the policy by the log-probabilities that the answers were drawn
with. The same answers are drawn without drafts as well, from the same policy
with the same key: rewards and times of both are compared. Prints tables, and
writes grpo.json, grpo.png and the learned policy, for `specsample.load`, to
--out. With configs/runs/rollouts.gin nothing is learned, and the speed of
rollouts is all that is measured. The same command resumes after an
interruption. This file is only the wiring: experiments/reinforcement/ trains
and reports.
"""

from absl import flags
from etils import epath

from experiments.command import cli
from experiments.command import config
from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import mesh
from experiments.command import run_flags
from experiments.reinforcement import reinforcement as reinforcement_lib
from experiments.reinforcement import report
from experiments.reinforcement import trainer as trainer_lib
from experiments.reporting import figures
from experiments.training import train_state
from experiments.training import trainer as training_lib
import specsample
from specsample import files
from specsample.models import checkpoint
from specsample.types import Params

config.define_flags('configs/runs/grpo.gin')
flags.adopt_module_key_flags(config)
_OUT = run_flags.out('the run')


def main() -> None:
  """Takes the steps that are not done yet, then reports everything."""
  config.parse()
  environment.set_up()
  with mesh.configured():
    _train()


def _train() -> None:
  with cli.bad_input():
    out = run_flags.folder(_OUT)
    settings = reinforcement_lib.Reinforcement()
    cli.make_folder(out)
    journal = journal_lib.Journal(out, trainer_lib.header(settings))
    _refuse_policy(out / 'policy', settings, journal)
    checkpoints = train_state.Checkpoints(out / 'checkpoints')
    trainer = trainer_lib.Trainer(
      settings=settings, journal=journal, checkpoints=checkpoints
    )
    try:
      policy = trainer.run()
    except training_lib.LossError as error:
      cli.fail(
        f'{error}: stopped; of the checkpoints in {out / "checkpoints"}, '
        f'{checkpoints.last}. Lower Reinforcement.learning_rate, and give '
        'another --out',
        1,
      )
    names = ['grpo.json', 'grpo.png']
    if settings.updates:
      names.insert(1, 'policy')
      _save(out / 'policy', settings.target, policy)
    found = report.Found.of(settings, journal)
    report.write(out, found)
  report.show(out, found)
  print(f'\n{figures.written(*names)} are in {out}')


def _save(
  folder: epath.Path, target: specsample.Loaded, policy: Params
) -> None:
  """Saves the policy; `_refuse_policy` says why one that exists is this one."""
  if not files.is_folder(folder):
    checkpoint.save(folder, target.model, policy, target.optional_tokenizer)


def _refuse_policy(
  folder: epath.Path,
  settings: reinforcement_lib.Reinforcement,
  journal: journal_lib.Journal,
) -> None:
  """Refuses a policy that exists before this run's last step.

  A run writes its policy in one piece, after that step.
  """
  taken = len(journal.of(trainer_lib.STEP))
  if taken < settings.steps:
    train_state.refuse_results(
      folder, f'has taken {taken} of {settings.steps} steps'
    )


if __name__ == '__main__':
  cli.run(main, 'interrupted: run the same command again to continue')
