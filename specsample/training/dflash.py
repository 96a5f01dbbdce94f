"""The objectives of block-parallel drafters: DFlash, DFlash 2 and DSpark."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample.drafters import dflash
from specsample.drafters import dflash2
from specsample.drafters import dspark
from specsample.models import cache as cache_lib
from specsample.training import losses
from specsample.training import objective
from specsample.training import rows as rows_lib
from specsample.training import slots
from specsample.training.step import Batch
from specsample.types import Array, Params

# Matrices whose rows are looked up by token.
_LOOKED_UP = ('markov.before', 'selector.predecessor')
# Odd multipliers, so that no bit of the other factor is lost.
_ROW = 0x9E3779B1
_BATCH = 0x85EBCA6B


class Text(NamedTuple):
  """The text that blocks are drafted from, and the context that they see."""

  tokens: Array  # [B, T] int32
  hidden: Array  # [B, T, D], the target's last hidden states
  context: cache_lib.KVCache  # of the T tokens
  begins: Array  # [B, T] int32, the places at which their documents begin


class Drafted(NamedTuple):
  """The drafts of n blocks per row, and what they are compared with."""

  vectors: Array  # [B, n, K, D]
  before: Array  # [B, n, K] int32, the tokens before the drafts
  logits: Array  # [B, n, K, V']
  ids: Array  # [B, n, K] int32, the text's tokens, as draft vocabulary ids
  is_drafted: Array  # [B, n, K] bool, whether they are in the draft vocabulary
  hidden: Array  # [B, n, K, D], the target's at the tokens before


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashObjective(objective.Objective):
  """The losses of a few blocks per document: an `objective.Objective`.

  `num_blocks` places are drawn from each document, evenly among those that are
  followed by a token to learn. The weight of draft i, from 0, is
  exp(-i / gamma), because a draft counts only if all drafts before it are kept.
  The paper uses gamma = 4 for 7 drafts and 7 for 15.

  A batch may hold precomputed `features` [B, T, n * D], the outputs of the
  drafter's n `feature_layers`.

  Attributes:
    drafter: DFlash.
    gamma: decay constant of the weights.
    slot_weights: one of `slots`, whose weights replace those of `gamma`. A loss
      is then the weighted sum divided by the number of learned drafts.
    num_blocks: blocks per document. `matches` processes as many at a time.
  """

  drafter: dflash.DFlash
  gamma: settings.Positive = 4.0
  slot_weights: slots.SlotWeights | None = None
  num_blocks: settings.Count = 8
  _kind: ClassVar[type] = dflash.DFlash

  def _check(self):
    super()._check()
    # Its logits given a token are -inf but for the candidates.
    if isinstance(self.drafter, dflash2.DFlash2) and (
      self._kind is not dflash2.DFlash2
    ):
      raise ValueError(
        f'drafter is DFlash2, but {type(self).__name__} trains a '
        f'{self._kind.__name__}: give a DFlash2Objective'
      )

  def __call__(self, params, batch):
    """Returns the loss [], and a report from `objective.acceptance`."""
    start, learned = self._chosen(batch)

    def compare(params, text, start, learned):
      drafted = self._draft(params, text, start)
      loss = self.loss(params, drafted, learned)
      return loss, self.came(params, drafted)

    compare = jax.checkpoint(compare) if self.recompute else compare
    loss, came = compare(params, self._read(params, batch), start, learned)
    of_drafts = lambda x: jnp.moveaxis(x, -1, 0)
    return loss, objective.acceptance(of_drafts(came), of_drafts(learned))

  def num_learned(self, batch: Batch) -> Array:
    """Returns what `mean` divides by [], which weighs a part of a batch."""
    _, learned = self._chosen(batch)
    if self.slot_weights is not None:
      return jnp.sum(learned)
    return jnp.sum(self._by_gamma(learned.shape[-1]) * learned)

  def matches(self, params: Params, batch: Batch) -> Array:
    """See `objective.Objective`; a few places at a time."""
    text = self._read(params, batch)
    num_rows, width = text.tokens.shape
    num_chunks = -(-width // self.num_blocks)

    def of_chunk(first):
      # Places past the end, in the last chunk, are cut off below.
      start = jnp.minimum(first + jnp.arange(self.num_blocks), width - 1)
      start = jnp.broadcast_to(start, (num_rows, self.num_blocks))
      start = sharding.constrain(start, 'batch', None)
      return self.came(params, self._draft(params, text, start))

    found = jax.lax.map(of_chunk, jnp.arange(num_chunks) * self.num_blocks)
    num_drafts = self.drafter.num_draft_tokens
    found = jnp.transpose(found, (3, 1, 0, 2)).reshape(num_drafts, num_rows, -1)
    return found[..., :width] & rows_lib.whole(batch).drafts(num_drafts)

  def num_rows(self, matrix: str, batch: Batch) -> int:
    is_unused = matrix == 'target' and not self.teacher_weight
    if matrix in _LOOKED_UP or is_unused:
      return 0
    dialogues = batch.get('starts', batch['tokens'][:, :1]).size
    drafts = dialogues * self.num_blocks * self.drafter.num_draft_tokens
    if not matrix.startswith(('fuse.', 'layers.')):
      return drafts
    tokens = batch['tokens'].size
    if matrix.startswith('fuse.'):
      return tokens
    pending = dialogues * self.num_blocks
    pending *= not self.drafter.drafts_from_pending
    is_seen = '.key.' in matrix or '.value.' in matrix
    return tokens * is_seen + drafts + pending

  def loss(self, params: Params, drafted: Drafted, learned: Array) -> Array:
    """Returns the loss [] of the drafts where `learned` [B, n, K] is set."""
    loss = jnp.zeros(())
    entropy = losses.cross_entropy(drafted.logits, drafted.ids)
    weights = self.weights(drafted, entropy, learned)
    if self.token_weight:
      mean = self.mean(entropy, learned & drafted.is_drafted, weights)
      loss += self.token_weight * mean
    if self.teacher_weight:
      teacher = self.teacher(params, drafted.hidden)
      values = self.teacher_loss(drafted.logits, teacher)
      loss += self.teacher_weight * self.mean(values, learned, weights)
    return loss

  def came(self, params: Params, drafted: Drafted) -> Array:
    """Returns where the most likely token is the text's, [B, n, K] bool."""
    del params
    best = jnp.max(drafted.logits, axis=-1)
    return drafted.is_drafted & (
      indexing.pick(drafted.logits, drafted.ids) == best
    )

  def weights(
    self, drafted: Drafted, entropy: Array, learned: Array
  ) -> Array | None:
    """Returns the weights [B, n, K] of `slot_weights`, if there are any.

    Args:
      drafted: the drafts.
      entropy: [B, n, K], their cross-entropy.
      learned: [B, n, K] bool, the drafts that are learned.
    """
    if self.slot_weights is None:
      return None
    log_probs = jnp.where(drafted.is_drafted, -entropy, -jnp.inf)
    by_draft = lambda x: jnp.moveaxis(x, -1, 0)
    weights = self.slot_weights(by_draft(log_probs), by_draft(learned))
    return jnp.moveaxis(weights, 0, -1)

  def mean(
    self, values: Array, learned: Array, weights: Array | None = None
  ) -> Array:
    """Returns the weighted mean [] of values [B, n, K] where they are learned.

    If `weights` [B, n, K] is None, the weights follow from gamma and their sum
    is the divisor; otherwise it is the number of learned values.
    """
    values = jnp.where(learned, values, 0)
    if weights is not None:
      return jnp.sum(weights * values) / jnp.maximum(jnp.sum(learned), 1)
    weights = jnp.where(learned, self._by_gamma(values.shape[-1]), 0)
    return jnp.sum(weights * values) / jnp.maximum(jnp.sum(weights), 1e-9)

  def _by_gamma(self, num_drafts):
    return jnp.exp(-jnp.arange(num_drafts) / self.gamma)

  def _chosen(self, batch):
    """Returns where blocks start [B, n], and their learned drafts [B, n, K]."""
    start, exists = starts(batch, self.num_blocks)
    index, begins = self._index(start) + 1, rows_lib.begins(batch)
    learned = at(batch['mask'], index) & exists[..., None]
    # No draft follows the last token of its document.
    return start, learned & (at(begins, index) == at(begins, start[..., None]))

  def _read(self, params, batch):
    hidden, features = self.of_target(params, batch)
    begins = rows_lib.begins(batch)
    context = self.drafter.context(params, features, begins)
    return Text(batch['tokens'], hidden, context, begins)

  def _draft(self, params, text, start) -> Drafted:
    drafter = self.drafter
    index = self._index(start)
    before, came = at(text.tokens, index), at(text.tokens, index + 1)
    vectors = drafter.vectors(
      params,
      before[..., 0],
      start,
      text.context,
      at(text.begins, start[..., None])[..., 0],
    )
    logits = self._logits(params, vectors, before)
    ids, is_drafted = drafter.draft_ids(params, came)
    hidden = at(text.hidden, index)
    return Drafted(vectors, before, logits, ids, is_drafted, hidden)

  def _logits(self, params, vectors, before):
    """Returns logits [B, n, K, V'] given the text's tokens, slot by slot.

    Without a state, all slots are computed at once.
    """
    drafter: Any = self.drafter
    found = drafter.read(params, vectors)
    memory = drafter.initial_memory(params, before[..., 0])
    if memory is None:
      return drafter.given(params, found, before, None)[0]

    def body(memory, slot):
      logits, memory = drafter.given(params, *slot, memory)
      return memory, logits

    by_slot = lambda x: jnp.moveaxis(x, 2, 0)
    slots = jax.tree.map(by_slot, (found, before))
    return jnp.moveaxis(jax.lax.scan(body, memory, slots)[1], 0, 2)

  def _index(self, start):
    """Returns the places [B, n, K] of the tokens before the drafts."""
    return start[..., None] + jnp.arange(self.drafter.num_draft_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Objective(DFlashObjective):
  """A `DFlashObjective` whose drafts are selected among candidates.

  The losses of a `DFlashObjective` are those of the block's logits, without a
  token before. The selection learns the text's token by its cross-entropy
  among the candidates, given the token before it in the text. Drafts whose
  candidates lack the text's token are left out of it.

  Attributes:
    drafter: DFlash2.
    selector_weight: weight of the cross-entropy of the selection.
  """

  drafter: dflash2.DFlash2
  selector_weight: float = 1.0
  _kind: ClassVar[type] = dflash2.DFlash2

  def loss(self, params, drafted, learned):
    loss = super().loss(params, drafted, learned)
    if not self.selector_weight:
      return loss
    logits, is_token = self._selection(params, drafted)
    values = jax.nn.logsumexp(logits, axis=-1)
    values -= jnp.sum(jnp.where(is_token, logits, 0), axis=-1)
    # Weights are of all drafts that are learned, also of those left out.
    entropy = losses.cross_entropy(drafted.logits, drafted.ids)
    weights = self.weights(drafted, entropy, learned)
    learned &= jnp.any(is_token, axis=-1)
    return loss + self.selector_weight * self.mean(values, learned, weights)

  def came(self, params, drafted):
    """See `DFlashObjective`: where the text's token is selected."""
    logits, is_token = self._selection(params, drafted)
    best = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.any(is_token & (logits == best), axis=-1)

  def _selection(self, params, drafted):
    """Returns the candidates' logits, and which is the text's token.

    Both are [B, n, K, C].
    """
    found = self.drafter.candidates(params, drafted.logits, drafted.vectors)
    is_token = (found.ids == drafted.ids[..., None]) & (
      drafted.is_drafted[..., None]
    )
    return self.drafter.select(params, found, drafted.before), is_token

  def _logits(self, params, vectors, before):
    del before
    return self.drafter.capped(self.drafter.logits(params, vectors))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkObjective(DFlashObjective):
  """A `DFlashObjective` whose drafts are each given the token before them.

  The confidence learns 1 - TV(target, draft), the probability that a draft is
  kept. Its loss trains the confidence head alone and leaves the drafts as they
  are. (The total variation is over the draft vocabulary, as in the teacher's
  loss.)

  Attributes:
    drafter: DSpark.
    confidence_weight: weight of the cross-entropy of the confidence, which is
      weighted by `gamma` even if `slot_weights` is given.
  """

  drafter: dspark.DSpark
  token_weight: float = 0.1
  teacher_weight: float = 1.8
  teacher_loss: objective.TeacherLoss = losses.total_variation
  confidence_weight: float = 1.0
  _kind: ClassVar[type] = dspark.DSpark

  def loss(self, params, drafted, learned):
    loss = super().loss(params, drafted, learned)
    if not self.confidence_weight:
      return loss
    # The loss below trains only the confidence head.
    fixed = jax.lax.stop_gradient((params, drafted))
    own = params['drafter']['confidence']
    fixed_params, drafted = fixed
    head = {**fixed_params['drafter'], 'confidence': own}
    found = self.drafter.confidence_logits(
      {**fixed_params, 'drafter': head}, drafted.vectors, drafted.before
    )
    teacher = self.teacher(fixed_params, drafted.hidden)
    kept = 1 - losses.total_variation(drafted.logits, teacher)
    values = jnp.logaddexp(0, found) - kept * found
    return loss + self.confidence_weight * self.mean(values, learned)


def starts(batch: Batch, num_blocks: int) -> tuple[Array, Array]:
  """Chooses the pending tokens of `num_blocks` blocks in each document.

  They are evenly spaced among the tokens that are followed by a token to learn.
  The offset is a hash of all tokens of the batch, so that a document gets other
  blocks when it recurs in another batch.

  Args:
    batch: `tokens` and `mask` [B, T], and `starts` [B, D] if rows hold up to D
      documents; otherwise D is 1.
    num_blocks: n.

  Returns:
    The places [B, D * n] int32 of the pending tokens, and whether there are
    that many, [B, D * n] bool.
  """
  rows, begins = rows_lib.whole(batch), rows_lib.begins(batch)
  first = batch['starts'] if 'starts' in batch else begins[:, :1]
  is_of = first[..., None] == begins[:, None]  # [B, D, T]
  count = jnp.cumsum(is_of & rows.learned(1)[:, None], axis=2)
  total = count[..., -1:]
  bits = rows.tokens.astype(jnp.uint32)
  # Always 32 bits, even if JAX uses 64, as are the floats divided below.
  total_of = functools.partial(jnp.sum, dtype=jnp.uint32)
  place_of = rows.positions.astype(jnp.uint32) + 1
  of_each = total_of(is_of * (bits * place_of)[:, None], axis=2)
  mixed = of_each * jnp.uint32(_ROW) ^ total_of(of_each) * jnp.uint32(_BATCH)
  mixed = (mixed ^ mixed >> 15) * jnp.uint32(_ROW)
  offset = (mixed >> 8).astype(jnp.float32) / 2**24  # in [0, 1)
  # If there are at most `num_blocks` places, all of them are taken.
  step = jnp.maximum(total, num_blocks).astype(jnp.float32) / num_blocks
  which = (jnp.arange(num_blocks) + offset[..., None]) * step
  which = jnp.floor(which).astype(jnp.int32)
  place = jnp.sum(count[:, :, None] <= which[..., None], axis=-1)
  place = jnp.minimum(place, bits.shape[1] - 1).astype(jnp.int32)
  of_row = lambda x: sharding.reshape(
    x, (len(x), first.shape[1] * num_blocks), 'batch', None
  )
  return of_row(place), of_row(which < total)


def at(x: Array, index: Array) -> Array:
  """Gathers x [B, T, ...] at index [B, n, K]: [B, n, K, ...], 0 past T."""
  flat = index.reshape(index.shape[0], -1)
  flat = flat.reshape(*flat.shape, *(1,) * (x.ndim - 2))
  inside = flat < x.shape[1]
  found = jnp.take_along_axis(x, jnp.minimum(flat, x.shape[1] - 1), axis=1)
  found = jnp.where(inside, found, jnp.zeros_like(found))
  axes = ('batch', *[None] * x.ndim)
  return sharding.reshape(found, (*index.shape, *x.shape[2:]), *axes)
