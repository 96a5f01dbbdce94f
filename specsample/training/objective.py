"""Objectives that train drafters on the target's tokens and distribution."""

import abc
from collections.abc import Callable, Sequence
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample.drafters import trainable
from specsample.training import compared
from specsample.training import losses
from specsample.training import rows as rows_lib
from specsample.training import step
from specsample.training.step import Batch
from specsample.types import Array, Model, Params

# loss(logits [..., V], target_log_probs [..., V]) -> [...].
TeacherLoss = Callable[[Array, Array], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective(settings.Settings, abc.ABC):
  """A loss of the whole tree of parameters, on a batch of documents.

  A batch holds `tokens` [B, T] int32, one document per row, and `mask` [B, T]
  bool, set for the tokens that the target wrote: those are learned. It may hold
  `hidden` [B, T, D], precomputed hidden states of the target, `places`, see
  `rows.crop`, and `starts`, with which rows hold several documents; see `rows`.

  Attributes:
    drafter: the drafter that is trained.
    token_weight: weight of the cross-entropy of the tokens.
    teacher_weight: weight of `teacher_loss` against the target's distribution.
    teacher_loss: one of `losses`.
    recompute: whether logits are recomputed for the gradient instead of kept.
      It matters for blocks (DFlash) and if the unembedding is trained; other
      objectives keep no logits.
  """

  drafter: trainable.Learnable
  token_weight: float = 1.0
  teacher_weight: float = 0.0
  teacher_loss: TeacherLoss = losses.forward_kl
  recompute: settings.Flag = False
  # The class of the drafters that the objective trains.
  _kind: ClassVar[type] = trainable.Learnable

  def _check(self):
    name = type(self.drafter).__name__
    if not isinstance(self.drafter, trainable.Learnable):
      raise ValueError(
        f'drafter is {name}, which is not trained here: give a drafter that '
        'is, such as DraftModel, Medusa or Eagle'
      )
    if not isinstance(self.drafter, self._kind):
      raise ValueError(
        f'drafter is {name}, but {type(self).__name__} trains a '
        f'{self._kind.__name__}: give the objective that is made for {name}'
      )
    if self.drafter.own_unembedding:
      raise ValueError(
        'own_unembedding is True, which is only for drafters that were trained '
        'elsewhere: train with own_unembedding = False'
      )

  @abc.abstractmethod
  def __call__(
    self, params: Params, batch: Batch
  ) -> tuple[Array, dict[str, Array]]:
    """Returns the loss [] and a report that includes that of `acceptance`."""

  @abc.abstractmethod
  def matches(self, params: Params, batch: Batch) -> Array:
    """Returns where drafts would be right, [K, B, T] bool.

    Entry [i, b, t], with token t pending, is set if the most likely draft i,
    given the tokens before it, is token t + 1 + i, and that token is learned.
    """

  @settings.default
  def target(self) -> Model:
    """The target, whose parameters are params['target']."""
    return self.drafter.model

  @property
  def reads_prompt(self) -> bool:
    """Whether the objective reads the prompt.

    If not, it reads a row's `hidden` only from two tokens before the mask on.
    """
    return self.drafter.reads_prompt

  def num_learned(self, batch: Batch) -> Array:
    """Returns what the loss divides by [], which weighs a part of a batch."""
    return step.num_tokens(batch)

  def num_rows(self, matrix: str, batch: Batch) -> int:
    """Returns how many vectors of a batch are multiplied by a matrix.

    Args:
      matrix: the name of a matrix of the drafter, such as 'fuse.kernel'; or
        'unembedding', for the drafts' logits, or 'target', for the target's.
      batch: the batch.
    """
    if matrix == 'target':
      return int(batch['mask'].sum()) if self.teacher_weight else 0
    if matrix == 'unembedding':
      return int(batch['mask'].sum())
    return batch['tokens'].size

  def of_target(
    self, params: Params, batch: Batch
  ) -> tuple[Array, tuple[Array, ...]]:
    """Returns the target's hidden states and the outputs of `feature_layers`.

    They are [B, T, D] each. The batch may hold them, with the outputs
    concatenated as `features` [B, T, n * D]; the target computes what it lacks.
    """
    layers = self.drafter.feature_layers
    if not layers:
      return self.hidden(params, batch), ()
    if 'features' in batch:
      stored = batch['features'].astype(self.target.dtype)
      split = jnp.split(stored, len(layers), axis=-1)
      return self.hidden(params, batch), tuple(split)
    hidden, features = self._run_target(params, batch, layers)
    if 'hidden' in batch:
      return self.hidden(params, batch), features
    return hidden, features

  def hidden(self, params: Params, batch: Batch) -> Array:
    """Returns the target's hidden states [B, T, D]."""
    if 'hidden' in batch:
      return batch['hidden'].astype(self.target.dtype)
    return self._run_target(params, batch)[0]

  def _run_target(self, params, batch, layers=()):
    """Returns the target's hidden states, and the outputs of layers."""
    tokens, parents = batch['tokens'], rows_lib.parents(batch)
    # A model for chains alone need not take parents.
    packed = {} if parents is None else {'parents': parents}
    empty = self.target.init_cache(tokens.shape[0], 0)
    output, _ = self.target.apply(
      params['target'], tokens, empty, layers, **packed
    )
    # From here on backward too, the compiler divides the tokens of the pass.
    return jax.tree.map(
      lambda x: sharding.constrain(x, 'batch', 'tokens', None),
      (output.hidden, output.features),
    )

  def teacher(self, params: Params, hidden: Array) -> Array:
    """Returns the target's log-probabilities [..., V'] of the drafted tokens.

    They are normalised over the draft vocabulary: the best possible draft from
    it is the target's distribution, given that the token is in it. (Normalising
    over all tokens would cost the whole product with the unembedding, more than
    the rest of a small drafter's step.) What losses call the acceptance rate,
    sum min(target, draft), is therefore that of a target that only writes these
    tokens. The true rate is lower if the target writes others: by at most their
    probability.
    """
    logits = self.target_logits(params, hidden)
    return jax.lax.stop_gradient(jax.nn.log_softmax(logits.astype(jnp.float32)))

  def target_logits(self, params: Params, hidden: Array) -> Array:
    """Returns the target's logits [..., V'] of the drafted tokens."""
    return self.drafter.logits(params, hidden)

  def compare(
    self,
    ahead: int,
    params: Params,
    vectors: Sequence[Array],
    hidden: Array,
    rows: rows_lib.Rows,
  ) -> compared.Compared:
    """Compares n drafts with the tokens of the text and with the target.

    Args:
      ahead: `vectors[i][:, t]` predicts `rows.tokens[:, t + ahead + i]`.
      params: the whole tree.
      vectors: n of [B, T, D], the inputs of the unembedding.
      hidden: [B, T, D], the target's hidden states.
      rows: the batch's.

    Returns:
      [n, B, T] each; the losses of draft i add up to its loss. `match` is a
      place later, at the pending token; the drafts follow it.
    """
    # Everything is aligned to the token before the predicted one, at which the
    # target's distribution is the same for all drafts.
    shifts = [ahead + i - 1 for i in range(len(vectors))]
    behind = rows_lib.behind
    ids, is_drafted = self.drafter.draft_ids(params, behind(rows.tokens, 1))
    learned = rows.learned(1)
    scales = [
      self._scales(learned & (rows.positions >= shift), is_drafted)
      for shift in shifts
    ]
    token_scale, teacher_scale = (
      jnp.stack(x, axis=-1) for x in zip(*scales, strict=True)
    )
    late = lambda x, shift: jnp.pad(x, ((0, 0), (shift, 0), (0, 0)))
    found = compared.by_places(
      compared.Comparison(
        self._compare_places,
        self.drafter.draft_vocab_size or self.drafter.vocab_size,
        self.recompute,
      ),
      self.drafter.unembedding(params),
      jnp.stack(
        [
          late(x, shift)[:, : x.shape[1]]
          for x, shift in zip(vectors, shifts, strict=True)
        ],
        axis=2,
      ),
      jax.lax.stop_gradient(params),
      compared.Drafts(
        jax.lax.stop_gradient(hidden),
        ids,
        is_drafted,
        learned,
        token_scale,
        teacher_scale,
      ),
    )
    by_root = lambda x: jnp.stack(
      [behind(x[..., i], shift) for i, shift in enumerate(shifts)]
    )
    found = jax.tree.map(by_root, found)
    match = jnp.pad(found.match, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    return found._replace(match=match)

  def _scales(self, learned, is_drafted):
    """Returns the weights of the two losses of a draft at each place [B, T]."""
    share = lambda mask: mask / jnp.maximum(jnp.sum(mask), 1)
    return (
      self.token_weight * share(learned & is_drafted),
      self.teacher_weight * share(learned),
    )

  def _compare_places(self, read, vectors, fixed, drafts):
    params = fixed | {name: fixed[name] | part for name, part in read.items()}
    logits = self.drafter.logits(params, vectors).astype(jnp.float32)
    ids = jnp.broadcast_to(drafts.ids[..., None], logits.shape[:-1])
    is_drafted = drafts.is_drafted[..., None]
    # Selected, not multiplied: values that are not learned may be infinite.
    scaled = lambda scale, values: scale * jnp.where(scale > 0, values, 0)
    entropy = losses.cross_entropy(logits, ids)
    found = jnp.zeros_like(entropy)
    if self.token_weight:
      found += scaled(drafts.token_scale, entropy)
    if self.teacher_weight:
      teacher = self.teacher(params, drafts.hidden)[:, :, None]
      teacher = jnp.broadcast_to(teacher, logits.shape)
      found += scaled(drafts.teacher_scale, self.teacher_loss(logits, teacher))
    best = jnp.max(logits, axis=-1)
    return compared.Compared(
      losses=found,
      log_probs=jax.lax.stop_gradient(
        jnp.where(is_drafted, -entropy, -jnp.inf)
      ),
      match=is_drafted & (indexing.pick(logits, ids) == best),
    )


def acceptance(match: Array, learned: Array) -> dict[str, Array]:
  """Returns how often drafts are kept at temperature 0, [K] each.

  `correct` is how often the most likely token of draft i is the text's, `kept`
  how often this holds for all drafts up to i. 1 + the sum of `kept` is the
  number of tokens per round that this would give.

  Args:
    match: [K, B, T], whether draft i is the token of the text, as in
      `Objective.matches`.
    learned: [K, B, T], whether that is a token to learn.
  """
  mean = jax.vmap(losses.masked_mean)
  return {
    'correct': mean(match, learned),
    'kept': mean(jnp.cumprod(match, axis=0), jnp.cumprod(learned, axis=0) > 0),
  }
