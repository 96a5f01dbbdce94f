"""Fixtures and hooks that several test files share."""

import collections
import concurrent.futures.thread
import fnmatch
import gc
import importlib.util
import pathlib
import re
import threading
import time

import gguf
import jax
import numpy as np
import pytest

import specsample
from specsample.loop import decode
from specsample.loop import refill
from specsample.models import rotary
from specsample.models import transformer

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_found_after: dict[str, str] = {}  # what there is, by the first file after it
# Processes that outlive what started them, one for all.
_KEPT = ('template_process', 'resource_tracker', 'forkserver')
# First what takes no compiler, then the rules, and behind them what takes long,
# longest first: the shorter files fill up what is left to do.
_FIRST = (
  *('test_layering.py', 'test_stats.py', 'test_streams.py', 'test_tree.py'),
  *('text/', 'cost/', 'verify/', 'policies/', 'testing/', 'test_sampling.py'),
  *('test_exactness.py', 'test_planted_bugs.py', 'test_audited_bugs.py'),
  'test_sampled_loop.py',
  *('test_on_8_devices.py', 'test_with_default_flags.py', 'test_colab.py'),
  'experiments/test_train.py',
  *('contract/', 'drafters/', 'loop/', 'experiments/', 'models/', 'loading/'),
)


def pytest_addoption(parser):
  parser.addoption(
    '--all', action='store_true', help='also run the tests marked as slow'
  )
  parser.addoption(
    '--nightly',
    action='store_true',
    help='also run the tests marked as slow or nightly',
  )


def pytest_ignore_collect(collection_path):
  """Leaves out the files that import torch where it is not installed."""
  is_file = collection_path.suffix == '.py'
  if not is_file or importlib.util.find_spec('torch'):
    return None
  return True if _needs_torch(collection_path) else None


def pytest_report_header():
  if importlib.util.find_spec('torch'):
    return None
  return 'torch is not installed: files that compare with it are left out'


def _needs_torch(path):
  source = path.read_text('utf-8')
  helpers = re.findall(
    r'^from (tests[.\w]*) import (\w+)$', source, re.MULTILINE
  )
  paths = [_ROOT.joinpath(*f'{a}.{b}'.split('.')) for a, b in helpers]
  files = [path.with_suffix('.py') for path in paths]
  return bool(re.search(r'^\s*import torch\b', source, re.MULTILINE)) or any(
    _needs_torch(file) for file in files if file.is_file()
  )


def pytest_collection_modifyitems(config, items):
  """Deselects slow and nightly tests, unless they are wanted, and sorts.

  `@pytest.mark.slow` marks a test, with `but` or `only` some of its parameters:
  those whose ids fit one of these patterns. A test that is named always runs.
  """
  if not any('::' in str(argument) for argument in config.args):
    _check_marks(items)
    marks = {'slow', 'nightly'}
    if config.getoption('--all'):
      marks = {'nightly'}
    if config.getoption('--nightly'):
      marks = set()
    is_left_out = lambda item: any(_is_marked(item, mark) for mark in marks)
    config.hook.pytest_deselected(items=list(filter(is_left_out, items)))
    items[:] = [item for item in items if not is_left_out(item)]
  folder = pathlib.Path(__file__).parent
  items.sort(key=lambda item: _turn(str(item.path.relative_to(folder))))
  # These objects live until the end, so the garbage collector can skip them.
  gc.collect()
  gc.freeze()


def _is_marked(item, name):
  return any(
    _fits(item, mark.kwargs['only'])
    if 'only' in mark.kwargs
    else not _fits(item, mark.kwargs.get('but', ()))
    for mark in item.iter_markers(name)
  )


def _fits(item, patterns):
  parameters = item.name.partition('[')[2].removesuffix(']')
  return any(fnmatch.fnmatchcase(parameters, pattern) for pattern in patterns)


def _check_marks(items):
  """Raises UsageError for a pattern that fits no parameters of its test."""
  of_tests = collections.defaultdict(list)
  for item in items:
    of_tests[item.nodeid.partition('[')[0]].append(item)
  for name, found in of_tests.items():
    for mark in found[0].iter_markers():
      of_mark = mark.kwargs if mark.name in ('slow', 'nightly') else {}
      for patterns in of_mark.values():
        for pattern in patterns:
          if not any(_fits(item, [pattern]) for item in found):
            raise pytest.UsageError(f'{name} has no parameters {pattern!r}')


def _turn(path):
  """Returns the place of a file, named from tests/ on, in the order of all."""
  fitting = (i for i, start in enumerate(_FIRST) if path.startswith(start))
  return next(fitting, len(_FIRST))


@pytest.fixture(scope='module', autouse=True)
def _drop_executables():
  """Drops each file's executables: Linux allows only 65530 mappings."""
  yield
  jax.clear_caches()


@pytest.fixture(scope='session', autouse=True)
def _nothing_is_left():
  """Fails where tests leave threads, processes or files; names their file."""
  before = _left()
  yield
  gc.collect()
  deadline = time.monotonic() + 5
  while (more := _left() - before) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not more, [f'{_found_after.get(x)} left {x}' for x in sorted(more)]


@pytest.fixture(scope='module', autouse=True)
def _note_what_is_left(request):
  """Notes what there is after each file, some of it until the end."""
  yield
  for what in _left():
    _found_after.setdefault(what, request.node.name)


def _read(path):
  """Returns the text of a file of /proc; '' if its process has ended."""
  try:
    return path.read_text('utf-8', 'replace')
  except OSError:
    return ''


def _left():
  """Returns this process's threads and children, and the root's files."""
  # Pools of libraries keep their threads.
  pooled = concurrent.futures.thread._threads_queues
  threads = {
    f'thread {x.name}'
    for x in threading.enumerate()
    if not (x.daemon or x in pooled)
  }
  children = set()
  for tasks in pathlib.Path('/proc/self/task').glob('*/children'):
    for child in _read(tasks).split():
      # A child without a command has ended.
      command = _read(pathlib.Path(f'/proc/{child}/cmdline'))
      if command and not any(kept in command for kept in _KEPT):
        children.add(f'process {child}: {command.replace(chr(0), " ")}')
  files = {
    f'file {path.name}'
    for path in _ROOT.iterdir()
    if not path.name.startswith('.')
  }
  return threads | children | files


@pytest.fixture(scope='session')
def num_compiled():
  """A function that counts the executables of continuous batching by part."""
  parts = (
    decode._advance,
    decode._emitted,
    decode._prefill,
    refill._empty,
    refill._replace,
  )
  return lambda: [part._cache_size() for part in parts]


@pytest.fixture(scope='session')
def smollm2():
  """SmolLM2-135M-Instruct in float32, read once per session."""
  return specsample.load('smollm2-135m-instruct')


@pytest.fixture(scope='session')
def tiny_llama():
  """A Llama model of two layers and its random parameters."""
  model = transformer.Transformer(
    vocab_size=96,
    num_layers=2,
    dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=96,
    max_length=128,
    rope_scaling=rotary.LinearRope(factor=2.0),
    # Rounded to float32, because that is how GGUF stores it.
    norm_eps=float(np.float32(1e-5)),
  )

  @jax.jit
  def init(key):
    # Noise, because norms of ones would hide that they are not applied.
    params = model.init(key)
    keys = iter(jax.random.split(key, len(jax.tree.leaves(params))))
    noise = lambda leaf: 0.1 * jax.random.normal(next(keys), leaf.shape)
    return jax.tree.map(lambda leaf: leaf + noise(leaf), params)

  return model, init(jax.random.key(0))


@pytest.fixture(scope='session')
def write_gguf():
  """The function `_write_gguf`."""
  return _write_gguf


def _write_gguf(path, metadata=(), tensors=(), kinds=()):
  """Writes metadata and tensors [out, in], some of them quantised."""
  metadata = dict(metadata)
  writer = gguf.GGUFWriter(path, metadata.pop('general.architecture', 'llama'))
  for key, value in metadata.items():
    writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
  for name, values in dict(tensors).items():
    kind = dict(kinds).get(name, gguf.GGMLQuantizationType.F32)
    stored = gguf.quantize(np.asarray(values, np.float32), kind)
    writer.add_tensor(name, stored, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
