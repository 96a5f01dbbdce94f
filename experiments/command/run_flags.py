"""Flags that many commands share: where results go, and which prompts."""

from absl import flags
from etils import epath

from experiments.command import config
from specsample import files

# The flags belong to the command, which lists them under --help.
flags.disclaim_key_flags()


def out(what: str = 'the results') -> flags.FlagHolder[str | None]:
  """Defines --out, the folder of `what`."""
  return flags.DEFINE_string(
    'out',
    None,
    f'Folder of {what}, here or in a bucket (gs://); default results/<name of '
    'the gin file>.',
  )


def folder(out: flags.FlagHolder[str | None]) -> epath.Path:
  """Returns the folder of --out, which need not exist.

  Raises:
    ValueError: if its path is neither local nor in a bucket that can be read.
  """
  return files.at(out.value or f'results/{config.name()}')


def prompts() -> flags.FlagHolder[str]:
  """Defines --prompts, a file; by default one with some prompts of ours."""
  return flags.DEFINE_string(
    'prompts',
    'experiments/data/prompts.jsonl',
    "Prompts: Spec-Bench's jsonl (first turns), JSON lines with a prompt "
    'field, or plain text with one prompt per line.',
  )


def limit(default: int | None = None) -> flags.FlagHolder[int | None]:
  """Defines --limit, how many prompts from the start of a file are used."""
  return flags.DEFINE_integer(
    'limit', default, 'How many of the first prompts to use.', lower_bound=1
  )
