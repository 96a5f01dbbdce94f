"""The commands, and a folder for each part of their work."""

import importlib.util
import sys


def _needs() -> str | None:
  """Returns what the commands need and Python does not have, if anything."""
  if sys.version_info < (3, 11):  # noqa: UP036
    return (
      f'this is Python {sys.version_info[0]}.{sys.version_info[1]}, and '
      'specsample needs 3.11 or newer: use .venv/bin/python, which ./run.sh '
      'makes, or another environment'
    )
  for name in ('absl', 'gin', 'jax'):
    if not importlib.util.find_spec(name):
      return (
        f'{sys.executable} has no {name}: use .venv/bin/python, which ./run.sh '
        "makes, or pip install '.[experiments]' in the repository"
      )
  return None


# In one line, in place of a traceback from the first import.
if needs := _needs():
  print(needs, file=sys.stderr)
  sys.exit(2)
