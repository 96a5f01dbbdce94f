"""Drafting a block of tokens in one pass over masks.

Chen et al., 2602.06036 (DFlash), as a chain.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import checks
from specsample import indexing
from specsample import sharding
from specsample import types
from specsample.drafters import feature_norms
from specsample.drafters import lattice as lattice_lib
from specsample.drafters import settings
from specsample.drafters import steps
from specsample.drafters import trainable
from specsample.drafters import vocabulary
from specsample.models import cache as cache_lib
from specsample.models import decoder_layer
from specsample.models import layers
from specsample.models import masks
from specsample.models import network
from specsample.types import Array, Params


class Network(nnx.Module):
  """A small decoder whose context is made from the target's features.

  The context consists of keys and values. A token that is not known yet is
  represented by a vector, `mask`. It is trained, because not every target has
  an unused token; with a `mask_token_id` it is the target's embedding of that
  token, as in the paper, and stays fixed.
  """

  def __init__(self, config, keys):
    model = dataclasses.replace(config.shape, dtype='float32')
    norm = lambda: layers.RMSNorm(
      model.dim, model.norm_eps, jnp.float32, is_wide=model.has_wide_norms
    )
    num_features = len(config.feature_layers)
    self.feature_norms = feature_norms.FeatureNorms(
      num_features if config.has_feature_norms else 0, model.dim, model.norm_eps
    )
    size = num_features * model.dim
    self.width = sharding.Axis('mlp', size)
    self.fuse = layers.Linear(
      size, model.dim, axes=(self.width, None), keys=keys, dtype=jnp.float32
    )
    self.fused_norm = norm()
    scale = model.dim**-0.5  # that of an untrained embedding
    mask = scale * jax.random.normal(next(keys), (model.dim,))
    is_fixed = config.mask_token_id is not None
    self.mask = (network.Buffer if is_fixed else nnx.Param)(mask, axes=(None,))
    self.layers = nnx.List(
      [self._layer(config, model, keys) for _ in range(config.num_layers)]
    )
    self.norm = norm()
    self.vocabulary = vocabulary.make(config)
    self.drafts_from_pending = config.drafts_from_pending
    self.causal_layers = config.causal_layers
    self.config = model

  def context(
    self, features: Sequence[Array], positions: Array
  ) -> tuple[list[Array], list[Array]]:
    """Returns keys and values of [B, H, T, head_dim], one of each per layer.

    Args:
      features: [B, T, D] each, one for each layer of the target that is read.
      positions: [B, T] int32, of the tokens.
    """
    rows = jnp.concatenate(self.feature_norms(features), axis=-1)
    rows = rows.reshape(-1, rows.shape[-1])
    rows = sharding.constrain(rows, 'batch', self.width)
    fused = self.fused_norm(self.fuse(rows))
    rope = functools.cache(functools.partial(self.config.rope, positions))
    keys, values = [], []
    for i, layer in enumerate(self.layers):
      new = layer.attention.keys_and_values(
        fused, rope(self.config.window(i)), features[0].shape[0]
      )
      keys.append(new[0])
      values.append(new[1])
    return keys, values

  def __call__(
    self,
    first: Array,
    start: Array,
    num_drafts: int,
    context: cache_lib.KVCache,
    begin: Array | None = None,
  ) -> Array:
    """Returns what the unembedding reads for each draft: [B, n, K, D].

    Args:
      first: [B, n, D], embeddings of the first tokens of n blocks per row.
      start: [B, n] int32, their places. A block sees the context before.
      num_drafts: K.
      context: holds what the method `context` returns.
      begin: [B, n] int32, the places from which on the blocks see the context
        and from which positions count; 0 by default.
    """
    begin = jnp.zeros_like(start) if begin is None else begin
    batch, num_blocks, dim = first.shape
    num_masks = num_drafts - self.drafts_from_pending
    shape = (batch, num_blocks, num_masks, dim)
    unknown = jnp.broadcast_to(self.mask[...].astype(first.dtype), shape)
    unknown = sharding.constrain(unknown, 'batch', None, None, None)
    block = jnp.concatenate([first[:, :, None], unknown], axis=2)
    size = block.shape[2]
    positions = (start - begin)[..., None] + jnp.arange(size)
    rope = functools.cache(
      functools.partial(self.config.rope, positions.reshape(batch, -1))
    )

    @functools.cache
    def mask(num_entries, window, is_causal):
      seen_at = masks.indices(context.length, num_entries)
      return block_mask(start, size, seen_at, window, is_causal, begin)

    x = self._scaled(block).reshape(-1, dim)
    for i, (layer, keys, values) in enumerate(
      zip(self.layers, context.keys, context.values, strict=True)
    ):
      window = self.config.window(i)
      seen = mask(cache_lib.size(keys), window, i in self.causal_layers)
      x, _, _ = layer(x, rope(window), seen, keys, values)
    outputs = self.norm(x).reshape(batch, num_blocks, size, dim)
    return outputs[:, :, size - num_drafts :]

  def _layer(self, config, model, keys):
    del config
    return decoder_layer.DecoderLayer(model, keys)

  def _scaled(self, block):
    return block


def block_mask(
  start: Array,
  size: int,
  seen_at: Array,
  window: int | None = None,
  is_causal: bool = False,
  begin: Array | None = None,
) -> Array:
  """Returns what tokens of n blocks see: [B, T, S + T] bool, T = n * size.

  A token sees the context before its block, and all of its own block.

  Args:
    start: [B, n] int32, the places of the blocks.
    size: the number of tokens in a block.
    seen_at: [B, S] int32, the places of the context's entries, negative for
      empty ones.
    window: if given, a token sees the last `window` tokens, itself included, as
      in `masks.causal`, and the `window` - 1 tokens after it.
    is_causal: whether a token sees no later tokens of its block.
    begin: [B, n] int32, the first places that the blocks see; 0 by default.
  """
  batch, num_blocks = start.shape
  positions = start[..., None] + jnp.arange(size)  # [B, n, size]
  of_token = positions[..., None]
  seen_at = seen_at[:, None, None]  # [B, 1, 1, S]
  first = 0 if begin is None else begin[..., None, None]
  before = (seen_at >= first) & (seen_at < of_token[:, :, :1])
  before = jnp.tile(before, (1, 1, size, 1))
  block, slot = jnp.divmod(jnp.arange(num_blocks * size), size)
  own = block[:, None] == block
  ahead = slot - slot[:, None]
  if is_causal:
    own &= ahead <= 0
  if window is not None:
    before &= of_token - seen_at < window
    own &= jnp.abs(ahead) < window
  before = before.reshape(batch, -1, seen_at.shape[-1])
  own = jnp.broadcast_to(own, (batch, *own.shape))
  own = sharding.constrain(own, 'batch', None, None)
  return jnp.concatenate([before, own], axis=-1)


@types.pytree
class _Block:
  """A block, and the slot from which the latest n tokens are drafted."""

  logits: Array  # [B, K, V']
  vectors: Array  # [B, K, D], from which the logits are made
  previous: Array  # [B, n] int32, the tokens before the slot's
  number: Array  # [] int32, of the slot
  state: Array | None  # [B, n, ...], after the slot
  num_nodes: int = types.static()  # of a tree so far


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash(trainable.Trainable):
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
  has_feature_norms: bool = False
  num_layers: int = 2
  drafts_from_pending: bool = False
  mask_token_id: int | None = None
  layer_config: Any = None
  causal_layers: tuple[int, ...] = ()
  _network = Network

  def __post_init__(self):
    """Raises ValueError if a setting does not fit; see `Trainable`."""
    super().__post_init__()
    settings.check_shape(self)
    if not checks.is_count(self.num_layers):
      raise ValueError(
        f'num_layers is {self.num_layers!r}: give the draft network at least '
        '1 layer'
      )
    causal = tuple(self.causal_layers)
    if not all(i in range(self.num_layers) for i in causal):
      raise ValueError(
        f'causal_layers are {causal}, but the draft network has layers 0 to '
        f'{self.num_layers - 1}: name some of them, or give ()'
      )
    object.__setattr__(self, 'causal_layers', causal)
    mask_id, size = self.mask_token_id, self.model.vocab_size
    is_id = checks.is_count(mask_id, least=0) and mask_id < size
    if mask_id is not None and not is_id:
      raise ValueError(
        f'mask_token_id is {mask_id!r}, but the target has tokens 0 to '
        f'{size - 1}: give a token that no text uses, or None to train a vector'
      )
    of_target = settings.check_features(
      self.feature_layers, self.model.num_layers
    )
    object.__setattr__(self, 'feature_layers', of_target)

  @property
  def shape(self) -> Any:
    """The configuration that gives the shape of the layers."""
    if self.layer_config is not None:
      return settings.plain_shape(self.layer_config)
    shape = settings.plain_shape(self.model)
    if getattr(shape, 'sliding_window', None) is None:
      return shape
    return dataclasses.replace(shape, sliding_window=None)

  @property
  def windows(self) -> tuple[int | None, ...]:
    """How many tokens each layer of the draft network sees, None for all."""
    return tuple(self.shape.window(i) for i in range(self.num_layers))

  @property
  def reads_prompt(self) -> bool:
    return True

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

  def initial_state(self, params: Params, pending: Array) -> Array | None:
    """Returns the state before the first slot, after pending tokens [...].

    It is [..., n], or None, as here, if drafts depend on no more than one token
    drawn before them.
    """
    del params, pending
    return None

  def given(
    self,
    params: Params,
    logits: Array,
    vectors: Array,
    previous: Array,
    state: Array | None,
  ) -> tuple[Array, Array | None]:
    """Returns logits given the tokens drawn before: here unchanged.

    Args:
      params: the whole tree of parameters.
      logits: [..., V'], of slots of a block.
      vectors: [..., D], from which the logits are made.
      previous: [...] int32, the tokens before the slots'.
      state: [..., n] or None, after the slots before.

    Returns:
      The logits [..., V'], and the state after the slots.
    """
    del params, vectors, previous
    return logits, state

  def _begin(self, key, target_params):
    if target_params is None:
      raise ValueError(
        "target_params is None, but the last norm starts as the target's: give "
        "the target's parameters"
      )
    params = super()._begin(key, target_params)
    # The unembedding is not trained, and expects the output of the target's
    # last norm.
    scale = feature_norms.scale_of(self.model, target_params['norm'])
    params |= {'norm': {'scale': scale}}
    if self.mask_token_id is not None:
      # Any mesh can divide this many rows; they are all the same.
      ids = jnp.full(jax.device_count(), self.mask_token_id)
      embedded = sharding.replicate(self.model.embed(target_params, ids))
      params |= {'mask': embedded[0].astype(jnp.float32)}
    if not self.has_feature_norms:
      return params
    norms = feature_norms.of_readers(
      self.model, target_params, self.feature_layers
    )
    return params | {'feature_norms': norms}

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
    """See `types.Drafter`: the features of the tokens become context.

    The rings of layers with a window have room for the window and a round.
    """
    del tokens
    found, own = output.features[0], self.own(params)['mask'].dtype
    if found.dtype != own:
      raise ValueError(
        f'the target computes in {found.dtype}, but the weights of the drafter '
        f'are {own}: load both with the same dtype'
      )
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

  def first(self, params, tokens, length, state):
    """See `steps.Steps`: one pass drafts the whole block."""
    pending = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    vectors = self.vectors(params, pending, length[:, None] - 1, state)[:, 0]
    block = _Block(
      logits=self.logits(params, vectors),  # in one product
      vectors=vectors,
      previous=pending,
      number=jnp.zeros((), jnp.int32),
      state=self.initial_state(params, pending),
      num_nodes=1,
    )
    return self._of_slot(params, block)

  def next(self, params, tokens, parents, carry):
    """See `steps.Steps`: the next slot of the block."""
    state, num_nodes = carry.state, carry.num_nodes
    if parents is not None:
      num_new = tokens.shape[1]
      # Parents are among the latest nodes.
      first = num_nodes - carry.previous.shape[1]
      index = parents[:, -num_new:, None] - first
      if state is not None:
        state = jnp.take_along_axis(state, index, axis=1)
      num_nodes += num_new
    block = dataclasses.replace(
      carry,
      previous=tokens,
      number=carry.number + 1,
      state=state,
      num_nodes=num_nodes,
    )
    return self._of_slot(params, block)

  def lattice(self, params, tokens, length, state, num_candidates):
    """See `lattice.LatticeDrafter`: the best tokens along the best path.

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

  def _of_slot(self, params, block):
    """Returns logits [B, n, V'] after n previous tokens, and the carry."""
    of_slot = lambda x: steps.of_step(x, block.number, block.previous)
    logits, state = self.given(
      params,
      of_slot(block.logits),
      of_slot(block.vectors),
      block.previous,
      block.state,
    )
    return logits, dataclasses.replace(block, state=state)


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
