"""How every command ends: a result, or one line that says what to do."""

from collections.abc import Callable, Iterator
import contextlib
import os
import pathlib
import re
import sys
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging

from experiments.command import distributed
from experiments.command import errors

BAD_INPUT = 2
INTERRUPTED = 130
# With which gin begins a line for each call that led to an error.
_CALL = '\n  In call to configurable '


def run(main: Callable[[], None], interrupted: str = 'interrupted') -> None:
  """Parses the flags and runs `main`.

  Args:
    main: the command, which reads its flags itself.
    interrupted: the line after a Ctrl-C.
  """

  def checked(arguments: list[str]) -> None:
    if arguments:
      fail(f'unexpected argument {arguments[0]!r}: --help lists the flags')
    main()

  _run(checked, interrupted)


def run_on(main: Callable[[str], None], name: str) -> None:
  """As `run`, of a command that takes one argument besides its flags.

  Args:
    main: the command.
    name: of the argument, for messages.
  """

  def checked(arguments: list[str]) -> None:
    if len(arguments) != 1:
      fail(f'{len(arguments)} arguments: give one {name} (--help says more)')
    main(arguments[0])

  _run(checked, 'interrupted')


def _run(main: Callable[[list[str]], None], interrupted: str) -> None:
  def guarded(argv: list[str]) -> None:
    with distributed.all_end():
      try:
        main(argv[1:])
      except KeyboardInterrupt:
        fail(interrupted, INTERRUPTED)
      except errors.NotWrittenError as error:
        fail(str(error))
      except BrokenPipeError:
        # The reader has gone; Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)

  # Of what the libraries log only warnings belong on a user's terminal.
  logging.set_verbosity(logging.WARNING)
  app.run(guarded, flags_parser=_parse_flags)


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
  """Ends the command with one line on standard error."""
  print(' '.join(message.split()), file=sys.stderr)
  sys.exit(code)


def make_folder(path: pathlib.PurePath) -> None:
  """Makes the folder of --out, in process 0; ValueError where that cannot be.

  Args:
    path: a `pathlib.Path` or, of a bucket too, an `epath.Path`.
  """
  # Imports JAX, which a command has not done yet when it parses its flags.
  from specsample import files  # noqa: PLC0415

  if not distributed.is_first():
    return
  folder = files.at(path)
  if files.is_remote(folder):
    files.is_folder(folder)  # says what is wrong with a bucket
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
      f'--out={path}: {error.strerror or error}: give a folder that can be '
      'written'
    ) from error


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
  """Makes an error about what the user gave one line and exit code 2."""
  try:
    yield
  except (
    ValueError,
    TypeError,
    LookupError,
    OSError,
    ImportError,
  ) as error:
    fail(_reason(error))


def _reason(error: Exception) -> str:
  """The message, without the calls that gin appends a line for each.

  The first of them says whose argument is missing or too many.
  """
  reason, _, calls = str(error).partition(_CALL)
  found = re.match(r"'(\S+)'.*?(?: in scope '(\S+)')?$", calls, re.MULTILINE)
  if not isinstance(error, TypeError) or found is None:
    return reason
  name, scope = found.groups()
  where = f'{scope}/{name}' if scope else name
  return f'{reason}: bind what {where} needs, or correct its name'


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    fail(f'{error} (--help lists the flags)')
