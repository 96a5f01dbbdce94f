"""Times measured on this machine before, kept in the user's cache folder."""

from collections.abc import Callable, Mapping
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
from typing import Any

import jax

from specsample import host
from specsample.cpu import native

_logger = logging.getLogger(__name__)
_PACKAGES = ('specsample', 'jax', 'jaxlib')
_FLAGS = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')


def recall(
  what: Mapping[str, Any],
  measure: Callable[[], Mapping[str, list[float]]],
  is_good: Callable[[Mapping[str, list[float]]], bool],
) -> Mapping[str, list[float]]:
  """Returns times measured before, or measures and keeps them.

  There is one file for each machine, code and `what`, in the folder that
  SPECSAMPLE_CACHE names or else in specsample/times of the user's cache folder.
  A file that is damaged or of another measurement is written again. If the
  folder cannot be written to, the times are not kept.

  Args:
    what: says what is measured, in JSON's types.
    measure: returns times by name.
    is_good: says whether the times are worth keeping.
  """
  content = {'of': {**here(), **what}}
  encoded = json.dumps(content, sort_keys=True).encode()
  path = _folder() / f'{hashlib.sha256(encoded).hexdigest()[:16]}.json'
  try:
    kept = json.loads(path.read_text())
    if kept['of'] == json.loads(encoded)['of']:
      return kept['times']
  except (OSError, ValueError, KeyError, TypeError):
    pass
  times = measure()
  if is_good(times):
    _write(path, json.dumps({**content, 'times': times}))
  return times


def here() -> dict[str, Any]:
  """Returns what times depend on besides `what`: the machine and the code."""
  devices = jax.devices()
  kind = devices[0].platform
  # A CPU multiplies with the same precision, whatever is asked for.
  precision = None
  if kind != 'cpu':
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
  return {
    'platform': kind,
    'device': devices[0].device_kind,
    'devices': len(devices),
    'machine': platform.node(),
    'cpus': host.num_cores(),
    'flags': [os.environ.get(name, '') for name in _FLAGS],
    'precision': precision,
    'native': native.is_used(),
    'versions': {name: importlib.metadata.version(name) for name in _PACKAGES},
    'code': _code(),
  }


@functools.cache
def _code() -> str:
  """Returns a hash of the library, which may change within a version."""
  return host.source(pathlib.Path(host.__file__).parent)[:16]


def _folder() -> pathlib.Path:
  named = os.environ.get('SPECSAMPLE_CACHE')
  if named:
    return pathlib.Path(named)
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(home) / 'specsample' / 'times'


def _write(path: pathlib.Path, text: str) -> None:
  # Another process may write the same file at the same time.
  part = path.with_suffix(f'.{os.getpid()}')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(text)
    part.replace(path)
  except OSError as error:
    _logger.info(
      'times are not kept (%s): set SPECSAMPLE_CACHE to a writable folder',
      error,
    )
