"""The gin configuration of a command: files, then bindings over them."""

import pathlib
import re
import tokenize

from absl import flags
from absl import logging
import gin

from experiments.command import cli
from experiments.command import moved

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def define_flags(default: str) -> None:
  """Defines --gin_file, with `default` as its default, and --gin_bindings."""
  flags.DEFINE_multi_string(
    'gin_file', [default], 'A gin file; repeat it to read several in order.'
  )
  flags.DEFINE_multi_string(
    'gin_bindings',
    [],
    "A setting that overrides the files, such as 'Ngram.num_draft_tokens = 4'; "
    'repeatable.',
  )


def parse() -> None:
  """Reads the configuration that the flags give.

  A fault in it ends the command with one line and exit code 2. Relative paths
  are looked up in the working directory, then in the repository.
  """
  gin.add_config_file_search_path(str(_ROOT))
  for path in flags.FLAGS.gin_file:
    if not pathlib.Path(find(path)).is_file():
      cli.fail(
        f'--gin_file={path} is not a file: choose one, for example from '
        'configs/runs/'
      )
  # gin logs every place where it misses an included file; its error has them.
  logging.set_verbosity(logging.FATAL)
  try:
    gin.parse_config_files_and_bindings(
      flags.FLAGS.gin_file, flags.FLAGS.gin_bindings
    )
  except tokenize.TokenError as error:
    cli.fail(f'gin: {error.args[0]}: a bracket or a quote is not closed')
  except (
    ValueError,
    TypeError,
    SyntaxError,
    NameError,
    AttributeError,
    ImportError,
    OSError,
  ) as error:
    # For an unknown macro, gin's error contains the whole configuration.
    reason = str(error).partition(' in config string:')[0]
    gone = re.search(r"No module named 'experiments\.(\w+)'", reason)
    if gone and (now := moved.to(gone[1])):
      cli.fail(f'gin: {reason}: it is now {now}')
    cli.fail(f'gin: {reason} (the files in configs/ show what can be set)')
  finally:
    logging.set_verbosity(logging.WARNING)


def name() -> str:
  """Returns the name of the configuration: the stem of its last file."""
  return pathlib.Path(flags.FLAGS.gin_file[-1]).stem


def find(path: str) -> str:
  """Returns the path, or the one in the repository if only that exists.

  Raises:
    ValueError: if it is empty, as from a shell variable that is not set.
  """
  if not path:
    raise ValueError(
      "the path '' names no file: give one, or leave the setting out"
    )
  in_repository = _ROOT / path
  use_repository = not pathlib.Path(path).exists() and in_repository.exists()
  return str(in_repository) if use_repository else path
