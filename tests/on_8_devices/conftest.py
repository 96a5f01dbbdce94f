"""Meshes over the 8 devices that these files need."""

import jax
import pytest

from specsample import sharding

MESHES = [
  pytest.param((*shape, explicit), id=f'{shape[0]}x{shape[1]}-{kind}')
  for shape in ((1, 8), (2, 4), (4, 2), (8, 1))
  for explicit, kind in ((True, 'explicit'), (False, 'auto'))
]


@pytest.fixture(params=MESHES)
def mesh(request):
  """A mesh of data x model devices, not set yet."""
  data, model, explicit = request.param
  assert jax.device_count() == 8
  return sharding.make_mesh(data, model, explicit=explicit)


@pytest.fixture(autouse=True)
def _few_executables(request):
  """Drops what was compiled before Linux's limit of 65530 mappings is hit."""
  yield
  session = request.session
  session.num_run = getattr(session, 'num_run', 0) + 1
  if session.num_run % 30 == 0:
    jax.clear_caches()
