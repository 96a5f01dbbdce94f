"""Block drafting as in DFlash, with each token given the one before it.

DSpark, as DeepSeek's DeepSpec trains it: a low-rank term turns a block of
independent tokens into a Markov chain, and a small head says how far to trust
it.
"""

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import checks
from specsample import indexing
from specsample import sharding
from specsample.drafters import dflash
from specsample.drafters import steps
from specsample.models import layers
from specsample.types import Array, Params


class _Markov(nnx.Module):
  """W1[x] W2^T, initially 0: how token x changes the next token's logits.

  The matrices are [rank, V or V'] and [rank, V'], sharded over the tokens. With
  V' on both sides the term is 0 after a token that is never drafted, which only
  a pending token can be.
  """

  def __init__(self, rank, num_before, size, keys):
    self.before_axis = sharding.Axis('vocab', num_before)
    self.axis = sharding.Axis('vocab', size)
    before = jax.random.normal(next(keys), (rank, num_before)) * rank**-0.5
    self.before = nnx.Param(before, axes=(None, self.before_axis))
    self.behind = nnx.Param(jnp.zeros((rank, size)), axes=(None, self.axis))

  def embed(self, ids: Array, is_drafted: Array) -> Array:
    """Returns W1[x], [..., rank]; 0 where `is_drafted` is False."""
    found = indexing.lookup(self.before[...], ids, self.before_axis)
    # Without fused loops, the CPU backend cannot run a bfloat16 product of what
    # a `where` returns.
    return jax.lax.optimization_barrier(
      jnp.where(is_drafted[..., None], found, 0)
    )

  def __call__(self, embedded: Array) -> Array:
    """Returns the logits [n, V'] to add for rows [n, rank]."""
    return sharding.einsum(
      'rd,dv->rv',
      embedded,
      self.behind[...],
      axes=('batch', self.axis),
      preferred_element_type=jnp.float32,
    )


class _Network(dflash.Network):
  def __init__(self, config, keys):
    super().__init__(config, keys)
    num_tokens = config.model.vocab_size
    size = config.draft_vocab_size or num_tokens
    num_before = num_tokens if config.reads_all_tokens else size
    self.markov = _Markov(config.rank, num_before, size, keys)
    # Before training the confidence is 1/2 everywhere.
    self.confidence = layers.Linear(
      config.model.dim + config.rank,
      1,
      axes=(None, None),
      bias=True,
      keys=None,
      dtype=jnp.float32,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSpark(dflash.DFlash):
  """A `DFlash` that draws token i given token i - 1.

  logits_i = U_i + W1[x_{i - 1}] W2^T, where U_i are the logits of DFlash; each
  token costs one product [rank, V']. Tokens are drawn from the distribution
  that these logits give, so the kind is SAMPLED as for other drafters.

  Attributes:
    rank: the rank of the term.
    reads_all_tokens: whether the term depends on every previous token,
      including tokens that are never drafted.
  """

  rank: int = 256
  reads_all_tokens: bool = False
  _network = _Network

  def __post_init__(self):
    """Raises ValueError unless `rank` is at least 1; see `DFlash`."""
    super().__post_init__()
    if not checks.is_count(self.rank):
      raise ValueError(
        f'rank is {self.rank!r}: give at least 1, or use DFlash, which has no '
        'term with a rank'
      )

  def given(self, params: Params, logits: Array, previous: Array) -> Array:
    """Returns logits [..., V'] given the previous tokens, [...]."""
    embedded = self._embed(params, previous)
    rows = embedded.reshape(-1, self.rank)
    term = self.merge(params).markov(rows)
    return logits + term.reshape(logits.shape)

  def confidence_logits(
    self, params: Params, vectors: Array, previous: Array
  ) -> Array:
    """Returns `confidence` before the sigmoid, [...].

    Args:
      params: the whole tree of parameters.
      vectors: [..., D], from `vectors`.
      previous: [...] int32, the tokens before the drafts.
    """
    read = jnp.concatenate([vectors, self._embed(params, previous)], axis=-1)
    rows = self.merge(params).confidence(read.reshape(-1, read.shape[-1]))
    axes = ('batch', *[None] * (previous.ndim - 1))
    rows = sharding.reshape(rows, previous.shape, *axes)
    return rows.astype(jnp.float32)

  def confidence(self, params: Params, carry: Any) -> Array:
    """See `steps.Steps`: how likely drafts are to be kept if those before are.

    Values are in (0, 1), trained towards 1 - TV(target, draft). A draft may be
    cut if its value is low: it depends on the tokens before, not on the one
    drawn.
    """
    vectors = steps.of_step(carry.vectors, carry.number, carry.previous)
    logits = self.confidence_logits(params, vectors, carry.previous)
    return jax.nn.sigmoid(logits)

  def _embed(self, params, previous):
    if self.reads_all_tokens:
      ids, is_drafted = previous, jnp.ones_like(previous, bool)
    else:
      ids, is_drafted = self.draft_ids(params, previous)
    return self.merge(params).markov.embed(ids, is_drafted)
