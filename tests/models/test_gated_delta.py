"""Recurrent layers: the recurrence of one token at a time is the oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import testing
from specsample.models import delta_rule
from specsample.models import gated_delta
from specsample.models import layers

_SIZES = gated_delta.Delta(
  layers=(0,), num_key_heads=2, num_value_heads=6, key_dim=4, value_dim=3
)
_LLAMA = testing.tiny_llama()
_CONFIG = dataclasses.replace(_LLAMA, delta=_SIZES)
_BATCH, _NUM_NEW = 3, 13
# Node i + 1 follows node `_PARENTS[row][i]`.
_PARENTS = np.asarray(
  [
    [0, 0, 1, 1, 2, 5, 5, 6, 3, 0, 10, 9],
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
  ],
  np.int32,
)


@functools.cache
def _layer():
  made = gated_delta.GatedDelta(_CONFIG, layers.random_keys(jax.random.key(0)))
  key = jax.random.key(1)
  for name in ('query', 'key', 'value'):
    weights = getattr(made, f'{name}_convolution')
    key, own = jax.random.split(key)
    weights.set_value(jax.random.normal(own, weights.get_value().shape))
  made.norm.scale.set_value(jnp.linspace(0.5, 2, _SIZES.value_dim))
  made.log_decay_scale.set_value(jnp.linspace(-2, 1, 6))
  made.decay_bias.set_value(jnp.linspace(1, -1, 6))
  return made


def _inputs(num_tokens, seed=2, batch=_BATCH):
  shape = batch, num_tokens, _CONFIG.dim
  return np.asarray(jax.random.normal(jax.random.key(seed), shape))


@functools.partial(jax.jit, static_argnames='num_new')
def _run(x, parents, state, num_new):
  order = gated_delta.order(len(x), num_new, parents)
  output, log = _layer()(x.reshape(-1, x.shape[-1]), order, state)
  return output.reshape(x.shape), log


def _read(x, parents=None, state=None):
  _layer()  # made here, because not while it is traced
  return _run(jnp.asarray(x), parents, state, x.shape[1])


@jax.jit
def _commit(state, log, count, nodes=None):
  return gated_delta.commit(state, log, count, nodes)


def _empty(batch=_BATCH):
  return gated_delta.empty(batch, _SIZES, jnp.dtype('float32'))


def _wide(array):
  return np.asarray(array, np.float64)


def _silu(x):
  return x / (1 + np.exp(-x))


class _Recurrence:
  """One row of the layer in float64, a token at a time."""

  def __init__(self):
    made = _layer()
    self.made = made
    self.weights = [
      _wide(getattr(made, f'{name}_convolution').get_value())
      for name in ('query', 'key', 'value')
    ]
    self.state = np.zeros((6, _SIZES.key_dim, _SIZES.value_dim))
    self.tails = [np.zeros((3, w.shape[1])) for w in self.weights]

  def __call__(self, x):
    """Returns the output of a token x [D], and goes on to the next."""
    made, x = self.made, _wide(x)
    product = lambda linear: x @ _wide(linear.kernel.get_value())
    mixed = []
    for i, linear in enumerate((made.query, made.key, made.value)):
      seen = np.concatenate([self.tails[i], product(linear)[None]])
      self.tails[i] = seen[1:]
      mixed.append(_silu((self.weights[i] * seen).sum(axis=0)))
    norm = lambda y: y / np.sqrt((y**2).sum(axis=-1, keepdims=True) + 1e-6)
    query = norm(mixed[0].reshape(2, -1)) / np.sqrt(_SIZES.key_dim)
    key = norm(mixed[1].reshape(2, -1))
    value = mixed[2].reshape(6, -1)
    rate = 1 / (1 + np.exp(-product(made.rate)))
    pre = product(made.decay) + _wide(made.decay_bias.get_value())
    scale = np.exp(_wide(made.log_decay_scale.get_value()))
    decay = np.exp(-scale * np.log1p(np.exp(pre)))
    gate = _silu(product(made.gate)).reshape(6, -1)
    outputs = []
    for head in range(6):
      q, k = query[head // 3], key[head // 3]
      state = decay[head] * self.state[head]
      update = rate[head] * (value[head] - state.T @ k)
      self.state[head] = state + np.outer(k, update)
      read = self.state[head].T @ q
      read /= np.sqrt((read**2).mean() + _CONFIG.norm_eps)
      outputs.append(read * _wide(made.norm.scale.get_value()) * gate[head])
    return np.concatenate(outputs) @ _wide(made.out.kernel.get_value())


def _replayed(x):
  """Returns the outputs of tokens x [T, D], and the recurrence after them."""
  recurrence = _Recurrence()
  return np.asarray([recurrence(token) for token in x]), recurrence


def _assert_state_is(state, row, recurrence):
  close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
  memory = recurrence.state.reshape(state.memory.shape[1:])
  close(state.memory[row], memory)
  tails = state.tail.query, state.tail.key, state.tail.value
  for found, expected in zip(tails, recurrence.tails, strict=True):
    close(found[row], expected.reshape(found.shape[1:]))


@pytest.mark.parametrize('num_new', [1, 3, _NUM_NEW, 64, 65, 150])
def test_a_chain_is_the_recurrence(num_new):
  x = _inputs(num_new)
  output, log = _read(x)
  state = _commit(_empty(), log, jnp.full(_BATCH, num_new))
  for row in range(_BATCH):
    expected, recurrence = _replayed(x[row])
    np.testing.assert_allclose(output[row], expected, rtol=0, atol=2e-5)
    _assert_state_is(state, row, recurrence)


def test_every_prefix_can_be_kept():
  x = _inputs(_NUM_NEW, batch=1)
  before = _inputs(5, seed=3, batch=1)
  _, log = _read(before)
  start = _commit(_empty(1), log, jnp.asarray([5]))
  output, log = _read(x, state=start)
  for count in range(_NUM_NEW + 1):
    state = _commit(start, log, jnp.asarray([count]))
    kept = np.concatenate([before[0], x[0, :count]])
    expected, recurrence = _replayed(kept)
    _assert_state_is(state, 0, recurrence)
    np.testing.assert_allclose(
      output[0, :count], expected[5:], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize('nodes', [None, np.zeros((_BATCH, 4), np.int32)])
def test_a_row_that_keeps_nothing_stays_bit_for_bit(nodes):
  _, log = _read(_inputs(5))
  state = _commit(_empty(), log, jnp.asarray([5, 2, 1]))
  # Values that are not kept must not matter, whatever they are.
  _, log = _read(np.full((_BATCH, 4, _CONFIG.dim), np.nan), state=state)
  again = _commit(state, log, jnp.zeros(_BATCH, jnp.int32), nodes)
  jax.tree.map(np.testing.assert_array_equal, again, state)


def _path_to(row, node):
  path = [node]
  while path[0]:
    path.insert(0, _PARENTS[row][path[0] - 1])
  return path


@pytest.mark.parametrize('num_before', [0, 2, 5])
def test_every_path_of_a_tree_can_be_kept(num_before):
  x, before = _inputs(_NUM_NEW), _inputs(num_before, seed=3)
  start = _empty()
  if num_before:
    _, log = _read(before)
    start = _commit(start, log, jnp.full(_BATCH, num_before))
  output, log = _read(x, _PARENTS, start)
  for node in range(_NUM_NEW):
    paths = [_path_to(row, node) for row in range(_BATCH)]
    padded = np.asarray([p + [0] * (_NUM_NEW - len(p)) for p in paths])
    state = _commit(start, log, np.asarray([len(p) for p in paths]), padded)
    for row, path in enumerate(paths):
      kept = np.concatenate([before[row], x[row, path]])
      expected, recurrence = _replayed(kept)
      _assert_state_is(state, row, recurrence)
      np.testing.assert_allclose(
        output[row, node], expected[-1], rtol=0, atol=1e-5
      )


def test_a_token_depends_on_its_path_alone():
  x = _inputs(_NUM_NEW)
  output, _ = _read(x, _PARENTS)
  for node in (4, 12):
    for row in range(_BATCH):
      path = _path_to(row, node)
      others = np.asarray([i for i in range(_NUM_NEW) if i not in path], int)
      changed = x.copy()
      changed[row, others] = 100 * x[row, others] + 1
      if others.size:
        changed[row, others[-1]] = np.nan
      found, _ = _read(changed, _PARENTS)
      np.testing.assert_array_equal(found[row, path], output[row, path])


def _tokens(num_new, decay, rate):
  """Returns tokens whose keys are all alike, as those of a repeated token."""
  shape = (1, num_new, 1)
  key = np.zeros((*shape, 4), np.float32)
  key[..., 0] = 1
  rng = np.random.default_rng(0)
  return delta_rule.Tokens(
    query=key,
    key=key,
    value=rng.normal(size=(*shape, 1, 2)).astype(np.float32),
    rate=np.full((*shape, 1), rate, np.float32),
    decay=np.full((*shape, 1), decay, np.float32),
  )


@pytest.mark.parametrize('decay', [0.0, -1e-3, -50.0])
def test_a_token_repeated_without_end_keeps_the_state_right(decay):
  num_new = 60
  tokens = _tokens(num_new, decay, rate=0.97)
  memory = jnp.ones((1, 1, 1, 4, 2))
  ancestors = jnp.tri(num_new, dtype=bool)[None]
  mixed, _ = jax.jit(delta_rule.attend)(memory, tokens, ancestors)
  state, expected = np.ones(2), []
  for value in _wide(tokens.value)[0, :, 0, 0]:
    state = np.exp(np.float64(np.float32(decay))) * state
    state = state + np.float64(np.float32(0.97)) * (value - state)
    expected.append(state)
  np.testing.assert_allclose(mixed[0, :, 0, 0], expected, rtol=0, atol=5e-6)


def test_decays_in_between_are_not_differences_of_long_sums():
  # The difference of two sums of -3000 would be off by 2e-4.
  num_new = 60
  tokens = _tokens(num_new, -0.01, rate=1.0)
  key = np.zeros((1, num_new, 1, 4), np.float32)
  key[:, -2:, :, 0], key[:, :-2, :, 1] = 1, 1
  decay = np.array(tokens.decay)
  decay[:, :-2] = -50.03
  tokens = dataclasses.replace(tokens, query=key, key=key, decay=decay)
  rate = np.array(tokens.rate)
  rate[:, -1] = 0
  tokens = dataclasses.replace(tokens, rate=rate)
  mixed, _ = jax.jit(delta_rule.attend)(
    jnp.zeros((1, 1, 1, 4, 2)), tokens, jnp.tri(num_new, dtype=bool)[None]
  )
  expected = np.exp(-0.01) * tokens.value[0, -2, 0, 0]
  np.testing.assert_allclose(mixed[0, -1, 0, 0], expected, rtol=1e-6)


def test_tokens_that_are_fed_twice_without_a_commit_are_refused():
  params = _CONFIG.init(jax.random.key(0))
  cache = _CONFIG.init_cache(1, 8)
  _, cache = _CONFIG.apply(params, jnp.zeros((1, 2), jnp.int32), cache)
  with pytest.raises(ValueError, match='fed tokens twice without a commit'):
    _CONFIG.apply(params, jnp.zeros((1, 1), jnp.int32), cache)


def test_a_part_of_a_tree_is_refused():
  params = _CONFIG.init(jax.random.key(0))
  with pytest.raises(ValueError, match='feed the whole tree in one pass'):
    _CONFIG.apply(
      params,
      jnp.zeros((1, 2), jnp.int32),
      _CONFIG.init_cache(1, 8),
      parents=jnp.zeros((1, 3), jnp.int32),
    )


def test_sizes_that_make_no_layer_are_refused():
  with pytest.raises(ValueError, match='num_value_heads is 5: each key head'):
    dataclasses.replace(_SIZES, num_value_heads=5)
  for name in ('num_key_heads', 'num_value_heads', 'value_dim', 'kernel'):
    with pytest.raises(ValueError, match=f'{name} is 0: give an integer of at'):
      dataclasses.replace(_SIZES, **{name: 0})
  with pytest.raises(ValueError, match='names all 2 layers: at least one'):
    dataclasses.replace(
      _LLAMA, delta=dataclasses.replace(_SIZES, layers=(0, 1))
    )
