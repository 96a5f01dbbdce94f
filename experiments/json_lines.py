"""What a line of JSON lines holds."""

import json
from typing import Any


def value(line: str) -> Any:
  """The value of a line.

  Raises:
    ValueError: it is no JSON, or nested too deeply to be read.
  """
  try:
    return json.loads(line)
  except RecursionError as error:
    raise ValueError('it is nested too deeply') from error
