"""Contexts in which the certificate enumerates: on the CPU, and in float64.

A TPU has no native float64, and its compiler cannot reinterpret a float64 as
bits, which the search for a sampling threshold does.
"""

from collections.abc import Iterator
import contextlib

import jax


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
  """Computes on the CPU whatever is not on a device yet."""
  with jax.default_device(jax.local_devices(backend='cpu')[0]):
    yield


@contextlib.contextmanager
def float64() -> Iterator[None]:
  """Does the same as `on_cpu`, in float64."""
  with jax.enable_x64(True), on_cpu():
    yield
