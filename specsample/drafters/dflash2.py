"""Block drafting with convolutions, and a selector of one of few candidates.

DFlash 2, as published by the authors of DFlash (2602.06036).
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample import types
from specsample.drafters import dflash
from specsample.drafters import dflash_network
from specsample.drafters import lattice as lattice_lib
from specsample.drafters import parts
from specsample.drafters import vocabulary
from specsample.models import decoder_layer
from specsample.models import layers
from specsample.types import Array, Params

_PREDECESSOR_SCALE = 0.02  # of an untrained codebook


class _GroupConv(nnx.Module):
  """Convolutions along a block, before and after one of a layer's sublayers.

  Number c of token t becomes the sum, over taps i, of base[c, i] + change_t[i,
  c // group_size] times number c of token t - i, which is 0 before the block.
  Both convolutions take the changes from the sublayer's normalised input, and
  both begin as the identity.
  """

  def __init__(self, config):
    dim, num_taps = config.model.dim, config.conv_kernel_size
    base = jnp.zeros((dim, num_taps, 2)).at[:, 0].set(1)
    self.base = nnx.Param(base, axes=(None, None, None))
    num_changes = 2 * num_taps * dim // config.conv_group_size
    self.projection = parts.linear(dim, num_changes, None)
    self.block_size = config.num_draft_tokens + 1

  def kernels(self, normed: Array) -> tuple[Array, Array]:
    """Returns the kernels before and after the sublayer, [n, taps, D] each.

    Args:
      normed: [n, D], whole blocks of the sublayer's normalised inputs.
    """
    dim, num_taps, _ = self.base.shape
    changes = self.projection(normed)
    changes = changes.reshape(len(normed), 2, num_taps, -1)
    changes = jnp.repeat(changes, dim // changes.shape[-1], axis=-1)
    kernels = self.base[...].T + changes
    return kernels[:, 0], kernels[:, 1]

  def __call__(self, kernel: Array, x: Array) -> Array:
    """Convolves rows x [n, D] with a kernel from `kernels`."""
    size, dim = self.block_size, x.shape[-1]
    shape = (len(x) // size, size, dim)
    blocks = sharding.reshape(x, shape, 'batch', None, None)
    mixed = jnp.zeros_like(x)
    for i in range(kernel.shape[1]):
      before = jnp.pad(blocks, ((0, 0), (i, 0), (0, 0)))[:, :size]
      before = sharding.reshape(before, x.shape, 'batch', None)
      mixed += kernel[:, i] * before
    return mixed


class _Layer(decoder_layer.DecoderLayer):
  """A layer of the draft network, whose sublayers have convolutions."""

  def __init__(self, config, model, keys):
    super().__init__(model, keys)
    self.attention_conv = _GroupConv(config)
    self.mlp_conv = _GroupConv(config)

  def __call__(
    self, x, rope, mask, keys, values, attend_with=None, *, layer_input=None
  ):
    """See `DecoderLayer`; the rows are those of whole blocks."""
    del layer_input
    conv = self.attention_conv
    normed = self.attention_norm(x)
    before, after = conv.kernels(normed)
    attended, new_keys, new_values = self.attention(
      conv(before, normed), rope, mask, keys, values, attend_with
    )
    x = x + conv(after, layers.normed(self.attention_post_norm, attended))
    conv = self.mlp_conv
    normed = self.mlp_norm(x)
    before, after = conv.kernels(normed)
    fed = self.mlp(conv(before, normed))
    fed = layers.normed(self.mlp_post_norm, fed)
    return x + conv(after, fed), new_keys, new_values


class _Selector(nnx.Module):
  """<P[a] * g, Q[b]>: what token a adds to the logit of b as the next token.

  The codebooks P [rank, V] and Q [rank, V'] are sharded over the tokens; g is a
  projection of the slot's vector. Q is initially 0.
  """

  def __init__(self, config, keys):
    rank, num_tokens = config.selector_rank, config.model.vocab_size
    size = config.draft_vocab_size or num_tokens
    self.hidden = parts.linear(config.model.dim, rank, keys)
    self.before_axis = sharding.Axis('vocab', num_tokens)
    self.axis = sharding.Axis('vocab', size)
    before = jax.random.normal(next(keys), (rank, num_tokens))
    self.predecessor = nnx.Param(
      _PREDECESSOR_SCALE * before, axes=(None, self.before_axis)
    )
    self.successor = nnx.Param(jnp.zeros((rank, size)), axes=(None, self.axis))

  def before(self, tokens: Array) -> Array:
    """Returns P[a] of tokens [B, ...] before a slot: [B, ..., rank]."""
    found = indexing.lookup(self.predecessor[...], tokens, self.before_axis)
    return found.astype(jnp.float32)

  def after(self, vectors: Array, ids: Array) -> Array:
    """Returns g * Q[b] of draft ids [B, ..., C]: [B, ..., C, rank].

    Args:
      vectors: [B, ..., D], of the slots.
      ids: the candidates of each slot.
    """
    gates = self.hidden(vectors.reshape(-1, vectors.shape[-1]))
    axes = ('batch', *[None] * (vectors.ndim - 1))
    gates = sharding.reshape(gates, (*vectors.shape[:-1], -1), *axes)
    found = indexing.lookup(self.successor[...], ids, self.axis)
    return gates.astype(jnp.float32)[..., None, :] * found.astype(jnp.float32)


class _Network(dflash_network.Network):
  def __init__(self, config, keys):
    super().__init__(config, keys)
    self.selector = _Selector(config, keys)
    self.input_embedding_scale = config.input_embedding_scale
    self.output_multiplier = config.output_multiplier

  def __call__(self, *args):
    return self.output_multiplier * super().__call__(*args)

  def _layer(self, config, model, keys):
    return _Layer(config, model, keys)

  def _scaled(self, block):
    return self.input_embedding_scale * block


@types.pytree
class Candidates:
  """The C most likely draft tokens of each slot, in decreasing order."""

  ids: Array  # [..., C] int32, in the draft vocabulary
  logits: Array  # [..., C] float32, without a token before
  terms: Array  # [..., C, rank] float32, g * Q[b]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2(dflash.DFlash):
  """A `DFlash` that selects each draft token among a few, given the one before.

  Candidates C_i are the `selector_top_k` tokens with the largest logits U_i of
  the block. The logit of b among them, after token a, is U_i(b) + <P[a] * g_i,
  Q[b]>, and that of all other tokens -inf: tokens are drawn from the
  distribution over the candidates, so the kind is SAMPLED.

  In each layer, convolutions over the block are applied to the inputs and the
  outputs of attention and of the feed-forward, with kernels that depend on the
  token. Keys and values of the context are made without
  convolutions.

  Attributes:
    conv_group_size: how many neighbouring numbers of a vector share what a
      token adds to the kernel. It must divide D.
    conv_kernel_size: the number of taps: how many tokens of the block, up to
      and including its own, an output depends on.
    selector_rank: the rank of the term that depends on the token before.
    selector_top_k: C.
    output_multiplier: factor of the vectors that are unembedded.
    final_logit_softcapping: if given, U are c * tanh(logits / c). None leaves
      the logits as the target's unembedding gives them.
    input_embedding_scale: factor of the block's embeddings, the mask's too.
  """

  conv_group_size: settings.Count = 16
  conv_kernel_size: settings.Count = 2
  selector_rank: settings.Count = 256
  selector_top_k: settings.Count = 16
  output_multiplier: settings.Positive = 1.0
  final_logit_softcapping: settings.Positive | None = None
  input_embedding_scale: settings.Positive = 1.0
  _network = _Network

  def _check(self):
    super()._check()
    if self.drafts_from_pending:
      raise ValueError(
        'drafts_from_pending is True, but DFlash2 reads draft i at mask i: '
        'leave it False'
      )
    if self.model.dim % self.conv_group_size:
      raise ValueError(
        f'conv_group_size is {self.conv_group_size}: give a divisor of '
        f"{self.model.dim}, the size of the target's vectors"
      )
    size = self.draft_vocab_size or self.vocab_size
    if self.selector_top_k > size:
      raise ValueError(
        f'selector_top_k is {self.selector_top_k}: give at most {size}, the '
        'number of tokens that are drafted'
      )
    cap = self.final_logit_softcapping
    if cap is not None and self._target_softcap not in (None, cap):
      raise ValueError(
        f"final_logit_softcapping is {cap}, but the target's unembedding caps "
        f'logits at {self._target_softcap}: give the same number, or None'
      )

  @property
  def _target_softcap(self):
    """That of the unembedding that `logits` reads."""
    return vocabulary.softcap_of(self)

  def capped(self, logits: Array) -> Array:
    """Returns U, given logits [..., V'] from the unembedding."""
    cap = self.final_logit_softcapping
    if cap is None or cap == self._target_softcap:
      return logits
    return cap * jnp.tanh(logits / cap)

  def candidates(
    self, params: Params, logits: Array, vectors: Array
  ) -> Candidates:
    """Returns the candidates of slots.

    Args:
      params: the whole tree of parameters.
      logits: [B, ..., V'], as `capped` returns them.
      vectors: [B, ..., D], from which the logits are made.
    """
    values, ids = indexing.top_k(logits, self.selector_top_k)
    vectors = vectors / self.output_multiplier
    return Candidates(
      ids=ids,
      logits=values.astype(jnp.float32),
      terms=self.merge(params).selector.after(vectors, ids),
    )

  def select(
    self, params: Params, candidates: Candidates, previous: Array
  ) -> Array:
    """Returns the logits of candidates given the tokens before: [B, ..., C].

    Args:
      params: the whole tree of parameters.
      candidates: [B, ..., C].
      previous: [B, ...] int32.
    """
    before = self.merge(params).selector.before(previous)[..., None, :]
    return candidates.logits + jnp.sum(before * candidates.terms, axis=-1)

  def read(self, params, vectors):
    """See `DFlash`: the candidates of slots."""
    logits = self.capped(self.logits(params, vectors))
    return self.candidates(params, logits, vectors)

  def given(self, params, found, previous, memory):
    """See `DFlash`: -inf for all tokens but the candidates."""
    size = self.draft_vocab_size or self.vocab_size
    values = self.select(params, found, previous)
    return indexing.put(values, found.ids, size), memory

  def lattice(self, params, tokens, length, state, num_candidates):
    """Returns a `lattice.Lattice` of the probabilities that `next` would give.

    Of the `selector_top_k` candidates, those with the largest U_i are taken.
    """
    if num_candidates > self.selector_top_k:
      raise ValueError(
        f'candidates is {num_candidates}, but selector_top_k is '
        f'{self.selector_top_k}: the drafter offers no others, so lower '
        'candidates'
      )
    _, block = self.first(params, tokens, length, state)
    ids = block.found.ids
    previous = self._before(params, block, ids)
    after_each = jax.tree.map(lambda x: x[:, :, None], block.found)
    log_probs = jax.nn.log_softmax(self.select(params, after_each, previous))
    return lattice_lib.Lattice(
      ids=self.target_ids(params, ids)[..., :num_candidates],
      log_probs=log_probs[..., :num_candidates, :num_candidates],
    )
