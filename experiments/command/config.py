"""The gin configuration of a command: files, then bindings over them."""

import inspect
import os
import pathlib
import re
import sys
import tokenize

from absl import flags
from absl import logging
import gin

from experiments.command import cli

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
  are looked up in the working directory, then in the repository, then in the
  folders of the files. Modules are found in these folders too.
  """
  # gin would also look for a package of the path's name. It fails where that
  # is a folder without code, as configs/ is with the repository on the path.
  gin.config._FILE_READERS = [(open, os.path.isfile)]
  gin.add_config_file_search_path(str(_ROOT))
  for path in flags.FLAGS.gin_file:
    found = pathlib.Path(find(path))
    if found.is_file():
      _look_in(str(found.resolve().parent))
    else:
      shipped = _ROOT.glob('configs/**/*.gin')
      names = [str(other.relative_to(_ROOT)) for other in shipped]
      cli.fail(
        f'--gin_file={path} is not a file: choose one, for example from '
        f'configs/runs/{cli.nearest(path, names)}'
      )
  # gin logs every place where it misses an included file; its error has them.
  logging.set_verbosity(logging.FATAL)
  try:
    gin.parse_config_files_and_bindings(
      flags.FLAGS.gin_file, None, finalize_config=False
    )
    of_files = _macros()
    gin.parse_config_files_and_bindings(None, flags.FLAGS.gin_bindings)
    # gin itself would pass over a misspelled TARGET.
    read = set(re.findall(r'%(\w+)', gin.config_str()))
    for new in sorted(_macros() - of_files - read):
      raise ValueError(f'{new} is set, but nothing reads it')
  except tokenize.TokenError as error:
    cli.fail(f'gin: {error.args[0]}: a bracket or a quote is not closed')
  except (
    ValueError,
    TypeError,
    SyntaxError,
    NameError,
    AttributeError,
    KeyError,  # a short name that fits two classes
    ImportError,
    OSError,
  ) as error:
    # For an unknown macro, gin's error contains the whole configuration.
    reason = str(error).partition(' in config string:')[0]
    reason += _suggestion(reason)
    cli.fail(f'gin: {reason} (the files in configs/ show what can be set)')
  finally:
    logging.set_verbosity(logging.WARNING)


def _look_in(folder: str) -> None:
  """Lets gin files include the files and import the modules of a folder."""
  gin.add_config_file_search_path(folder)
  # Last: a file of yours must not stand in for a package of the same name.
  if folder not in sys.path:
    sys.path.append(folder)


def _macros() -> set[str]:
  """Returns the names that the configuration gives to values, as TARGET."""
  # gin has no public list of them, nor of what can be configured.
  return {scope for scope, name in gin.config._CONFIG if name == 'gin.macro'}


def _suggestion(reason: str) -> str:
  """Returns a question with the known name that resembles gin's unknown one."""
  if found := re.search(r"matching (?:reference )?'@?([\w./]+)", reason):
    names = {name.split('.')[-1] for name, _ in gin.config._REGISTRY.items()}
    return cli.nearest(re.split('[./]', found[1])[-1], names)
  if found := re.search(r"'(\S+)' doesn't .* parameter named '(\w+)", reason):
    owner = gin.config._REGISTRY.get_match(found[1]).wrapped
    return cli.nearest(found[2], inspect.signature(owner).parameters)
  found = re.search(r"for '(\w+)/gin.macro'|(\w+) is set, but", reason)
  return cli.nearest(found[1] or found[2], _macros()) if found else ''


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
