"""Block drafting as in DFlash, with each token given the one before it.

DSpark, as DeepSeek's DeepSpec trains it: a low-rank term turns a block of
independent tokens into a Markov chain, and a small head says how far to trust
it.
"""

import dataclasses
import functools
from typing import Annotated, Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample.drafters import dflash
from specsample.drafters import dflash_network
from specsample.drafters import parts
from specsample.drafters import steps
from specsample.types import Array, Params


class _Markov(nnx.Module):
  """W1[x] W2^T, initially 0: how token x changes the next token's logits.

  The matrices are [rank, V or V'] and [rank, V'], sharded over the tokens. With
  V' on both sides W1[x] is 0 for a token that is never drafted, which only a
  pending token can be. The kind of head says what is made of W1[x] in between.
  """

  def __init__(self, config, num_before, size, keys):
    rank, dim = config.rank, config.model.dim
    self.before_axis = sharding.Axis('vocab', num_before)
    self.axis = sharding.Axis('vocab', size)
    before = jax.random.normal(next(keys), (rank, num_before)) * rank**-0.5
    self.before = nnx.Param(before, axes=(None, self.before_axis))
    self.behind = nnx.Param(jnp.zeros((rank, size)), axes=(None, self.axis))
    linear = functools.partial(parts.linear, keys=keys, bias=True)
    is_gated, is_rnn = config.head == 'gated', config.head == 'rnn'
    self.gate = linear(dim + rank, rank) if is_gated else None
    self.joint = linear(2 * rank + dim, 3 * rank) if is_rnn else None

  def embed(self, ids: Array, is_drafted: Array) -> Array:
    """Returns W1[x], [..., rank]; 0 where `is_drafted` is False."""
    found = indexing.lookup(self.before[...], ids, self.before_axis)
    # Without fused loops, the CPU backend cannot run a bfloat16 product of what
    # a `where` returns.
    return jax.lax.optimization_barrier(
      jnp.where(is_drafted[..., None], found, 0)
    )

  def latent(
    self, embedded: Array, vectors: Array, state: Any
  ) -> tuple[Array, Any]:
    """Returns what W2 multiplies, [n, rank], and the state after the slots.

    Args:
      embedded: [n, rank], from `embed`.
      vectors: [n, D], of the slots.
      state: [n, rank], after the slots before; None unless the head is an RNN.
    """
    if self.gate is not None:
      read = jnp.concatenate([vectors, embedded], axis=-1)
      return jax.nn.sigmoid(self.gate(read)) * embedded, state
    if self.joint is None:
      return embedded, state
    read = jnp.concatenate([state, embedded, vectors], axis=-1)
    kept, new, output = jnp.split(self.joint(read), 3, axis=-1)
    kept = jax.nn.sigmoid(kept)
    return jnp.tanh(output), kept * state + (1 - kept) * jnp.tanh(new)

  def __call__(self, embedded: Array) -> Array:
    """Returns the logits [n, V'] to add for rows [n, rank]."""
    return sharding.einsum(
      'rd,dv->rv',
      embedded,
      self.behind[...],
      axes=('batch', self.axis),
      preferred_element_type=jnp.float32,
    )

  def between(self, embedded: Array, ids: Array) -> Array:
    """Returns what to add to logits of ids [B, K, n]: [B, K, m, n].

    Args:
      embedded: [B, K, m, rank], for m tokens before each of the K positions.
      ids: of the V' tokens.
    """
    columns = indexing.lookup(self.behind[...], ids, self.axis)
    # In float32, because the CPU backend cannot run a bfloat16 product of what
    # a `where` returns.
    return jnp.einsum(
      'bkmr,bknr->bkmn',
      embedded.astype(jnp.float32),
      columns.astype(jnp.float32),
    )


class _Network(dflash_network.Network):
  def __init__(self, config, keys):
    super().__init__(config, keys)
    num_tokens = config.model.vocab_size
    size = config.draft_vocab_size or num_tokens
    num_before = num_tokens if config.reads_all_tokens else size
    self.markov = _Markov(config, num_before, size, keys)
    # Before training the confidence is 1/2 everywhere.
    size = config.model.dim + config.rank
    self.confidence = parts.linear(size, 1, None, bias=True)


# The kinds of Markov heads.
HEADS = ('vanilla', 'gated', 'rnn')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSpark(dflash.DFlash):
  """A `DFlash` that draws token i given token i - 1.

  logits_i = U_i + W1[x_{i - 1}] W2^T, where U_i are the logits of DFlash; each
  token costs one product [rank, V']. Tokens are drawn from the distribution
  that these logits give, so the kind is SAMPLED as for other drafters.

  A gated head multiplies W1[x] by a sigmoid of it and of the slot's vector,
  number by number. An RNN head replaces W1[x] by the output of a cell that
  reads W1[x], the slot's vector and the state after the slot before (at first
  0).

  Attributes:
    rank: the rank of the term.
    reads_all_tokens: whether the term depends on every previous token,
      including tokens that are never drafted.
    head: the kind of the head, one of `HEADS`.
  """

  rank: settings.Count = 256
  reads_all_tokens: settings.Flag = False
  head: Annotated[str, settings.one_of(*HEADS)] = 'vanilla'
  _network = _Network

  def initial_memory(self, params, pending):
    if self.head != 'rnn':
      return None
    axes = ('batch', *[None] * pending.ndim)
    dtype = self.own(params)['mask'].dtype
    return sharding.zeros((*pending.shape, self.rank), dtype, *axes)

  def given(self, params, found, previous, memory):
    logits, vectors = found
    latent, memory = self._latent(params, vectors, previous, memory)
    rows = latent.reshape(-1, self.rank)
    term = self.merge(params).markov(rows).reshape(logits.shape)
    return logits + term, memory

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

  def confidence(self, params, carry):
    """See `steps.Steps`: how likely drafts are to be kept if those before are.

    Values are in (0, 1), trained towards 1 - TV(target, draft). A draft may be
    cut if its value is low: it depends on the tokens before, not on the one
    drawn.
    """
    _, vectors = steps.of_step(carry.found, carry.number, carry.previous)
    logits = self.confidence_logits(params, vectors, carry.previous)
    return jax.nn.sigmoid(logits)

  def lattice(self, params, tokens, length, state, num_candidates):
    if self.head == 'rnn':
      raise ValueError(
        "head is 'rnn', after which a token depends on all those before it, "
        'but a lattice has steps between neighbours: use DynamicTree in place '
        'of LatticeTree'
      )
    return super().lattice(params, tokens, length, state, num_candidates)

  def _after_each(self, params, block, logits, ids):
    """See `DFlash`: the terms of all pairs of candidates in one product."""
    previous = self._before(params, block, ids)
    vectors = jnp.stack([block.found[1]] * ids.shape[2], axis=2)
    latent, _ = self._latent(params, vectors, previous, None)
    term = self.merge(params).markov.between(latent, ids)
    confidence = self.confidence_logits(params, vectors, previous)
    after_each = logits[:, :, None] + term - term[:, :, :1]
    return after_each, jax.nn.sigmoid(confidence)

  def _latent(self, params, vectors, previous, state):
    """Returns what W2 multiplies, [..., rank], and the state after the slots.

    The arguments are those of `given`.
    """
    embedded = self._embed(params, previous)
    rows = lambda x: None if x is None else x.reshape(-1, x.shape[-1])
    found = self.merge(params).markov.latent(
      rows(embedded), rows(vectors), rows(state)
    )
    axes = ('batch', *[None] * previous.ndim)
    of_slots = lambda x: sharding.reshape(x, embedded.shape, *axes)
    return jax.tree.map(of_slots, found)

  def _embed(self, params, previous):
    if self.reads_all_tokens:
      ids, is_drafted = previous, jnp.ones_like(previous, bool)
    else:
      ids, is_drafted = self.draft_ids(params, previous)
    return self.merge(params).markov.embed(ids, is_drafted)
