"""Runs commands so that each ends in a result or in one line of advice."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import difflib
import os
import pathlib
import re
import sys
import sysconfig
import traceback
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging

from experiments.command import distributed
from experiments.command import errors
from experiments.command import interruption

BAD_INPUT = 2
INTERRUPTED = 130
# gin begins a line with this for each call that led to an error.
_CALL = '\n  In call to configurable '


def run(main: Callable[[], None], interrupted: str = 'interrupted') -> None:
  """Parses the flags and runs `main`.

  Args:
    main: the command, which reads its flags itself.
    interrupted: the line to print after Ctrl-C.
  """

  def checked(arguments: list[str]) -> None:
    if arguments:
      fail(f'unexpected argument {arguments[0]!r}: --help lists the flags')
    main()

  _run(checked, interrupted)


def run_on(main: Callable[[str], None], name: str) -> None:
  """Runs a command that takes one argument besides its flags; see `run`.

  Args:
    main: the command.
    name: the argument's name, for messages.
  """

  def checked(arguments: list[str]) -> None:
    if len(arguments) != 1:
      fail(
        f'there are {len(arguments)} arguments: give one {name} (see --help)'
      )
    main(arguments[0])

  _run(checked, 'interrupted')


def _run(main: Callable[[list[str]], None], interrupted: str) -> None:
  def guarded(argv: list[str]) -> None:
    interruption.listen()
    with distributed.all_end():
      try:
        main(argv[1:])
      except KeyboardInterrupt:
        fail(interrupted, INTERRUPTED)
      except errors.NotWrittenError as error:
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
      interruption.end(INTERRUPTED)
    raise


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
  """Ends the command with one line on standard error."""
  print(' '.join(message.split()), file=sys.stderr)
  sys.exit(code)


def nearest(name: str, names: Iterable[str]) -> str:
  """Returns a question with the name that resembles `name` most, or nothing."""
  others = [other for other in names if other != name]
  found = difflib.get_close_matches(name, others, n=1)
  return f'. Did you mean {found[0]}?' if found else ''


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


def make_folder(path: pathlib.PurePath) -> None:
  """Makes the folder of --out, in process 0 only.

  Args:
    path: a `pathlib.Path`, or an `epath.Path`, which may be in a bucket.

  Raises:
    ValueError: if the folder cannot be made.
  """
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
      f'--out={path}: {error.strerror or error}: give a folder that can be '
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
  found = re.match(r"'(\S+)'.*?(?: in scope '(\S+)')?$", calls, re.MULTILINE)
  if not isinstance(error, TypeError) or found is None:
    return reason
  name, scope = found.groups()
  where = f'{scope}/{name}' if scope else name
  return f'{reason}: bind what {where} needs, or correct its name'


def _parse_flags(argv: list[str]) -> list[str]:
  if {'-h', '-help', '--help'} & {*argv[1:]}:
    print(_help())
    sys.exit(0)
  try:
    return flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    # absl would suggest flags of libraries too.
    known = [f'--{flag.name}' for flag in _own_flags()]
    fail(
      f'there is no flag {error.flagname!r}{nearest(error.flagname, known)} '
      '(--help lists the flags)'
    )
  except flags.Error as error:
    fail(f'{error} (--help lists the flags)')
  except SystemExit:  # absl has printed the help, and would end with 1
    sys.exit(0)


def _own_flags() -> list[flags.Flag]:
  """Returns the command's flags, then those that many commands share."""
  return flags.FLAGS.get_key_flags_for_module('__main__')


def _help() -> str:
  """Returns the command's docstring and its flags.

  absl would sort the flags by name. Here they are in the order of their
  definitions.
  """
  lines = [(sys.modules['__main__'].__doc__ or '').strip(), '\nFlags:']
  for flag in _own_flags():
    name = f'--[no]{flag.name}' if flag.boolean else f'--{flag.name}'
    text = f'{name}: {flag.help}'
    # Not None, False, '' or [], but 0, which equals False.
    if flag.default or (flag.default == 0 and not flag.boolean):
      text += f' (default: {flag.default_as_str})'
    lines.append(flags.text_wrap(text, indent='      ', firstline_indent='  '))
  return '\n'.join([*lines, '\n--helpfull lists the flags of libraries too.'])
