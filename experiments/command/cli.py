"""Runs commands so that each ends in a result or in one line of advice."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import difflib
import os
import pathlib
import signal
import sys
import sysconfig
import threading
import traceback
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging

from experiments.command import distributed

BAD_INPUT = 2
INTERRUPTED = 130
# gin begins a line with this for each call that led to an error.
_CALL = '\n  In call to configurable '
_interrupted = threading.Event()


class NotWrittenError(ValueError):
  """The error if results cannot be written; its message says how to go on."""


def run(
  main: Callable[..., None],
  *names: str,
  interrupted: str = 'interrupted',
) -> None:
  """Parses the flags and runs `main` with the arguments called `names`.

  `main` reads the flags itself; `interrupted` is the line to print after
  Ctrl-C.
  """

  def guarded(argv: list[str]) -> None:
    _listen()
    with distributed.all_end():
      try:
        _check(argv[1:], names)
        main(*argv[1:])
      except KeyboardInterrupt:
        fail(interrupted, INTERRUPTED)
      except NotWrittenError as error:
        fail(str(error))
      except BrokenPipeError:
        # The reader is gone, and Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)

  # Only the warnings of libraries belong on a user's terminal.
  logging.set_verbosity(logging.WARNING)
  try:
    app.run(guarded, flags_parser=_parse_flags)
  except SystemExit as ended:
    if ended.code == INTERRUPTED:
      # The destructors of libraries may crash.
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(INTERRUPTED)
    raise


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    fail(f'{error} (--help lists the flags)')
  except SystemExit:  # absl has printed the help, and would end with 1
    sys.exit(0)


def _check(arguments: list[str], names: tuple[str, ...]) -> None:
  if len(arguments) == len(names):
    return
  if not names:
    fail(f'unexpected argument {arguments[0]!r}: --help lists the flags')
  fail(
    f'there are {len(arguments)} arguments: give one {" and one ".join(names)} '
    '(see --help)'
  )


def _listen() -> None:
  """Handles SIGINT from now on, unless it is ignored, as under nohup."""
  if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, _hear)


def _hear(number, frame) -> None:
  del number, frame
  # Later signals would hit a process that is ending.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  _interrupted.set()
  raise KeyboardInterrupt


def check_interrupted() -> None:
  """Raises KeyboardInterrupt if there was a Ctrl-C.

  Python raises it in whatever runs at that moment. In another library's
  destructor it is swallowed, so each step of the progress calls this.
  """
  if _interrupted.is_set():
    raise KeyboardInterrupt


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
  """Ends the command with one line on standard error."""
  print(' '.join(message.split()), file=sys.stderr)
  sys.exit(code)


def nearest(name: str, names: Iterable[str]) -> str:
  """Returns a question with the name that resembles `name` most, or nothing."""
  others = [other for other in names if other != name]
  found = difflib.get_close_matches(name, others, n=1)
  return f'. Did you mean {found[0]}?' if found else ''


def say(line: str) -> None:
  """Prints a line on standard error, in process 0 only."""
  if distributed.is_first():
    print(line, file=sys.stderr, flush=True)


def check_utf8(name: str, text: str) -> None:
  """Raises ValueError if a text from outside was not UTF-8.

  Python turns bytes that are not UTF-8 into lone surrogates.
  """
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f'{name} is not UTF-8 at character {error.start + 1}: convert it, as '
      '`iconv -f latin1 -t utf-8` does, or set the terminal to UTF-8'
    ) from error


def make_folder(path: pathlib.PurePath, flag: str = 'out') -> None:
  """Makes a flag's folder, here or in a bucket, in process 0 only."""
  # Imported lazily: it imports JAX, and flags are parsed before that.
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
      f'--{flag}={path}: {error.strerror or error}: give a folder that can be '
      'written'
    ) from error


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
  """Turns an error in what the user gave into one line and exit code 2."""
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
  """Returns what is wrong, and where if it is in a file of the user's own."""
  # Imported lazily, as it imports JAX.
  import specsample  # noqa: PLC0415

  packages = [str(pathlib.Path(__file__).parents[1]), *specsample.__path__]
  packages += map(sysconfig.get_path, ('stdlib', 'purelib', 'platlib'))
  for frame in reversed(traceback.extract_tb(error.__traceback__)):
    path = pathlib.Path(frame.filename)
    if path.is_file() and not any(map(path.is_relative_to, packages)):
      return f'{path}:{frame.lineno}: {type(error).__name__}: {_message(error)}'
  return _message(error)


def _message(error: Exception) -> str:
  """Returns the message without the lines that gin appends, one per call.

  The first of these lines says whose argument is missing or too many.
  """
  reason, _, calls = str(error).partition(_CALL)
  if not isinstance(error, TypeError) or not calls:
    return reason
  return (
    f'{reason} in the call of {calls.splitlines()[0]}: bind what it needs, or '
    'correct its name'
  )
