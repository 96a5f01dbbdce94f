"""The frame of a command: its shared flags, configuration and devices.

JAX is imported lazily, because flags are parsed before that.
"""

from collections.abc import Callable, Iterator
import contextlib
from typing import TYPE_CHECKING

from absl import flags
import gin

from experiments.command import cli
from experiments.command import config
from experiments.command import distributed

if TYPE_CHECKING:
  from etils import epath

_AGAIN = 'interrupted: run the same command again to continue'

# The flags belong to the command, which lists them under --help.
flags.disclaim_key_flags()


def define_flags(
  default: str, *, on_hosts: bool = False, recipe: str | None = None
) -> None:
  """Defines --gin_file, whose default is `default`, and --gin_bindings.

  With `on_hosts`, several processes may run the command together, by
  --distributed and its flags. With a `recipe`, '' for none, --recipe chooses a
  scope of the files.
  """
  flags.DEFINE_multi_string(
    'gin_file', [default], 'A gin file; repeat it to read several in order.'
  )
  flags.DEFINE_multi_string(
    'gin_bindings',
    [],
    "A setting that overrides the files, such as 'Ngram.num_draft_tokens = 4'; "
    'repeatable.',
  )
  if recipe is not None:
    flags.DEFINE_string(
      'recipe',
      recipe,
      'The scope of the gin files that has the settings; --gin_bindings '
      'without a scope override them. By default, files other than the default '
      'one are read without a scope.',
    )
  if on_hosts:
    distributed.define_flags()


def out(what: str = 'the results') -> flags.FlagHolder[str | None]:
  """Defines --out, the folder of `what`."""
  return flags.DEFINE_string(
    'out',
    None,
    f'Folder of {what}, here or in a bucket (gs://); default results/<name of '
    'the gin file>.',
  )


def folder(out: flags.FlagHolder[str | None]) -> 'epath.Path':
  """Returns the folder of --out, which need not exist."""
  from specsample import files  # noqa: PLC0415

  return files.at(out.value or f'results/{config.name()}')


def run(main: Callable[[], None], *, resumes: bool = False) -> None:
  """Runs `main` as `configured`, and ends it as `cli.run` does.

  If it `resumes`, the same command continues after an interruption.
  """

  def framed() -> None:
    with configured():
      main()

  cli.run(framed, interrupted=_AGAIN if resumes else 'interrupted')


@contextlib.contextmanager
def configured() -> Iterator[None]:
  """Reads the configuration, joins other processes, and enters the mesh.

  A fault in what the user gave ends the command with one line and exit code 2.
  """
  from experiments.command import environment  # noqa: PLC0415
  from experiments.command import mesh  # noqa: PLC0415

  recipe = config.parse()
  with cli.bad_input():
    distributed.start()
  environment.set_up()
  with gin.config_scope(recipe or None):
    with cli.bad_input():
      devices = mesh.Mesh().set()
    with devices:
      yield
