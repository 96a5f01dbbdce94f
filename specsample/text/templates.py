"""Chat templates, rendered in a process with limits.

Templates are programs that come with a model, and one operation of a program
can hide any amount of work: a power, a text that is doubled, a filter that
pads. So they run in jinja2's sandbox in a process of their own, whose time and
memory the system limits.
"""

from collections.abc import Mapping
import json
import os
import pathlib
import subprocess
import sys
import threading
from typing import Any

_PROGRAM = pathlib.Path(__file__).with_name('template_process.py')
_SECONDS = 5  # of computing, for one rendering
_BYTES = 2**30  # of addresses, of which an interpreter takes a tenth
_lock = threading.Lock()
_processes: dict[int, subprocess.Popen] = {}  # by the id of who started it


def render(template: str, variables: Mapping[str, Any]) -> str:
  """Returns the text that a template makes of plain data."""
  request = {
    'template': template,
    'variables': dict(variables),
    'seconds': _SECONDS,
  }
  with _lock:
    answer = _asked(json.dumps(request).encode() + b'\n')
  if not answer:
    raise ValueError(
      f'it takes more than {_SECONDS} s or {_BYTES // 2**20} MiB: give the '
      "model its authors' template"
    )
  found = json.loads(answer)
  if 'error' in found:
    raise ValueError(found['error'])
  return found['text']


def _asked(line: bytes) -> bytes:
  """Returns the answer, empty if the process has ended over it."""
  process = _running()
  assert process.stdin is not None and process.stdout is not None
  try:
    process.stdin.write(line)
    process.stdin.flush()
    answer = process.stdout.readline()
  except BrokenPipeError:
    answer = b''
  except BaseException:  # an interruption: the answer would be the next one's
    _end()
    raise
  if not answer:
    _end()
  return answer


def _running() -> subprocess.Popen:
  """Returns the process, started anew after a fork or an end."""
  if os.getpid() in _processes:
    return _processes[os.getpid()]
  # The sandbox hides the environment, which is small all the same.
  kept = ('PATH', 'LD_LIBRARY_PATH', 'LANG', 'LC_ALL', 'TZ', 'SYSTEMROOT')
  environment = {name: os.environ[name] for name in kept if name in os.environ}
  started = subprocess.Popen(
    [sys.executable, '-P', '-B', str(_PROGRAM), str(_BYTES)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    env=environment | {'PYTHONPATH': os.pathsep.join(filter(None, sys.path))},
    start_new_session=True,  # Ctrl-C is not for it; it ends with its input
  )
  _processes[os.getpid()] = started
  return started


def _end() -> None:
  ended = _processes.pop(os.getpid())
  ended.kill()
  ended.communicate()
