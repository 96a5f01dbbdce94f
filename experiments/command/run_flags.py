"""Flags that many commands have: where results go, and which prompts."""

from absl import flags
from etils import epath

from experiments.command import config
from specsample import files

# They are the command's, which shows them with --help.
flags.disclaim_key_flags()


def out(what: str = 'the results') -> flags.FlagHolder[str | None]:
  """Defines --out: a folder, which holds `what`."""
  return flags.DEFINE_string(
    'out',
    None,
    f'Folder of {what}, here or in a bucket (gs://); default results/<name of '
    'the gin file>.',
  )


def folder(out: flags.FlagHolder[str | None]) -> epath.Path:
  """The folder of --out, which need not be there.

  Raises:
    ValueError: its path is of no place that is known.
  """
  return files.at(out.value or f'results/{config.name()}')


def prompts() -> flags.FlagHolder[str]:
  """Defines --prompts: a file, some prompts of ours by default."""
  return flags.DEFINE_string(
    'prompts',
    'experiments/data/prompts.jsonl',
    "Prompts: Spec-Bench's jsonl (first turns), JSON lines with a prompt "
    'field, or plain text with a prompt a line.',
  )


def limit(default: int | None = None) -> flags.FlagHolder[int | None]:
  """Defines --limit: of a file of prompts only the first so many."""
  return flags.DEFINE_integer(
    'limit', default, 'Only the first so many prompts.', lower_bound=1
  )
