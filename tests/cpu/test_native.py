"""Building the C++ files, and all that may prevent it."""

import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample.cpu import native

pytestmark = pytest.mark.skipif(
  not native.is_available(), reason='the C++ files cannot be built here'
)
_ASK = 'from specsample.cpu import native; print(native.is_available())'


def _built():
  return native._folder() / f'rows-{native._key()}.so'


def _compiler(path, script):
  """Writes a shell script that takes the compiler's place; $out is the file."""
  find = 'while [ "$1" != -o ]; do shift; done; out="$2"'
  path.write_text(f'#!/bin/sh\n{find}\n{script}\n')
  path.chmod(0o755)
  return str(path)


def _start(cache, code=_ASK, **environment):
  return subprocess.Popen(
    [sys.executable, '-c', code],
    env=os.environ | {'XDG_CACHE_HOME': str(cache)} | environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def _ask(cache, **environment):
  """Returns whether a new process has the library, and its lines on stderr."""
  process = _start(cache, **environment)
  found, errors = process.communicate(timeout=120)
  assert process.returncode == 0, errors
  return found.strip() == 'True', errors.splitlines()


@pytest.fixture
def copier(tmp_path):
  """A compiler that takes no time: it copies the library of this process."""
  return _compiler(tmp_path / 'copier', f'cp {_built()} "$out"')


def test_the_library_is_built_once_into_a_private_folder(tmp_path, copier):
  assert _ask(tmp_path, CXX=copier) == (True, [])
  folder = tmp_path / 'specsample' / 'native'
  assert folder.stat().st_mode & 0o777 == 0o700
  assert [path.name for path in folder.iterdir()] == [_built().name]
  assert _ask(tmp_path, CXX='no-such-compiler') == (True, [])


def test_it_is_turned_off(tmp_path):
  assert _ask(tmp_path, SPECSAMPLE_NATIVE='0') == (False, [])
  assert not list(tmp_path.iterdir())


def test_without_a_compiler_one_line_says_what_to_install(tmp_path):
  found, (line,) = _ask(tmp_path, CXX='no-such-compiler')
  assert not found
  assert 'no C++ compiler: install one (on Debian' in line
  assert 'SPECSAMPLE_NATIVE=0' in line


def test_the_first_error_of_a_compiler_is_shown(tmp_path):
  script = 'echo "rows.cc:1: error: first" >&2; echo "error: 2nd" >&2; exit 3'
  compiler = _compiler(tmp_path / 'failing', script)
  found, (line,) = _ask(tmp_path, CXX=compiler)
  assert not found
  assert 'rows.cc:1: error: first' in line
  assert '2nd' not in line
  assert not list((tmp_path / 'specsample' / 'native').iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path, copier):
  (tmp_path / 'file').touch()
  found, (line,) = _ask(tmp_path / 'file', CXX=copier)
  assert not found
  assert str(tmp_path / 'file') in line
  assert 'set XDG_CACHE_HOME' in line


@pytest.mark.parametrize('mode', [0o770, 0o707])
def test_nothing_is_read_from_a_folder_of_others(tmp_path, copier, mode):
  assert _ask(tmp_path, CXX=copier) == (True, [])
  folder = tmp_path / 'specsample' / 'native'
  folder.chmod(mode)
  found, (line,) = _ask(tmp_path, CXX=copier)
  assert not found
  assert f'{folder} belongs to another user, or others can write' in line


@pytest.mark.skipif(os.getuid() != 0, reason='only root can give files away')
def test_nothing_is_read_from_a_folder_of_another_user(tmp_path, copier):
  assert _ask(tmp_path, CXX=copier) == (True, [])
  os.chown(tmp_path / 'specsample' / 'native', 12345, -1)
  found, (line,) = _ask(tmp_path, CXX=copier)
  assert not found
  assert 'belongs to another user' in line


def test_a_damaged_library_is_built_again(tmp_path, copier):
  assert _ask(tmp_path, CXX=copier) == (True, [])
  (path,) = (tmp_path / 'specsample' / 'native').iterdir()
  path.write_bytes(b'')
  assert _ask(tmp_path, CXX=copier) == (True, [])
  assert path.stat().st_size == _built().stat().st_size


def test_other_processors_jaxlibs_and_sources_have_other_names(
  monkeypatch, tmp_path
):
  names = {native._key()}
  with monkeypatch.context() as patch:
    patch.setattr(native, '_processor', lambda: 'a CPU of last year')
    names.add(native._key())
  with monkeypatch.context() as patch:
    patch.setattr(native.importlib.metadata, 'version', lambda _: '0.99')
    names.add(native._key())
  shutil.copytree(native._FOLDER, tmp_path / 'cpu')
  (tmp_path / 'cpu' / 'vectors.h').write_text('// changed')
  monkeypatch.setattr(native, '_FOLDER', tmp_path / 'cpu')
  names.add(native._key())
  assert len(names) == 4


def test_two_processes_may_build_at_once(tmp_path):
  compiler = _compiler(tmp_path / 'slow', f'sleep 1; cp {_built()} "$out"')
  processes = [_start(tmp_path, CXX=compiler) for _ in range(2)]
  for process in processes:
    assert process.communicate(timeout=120) == ('True\n', '')
  left = list((tmp_path / 'specsample' / 'native').iterdir())
  assert [path.name for path in left] == [_built().name]


def test_what_a_killed_build_leaves_is_removed_later(tmp_path, copier):
  begun = tmp_path / 'begun'
  compiler = _compiler(tmp_path / 'slow', f'touch {begun}; exec sleep 60')
  process = _start(tmp_path, CXX=compiler)
  while not begun.exists():
    time.sleep(0.05)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  folder = tmp_path / 'specsample' / 'native'
  (left,) = folder.iterdir()
  hours_ago = time.time() - 7200
  os.utime(left, (hours_ago, hours_ago))
  assert _ask(tmp_path, CXX=copier) == (True, [])
  assert [path.name for path in folder.iterdir()] == [_built().name]


def test_six_threads_compute_at_once():
  width, _ = native.panel()
  kernel = jax.random.normal(jax.random.key(0), (40, 96, width))
  x = jax.random.normal(jax.random.key(1), (7, 96))
  product = jax.jit(lambda x: native.products(x, [kernel] * 3)[2])
  expected, wrong = np.asarray(product(x)), []

  def run():
    for _ in range(200):
      if not np.array_equal(product(x), expected):
        wrong.append(1)

  threads = [threading.Thread(target=run, daemon=True) for _ in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
    assert not thread.is_alive()
  assert not wrong


_AFTER_FORK = """
import os, warnings
import jax.numpy as jnp
from specsample.cpu import native
warnings.simplefilter('ignore')  # JAX warns of any fork
width, _ = native.panel()
run = lambda: native.products(jnp.ones((3, 8)), [jnp.ones((64, 8, width))])
assert float(run()[0][0, 0]) == 8
child = os.fork()
if not child:
  assert native.is_available()
  os._exit(7)
_, status = os.waitpid(child, 0)
assert float(run()[0][2, 5]) == 8
print(os.waitstatus_to_exitcode(status))
"""


def test_a_fork_after_first_use_harms_neither_process(tmp_path, copier):
  process = _start(tmp_path, _AFTER_FORK, CXX=copier)
  found, errors = process.communicate(timeout=60)
  assert (found, process.returncode) == ('7\n', 0), errors


def test_the_source_needs_no_library_but_the_headers_of_jaxlib():
  path = pathlib.Path(str(_built()))
  assert ctypes.CDLL(str(path)).panel_width() == native.panel()[0]


def test_matrices_of_another_width_are_refused():
  width, _ = native.panel()
  with pytest.raises(Exception, match='packed'):
    jax.block_until_ready(
      native.products(jnp.ones((2, 8)), [jnp.ones((4, 9, width))])
    )
