"""Lines of a file, and what a line of JSON lines holds."""

import gzip
import json
from typing import Any
import zlib

_GZIP = b'\x1f\x8b'  # how such a file begins, whatever it is called


def unpacked(data: bytes) -> bytes:
  """The text of a file, which may be compressed by gzip.

  Raises:
    ValueError: it is damaged.
  """
  if not data.startswith(_GZIP):
    return data
  try:
    return gzip.decompress(data)
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f'it is damaged ({error}), get it again') from error


def lines(data: bytes) -> list[str]:
  """The lines of a text in UTF-8, also of one compressed by gzip.

  Raises:
    ValueError: it is damaged, or no such text; names the line.
  """
  data = unpacked(data)
  try:
    # Not splitlines, which also splits at a form feed inside a text.
    return data.decode('utf-8-sig').split('\n')
  except UnicodeDecodeError as error:
    line = data[: error.start].count(b'\n') + 1
    raise ValueError(
      f'line {line} is not UTF-8 ({error.reason}), save it as UTF-8'
    ) from error


def value(line: str) -> Any:
  """The value of a line.

  Raises:
    ValueError: it is no JSON, or nested too deeply to be read.
  """
  try:
    return json.loads(line)
  except json.JSONDecodeError as error:
    raise ValueError(
      f'{error.msg} (character {error.colno} of a line that is to be a JSON '
      'object)'
    ) from error
  except RecursionError as error:
    raise ValueError('it is nested too deeply') from error
