"""Gated delta networks: recurrent layers with a state instead of a KV cache.

Yang et al., 2412.06464 (Gated DeltaNet), as in Qwen3-Next and Qwen3.5: a
convolution over the last tokens, then the recurrence of `delta_rule`. A pass
does not change the state: it returns a log of its tokens' k, u and g, from
which `commit` computes the state after any prefix or path of a tree by one
product. No state is stored per token.
"""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import settings
from specsample import sharding
from specsample import tree
from specsample import types
from specsample.models import delta_rule
from specsample.models import layers
from specsample.types import Array

# The epsilon in the norms of queries and keys.
_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta(settings.Settings):
  """Sizes of the recurrent layers.

  Attributes:
    layers: the layers that are recurrent, in place of attention.
    num_key_heads: H. Each head of queries and keys serves several value heads,
      which are consecutive.
    num_value_heads: a multiple of H; each value head has a state of its own.
    key_dim, value_dim: sizes of a head.
    kernel: how many tokens, itself included, a token's convolution sees.
  """

  layers: tuple[int, ...]
  num_key_heads: settings.Count
  num_value_heads: settings.Count
  key_dim: settings.Count
  value_dim: settings.Count
  kernel: settings.Count = 4

  def _check(self) -> None:
    if self.num_value_heads % self.num_key_heads:
      raise ValueError(
        f'num_key_heads is {self.num_key_heads} and num_value_heads is '
        f'{self.num_value_heads}: each key head must serve the same number of '
        'value heads'
      )

  @property
  def heads(self) -> tuple[int, int]:
    """The number of key heads, and of the value heads of each."""
    return self.num_key_heads, self.num_value_heads // self.num_key_heads

  def shape(self, kind: str) -> tuple[int, ...]:
    """Returns the shape of one token's keys, values or numbers per head."""
    return {
      'key': (self.num_key_heads, self.key_dim),
      'value': (*self.heads, self.value_dim),
      'per_head': self.heads,
    }[kind]


@types.pytree
class Heads:
  """Queries, keys and values of some tokens; G value heads for each key head.

  Also used for the convolution's weights, and for the axes of such arrays.
  """

  query: Array  # [B, T, H, dk]
  key: Array  # [B, T, H, dk]
  value: Array  # [B, T, H, G, dv]


@types.pytree
class State:
  """What a layer remembers of the tokens so far."""

  memory: Array  # [B, H, G, dk, dv] float32
  tail: Heads  # inputs of the convolution: the last kernel - 1, oldest first


@types.pytree
class Log:
  """What the tokens of a pass would do to a state."""

  inputs: Heads  # of the convolution
  keys: Array  # [B, T, H, dk] float32, of norm 1
  updates: Array  # [B, T, H, G, dv] float32, u
  decays: Array  # [B, T, H, G] float32, g


@types.pytree
class Order:
  """How the new tokens of a pass follow each other: a chain or a tree."""

  shape: tuple[int, int] = types.static()  # (B, T)
  # For a tree, [B, T, T] bool: which nodes are on the path to each node.
  ancestors: Array | None = None


def order(batch: int, num_new: int, parents: Array | None) -> Order:
  """Returns the order of T new tokens, given parents [B, T - 1] if a tree."""
  if parents is None:
    return Order(shape=(batch, num_new))
  if parents.shape[1] + 1 != num_new:
    raise ValueError(
      f'{num_new} nodes of a tree of {parents.shape[1] + 1} are fed to a '
      'recurrent model, which keeps no state per node: feed the whole tree in '
      'one pass'
    )
  return Order(shape=(batch, num_new), ancestors=tree.ancestors(parents))


def empty(batch_size: int, sizes: Delta, dtype: jnp.dtype) -> State:
  """Returns the state before any token."""
  axes = _axes(*sizes.heads)
  shape = batch_size, *sizes.heads, sizes.key_dim, sizes.value_dim
  before = batch_size, sizes.kernel - 1
  tail = lambda kind: sharding.zeros(
    (*before, *sizes.shape(kind)), dtype, *axes[kind]
  )
  memory = sharding.zeros(shape, jnp.float32, *axes['memory'])
  return State(memory=memory, tail=_heads(tail))


def _heads(make) -> Heads:
  return Heads(query=make('key'), key=make('key'), value=make('value'))


def _head_axes(num_heads, group):
  heads = sharding.Axis('kv_heads', num_heads)
  return heads, sharding.Axis('heads_of_kv', group, within=heads)


def _axes(num_heads, group):
  """Returns the `sharding.Axes` of each kind of array, from the batch on."""
  heads, group = _head_axes(num_heads, group)
  return {
    'key': ('batch', None, heads, None),
    'value': ('batch', None, heads, group, None),
    'per_head': ('batch', None, heads, group),
    'memory': ('batch', heads, group, None, None),
  }


def _state_axes(axes):
  return State(memory=axes['memory'], tail=_heads(axes.get))


def _log_axes(axes):
  return Log(
    inputs=_heads(axes.get),
    keys=axes['key'],
    updates=axes['value'],
    decays=axes['per_head'],
  )


class GatedDelta(nnx.Module):
  """A gated delta network, in the place of attention.

  `config` has the fields of `transformer.Transformer`.
  """

  def __init__(self, config, keys):
    sizes, dtype = config.delta, jnp.dtype(config.dtype)
    of_values = heads, _ = _head_axes(*sizes.heads)
    read = functools.partial(layers.Linear, config.dim, keys=keys, dtype=dtype)
    key_width = sizes.num_key_heads * sizes.key_dim
    width = sizes.num_value_heads * sizes.value_dim
    self.query = read(key_width, axes=(None, heads))
    self.key = read(key_width, axes=(None, heads))
    self.value = read(width, axes=(None, of_values))
    self.gate = read(width, axes=(None, of_values))
    self.rate = read(sizes.num_value_heads, axes=(None, of_values))
    self.decay = read(sizes.num_value_heads, axes=(None, of_values))
    # Named so that they are no matrices of products (`tensors.is_matrix`).
    convolution = lambda size, axis: nnx.Param(
      jnp.full((sizes.kernel, size), 1 / sizes.kernel, dtype),
      axes=(None, axis),
    )
    self.query_convolution = convolution(key_width, heads)
    self.key_convolution = convolution(key_width, heads)
    self.value_convolution = convolution(width, of_values)
    per_head = lambda: nnx.Param(
      jnp.zeros(sizes.num_value_heads, jnp.float32), axes=(of_values,)
    )
    self.log_decay_scale = per_head()
    self.decay_bias = per_head()
    self.norm = layers.RMSNorm(sizes.value_dim, config.norm_eps, dtype)
    self.out = layers.Linear(
      width, config.dim, axes=(of_values, None), keys=keys, dtype=dtype
    )
    self.sizes = sizes
    self.value_axes = of_values

  def __call__(self, x, order, state):
    """Reads rows x [B * T, D]; returns the output [B * T, D] and a `Log`.

    The state is only read. Without one, the tokens are the first of their rows.
    """
    sizes, axes = self.sizes, _axes(*self.sizes.heads)
    if state is None:
      state = empty(order.shape[0], sizes, x.dtype)
    split = lambda y, kind: sharding.reshape(
      layers.finite(y), (*order.shape, *sizes.shape(kind)), *axes[kind]
    )
    inputs = Heads(
      query=split(self.query(x), 'key'),
      key=split(self.key(x), 'key'),
      value=split(self.value(x), 'value'),
    )
    decays = -jnp.exp(self.log_decay_scale[...]) * jax.nn.softplus(
      self.decay(x).astype(jnp.float32) + self.decay_bias[...]
    )
    # A list, because a tuple stands for the axes of an array.
    of_tree = [] if order.ancestors is None else [order.ancestors]
    mixed, log = sharding.map_parts(
      _read,
      (
        self._kernels(),
        state,
        inputs,
        split(jax.nn.sigmoid(self.rate(x)), 'per_head'),
        split(decays, 'per_head'),
        of_tree,
      ),
      (
        _heads(lambda kind: axes[kind][1:]),
        _state_axes(axes),
        _heads(axes.get),
        axes['per_head'],
        axes['per_head'],
        [('batch', None, None)] * len(of_tree),
      ),
      result=[axes['value'], _log_axes(axes)],
    )
    gate = split(self.gate(x), 'value').astype(jnp.float32)
    mixed = self.norm(mixed.astype(x.dtype)) * jax.nn.silu(gate)
    mixed = sharding.reshape(
      mixed.astype(x.dtype), (len(x), -1), 'batch', self.value_axes
    )
    return self.out(mixed), log

  def _kernels(self) -> Heads:
    """Returns the convolutions' weights [kernel, H, ...]."""
    sizes, axes = self.sizes, _axes(*self.sizes.heads)
    split = lambda kernel, kind: sharding.reshape(
      kernel[...], (sizes.kernel, *sizes.shape(kind)), *axes[kind][1:]
    )
    return Heads(
      query=split(self.query_convolution, 'key'),
      key=split(self.key_convolution, 'key'),
      value=split(self.value_convolution, 'value'),
    )


def _read(kernels, state, inputs, rates, decays, of_tree):
  """Returns the outputs [B, T, H, G, dv] float32 of some heads, and the log."""
  ancestors = of_tree[0] if of_tree else None
  lags = None if ancestors is None else _lags(ancestors, kernels.key.shape[0])
  made = jax.tree.map(
    functools.partial(_convolved, lags=lags), kernels, state.tail, inputs
  )
  wide = lambda x: x.astype(jnp.float32)
  tokens = delta_rule.Tokens(
    query=_normed(wide(made.query)) / made.query.shape[-1] ** 0.5,
    key=_normed(wide(made.key)),
    value=wide(made.value),
    rate=wide(rates),
    decay=decays,
  )
  mixed, updates = delta_rule.run(state.memory, tokens, ancestors)
  return [
    mixed,
    Log(inputs=inputs, keys=tokens.key, updates=updates, decays=decays),
  ]


def _normed(x):
  squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(squares + _EPS)


def _take(x, index):
  """Takes entries of x [B, n, ...] at each row's own index [B, T]."""
  return jax.vmap(lambda row, index: jnp.take(row, index, axis=0))(x, index)


def _lags(ancestors, kernel):
  """Returns the places in [tail, nodes] of the tokens up to each node.

  They are [B, T, kernel], the oldest token first.
  """
  nodes = jnp.arange(ancestors.shape[-1])
  depths = tree.depths(ancestors)
  back = jnp.arange(kernel)[::-1]
  wanted = depths[..., None] - back  # [B, T, kernel]
  is_wanted = ancestors[:, :, None] & (
    depths[:, None, None] == wanted[..., None]
  )
  node = jnp.sum(is_wanted * nodes, axis=-1)
  # Before node 0, a token's depth goes on below 0.
  return kernel - 1 + jnp.where(wanted < 0, wanted, node)


def _convolved(kernel, tail, inputs, lags):
  """Returns silu of the causal convolution of inputs [B, T, ...]."""
  held = jnp.concatenate([tail, inputs], axis=1)
  num_new, total = inputs.shape[1], jnp.zeros((), jnp.float32)
  for i in range(len(kernel)):
    seen = (
      held[:, i : i + num_new] if lags is None else _take(held, lags[..., i])
    )
    total += seen.astype(jnp.float32) * kernel[i].astype(jnp.float32)
  total = total.astype(inputs.dtype).astype(jnp.float32)
  return jax.nn.silu(total).astype(inputs.dtype)


def commit(
  state: State, log: Log, count: Array, nodes: Array | None = None
) -> State:
  """Returns the state after the first count [B] tokens of a log.

  Args:
    state: before all of them. A row that keeps none stays as it is, bit for
      bit.
    log: of T tokens.
    count: from 0 to T, or to P.
    nodes: [B, P], the indices in the log of the path that is kept; None for a
      chain.
  """
  if nodes is not None:
    log = along(log, nodes)
  axes = _axes(*log.decays.shape[2:])
  of_state = _state_axes(axes)
  return sharding.map_parts(
    _commit,
    (state, log, count),
    (of_state, _log_axes(axes), ('batch',)),
    result=of_state,
  )


def _commit(state, log, count):
  is_kept = jnp.arange(log.decays.shape[1]) < count[:, None]
  keep = lambda x: jnp.where(
    is_kept.reshape(*is_kept.shape, *(1,) * (x.ndim - 2)), x, 0
  )
  last = jax.vmap(
    lambda tail, inputs, count: jax.lax.dynamic_slice_in_dim(
      jnp.concatenate([tail, inputs]), count, len(tail)
    )
  )
  return State(
    memory=delta_rule.folded(
      state.memory, keep(log.keys), keep(log.updates), keep(log.decays)
    ),
    tail=jax.tree.map(
      lambda tail, inputs: last(tail, inputs, count), state.tail, log.inputs
    ),
  )


def widen(log: Log, num_tokens: int) -> Log:
  """Pads a log to `num_tokens` tokens, none of which may be kept."""
  more = lambda x: jnp.pad(
    x, [(0, 0), (0, num_tokens - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
  )
  return jax.tree.map(more, log)


def along(log: Log, path: Array) -> Log:
  """Returns the log of the tokens at the indices path [B, P], as a chain."""
  axes = _log_axes(_axes(*log.decays.shape[2:]))
  return sharding.map_parts(
    lambda log, path: jax.tree.map(lambda x: _take(x, path), log),
    (log, path),
    (axes, ('batch', None)),
    result=axes,
  )
