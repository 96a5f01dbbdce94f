"""The gin configuration of a command: files, then bindings over them."""

from collections.abc import Callable
import functools
import inspect
import os
import pathlib
import re
import sys
import tokenize
from typing import Any

from absl import flags
from absl import logging
import gin

from experiments.command import cli

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def parse() -> str:
  """Reads the configuration that the flags give; returns the recipe's scope.

  A fault in it ends the command with one line and exit code 2. Relative paths
  are looked up in the working directory, then in the repository, then in the
  folders of the files. Modules are found in these folders too.
  """
  # gin would also look for a package of the path's name. It fails where that
  # is a folder without code, as configs/ is with the repository on the path.
  gin.config._FILE_READERS = [(open, os.path.isfile)]
  gin.add_config_file_search_path(str(_ROOT))
  for path in flags.FLAGS.gin_file:
    _look_beside(path)
  recipe = _recipe()
  read = functools.partial(
    gin.parse_config_files_and_bindings, finalize_config=False
  )
  # gin logs every place where it misses an included file; its error has them.
  logging.set_verbosity(logging.FATAL)
  try:
    for path in flags.FLAGS.gin_file:
      _bind(functools.partial(read, [path], None), recipe)
    of_files = _macros()
    _bind(functools.partial(read, None, flags.FLAGS.gin_bindings), recipe)
    gin.finalize()
    scopes = {scope for scope, _ in gin.config._CONFIG}
    if recipe and recipe not in scopes:
      near = cli.nearest(recipe, scopes)
      raise ValueError(f'--recipe={recipe} is no scope of these files{near}')
    # gin itself would pass over a misspelled TARGET.
    is_read = set(re.findall(r'%(\w+)', gin.config_str()))
    for new in sorted(_macros() - of_files - is_read):
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
  return recipe


def _recipe() -> str:
  """Returns the scope that --recipe chooses, '' for none."""
  if 'recipe' not in flags.FLAGS:
    return ''
  recipe, files = flags.FLAGS['recipe'], flags.FLAGS['gin_file']
  if not recipe.present and files.value != files.default:
    return ''
  return recipe.value or ''


def _bind(parse_more: Callable[[], Any], recipe: str) -> None:
  """Parses more bindings, which also replace a recipe's values.

  gin itself would keep a value in the recipe's scope when one without a scope
  is bound later.
  """
  config = gin.config._CONFIG  # gin cannot tell what a text binds
  before = {key: dict(values) for key, values in config.items()}
  config.clear()
  parse_more()
  given = dict(config)
  config.clear()
  config.update(before)
  parts = recipe.split('/') if recipe else []
  within = ['/'.join(parts[:i]) for i in range(len(parts) + 1)]
  # Outer scopes come first, for texts that bind inner ones too.
  for scope, name in sorted(given, key=lambda key: len(key[0].split('/'))):
    values = given[scope, name]
    config.setdefault((scope, name), {}).update(values)
    if scope in within:
      for inner in within[within.index(scope) + 1 :]:
        own = config.get((inner, name), {})
        own.update({x: values[x] for x in own.keys() & values.keys()})


def _look_beside(path: str) -> None:
  """Lets gin files include the files and import the modules beside a file."""
  found = pathlib.Path(find(path))
  if not found.is_file():
    shipped = _ROOT.glob('configs/**/*.gin')
    names = [str(other.relative_to(_ROOT)) for other in shipped]
    cli.fail(
      f'--gin_file={path} is not a file: choose one, for example from '
      f'configs/runs/{cli.nearest(path, names)}'
    )
  folder = str(found.resolve().parent)
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


def settings() -> dict[str, str]:
  """Returns what the configuration binds, as text, by its full name."""
  return {
    '/'.join(filter(None, [scope, f'{name}.{argument}'])): repr(value)
    for (scope, name), values in gin.config._CONFIG.items()
    for argument, value in values.items()
  }


def name() -> str:
  """Returns the name of the last file, and the recipe if there is one."""
  parts = [pathlib.Path(flags.FLAGS.gin_file[-1]).stem, *_recipe().split('/')]
  return '_'.join(filter(None, parts))


def find(path: str) -> str:
  """Returns the path, or the one in the repository if only that exists."""
  if not path:
    raise ValueError(
      "the path '' names no file: give one, or leave the setting out"
    )
  in_repository = _ROOT / path
  use_repository = not pathlib.Path(path).exists() and in_repository.exists()
  return str(in_repository) if use_repository else path
