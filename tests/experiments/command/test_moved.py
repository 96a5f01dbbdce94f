"""Old module names say where the modules went."""

import importlib.util

import pytest

import experiments
from experiments.command import moved


@pytest.mark.parametrize('name', moved._MOVED)
def test_a_module_is_where_its_old_name_says(name):
  now = moved.to(name)
  assert importlib.util.find_spec(now) is not None
  with pytest.raises(ImportError, match=f'experiments.{name} is now {now}'):
    getattr(experiments, name)


def test_a_name_that_was_never_there_is_not_known():
  assert moved.to('nothing') is None
  assert not hasattr(experiments, 'nothing')
