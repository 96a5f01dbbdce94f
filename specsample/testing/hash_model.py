"""A random language model whose distribution is a hash of the whole prefix.

Any mistake in a cache, a position or a batch changes its logits. They are
bitwise the same for any batch, padding, chunking or sharding, because they take
only integer hashing, one conversion to float32 and one product.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specsample import types
from specsample.models import cache as cache_lib
from specsample.types import Array, ModelOutput, Params


@types.pytree
class HashCache:
  """The hash of every prefix; entries after `length` are stale."""

  # [B, S + 1] uint32; entry i is the hash of the first i tokens.
  hashes: Array
  length: Array  # [B] int32, tokens kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashModel:
  """A `types.Model` without parameters (pass {}), for tests and enumeration.

  A model that differs only in `noise`, `noise_seed` or `scale` sees the same
  hashes, so it is correlated with this one and can draft for it.
  """

  vocab_size: int
  seed: int = 0
  # Logits are uniform over [0, scale). With 0 the distribution is uniform, and
  # below 0 the least likely tokens become the most likely.
  scale: float = 4.0
  # The share of the logits that comes from `noise_seed`, in steps of 1 / 256.
  noise: float = 0.0
  noise_seed: int = 1
  # The number of padding ids at the end, whose logits are -inf.
  padding: int = 0
  # Leaving layers out (see `keep_layers`) adds noise.
  num_layers: int = 4
  max_length: int = 4096
  dim = 2
  dtype = 'float32'

  def __post_init__(self):
    """Refuses values out of range."""
    if not 0 <= self.noise <= 1:
      raise ValueError(f'noise is {self.noise}: it must be in [0, 1]')
    if not 0 <= self.padding < self.vocab_size:
      raise ValueError(
        f'padding is {self.padding}: it must leave at least one token among '
        f'{self.vocab_size} ids'
      )

  def init_cache(
    self, batch_size: int, max_length: int, max_new: int | None = None
  ) -> HashCache:
    del max_new
    return HashCache(
      hashes=jnp.full((batch_size, max_length + 1), _seed_hash(self.seed)),
      length=jnp.zeros(batch_size, jnp.int32),
    )

  def apply(
    self,
    params: Params,
    tokens: Array,
    cache: HashCache,
    features: tuple[int, ...] = (),
    parents: Array | None = None,
  ) -> tuple[ModelOutput, HashCache]:
    """See `types.Model`; every feature is the hidden vector."""
    output, hashes = self.read(params, tokens, cache, features, parents)
    return output, self.append(cache, hashes)

  def read(
    self,
    params: Params,
    tokens: Array,
    cache: HashCache,
    features: tuple[int, ...] = (),
    parents: Array | None = None,
  ) -> tuple[ModelOutput, Array]:
    hashes = _hashes(tokens, cache, parents)
    hidden = jnp.stack([hashes >> 16, hashes & 0xFFFF], axis=-1)
    hidden = hidden.astype(jnp.float32)
    output = ModelOutput(
      logits=self.unembed(params, hidden),
      hidden=hidden,
      features=(hidden,) * len(features),
    )
    return output, hashes

  def widen(self, new: Array, num_tokens: int) -> Array:
    return jnp.pad(new, ((0, 0), (0, num_tokens - new.shape[1])))

  def append(
    self, cache: HashCache, new: Array, path: Array | None = None
  ) -> HashCache:
    if path is not None:
      new = jnp.take_along_axis(new, path, axis=1)
    if cache.hashes.shape[1] == 1:  # no room for any token
      return cache
    return HashCache(
      hashes=cache_lib.write(cache.hashes, new, cache.length + 1),
      length=cache.length + new.shape[1],
    )

  def commit(
    self, cache: HashCache, length: Array, path: Array | None = None
  ) -> HashCache:
    hashes = cache.hashes
    if path is not None:
      kept = jnp.take_along_axis(hashes, path + 1, axis=1)
      hashes = cache_lib.write(hashes, kept, path[:, 0] + 1)
    return HashCache(hashes=hashes, length=length)

  def embed(self, params: Params, ids: Array) -> Array:
    """See `types.Model`: the vector (id, 0)."""
    del params
    ids = ids.astype(jnp.float32)
    return jnp.stack([ids, jnp.zeros_like(ids)], axis=-1)

  def unembed(self, params: Params, hidden: Array) -> Array:
    """See `types.Model`: hidden [..., 2] is the hash, in two halves."""
    del params
    high, low = jnp.moveaxis(hidden.astype(jnp.uint32), -1, 0)
    prefix = (high << 16 | low)[..., None]
    weight = round(256 * self.noise)
    own = _mix(prefix ^ self._token_hashes(self.seed)) >> 16
    other = _mix(prefix ^ self._token_hashes(self.noise_seed)) >> 16
    # Below 2 ** 24, hence exact in float32.
    level = own * (256 - weight) + other * weight
    logits = level.astype(jnp.float32) * np.float32(self.scale / 2**24)
    is_token = np.arange(self.vocab_size) < self.vocab_size - self.padding
    return jnp.where(is_token, logits, -np.inf)

  def keep_layers(self, indices: tuple[int, ...]) -> 'HashModel':
    """Returns the noisier model that has only the layers `indices`."""
    return dataclasses.replace(
      self, noise=1 - len(indices) / self.num_layers, num_layers=len(indices)
    )

  def keep_params(self, params: Params, indices: tuple[int, ...]) -> Params:
    """Returns the parameters of `keep_layers(indices)`: still none."""
    del indices
    return params

  def _token_hashes(self, seed):
    ids = np.arange(self.vocab_size, dtype=np.uint32)
    return _mix(ids * _TOKEN + _seed_hash(seed))


# Odd, so that multiplying by them loses no bits.
_PREFIX = np.uint32(0xCC9E2D51)
_TOKEN = np.uint32(0x9E3779B1)


def _hashes(tokens, cache, parents):
  """Returns the hashes [B, T] of the prefixes up to each of the tokens."""
  num_new = tokens.shape[1]
  if parents is None:
    parents = jnp.arange(num_new - 1)
    parents = jnp.broadcast_to(parents, (len(tokens), num_new - 1))
  num_nodes = parents.shape[1] + 1
  # The hash of the prefix before the tree, then those of its nodes.
  root = cache.length - (num_nodes - num_new)
  index = jnp.minimum(
    root[:, None] + jnp.arange(num_nodes + 1), cache.hashes.shape[1] - 1
  )
  known = jnp.take_along_axis(cache.hashes, index, axis=1)
  before = jnp.pad(parents + 1, ((0, 0), (1, 0)))
  ids = jnp.asarray(tokens, jnp.uint32) + 1

  def extend(i, hashes):
    node = num_nodes - num_new + i
    of_parent = jnp.take_along_axis(hashes, before[:, node, None], axis=1)
    new = _mix(of_parent[:, 0] * _PREFIX + ids[:, i] * _TOKEN)
    return hashes.at[:, node + 1].set(new)

  found = jax.lax.fori_loop(0, num_new, extend, known)
  return found[:, num_nodes - num_new + 1 :]


def _mix(x):
  """Applies the finaliser of MurmurHash3, a bijection of 32 bits."""
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def _seed_hash(seed):
  return _mix(np.asarray([seed + 1], np.uint32))[0]
