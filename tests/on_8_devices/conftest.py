"""Meshes over the 8 devices that these files need."""

import jax
import pytest

from specsample import sharding

# Each shape once and each kind twice, as each mesh compiles everything anew.
MESHES = [
  pytest.param((1, 8, False), id='1x8-auto'),
  pytest.param((2, 4, True), id='2x4-explicit'),
  pytest.param((4, 2, False), id='4x2-auto'),
  pytest.param((8, 1, True), id='8x1-explicit'),
]


@pytest.fixture(params=MESHES)
def mesh(request):
  """A mesh of data x model devices, not set yet."""
  data, model, explicit = request.param
  assert jax.device_count() == 8
  return sharding.make_mesh(data, model, explicit=explicit)


@pytest.fixture(autouse=True)
def _few_executables(request):
  """Drops executables before Linux's limit of 65530 mappings is hit."""
  yield
  session = request.session
  session.num_run = getattr(session, 'num_run', 0) + 1
  if session.num_run % 30 == 0:
    jax.clear_caches()
