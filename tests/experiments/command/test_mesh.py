"""Meshes of devices as gin describes them, and the rules for them."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from experiments.command import mesh
from specsample import sharding


@pytest.mark.parametrize(
  ('sizes', 'words'),
  [
    ({'data': 3}, 'a mesh of 3 x 1 needs 3 devices, but there are 8'),
    ({'model': 0}, 'model is 0: give an integer of at least 1'),
    (
      {'data': 3, 'sequence': 2},
      'a mesh of 3 x 1 x 2 needs 6 devices, but there are 8: choose data, '
      'model, sequence so that',
    ),
    ({'sequence': 8}, 'sequence is 8 and explicit is True'),
    ({'data': 8, 'num_slices': 3}, 'num_slices is 3 and data is 8'),
  ],
)
def test_mesh_that_devices_do_not_make_is_refused(sizes, words):
  with pytest.raises(ValueError, match=words):
    sharding.make_mesh(**sizes, devices=range(8))


@pytest.mark.parametrize(
  ('rules', 'words'),
  [
    (
      (('batch', 'data'),),
      "Mesh.rules holds ('batch', 'data'): give pairs such as ('batch', "
      "('data',))",
    ),
    ([('batch', ('data',))], 'Mesh.rules is ['),
    ((('batch', ('rows',)),), "with mesh axes 'data', 'model'"),
    (
      (('heads', ('model',)),),
      "Mesh.rules has 'heads', but no array has an axis of that name",
    ),
  ],
)
def test_rules_over_unknown_axes_are_refused(rules, words):
  with pytest.raises(ValueError, match=re.escape(words)):
    mesh.Mesh(rules=rules)


def test_one_device_is_no_mesh_and_no_rules_are_not_the_default_ones():
  with mesh.Mesh().set():
    assert jax.sharding.get_mesh().empty
  assert mesh.Mesh(model=2, rules=()).rules == ()
  assert mesh.Mesh(model=2).rules == sharding.DEFAULT_RULES


def test_rules_hold_within_the_mesh_only():
  own = (('batch', ('data',)), ('vocab', ()))
  (device,) = jax.devices()[:1]
  entered = mesh.entered(sharding.make_mesh(devices=[device]), own)
  with entered:
    assert sharding.rules.value == own
    assert not jax.sharding.get_mesh().empty
  assert sharding.rules.value == sharding.DEFAULT_RULES
  assert jax.sharding.get_mesh().empty


@dataclasses.dataclass(frozen=True)
class _Device:
  """The attributes of a slice's device that `make_mesh` reads."""

  id: int
  slice_index: int
  process_index: int
  platform: str = 'cpu'
  device_kind: str = 'cpu'


def test_slices_divide_the_data_axis():
  # Two slices of two hosts with two devices each, in any order.
  devices = [_Device(i, i // 4, i // 2) for i in range(8)]
  shuffled = [devices[i] for i in (5, 0, 7, 2, 1, 4, 3, 6)]
  grid = sharding.make_mesh(4, 2, num_slices=2, devices=shuffled).devices
  slices = np.vectorize(lambda device: device.slice_index)(grid)
  assert grid.shape == (4, 2)
  assert slices.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
  assert {device.id for device in grid.flat} == set(range(8))
