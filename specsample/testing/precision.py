"""Where the certificate enumerates: on the CPU, and in float64.

A TPU has no float64 of its own, and its compiler cannot take one apart into
bits, as the search for a threshold does.
"""

from collections.abc import Iterator
import contextlib

import jax


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
  """What is not on a device yet is computed on the CPU."""
  with jax.default_device(jax.local_devices(backend='cpu')[0]):
    yield


@contextlib.contextmanager
def float64() -> Iterator[None]:
  """The same, in float64."""
  with jax.enable_x64(True), on_cpu():
    yield
