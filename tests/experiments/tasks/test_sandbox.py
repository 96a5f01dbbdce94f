import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from experiments.tasks import sandbox

_SHORT = sandbox.Limits(seconds=1, clock_seconds=5)
_TIMEOUT = 60
# A parent whose program sleeps for a long time.
_PARENT = """
from experiments.tasks import sandbox
limits = sandbox.Limits(clock_seconds=600)
sandbox.run_all(['import time\\ntime.sleep(600)'], limits)
"""


class _NoNumber(sandbox.Limits):
  """A limit that setrlimit doesn't take."""

  def of_process(self):
    return super().of_process() | {'CPU': 4.5}


def _plainly(program):
  """Runs a program without a sandbox, to see that it does what it tries."""
  subprocess.run([sys.executable, '-I', '-c', program], check=True)


def _processes(mark):
  """Returns the ids of processes whose command line contains the mark."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
    try:
      if mark in path.read_bytes().decode(errors='replace'):
        found.append(int(path.parent.name))
    except OSError:
      continue
  return found


def test_program_that_computes_passes():
  assert sandbox.refusal() is None
  program = (
    'import collections, functools, hashlib, heapq, itertools, math, random\n'
    'assert math.isqrt(sum(itertools.repeat(4, 4))) == 4\n'
    'assert hashlib.md5(b"x").hexdigest().startswith("9dd4e461")\n'
    'assert len(bytearray(2**26)) == 2**26\n'
    'files = [open("/dev/null") for _ in range(8)]\n'
    'print("x" * 10_000_000)'
  )
  assert sandbox.run(program) == sandbox.Outcome(True, '')


@pytest.mark.parametrize(
  ('program', 'reason'),
  [
    ('assert 1 == 2', 'AssertionError'),
    ('def f(:', 'SyntaxError'),
    ('undefined', 'NameError'),
    ('def f(): f()\nf()', 'RecursionError'),
    ('x = "\\ud800".encode()', 'UnicodeEncodeError'),
    ('input()', 'EOFError'),
    # To end early is not to pass.
    ('import sys\nsys.exit(0)', 'SystemExit'),
    ('raise SystemExit', 'SystemExit'),
    ('import os\nos._exit(0)', 'exit 0'),
    (
      'import atexit, os\natexit.register(os._exit, 0)\n1 / 0',
      'ZeroDivisionError',
    ),
    (
      'print("passed")\nprint(\'{"kind": "passed"}\')\n1 / 0',
      'ZeroDivisionError',
    ),
    # File descriptor 3 is where the answer goes.
    (
      'import os\nos.write(3, b\'{"kind": "passed", "reason": "", '
      '"secret": "00"}\')\nos._exit(0)',
      'exit 0',
    ),
    # What is limited.
    ('x = bytearray(2**30)', 'MemoryError'),
    ('files = [open("/dev/null") for _ in range(64)]', 'OSError'),
    ('import os\nfor _ in range(4): os.fork()', 'OSError'),
    (
      'import threading\nthreading.Thread(target=print).start()',
      'RuntimeError',
    ),
  ],
)
def test_program_that_fails_does_not_pass(program, reason):
  outcome = sandbox.run(f'{program}\nassert False, "these are the tests"')
  assert outcome == sandbox.Outcome(False, reason)


@pytest.mark.parametrize(
  'program',
  [
    'while True: pass',
    'while True: print("x" * 100_000)',
    'import os\nwhile True: os.write(3, b"x" * 100_000)',
  ],
)
def test_endless_program_ends(program):
  start = time.monotonic()
  assert not sandbox.run(program, _SHORT).passed
  assert time.monotonic() - start < 30


def test_program_that_sleeps_ends_by_the_clock():
  limits = sandbox.Limits(clock_seconds=1)
  outcome = sandbox.run('import time\ntime.sleep(1e6)', limits)
  assert outcome == sandbox.Outcome(False, 'out of time')


def test_no_process_is_left_behind():
  mark = '86398.25'
  program = (
    'import subprocess\n'
    f'subprocess.Popen(["sleep", "{mark}"], start_new_session=True)'
  )
  _plainly(program)
  left = _processes(mark)
  try:
    assert len(left) == 1
  finally:
    for process in left:
      subprocess.run(['kill', str(process)], check=True)
  while _processes(mark):
    time.sleep(0.01)
  assert sandbox.run(program) == sandbox.Outcome(False, 'OSError')
  assert not _processes(mark)


def test_processes_of_others_are_not_signalled():
  with subprocess.Popen(['sleep', '60']) as victim:
    program = f'import os\nos.kill({victim.pid}, 15)'
    assert sandbox.run(program) == sandbox.Outcome(False, 'OSError')
    assert victim.poll() is None
    _plainly(program)
    assert victim.wait(10) == -15


def test_the_network_is_out_of_reach():
  with socket.create_server(('127.0.0.1', 0)) as server:
    server.settimeout(10)
    program = (
      'import socket\n'
      f'socket.create_connection({server.getsockname()!r}).close()'
    )
    assert sandbox.run(program) == sandbox.Outcome(False, 'OSError')
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
      server.accept()
    _plainly(program)
    server.settimeout(10)
    server.accept()[0].close()


@pytest.mark.parametrize(
  'action',
  [
    'open({path!r}, "w").write("x" * 2**30)',
    'open({path!r}, "a").write("x")',
    'import os\nos.truncate({path!r}, 0)',
    'import os\nos.open({path!r}, os.O_RDONLY | os.O_TRUNC)',
    'import os\nos.remove({path!r})',
    'import os\nos.chmod({path!r}, 0)',
    'import os\nos.rename({path!r}, {path!r} + ".gone")',
    'import shutil\nshutil.rmtree({folder!r})',
  ],
)
def test_files_stay_as_they_are(action, tmp_path):
  path = tmp_path / 'folder' / 'kept'
  path.parent.mkdir()
  path.write_text('kept')
  program = action.format(path=str(path), folder=str(path.parent))
  before = path.stat()
  assert not sandbox.run(program).passed
  assert path.read_text() == 'kept'
  assert path.stat().st_mode == before.st_mode
  if '2**30' not in action:
    _plainly(program)
    assert not path.exists() or path.stat() != before


@pytest.mark.parametrize(
  'action', ['open({target!r}, "w")', 'import os\nos.mkdir({target!r})']
)
def test_nothing_is_created(action, tmp_path):
  for target in ('here', str(tmp_path / 'there')):
    assert not sandbox.run(action.format(target=target)).passed
  assert not list(tmp_path.iterdir())


def test_it_finds_nothing_of_ours(monkeypatch):
  monkeypatch.setenv('A_TOKEN', 'secret')
  program = (
    'import os\n'
    'assert not os.listdir()\n'
    'assert "A_TOKEN" not in os.environ\n'
    'try:\n  import experiments\n'
    'except ImportError: pass\n'
    'else: assert False'
  )
  assert sandbox.run(program) == sandbox.Outcome(True, '')


def test_outcomes_keep_their_order():
  outcomes = sandbox.run_all(['pass', '1 / 0', 'pass', 'undefined'])
  reasons = [outcome.reason for outcome in outcomes]
  assert reasons == ['', 'ZeroDivisionError', '', 'NameError']


def test_sets_have_the_same_order_each_time():
  order = 'tuple({"a", "b", "c", "d", "e", "f", "g", "h"})'
  failing = [f'assert {order}[0] == {letter!r}' for letter in 'abcdefgh']
  first = [x.passed for x in sandbox.run_all(failing)]
  assert first.count(True) == 1
  assert [x.passed for x in sandbox.run_all(failing)] == first


def test_where_it_cannot_be_walled_in_it_is_not_run():
  with pytest.raises(
    ValueError, match=r'not run here.*as an integer.*--allow_code_execution'
  ):
    sandbox.run('pass', _NoNumber())
  assert 'as an integer' in sandbox.refusal(_NoNumber())


def test_program_without_its_parent_is_not_run():
  jail = pathlib.Path(sandbox.__file__).with_name('jail.py')
  task = {'program': 'pass', 'secret': '0', 'parent': 1, 'limits': {}}
  ended = subprocess.run(
    [sys.executable, '-I', jail],
    input=json.dumps(task).encode(),
    stdout=subprocess.PIPE,
    check=True,
  )
  assert json.loads(ended.stdout) == {
    'secret': '0',
    'kind': 'refused',
    'reason': 'the process that started this has ended',
  }


_COUNT, _NUMBER = 'an integer of at least ', 'a number, 1 or more'


@pytest.mark.parametrize(
  ('name', 'value', 'remedy'),
  [
    ('seconds', 4.5, f'{_COUNT}1'),
    ('seconds', 0, f'{_COUNT}1'),
    ('seconds', True, f'{_COUNT}1'),
    ('clock_seconds', 0.05, _NUMBER),
    ('clock_seconds', math.nan, _NUMBER),
    ('clock_seconds', math.inf, _NUMBER),
    ('memory_bytes', 2**24, f'{_COUNT}67108864'),
    ('memory_bytes', '1 GiB', f'{_COUNT}67108864'),
    ('file_bytes', 16, f'{_COUNT}4096'),
    ('open_files', 4, f'{_COUNT}8'),
  ],
)
def test_limits_that_nothing_keeps_are_refused(name, value, remedy):
  with pytest.raises(ValueError) as caught:
    sandbox.Limits(**{name: value})
  line, *_ = str(caught.value).splitlines()  # gin adds lines of its own
  assert line == f'Limits.{name} is {value!r}: give {remedy}'


def test_programs_run_within_the_least_limits():
  least = sandbox.Limits(
    seconds=1,
    clock_seconds=15,
    memory_bytes=2**26,
    file_bytes=4096,
    open_files=8,
  )
  assert sandbox.refusal(least) is None


@pytest.mark.slow
def test_program_ends_with_the_run_that_started_it():
  with subprocess.Popen([sys.executable, '-c', _PARENT]) as parent:
    try:
      program = _wait_for(lambda: _walled_in_child(parent.pid))
      parent.send_signal(signal.SIGKILL)
      parent.wait(_TIMEOUT)
    finally:
      parent.kill()
  try:
    _wait_for(lambda: _status(program).get('State', 'Z')[0] in 'ZX')
  finally:
    if _status(program).get('State', 'Z')[0] not in 'ZX':
      os.kill(program, signal.SIGKILL)


def _wait_for(condition):
  """Waits until the condition gives a true value, and returns it."""
  deadline = time.monotonic() + _TIMEOUT
  while not (found := condition()):
    assert time.monotonic() < deadline
    time.sleep(0.02)
  return found


def _walled_in_child(parent):
  """Returns the id of the parent's sandboxed child, or None."""
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    status = _status(path.name)
    if status.get('PPid') == str(parent) and status.get('Seccomp') == '2':
      return int(path.name)
  return None


def _status(process):
  """Returns Linux's status of a process, or {} if it has ended."""
  try:
    text = pathlib.Path(f'/proc/{process}/status').read_text()
  except OSError:
    return {}
  return dict(line.split(':\t', 1) for line in text.splitlines())
