"""Builds the C++ files for this processor at first use, and calls them.

The library is kept in the user's cache folder, in specsample/native, under a
hash of all that it depends on. SPECSAMPLE_NATIVE=0 turns it off. Where it
cannot be built, one line on stderr says why, and `is_available` returns False.
"""

from collections.abc import Callable
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from specsample.types import Array

_FOLDER = pathlib.Path(__file__).parent
# No -ffast-math, because sums must keep their order. Products and sums are
# fused everywhere or nowhere, so that rows do not differ by their number.
_FLAGS = (
  '-std=c++17',
  '-O3',
  '-march=native',
  '-ffp-contract=fast',
  '-fPIC',
  '-shared',
  '-w',
)
_ROWS, _ATTENTION, _NORM = (
  f'specsample_{name}' for name in ('rows', 'attention', 'norm')
)
_SECONDS = 120  # of a compiler that hangs
_lock = threading.Lock()
_call = functools.partial(jax.ffi.ffi_call, vmap_method='sequential')


def _library() -> ctypes.CDLL | None:
  with _lock:  # two threads that load models would build twice
    return _find()


@functools.cache
def _find() -> ctypes.CDLL | None:
  if os.environ.get('SPECSAMPLE_NATIVE') == '0':
    return None
  try:
    library = _load()
  except (OSError, ValueError, subprocess.SubprocessError) as error:
    print(
      f'specsample: XLA computes all products, which is slower: {error}. '
      'SPECSAMPLE_NATIVE=0 hides this line',
      file=sys.stderr,
      flush=True,
    )
    return None
  calls = library.rows, library.attention, library.norm
  for name, call in zip((_ROWS, _ATTENTION, _NORM), calls, strict=True):
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(call), platform='cpu')
  return library


def is_available() -> bool:
  """Returns whether `products` can be called; builds the library if need be."""
  return _library() is not None


def is_used() -> bool:
  """Returns whether this process computes on a CPU without a mesh by it."""
  is_here = jax.default_backend() == 'cpu'
  return is_here and jax.sharding.get_abstract_mesh().empty and is_available()


def on_cpu(
  fast: Callable[..., Array], plain: Callable[..., Array]
) -> Callable[..., Array]:
  """Returns a function that calls `fast` on a CPU, and `plain` elsewhere.

  Its gradient is that of `plain`.
  """
  with_gradient = jax.custom_vjp(fast)
  with_gradient.defvjp(
    lambda *arguments: (fast(*arguments), arguments),
    lambda arguments, gradient: jax.vjp(plain, *arguments)[1](gradient),
  )
  return lambda *arguments: jax.lax.platform_dependent(
    *arguments, cpu=with_gradient, default=plain
  )


def panel() -> tuple[int, int]:
  """Returns the outputs of a panel and of a vector register on this machine."""
  library = _library()
  assert library is not None
  return library.panel_width(), library.vector_width()


def products(x: Array, kernels: list[Array]) -> list[Array]:
  """Multiplies rows by packed matrices, in one call.

  Args:
    x: [R, D] float32.
    kernels: [P, D, W] float32 or bfloat16 each; `models.packed` packs them.

  Returns:
    [R, P * W] float32 for each matrix. A row has the same bits whatever R is.
  """
  width, _ = panel()  # registers the target
  shapes = [
    jax.ShapeDtypeStruct((len(x), len(kernel) * width), jnp.float32)
    for kernel in kernels
  ]
  return list(_call(_ROWS, shapes)(x, *kernels))


def attention(
  query: Array,
  mask: Array,
  keys: tuple[Array, Array],
  values: tuple[Array, Array],
  sinks: Array,
  softcap: float,
) -> Array:
  """Attends from queries; see `models.attention.attend`.

  Args:
    query: [B, H, G * T, D] float32, like all but the mask.
    mask: [B, T, S + T] bool.
    keys: [B, H, S, D] and [B, H, T, D].
    values: [B, H, S, E] and [B, H, T, E].
    sinks: [H, G * T], very negative if there are none.
    softcap: 0 if there is none.

  Returns:
    [B, H, G * T, E] float32. A query has the same bits whatever others there
    are, and whether an entry that it sees is new or in the cache.
  """
  assert is_available()  # registers the target
  batch, heads, _, dim = query.shape
  num_new, value_dim = mask.shape[1], values[0].shape[3]
  # [B, T, H * G, D]; XLA drops this transposition, which undoes the caller's.
  query = query.reshape(batch, heads, -1, num_new, dim).transpose(0, 3, 1, 2, 4)
  query = query.reshape(batch, num_new, -1, dim)
  shape = (*query.shape[:3], value_dim)
  call = _call(_ATTENTION, jax.ShapeDtypeStruct(shape, jnp.float32))
  mixed = call(query, mask, *keys, *values, sinks, softcap=np.float32(softcap))
  mixed = mixed.reshape(batch, num_new, heads, -1, value_dim)
  return mixed.transpose(0, 2, 3, 1, 4).reshape(batch, heads, -1, value_dim)


def norm(x: Array, eps: float) -> Array:
  """Divides rows [..., n], float32, by their root mean square.

  A row has the same bits whatever other rows there are.
  """
  assert is_available()  # registers the target
  call = _call(_NORM, jax.ShapeDtypeStruct(x.shape, x.dtype))
  return call(x, eps=np.float32(eps))


def _load() -> ctypes.CDLL:
  path = _folder() / f'rows-{_key()}.so'
  if path.exists():
    with contextlib.suppress(OSError):  # damaged
      return ctypes.CDLL(str(path))
  _build(path)
  return ctypes.CDLL(str(path))


def _key() -> str:
  """Returns a hash of the source, the compiler's input and the processor."""
  files = sorted([*_FOLDER.glob('*.h'), *_FOLDER.glob('*.cc')])
  parts = [path.read_text() for path in files]
  parts += [importlib.metadata.version('jaxlib'), *_FLAGS, _processor()]
  return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
  """Returns what decides which instructions -march=native may use."""
  found = [platform.machine(), platform.processor()]
  with contextlib.suppress(OSError):
    for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
      name = line.partition(':')[0].strip()
      if not line:
        break
      if name in ('model name', 'flags', 'Features', 'CPU part'):
        found.append(line)
  return '\n'.join(found)


def _folder() -> pathlib.Path:
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  folder = pathlib.Path(home) / 'specsample' / 'native'
  try:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
  except OSError as error:
    raise ValueError(
      f'{error}: set XDG_CACHE_HOME to a folder that can be written to'
    ) from error
  of_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
  if found.st_uid != os.getuid() or of_others:
    raise ValueError(
      f'{folder} belongs to another user, or others can write to it: remove '
      'it, or set XDG_CACHE_HOME to a folder of your own'
    )
  return folder


def _build(path: pathlib.Path) -> None:
  """Compiles the source; `path` appears whole or not at all."""
  compiler = shutil.which(os.environ.get('CXX') or 'c++')
  if compiler is None:
    raise ValueError(
      'there is no C++ compiler: install one (on Debian and Ubuntu, apt-get '
      'install g++), or name it in CXX'
    )
  _remove_abandoned(path.parent)
  with tempfile.TemporaryDirectory(prefix='build-', dir=path.parent) as folder:
    made = pathlib.Path(folder) / path.name
    command = [compiler, *_FLAGS, f'-I{jax.ffi.include_dir()}']
    command += ['-o', str(made), '-x', 'c++', '-']
    # As one file, because XLA's headers take longer than all of ours.
    whole = [f'#include "{path}"\n' for path in sorted(_FOLDER.glob('*.cc'))]
    done = subprocess.run(
      command,
      input=''.join(whole),
      capture_output=True,
      text=True,
      check=False,
      timeout=_SECONDS,
    )
    if done.returncode:
      lines = done.stderr.splitlines()
      first = next((x for x in lines if 'error' in x.lower()), 'no message')
      raise ValueError(f'{shlex.join(command)} failed with: {first}')
    made.replace(path)


def _remove_abandoned(folder):
  """Removes what builds that were killed an hour ago or earlier left."""
  for left in folder.glob('build-*'):
    with contextlib.suppress(OSError):
      if time.time() - left.stat().st_mtime > 3600:
        shutil.rmtree(left)
