"""Readers of JSON lines and arrays, also in compressed and damaged files."""

import codecs
from collections.abc import Iterator
import gzip
import json
import pathlib
import re
from typing import Any
import zlib

# Bytes to decompress, and to decode, at once.
_PACKED = 1 << 16
_CHUNK = 1 << 20
_NO_SEPARATOR = re.compile(r'[^\s,]')
_GZIP = b'\x1f\x8b'  # how a gzip file begins, whatever its name


def content(path: str) -> bytes:
  """Returns the bytes of a file.

  Raises:
    ValueError: it cannot be read; the message names the file and the remedy.
  """
  try:
    return pathlib.Path(path).read_bytes()
  except OSError as error:
    raise ValueError(
      f'{path}: {error.strerror}: give a readable file'
    ) from error


def unpacked(data: bytes) -> bytes:
  """Returns the content of a file, decompressed if it is a gzip file.

  Raises:
    ValueError: the file is damaged.
  """
  if not data.startswith(_GZIP):
    return data
  try:
    return gzip.decompress(data)
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f'it is damaged ({error}); get it again') from error


class BreakError(ValueError):
  """An error for an array that is damaged or lacks its closing bracket.

  Attributes:
    num_bytes: number of bytes after the last value that could be read.
  """

  def __init__(self, reason: str, num_bytes: int):
    """Creates the error with `reason` as its message."""
    super().__init__(reason)
    self.num_bytes = num_bytes


def unpacked_until(data: bytes) -> tuple[bytes, str | None]:
  """Returns the text of a file up to where its compression is damaged.

  Args:
    data: the file, which may be compressed by gzip.

  Returns:
    The text, and what is wrong after it; None if nothing is wrong.
  """
  if not data.startswith(_GZIP):
    return data, None
  found, rest = [], data
  try:
    while rest.startswith(_GZIP):  # a file may have several members
      member = zlib.decompressobj(wbits=31)
      for start in range(0, len(rest), _PACKED):
        found.append(member.decompress(rest[start : start + _PACKED]))
        if member.eof:
          break
      if not member.eof:
        return b''.join(found), 'it is cut off'
      rest = member.unused_data + rest[start + _PACKED :]
  except zlib.error as error:
    return b''.join(found), str(error)
  return b''.join(found), None


def array(data: bytes) -> Iterator[Any]:
  """Yields the values of a JSON array, one at a time.

  Bytes that are not UTF-8 become surrogates, which no valid text contains.

  Raises:
    BreakError: the array is damaged; raised after its last complete value.
  """
  decoder = json.JSONDecoder()
  read_text = codecs.getincrementaldecoder('utf-8')('surrogateescape').decode
  end, size = data.index(b'[') + 1, _CHUNK
  text, at = '', 0
  while True:
    begin = _NO_SEPARATOR.search(text, at)
    at = begin.start() if begin else len(text)
    reason = 'it ends'
    if text.startswith(']', at):
      return
    if at < len(text):
      try:
        found, at = decoder.raw_decode(text, at)
      except json.JSONDecodeError as error:
        reason = error.msg
      except RecursionError:
        reason = 'it is nested too deeply'
      else:
        yield found
        size = _CHUNK
        continue
    if end >= len(data):
      rest = text[at:].encode(errors='surrogateescape')
      raise BreakError(reason, len(rest))
    chunk = data[end : end + size]
    end, size = end + size, 2 * size  # the value may be longer
    text, at = text[at:] + read_text(chunk, end >= len(data)), 0


def as_utf8(data: bytes) -> bytes:
  """Returns a text in UTF-8, if its mark of byte order says that it is UTF-16.

  Raises:
    ValueError: it says so, but is not.
  """
  if not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
    return data.removeprefix(codecs.BOM_UTF8)
  try:
    return data.decode('utf-16').encode()
  except UnicodeDecodeError as error:
    raise ValueError(
      f'it begins as UTF-16 does, but is not ({error.reason} at byte '
      f'{error.start:,}): save it as UTF-8'
    ) from error


def lines(data: bytes) -> list[str]:
  """Returns the lines of a text, which may be compressed by gzip.

  Raises:
    ValueError: it is damaged or not UTF-8; the message then names the line.
  """
  data = as_utf8(unpacked(data))
  try:
    # Not splitlines, which would also split at a form feed inside a text.
    return data.decode().split('\n')
  except UnicodeDecodeError as error:
    line = data[: error.start].count(b'\n') + 1
    raise ValueError(
      f'line {line} is not UTF-8 ({error.reason}); save it as UTF-8, as '
      '`iconv -f latin1 -t utf-8` does'
    ) from error


def value(line: str) -> Any:
  """Returns the value of a line.

  Raises:
    ValueError: the line is not JSON, or is nested too deeply to be read.
  """
  try:
    return json.loads(line)
  except json.JSONDecodeError as error:
    raise ValueError(
      f'{error.msg} (character {error.colno} of a line that should be a JSON '
      'object)'
    ) from error
  except RecursionError as error:
    raise ValueError('it is nested too deeply') from error
