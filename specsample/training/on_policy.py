"""Texts that a draft model writes itself, as training data.

On-policy data of DistillSpec (Zhou et al., 2310.08461, section 4): in decoding,
a draft token follows other draft tokens, so that is where the draft model
should agree with the target.
"""

from collections.abc import Mapping
import functools

import jax
import jax.numpy as jnp

from specsample import sampling as sampling_lib
from specsample import sharding
from specsample import streams
from specsample.drafters import draft_model
from specsample.sampling import Sampling
from specsample.types import Array, Params


def resample(
  params: Params,
  batch: Mapping[str, Array],
  key: Array,
  *,
  drafter: draft_model.DraftModel,
  temperature: float = 1.0,
  end_ids: tuple[int, ...] = (),
) -> dict[str, Array]:
  """Returns the batch with answers of the draft model instead of the target's.

  Train on it with teacher_weight alone: its tokens are not examples to imitate.

  Args:
    params: the whole tree, in the dtype of the target.
    batch: `tokens` [B, T] and `mask` [B, T], set for the tokens that the target
      wrote. All other tokens stay; a row may hold several answers one after the
      other.
    key: a PRNG key, folded with row and position for each draw.
    drafter: the draft model that writes.
    temperature: its temperature; 0 takes the most likely tokens.
    end_ids: tokens that end an answer. The end token is then repeated up to the
      end of the batch's answer, and not learned.

  Returns:
    `tokens` and `mask` of the same shapes, the mask set for the tokens that the
    draft model wrote. Other entries, such as `hidden`, no longer apply and are
    left out.

  Raises:
    ValueError: the temperature is out of range.
  """
  rows = sampling_lib.per_row(
    Sampling(temperature=temperature), len(batch['tokens']), drafter.vocab_size
  )
  return _resample(
    params,
    batch['tokens'],
    batch['mask'],
    key,
    rows,
    drafter=drafter,
    end_ids=end_ids,
  )


@functools.partial(jax.jit, static_argnames=('drafter', 'end_ids'))
def _resample(params, tokens, mask, key, sampling, *, drafter, end_ids):
  batch_size, size = tokens.shape
  model = drafter.draft_model
  numbers = sharding.constrain(jnp.arange(batch_size), 'batch')
  keys = jax.vmap(streams.row_key, (None, 0))(key, numbers)
  nothing = sharding.zeros((batch_size, 0), jnp.int32, 'batch', None)
  sampling = jax.tree.map(lambda x: sharding.constrain(x, 'batch'), sampling)

  def write_one(carry, column):
    token, is_over, cache = carry
    position, given, is_answer = column
    output, cache = model.apply(params, token[:, None], cache)
    probs = jax.vmap(sampling_lib.warp, (0, None, 0, 0))(
      sampling, None, output.logits[:, 0], nothing
    )
    own = jax.vmap(streams.position_key, (0, None))(keys, position)
    drawn = jax.vmap(sampling_lib.draw)(own, probs)
    is_over &= is_answer
    is_learned = is_answer & ~is_over
    token = jnp.where(
      is_learned, drawn, jnp.where(is_answer, token, given)
    ).astype(tokens.dtype)
    ends = jnp.isin(token, jnp.asarray(end_ids, tokens.dtype))
    return (token, is_learned & ends | is_over, cache), (token, is_learned)

  # Position 0 has no prefix from which it could be drawn.
  first = tokens[:, 0]
  begin = (first, jnp.zeros_like(mask[:, 0]), model.init_cache(*tokens.shape))
  columns = (jnp.arange(1, size), tokens[:, 1:].T, mask[:, 1:].T)
  _, (new, learned) = jax.lax.scan(write_one, begin, columns)
  return {
    'tokens': jnp.concatenate([first[:, None], new.T], axis=1),
    'mask': jnp.concatenate([jnp.zeros_like(mask[:, :1]), learned.T], axis=1),
  }
