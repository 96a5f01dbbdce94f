"""One of the two processes of `check_loading`.

Takes the coordinator's address, its own number, the folder of a model, which it
reads as from a bucket, and a folder to save the model to. The last word that it
prints is how many bytes of weights it read.
"""

import os
import pathlib
import sys
import traceback

import jax
import numpy as np

import specsample
from specsample import sharding
from specsample.models import checkpoint
from specsample.models import packed
from tests import bucket


def _assert_equal(array, whole):
  for shard in array.addressable_shards:
    np.testing.assert_array_equal(shard.data, whole[shard.index])


def _raised(action) -> str:
  try:
    action()
  except (AttributeError, ValueError) as error:
    return str(error)
  raise AssertionError('nothing was raised')


def _check_drafter(loaded, medusa, params, folder):
  placed = sharding.place(params, medusa.param_axes())
  specsample.save_drafter(folder, medusa, placed, target=loaded, card={})
  again = specsample.load_drafter(folder, loaded).params
  assert not again['vocabulary']['unembedding'].is_fully_addressable
  # Before training, heads are the identity, which bfloat16 represents exactly.
  jax.tree.map(_assert_equal, again, params)


def main():
  address, number, source, target = sys.argv[1:]
  jax.distributed.initialize(
    address, 2, int(number), heartbeat_timeout_seconds=10
  )
  assert len(jax.local_devices()) == 4 and jax.device_count() == 8
  source, target = pathlib.Path(source), pathlib.Path(target)
  with jax.default_device(jax.local_devices()[0]):
    whole = specsample.load(source)
    medusa = specsample.drafters.Medusa(
      model=whole.model, num_draft_tokens=2, draft_vocab_size=24
    )
    heads = medusa.init_params(
      jax.random.key(0), whole.params, 2 * np.arange(24)
    )
    plain = packed.plain(whole.params)
    expected, heads = jax.device_get((plain, heads))
  served = bucket.make(source.parents[1]).served

  with jax.set_mesh(sharding.make_mesh(1, 8)):
    loaded = specsample.load('gs://bucket/model')
    num_bytes = sum(stop - start for _, start, stop in served)
    jax.tree.map(_assert_equal, loaded.params, expected)
    assert not loaded.params['embedding'].is_fully_addressable
    model, params = loaded.model, loaded.params
    own = _raised(lambda: checkpoint.save(target, model, expected))
    assert 'each of 2 processes has parameters of its own' in own
    # The first process fails while the other one waits.
    broken = _raised(lambda: checkpoint.save(target, model, params, object()))
    assert ('process 0 failed' in broken) == (number == '1'), broken
    assert not target.exists()
    checkpoint.save(target, model, params)
    assert target.exists()
    exists = _raised(lambda: checkpoint.save(target, model, params))
    assert ('saved exists' in exists) == (number == '0'), exists
    _check_drafter(loaded, medusa, heads, target.with_name('drafter'))
  with jax.set_mesh(sharding.make_mesh(2, 4)):
    restored = specsample.load(target)
    jax.tree.map(_assert_equal, restored.params, expected)
  print(num_bytes)


if __name__ == '__main__':
  try:
    main()
  except BaseException:
    traceback.print_exc()
    # Exit at once, because an orderly end would wait for the other process.
    os._exit(1)
