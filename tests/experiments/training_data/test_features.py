"""Whether the target's vectors are kept beside the data."""

import jax
import ml_dtypes
import numpy as np
import pytest

from experiments.training_data import data_folder
from experiments.training_data import features
import specsample
from specsample import testing

_MODEL = testing.tiny_llama()
_TARGET = specsample.Loaded(_MODEL, _MODEL.init(jax.random.key(0)), None)


def _data(folder, sizes):
  """Returns shards of one dialogue each, whose tokens take no memory."""
  of = lambda size: data_folder.Dialogue(
    tokens=np.broadcast_to(np.int32(1), (size,)),
    answers=((1, size),),
    temperature=0.0,
    source=data_folder.Source.PROMPT,
    turn=0,
  )
  shards = [[of(size)] if size else [] for size in sizes]
  return data_folder.Data(folder, {}, shards)


@pytest.mark.parametrize(
  ('sizes', 'fits', 'message'),
  [
    # Vectors of 16 numbers of 2 bytes.
    (
      [100_000, 0, 200_000],
      True,
      'will be kept next to the data: they need 0.0096 GB more',
    ),
    (
      [10**14],
      False,
      'will be computed in each step: they need 3.2e+06 GB more',
    ),
  ],
)
def test_vectors_are_kept_if_the_disk_has_room(tmp_path, sizes, fits, message):
  found = features.fit([_data(tmp_path, sizes)], _TARGET)
  assert found[0] == fits
  assert message in found[1]
  assert list(tmp_path.iterdir()) == []


def test_vectors_of_layers_and_folders_need_more_room(tmp_path):
  data = _data(tmp_path, [100_000, 0, 200_000])
  _, message = features.fit([data, data], _TARGET, (0, 1, -1))
  assert f'need {2 * 4 * 0.0096:.3g} GB more' in message
  # What is there needs nothing more.
  features.path(tmp_path, 0).touch()
  fits, message = features.fit([_data(tmp_path, [10**14, 50])], _TARGET)
  assert fits
  assert 'need 1.6e-06 GB more' in message


def test_no_vectors_are_kept_in_a_bucket():
  fits, message = features.fit([_data('gs://bucket/data', [10])], _TARGET)
  assert not fits
  assert message.startswith('gs://bucket/data is in a bucket: the vectors')


def test_what_is_read_stays_on_the_disk_until_it_is_used(tmp_path):
  data = _data(tmp_path, [3, 5])
  for number, (dialogue,) in enumerate(data.shards):
    shape = (dialogue.tokens.size, _MODEL.dim)
    hidden = np.full(shape, number, ml_dtypes.bfloat16)
    np.save(features.path(tmp_path, number), hidden.view(np.uint16))
  found, num_tokens = features.read(data, _TARGET)
  assert num_tokens == 0
  for number, ((vectors,), (dialogue,)) in enumerate(
    zip(found, data.shards, strict=True)
  ):
    hidden = vectors['hidden']
    assert hidden.shape == (dialogue.tokens.size, _MODEL.dim)
    assert (np.asarray(hidden, np.float32) == number).all()
    base = hidden
    while base.base is not None and not isinstance(base, np.memmap):
      base = base.base
    assert isinstance(base, np.memmap)
