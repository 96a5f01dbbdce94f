"""Drafting a block of tokens in one pass over masks.

Chen et al., 2602.06036 (DFlash), as a chain.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample.drafters import dflash_network
from specsample.drafters import fields
from specsample.drafters import lattice as lattice_lib
from specsample.drafters import parts
from specsample.drafters import steps
from specsample.drafters import trainable
from specsample.models import cache as cache_lib
from specsample.types import Array, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash(steps.OnePass, trainable.Trainable):
  """A drafter that draws K tokens in one pass over [pending, mask, ..., mask].

  As in Medusa, no draft sees the token drawn before it. But each mask sees the
  others and, through `num_layers` layers of the target's own kind, all of the
  target's features of the tokens before the pending one, each as its own key
  and value. The embedding and the unembedding are the target's.

  Its draft tokens are drawn. `Tree(drafter=..., topology=tree.chain(K))` takes
  the most likely token of each slot instead, as a point mass, which is exact
  with `verify.tree` at any temperature.

  Attributes:
    feature_layers: layers of the target whose outputs are read; -1 is its
      embedding.
    has_feature_norms: whether each feature is normalised before they are
      concatenated, initially as the target's layer that reads it does. Not in
      the paper.
    num_layers: the number of layers of the draft network.
    drafts_from_pending: whether draft 0 is read at the pending token and draft
      i at mask i - 1, as DeepSpec trains it. If not, draft i is read at mask i.
    mask_token_id: an unused token of the target, whose embedding is the mask.
      Engines that read the mask from the target's embedding, as the published
      layout has it, need one. None trains a vector instead.
    layer_config: a `models.transformer.Transformer` that gives the shape of the
      layers, and the windows of its first `num_layers` layers; None for the
      target's shape without windows. The layers have keys and values and one
      feed-forward, even if the shape has latent vectors or experts.
    causal_layers: the layers in which a token of a block does not see the later
      ones, as in layers with windows that `speculators` and SpecForge train, or
      in all layers of JetSpec (2606.18394).
  """

  feature_layers: tuple[int, ...] = ()
  has_feature_norms: settings.Flag = False
  num_layers: settings.Count = 2
  drafts_from_pending: settings.Flag = False
  mask_token_id: int | None = None
  layer_config: Any = None
  causal_layers: tuple[int, ...] = ()
  _network = dflash_network.Network

  def _check(self):
    super()._check()
    fields.check_shape(self)
    if not all(i in range(self.num_layers) for i in self.causal_layers):
      raise ValueError(
        f'causal_layers are {self.causal_layers}, but the draft network has '
        f'layers 0 to {self.num_layers - 1}: name some of them, or give ()'
      )
    if self.mask_token_id is not None:
      fields.check_mask(self.mask_token_id, self.model.vocab_size)
    num_layers = self.model.num_layers
    fields.check_layers('feature_layers', self.feature_layers, num_layers, -1)

  @property
  def shape(self) -> Any:
    """The configuration that gives the shape of the layers."""
    if self.layer_config is not None:
      return super().shape
    return dataclasses.replace(super().shape, sliding_window=None)

  @property
  def windows(self) -> tuple[int | None, ...]:
    """How many tokens each layer of the draft network sees, None for all."""
    return tuple(self.shape.window(i) for i in range(self.num_layers))

  def context(
    self,
    params: Params,
    features: Sequence[Array],
    begins: Array | int = 0,
  ) -> cache_lib.KVCache:
    """Returns what blocks see of sequences with features [B, T, D] each.

    Positions count from begins [B, T] on.
    """
    batch, size, _ = features[0].shape
    place = jnp.broadcast_to(jnp.arange(size), (batch, size))
    place = sharding.constrain(place, 'batch', None)
    keys, values = self.merge(params).context(features, place - begins)
    return cache_lib.KVCache(
      keys=tuple(keys),
      values=tuple(values),
      length=sharding.zeros((batch,), jnp.int32, 'batch') + size,
    )

  def vectors(
    self,
    params: Params,
    first: Array,
    start: Array,
    context: cache_lib.KVCache,
    begin: Array | None = None,
  ) -> Array:
    """Returns what the unembedding reads for n blocks per row: [B, n, K, D].

    Args:
      params: the whole tree of parameters.
      first: [B, n] int32, the pending tokens.
      start: [B, n] int32, their places.
      context: holds the tokens before them; blocks do not see later ones.
      begin: [B, n] int32, the first places that they see; 0 by default.
    """
    return self.merge(params)(
      self.model.embed(params['target'], first),
      start,
      self.num_draft_tokens,
      context,
      begin,
    )

  def read(self, params: Params, vectors: Array) -> Any:
    """Returns what `given` reads of slots, arrays [B, ..., n] each.

    Here it is the logits [B, ..., V'], and the vectors [B, ..., D] from which
    they are made.
    """
    return self.logits(params, vectors), vectors

  def given(self, params, found, previous, memory):
    """See `steps.OnePass`: here the logits are unchanged."""
    del params, previous
    return found[0], memory

  def _begin(self, key, target_params):
    if target_params is None:
      raise ValueError(
        "target_params is None, but the last norm starts as the target's: give "
        "the target's parameters"
      )
    params = super()._begin(key, target_params)
    if self.mask_token_id is not None:
      # Any mesh can divide this many rows; they are all the same.
      ids = jnp.full(jax.device_count(), self.mask_token_id)
      embedded = sharding.replicate(self.model.embed(target_params, ids))
      params |= {'mask': embedded[0].astype(jnp.float32)}
    return parts.with_norms_of(self, params, target_params)

  def init(self, params, batch_size, max_length):
    dtype = self.own(params)['mask'].dtype
    num_new = self.num_draft_tokens + 1
    if max_length < num_new:
      raise ValueError(
        f'num_draft_tokens is {self.num_draft_tokens}, but a cache of '
        f'{max_length} tokens has no room for the {num_new} tokens of a round: '
        'lower num_draft_tokens, or raise max_length'
      )
    own = dataclasses.replace(
      self.shape,
      num_layers=self.num_layers,
      has_int8_cache=False,
      dtype=jnp.dtype(dtype).name,
    )
    return own.init_cache(batch_size, max_length, num_new)

  def observe(self, params, tokens, count, output, verdict, state):
    """See `Drafter`: the features of the tokens become context.

    The rings of layers with a window have room for the window and a round.
    """
    del tokens
    found = output.features[0]
    fields.check_dtype(found.dtype, self.own(params)['mask'].dtype)
    positions = state.length[:, None] + jnp.arange(found.shape[1])
    context = self.merge(params).context
    if verdict is not None:
      context = functools.partial(_of_first, context, jnp.max(count))
    keys, values = context(output.features, positions)
    is_round = found.shape[1] <= self.num_draft_tokens + 1
    cache = cache_lib.append(
      state,
      keys,
      values,
      after=found[:, 0],
      count=None if is_round else count,
    )
    return cache_lib.commit(cache, state.length + count)

  def slots(self, params, tokens, length, state):
    """See `steps.OnePass`; all logits are made in one product."""
    first, start = steps.pending(tokens, length), length[:, None] - 1
    vectors = self.vectors(params, first, start, state)[:, 0]
    return self.read(params, vectors), state

  def lattice(self, params, tokens, length, state, num_candidates):
    """Returns a `lattice.Lattice` of the best tokens along the best path.

    The other tokens keep the logits that they have on that path, whichever
    candidate comes before. That saves a product [rank, V'] per candidate.
    """
    logits, block = self.first(params, tokens, length, state)
    carry, found = block, []
    for _ in range(self.num_draft_tokens):
      steps.check_siblings(num_candidates, logits)
      logits = logits[:, 0].astype(jnp.float32)
      values, ids = indexing.top_k(logits, num_candidates)
      total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
      found.append((values, ids, total))
      token = self.target_ids(params, ids[:, :1])
      logits, carry = self.next(params, token, None, carry)
    logits, ids, total = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *found)
    sum_up = functools.partial(jax.nn.logsumexp, axis=-1, keepdims=True)
    # The share of the candidates on the path, and what is left to the others.
    share = jnp.exp(jnp.minimum(sum_up(logits) - total, 0))
    others = (total + jnp.log1p(-share))[..., None]
    after_each, confidence = self._after_each(params, block, logits, ids)
    return lattice_lib.Lattice(
      ids=self.target_ids(params, ids),
      log_probs=after_each - jnp.logaddexp(sum_up(after_each), others),
      confidence=confidence,
    )

  def _after_each(self, params, block, logits, ids):
    """Returns logits [B, K, C, C] after each candidate of the position before.

    Also returns the confidence, as in `lattice.Lattice`.

    Args:
      params: the whole tree of parameters.
      block: as `first` returns it.
      logits: [B, K, C], after the first candidate of the position before.
      ids: [B, K, C], the candidates in the draft vocabulary.
    """
    del params, block
    return jnp.stack([logits] * ids.shape[2], axis=2), None

  def _before(self, params, block, ids):
    """Returns the target's tokens before those of ids [B, K, C], [B, K, C]."""
    targets = self.target_ids(params, ids)
    pending = jnp.broadcast_to(block.previous[..., None], targets[:, :1].shape)
    return jnp.concatenate([pending, targets[:, :-1]], axis=1)


def _of_first(context, most, features, positions):
  """Returns the `context` of the first `most` tokens; the rest is zeros.

  Most rounds keep few drafts, and a decoder that drafts nothing keeps none, but
  a product for all K + 1 tokens takes 2% of its rounds on a CPU.
  """
  size = positions.shape[1]
  widths = sorted({min(width, size) for width in (1, 2, size)})

  def of_width(width):
    found = context([x[:, :width] for x in features], positions[:, :width])
    rest = ((0, 0), (0, 0), (0, size - width), (0, 0))
    return jax.tree.map(lambda x: jnp.pad(x, rest), found)

  return jax.lax.switch(
    jnp.sum(most > jnp.asarray(widths[:-1])),
    [functools.partial(of_width, width) for width in widths],
  )
