"""Attention in C++, and bugs planted in the C++ files."""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample.cpu import native
from specsample.models import attention

pytestmark = pytest.mark.skipif(
  not native.is_available(), reason='the C++ files cannot be built here'
)


def _normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def _scene(*shape):
  """Returns the arguments of `attend` for rows of different length."""
  batch, heads, group, num_new, size, dim, value_dim = shape
  query = _normal(0, batch, heads, group * num_new, dim)
  parts = lambda seed, dim: (
    _normal(seed, batch, heads, size, dim),
    _normal(seed + 1, batch, heads, num_new, dim),
  )
  length = np.arange(batch)[:, None, None] * 5 % (size + 1)
  cached = np.broadcast_to(np.arange(size) < length, (batch, num_new, size))
  new = np.broadcast_to(np.tri(num_new, dtype=bool), (batch, num_new, num_new))
  mask = np.concatenate([cached, new], axis=2)
  return query, jnp.asarray(mask), parts(1, dim), parts(3, value_dim)


_SHAPES = [
  (1, 3, 3, 1, 256, 64, 64),
  (3, 2, 2, 5, 40, 64, 64),
  (2, 1, 4, 3, 17, 24, 20),  # as DeepSeek's: one head, other values
  (2, 2, 1, 2, 9, 7, 3),  # smaller than a register
  (4, 2, 1, 4, 0, 8, 8),  # nothing is cached
]


@pytest.mark.parametrize('shape', _SHAPES)
@pytest.mark.parametrize('softcap', [None, 2.0])
@pytest.mark.parametrize('has_sinks', [False, True])
def test_attention_is_that_of_xla(shape, softcap, has_sinks):
  query, mask, keys, values = _scene(*shape)
  sinks = _normal(7, *query.shape[1:3]) if has_sinks else None
  arguments = query, mask, keys, values, softcap, sinks
  found = attention.attend(*arguments)
  assert 'specsample_attention' in str(
    jax.make_jaxpr(attention.attend, static_argnums=4)(*arguments)
  )
  expected = attention._attend(*arguments)
  np.testing.assert_allclose(found, expected, atol=2e-5)


def test_gradients_are_those_of_xla():
  query, mask, keys, values = _scene(*_SHAPES[1])
  sinks = _normal(7, *query.shape[1:3])

  def gradients(attend):
    loss = lambda query, keys, values, sinks: jnp.sum(
      jnp.sin(attend(query, mask, keys, values, 3.0, sinks))
    )
    return jax.grad(loss, argnums=(0, 1, 2, 3))(query, keys, values, sinks)

  for found, expected in zip(
    *map(
      jax.tree.leaves,
      map(gradients, (attention.attend, attention._attend)),
    ),
    strict=True,
  ):
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize('is_native', [True, False])
def test_a_query_that_sees_nothing_gets_zeros(is_native):
  query, mask, keys, values = _scene(*_SHAPES[1])
  given = query, jnp.zeros_like(mask), keys, values
  if is_native:
    found = attention.attend(*given)
  else:
    found = attention._attend(*given, None, None)
  np.testing.assert_array_equal(found, jnp.zeros_like(found))


def test_a_query_has_the_same_bits_wherever_its_entries_are():
  # One sequence of 12 entries, of which the last `num_new` are new.
  group, dim, total = 3, 64, 12
  all_keys, all_values = (
    _normal(1, 1, 2, total, dim),
    _normal(2, 1, 2, total, dim),
  )
  all_queries = _normal(3, 1, 2, group, total, dim)

  def last_query(num_new):
    cached = total - num_new
    room = jnp.full((1, 2, 20 - cached, dim), jnp.nan)  # not seen
    parts = lambda x: (
      jnp.concatenate([x[:, :, :cached], room], axis=2),
      x[:, :, cached:],
    )
    sees = np.concatenate(
      [
        np.broadcast_to(np.arange(20) < cached, (num_new, 20)),
        np.tri(num_new, dtype=bool),
      ],
      axis=1,
    )
    query = all_queries[:, :, :, cached:].reshape(1, 2, -1, dim)
    found = attention.attend(
      query, jnp.asarray(sees[None]), parts(all_keys), parts(all_values)
    )
    return found.reshape(1, 2, group, num_new, dim)[:, :, :, -1]

  expected = last_query(1)
  for num_new in range(2, 13):
    np.testing.assert_array_equal(last_query(num_new), expected)


# The file of each bug, its text, and what takes the text's place.
_BUGS = {
  'neighbour': (
    *('rows.cc', 'float t = x[i * stride + k];'),
    'float t = x[(i ? i - 1 : i) * stride + k];',
  ),
  'tail of outputs': ('rows.cc', 'std::min(last, m.panels)', 'm.panels - 1'),
  'second block': ('rows.cc', 'k > 0,', 'false,'),
  'halves': ('rows.cc', 'u[v] = (Vector)(pair << 16);', 'u[v] = (Vector)pair;'),
  'order': (
    'rows.cc',
    'sums[i][v] += u[v] * t',
    'sums[i][v] += u[v] * (N > 3 ? t * 3 / 3 : t)',
  ),
  'last new entry': ('attention.cc', 'i < all; i++) {', 'i < all - 1; i++) {'),
  'sink': ('attention.cc', 'total + *(Four*)&rest', 'total'),
  'mask of a neighbour': (
    'attention.cc',
    '= seen + token',
    '= seen + 0 * token',
  ),
  'neighbour in the block': ('attention.cc', 'query[i] + d)', 'query[0] + d)'),
  'odd entry': ('attention.cc', 'j <= has_next', 'j < 2 * has_next'),
}
_CHECK = """
import json, pathlib, sys
from specsample.cpu import native
native._FOLDER = pathlib.Path(sys.argv[1])
native._FLAGS = tuple(x.replace('-O3', '-O1') for x in native._FLAGS)
from tests.cpu import test_attention as attention
from tests.models import test_packed as products
def caught(function, *arguments):
  try:
    function(*arguments)
  except AssertionError:
    return True
  return False
print(json.dumps(any([
  *(caught(attention.test_attention_is_that_of_xla, x, None, True)
    for x in attention._SHAPES[:2]),
  caught(attention.test_a_query_has_the_same_bits_wherever_its_entries_are),
  *(caught(products.test_products_are_those_of_the_array, (2051, 96), narrow)
    for narrow in (False, True)),
  caught(products.test_a_row_has_the_same_bits_in_a_product_of_any_width),
])))
"""


@pytest.mark.parametrize('bug', [None, *_BUGS])
def test_planted_bugs_are_caught(bug, tmp_path):
  folder = tmp_path / 'cpu'
  shutil.copytree(native._FOLDER, folder)
  if bug:
    name, text, instead = _BUGS[bug]
    source = (folder / name).read_text()
    assert text in source
    (folder / name).write_text(source.replace(text, instead))
  done = subprocess.run(
    [sys.executable, '-c', _CHECK, str(folder)],
    env=os.environ | {'XDG_CACHE_HOME': str(tmp_path)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout) == (bug is not None)
