"""Whether the target's vectors are kept beside the data."""

import jax
import ml_dtypes
import numpy as np

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


def test_vectors_that_need_little_of_the_disk_are_kept(tmp_path):
  data = _data(tmp_path, [100_000, 0, 200_000])
  fits, message = features.fit([data], _TARGET)
  # Vectors of 16 numbers of 2 bytes.
  assert fits
  assert 'will be kept next to the data: they need 0.0096 GB more' in message
  _, message = features.fit([data, data], _TARGET, (0, 1, -1))
  assert f'need {2 * 4 * 0.0096:.3g} GB more' in message


def test_vectors_that_need_more_than_half_of_what_is_free_are_not(tmp_path):
  data = _data(tmp_path, [10**14])
  fits, message = features.fit([data], _TARGET)
  assert not fits
  assert 'will be computed in each step: they need 3.2e+06 GB more' in message
  assert list(tmp_path.iterdir()) == []


def test_vectors_that_are_there_need_nothing_more(tmp_path):
  data = _data(tmp_path, [10**14, 50])
  features.path(tmp_path, 0).touch()
  fits, message = features.fit([data], _TARGET)
  assert fits
  assert 'need 1.6e-06 GB more' in message


def test_none_are_kept_in_a_bucket():
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
