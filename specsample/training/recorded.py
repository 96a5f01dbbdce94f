"""Examples and a loss from the positions that `drafters.Recording` kept.

For each position the target's k most likely tokens are known, and the total
probability of all others. The draft is compared with these k + 1 outcomes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample.drafters import draft_model
from specsample.drafters import recording
from specsample.training import losses
from specsample.training import objective
from specsample.training.step import Batch
from specsample.types import Array, Params

# Keeps the logarithm of the remaining probability, a difference, finite.
_SMALLEST = 1e-6


@functools.partial(jax.jit, static_argnames=('window',))
def examples(
  ring: recording.Ring, tokens: Array, length: Array, *, window: int
) -> dict[str, Array]:
  """Turns a ring into a batch, cut to the last `window` tokens of each row.

  Args:
    ring: the ring of a `drafters.RecordingState`.
    tokens, length: [B, S] and [B], those of the `types.DecodeState`.
    window: W; earlier positions are masked out.

  Returns:
    `tokens` [B, W]; `places` [B, M], the index in `tokens` of the token before
    each position; `mask` [B, M], which positions are valid; `ids` [B, M, k]
    and `log_probs` [B, M, k] of the target's most likely tokens.
  """
  window = min(window, tokens.shape[1])
  start = jnp.maximum(length - window, 0)
  cut = lambda row, i: jax.lax.dynamic_slice(row, (i,), (window,))
  places = ring.position - 1 - start[:, None]
  return {
    'tokens': jax.vmap(cut)(tokens, start),
    'places': jnp.maximum(places, 0),
    'mask': (ring.position >= 0) & (places >= 0),
    'ids': ring.ids,
    'log_probs': ring.logits - ring.log_sum_exp[..., None],
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModelObjective:
  """The loss [] of a draft model on `examples`, and its acceptance rate `kept`.

  Drafters that read the target's hidden states cannot use it: a ring has none.

  Attributes:
    drafter: the draft model that is trained.
    teacher_loss: one of `losses`, on distributions over k + 1 outcomes.
  """

  drafter: draft_model.DraftModel
  teacher_loss: objective.TeacherLoss = losses.forward_kl

  def __call__(
    self, params: Params, batch: Batch
  ) -> tuple[Array, dict[str, Array]]:
    """Returns the mean loss [] and a report.

    `kept` [] is the mean of sum min(target, draft), and `recorded` [] the
    number of positions.
    """
    vectors = self.drafter.vectors(params, batch['tokens'])
    vectors = jnp.take_along_axis(vectors, batch['places'][..., None], axis=1)
    logits = self.drafter.logits(params, vectors).astype(jnp.float32)
    ids, is_drafted = self.drafter.draft_ids(params, batch['ids'])
    draft, target = outcomes(logits, ids, is_drafted, batch['log_probs'])
    mean = lambda values: losses.masked_mean(values, batch['mask'])
    return mean(self.teacher_loss(draft, target)), {
      'kept': mean(1 - losses.total_variation(draft, target)),
      'recorded': jnp.sum(batch['mask']),
    }


def outcomes(
  logits: Array, ids: Array, is_drafted: Array, log_probs: Array
) -> tuple[Array, Array]:
  """Returns log-probabilities [..., k + 1] of the draft and of the target.

  They are those of k tokens, -inf if a token is not drafted, and of all others.

  Args:
    logits: [..., V'], the draft's, float32.
    ids: [..., k], draft vocabulary ids.
    is_drafted: [..., k], whether the tokens are in the draft vocabulary.
    log_probs: [..., k], the target's.
  """
  all_drafts = jax.nn.log_softmax(logits, axis=-1)
  pick = jax.vmap(indexing.pick, in_axes=(None, -1), out_axes=-1)
  draft = jnp.where(is_drafted, pick(all_drafts, ids), -jnp.inf)
  target = jnp.where(is_drafted, log_probs, -jnp.inf)
  rest = lambda log_probs: jnp.log(
    jnp.maximum(1 - jnp.sum(jnp.exp(log_probs), -1, keepdims=True), 0)
    + _SMALLEST
  )
  join = lambda *parts: jnp.concatenate(parts, axis=-1)
  return join(draft, rest(draft)), join(target, rest(log_probs))
