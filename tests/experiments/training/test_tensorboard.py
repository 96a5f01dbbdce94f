"""The scalars that TensorBoard would read, from the event file itself."""

import sys

import pytest

from experiments.training import history
from tests.experiments.training import event_files


def test_numbers_and_lists_of_them_are_scalars(tmp_path):
  with history.tensorboard(tmp_path / 'events') as observe:
    observe('train', {'step': 20, 'loss': 1.5})
    observe(
      'held out',
      {
        'step': 20,
        'tokens_per_round': 1.25,
        'acceptance_by_position': [0.5, None],
      },
    )
  (path,) = (tmp_path / 'events').iterdir()
  assert event_files.scalars(path) == [
    ('train/step', 20, 20.0),
    ('train/loss', 20, 1.5),
    ('held_out/step', 20, 20.0),
    ('held_out/tokens_per_round', 20, 1.25),
    ('held_out/acceptance_by_position/1', 20, 0.5),
  ]


def test_without_the_package_the_remedy_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  with (
    pytest.raises(ValueError, match=r"pip install 'specsample\[tensorboard\]'"),
    history.tensorboard(tmp_path),
  ):
    pass
