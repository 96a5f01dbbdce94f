"""What drafters share that go on from the target's features, token by token.

Entry t is made of the target's feature at token t and of token t + 1, and its
output is read for token t + 2. So there are as many entries as tokens before
the pending one. While a draft is drawn, the output of the entry before stands
for a feature that the target has not given yet (EAGLE, Li et al., 2401.15077).
"""

import abc
from collections.abc import Callable
import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.drafters import settings
from specsample.drafters import trainable
from specsample.models import cache as cache_lib
from specsample.models import layers
from specsample.types import Array, Draft, DraftLaw, Params


@types.pytree
class FeatureState:
  """What is known of the tokens before the pending one."""

  cache: cache_lib.KVCache  # of the entries that are made of features
  features: Array  # [B, K + 1, D], of the first tokens that have no entry
  length: Array  # [B] int32, tokens whose features are known


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureChain(trainable.Trainable, abc.ABC):
  """The parts of `types.Drafter` that are the same for all networks.

  A network has `project`, a linear map of the features or of what is joined
  with them. It is called with rows of embeddings and features [B * T, D], and
  as `layers.DecoderLayer` then; it returns as that does. `read` turns outputs
  [B * T, D] into what the unembedding reads.

  In the cache are entries made of the target's own features only: those of a
  round's kept drafts are made in the next round, in the pass that begins it.
  """

  def __post_init__(self):
    """Refuses a target of whose layers none can be made."""
    super().__post_init__()
    if not hasattr(self.model, 'num_kv_heads'):
      raise ValueError(
        f'{type(self).__name__} has a layer of the target, which is '
        f'{self.model}: it can be one of the Llama family'
      )
    if self.feature_layers:
      settings.check_features(self.feature_layers, self.model.num_layers)

  @abc.abstractmethod
  def features(
    self, params: Params, hidden: Array, of_layers: tuple[Array, ...]
  ) -> Array:
    """What is read of the target, [B, T, D].

    Args:
      params: the whole tree.
      hidden: [B, T, D], its hidden vectors.
      of_layers: [B, T, D] each, the outputs of `feature_layers`.
    """

  @property
  def reads_prompt(self) -> bool:
    """See `trainable.Trainable`."""
    return True

  def outputs(
    self,
    params: Params,
    tokens: Array,
    features: Array,
    num_steps: int,
    pick: Callable[[Array], Array] = lambda x: x,
  ) -> list[Array]:
    """What decoding would have behind every prefix, if all drafts were right.

    Args:
      params: the whole tree.
      tokens: [B, T].
      features: [B, T, D], from `features`.
      num_steps: n.
      pick: takes the places that drafts are wanted at, [B, A, ...] of [B, T,
        ...]; by default all. What lies behind T is 0 there.

    Returns:
      n of [B, A, D]. At place t, number i is of the entry of token t + i, made
      of features up to token t and of outputs behind it; `vectors` of it are
      for token t + i + 2. Where tokens run out it is of zeros.
    """
    batch, size = tokens.shape
    network = self.merge(params)
    embedded = self.model.embed(params['target'], tokens)
    cache = self._cache(batch, 0, features.dtype)
    keys, values = cache.keys[0], cache.values[0]
    roots = jnp.broadcast_to(jnp.arange(size), (batch, size))
    roots = all_roots = sharding.constrain(roots, 'batch', None)
    found = []
    for i in range(num_steps):
      mask = _step_mask(i, roots, size, self.model.sliding_window)
      behind = _behind(embedded, i + 1)
      rows, new_keys, new_values = network(
        _rows(pick(behind) if i else behind),
        _rows(features),
        self._rope(roots + i),
        sharding.constrain(mask, 'batch', None, None),
        keys,
        values,
      )
      keys = jnp.concatenate([keys, new_keys], axis=2)
      values = jnp.concatenate([values, new_values], axis=2)
      features = rows.reshape(features.shape)
      if i == 0:
        # Every entry is seen from the first step on, those picked go on.
        features, roots = pick(features), pick(all_roots)
      found.append(features)
    return found

  def vectors(self, params: Params, outputs: Array) -> Array:
    """What the unembedding reads of outputs [..., D]."""
    return self.merge(params).read(_rows(outputs)).reshape(outputs.shape)

  def init(self, params, batch_size, max_length):
    """See `types.Drafter`."""
    dtype = self.own(params)['project']['linear']['kernel'].dtype
    shape = (batch_size, self.num_draft_tokens + 1, self.model.dim)
    return FeatureState(
      cache=self._cache(batch_size, max_length, dtype),
      features=sharding.zeros(shape, dtype, 'batch', None, None),
      length=sharding.zeros((batch_size,), jnp.int32, 'batch'),
    )

  def extend(self, params, tokens, count, output, state):
    """See `types.Drafter`: the last token's entry waits for the next token."""
    features = self._features(params, output, state)
    held = state.features[:, :1]
    # With token j of the chunk comes the feature before it, but for the first
    # token of all.
    index = jnp.arange(tokens.shape[1]) + (state.length == 0)[:, None]
    index = jnp.minimum(index, tokens.shape[1] - 1)
    before = jnp.concatenate([held, features[:, :-1]], axis=1)
    _, cache = self._run(
      params,
      jnp.take_along_axis(tokens, index, axis=1),
      jnp.take_along_axis(before, index[..., None], axis=1),
      state.cache,
    )
    length = state.length + count
    cache = cache_lib.commit(cache, jnp.maximum(length - 1, 0))
    last = jnp.maximum(count - 1, 0)[:, None, None]
    last = jnp.take_along_axis(features, last, axis=1)
    last = jnp.where((count > 0)[:, None, None], last, held)
    return FeatureState(
      cache=cache,
      features=jnp.concatenate([last, state.features[:, 1:]], axis=1),
      length=length,
    )

  def update(self, params, tokens, length, output, verdict, state):
    """See `types.Drafter`: keeps the features for the next round."""
    del tokens, verdict
    features = self._features(params, output, state)
    return dataclasses.replace(state, features=features, length=length - 1)

  def propose(self, params, draw, warp, tokens, length, state):
    """See `types.Drafter`: one pass of K + 1 entries, then one a token.

    Behind a prompt of one token there is no feature yet, and zeros stand for
    it.
    """
    first = state.cache.length[:, None]
    index = first + 1 + jnp.arange(self.num_draft_tokens + 1)
    # Entries of tokens that are not there yet are dropped.
    index = jnp.minimum(index, length[:, None] - 1)
    outputs, cache = self._run(
      params,
      jnp.take_along_axis(tokens, index, axis=1),
      state.features,
      state.cache,
    )
    last = jnp.maximum(length[:, None] - 2 - first, 0)
    output = jnp.take_along_axis(outputs, last[..., None], axis=1)
    committed = cache_lib.commit(cache, length - 1)

    nothing = jnp.full((tokens.shape[0], self.num_draft_tokens), -1, jnp.int32)
    nothing = sharding.constrain(nothing, 'batch', None)

    def draft_one(output, drafted, i):
      vectors = self.vectors(params, output)[:, 0]
      probs = warp(self.target_logits(params, vectors), drafted)
      token = draw(probs, length + i)
      return drafted.at[:, i].set(token), probs

    def body(carry, i):
      output, drafted, cache = carry
      drafted, probs = draft_one(output, drafted, i)
      output, cache = self._run(params, drafted[:, i, None], output, cache)
      return (output, drafted, cache), probs

    end = self.num_draft_tokens - 1
    (output, drafted, cache), probs = jax.lax.scan(
      body, (output, nothing, committed), jnp.arange(end)
    )
    drafted, last_probs = draft_one(output, drafted, end)
    probs = jnp.concatenate([probs, last_probs[None]])
    draft = Draft(
      tokens=drafted, probs=jnp.swapaxes(probs, 0, 1), law=DraftLaw.SAMPLED
    )
    # Made of outputs, the drafts' own entries do not stay.
    cache = cache_lib.commit(cache, committed.length)
    return draft, dataclasses.replace(state, cache=cache)

  def _run(self, params, tokens, features, cache):
    """The outputs [B, T, D] behind the cache, and the cache with them.

    Entries are of tokens [B, T] and of the features before them.
    """
    num_new = tokens.shape[1]
    rows, keys, values = self.merge(params)(
      _rows(self.model.embed(params['target'], tokens)),
      _rows(features),
      self._rope(cache.length[:, None] + jnp.arange(num_new)),
      layers.causal_mask(
        cache.length,
        num_new,
        cache.keys[0].shape[2],
        self.model.sliding_window,
      ),
      cache.keys[0],
      cache.values[0],
    )
    outputs = rows.reshape(features.shape)
    after = outputs[:, 0]
    return outputs, cache_lib.append(cache, [keys], [values], after=after)

  def _features(self, params, output, state):
    if output.hidden.dtype != state.features.dtype:
      raise ValueError(
        f'the target computes in {output.hidden.dtype} and the weights of the '
        f'drafter are {state.features.dtype}: load both with one dtype'
      )
    return self.features(params, output.hidden, output.features)

  def _rope(self, positions):
    model = self.model
    return layers.rope_tables(
      positions, model.head_dim, model.rope_theta, model.rope_scaling
    )

  def _cache(self, batch_size, max_length, dtype):
    heads, head_dim = self.model.num_kv_heads, self.model.head_dim
    return cache_lib.init(batch_size, max_length, 1, heads, head_dim, dtype)


class Joined(nnx.Module):
  """A linear map of so many vectors [n, D], joined, to one of them."""

  def __init__(self, count: int, dim: int, bias: bool, keys):
    self.axis = sharding.Axis('mlp', count * dim)
    self.linear = layers.Linear(
      count * dim,
      dim,
      axes=(self.axis, None),
      bias=bias,
      keys=keys,
      dtype=jnp.float32,
    )

  def __call__(self, *vectors: Array) -> Array:
    joined = jnp.concatenate(vectors, axis=1)
    return self.linear(sharding.constrain(joined, 'batch', self.axis))


def with_norm_of(params: Params, target_params: Params) -> Params:
  """A drafter's parameters with the target's last norm, if that is given."""
  if target_params is None:
    return params
  scale = jnp.array(target_params['norm']['scale'], jnp.float32)
  return params | {'norm': {'scale': scale}}


def _step_mask(step: int, roots: Array, size: int, window: int | None) -> Array:
  """What the entries of a step see [B, A, T + step * A], by their roots [B, A].

  The root is the last token whose feature was the target's. Of the first step
  an entry sees those up to its root, of every later one that of its root.
  """
  ahead = jnp.arange(size) - roots[..., None]
  near = lambda back: True if window is None else back < window
  own = jnp.broadcast_to(
    jnp.eye(roots.shape[1], dtype=bool), (*roots.shape, roots.shape[1])
  )
  seen = [(ahead <= 0) & near(step - ahead)]
  seen += [own & near(step - i) for i in range(1, step + 1)]
  return jnp.concatenate(seen, axis=2)


def _behind(x, count):
  return jnp.pad(x, ((0, 0), (0, count), (0, 0)))[:, count:]


def _rows(x):
  return x.reshape(-1, x.shape[-1])
