"""Indexing without a mesh; with one, see `on_8_devices/check_sharding.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import indexing


# In one piece, in whole blocks and in padded ones.
@pytest.mark.parametrize('vocab', [300, 49_152, 50_257])
@pytest.mark.parametrize('k', [1, 9, 64, 70])
def test_top_k_is_that_of_whole_rows(vocab, k):
  rng = np.random.default_rng(0)
  # Few values, so that most entries have equals, also beyond the k largest.
  x = rng.integers(0, 60, size=(2, 3, vocab)).astype(np.float32)
  x[1, 1, 3:] = -np.inf
  found = indexing.top_k(jnp.asarray(x), k)
  for one, expected in zip(found, jax.lax.top_k(x, k), strict=True):
    np.testing.assert_array_equal(one, expected)


def test_take_reads_entries_of_each_row():
  x = jnp.arange(24).reshape(2, 12)
  ids = jnp.asarray([[3, 0, 3], [11, 1, 2]])
  expected = [[3, 0, 3], [23, 13, 14]]
  np.testing.assert_array_equal(indexing.take(x, ids), expected)


def test_put_writes_entries_of_each_row():
  ids = jnp.asarray([[[3, 0]], [[4, 1]]])
  values = jnp.asarray([[[1.0, 2.0]], [[3.0, -jnp.inf]]])
  found = indexing.put(values, ids, 5)
  inf = np.inf
  np.testing.assert_array_equal(
    found, [[[2, -inf, -inf, 1, -inf]], [[-inf, -inf, -inf, -inf, 3]]]
  )


def test_top_k_sorts_no_row_if_only_some_entries_are_read():
  best = lambda x: jax.tree.map(lambda y: (y, y[:, :1]), indexing.top_k(x, 9))
  compiled = jax.jit(best).lower(jnp.zeros((2, 300))).compile().as_text()
  assert 'TopK' in compiled
  assert ' sort(' not in compiled
