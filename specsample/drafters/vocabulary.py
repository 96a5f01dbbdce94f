"""A draft vocabulary: the few tokens of the target that a drafter proposes.

The unembedding is a fifth of a small model's bytes; the columns of the tokens
that the target mostly writes are a fraction of that (FR-Spec, Zhao et al.,
2502.14856; EAGLE-3, 2503.01840).

Published drafters have an unembedding of their own, of some tokens or of all.
"""

import dataclasses
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from specsample import sharding
from specsample.models import matrices
from specsample.models import network
from specsample.models import transformer
from specsample.types import Array, ArrayLike, Model, Params

# Rows of the target's [D, V] that are computed at a time, at most.
_UNIT_VECTORS = 64


class DraftVocabulary(nnx.Module):
  """The ids of the draft tokens and their columns of an unembedding.

  `d2t` [V'] are ids in the target's vocabulary, None if they are all of it in
  its order; `unembedding` is [D, V'], by default the target's. Neither is
  trained. With a `softcap` c, logits x become c * tanh(x / c), as the target's
  own do (Gemma 2).
  """

  def __init__(
    self,
    dim: int,
    size: int,
    has_ids: bool = True,
    softcap: float | None = None,
  ):
    self.axis = sharding.Axis('vocab', size)
    ids = lambda: network.Buffer(jnp.arange(size), axes=(None,))
    self.d2t = ids() if has_ids else None
    self.unembedding = network.Buffer(
      jnp.zeros((dim, size)), axes=(None, self.axis)
    )
    self.softcap = softcap

  def __call__(self, rows: Array) -> Array:
    """Returns logits [n, V'] of rows [n, D]."""
    kernel = self.unembedding.get_value()
    axes = ('batch', self.axis)
    return self._capped(matrices.product(rows, kernel, axes, jnp.float32))

  def at(self, rows: Array, ids: Array) -> Array:
    """Returns logits [n, m] of rows [n, D] for the draft tokens ids [n, m]."""
    columns = matrices.lookup(
      self.unembedding.get_value(), ids, self.axis, rows.dtype
    )
    return self._capped(
      jnp.einsum(
        'nd,nmd->nm', rows, columns, preferred_element_type=jnp.float32
      )
    )

  def _capped(self, logits):
    if self.softcap is None:
      return logits
    return self.softcap * jnp.tanh(logits / self.softcap)

  def to_target(self, logits: Array, vocab_size: int) -> Array:
    """Returns logits [n, V] of the target's tokens, -inf if never drafted."""
    if self.d2t is None:
      return logits
    logits = sharding.constrain(logits, 'batch', None)
    nothing = sharding.zeros(
      (logits.shape[0], vocab_size), logits.dtype, 'batch', None
    )
    # The CPU backend cannot run a bfloat16 product whose result is scattered.
    logits = jax.lax.optimization_barrier(logits)
    write = lambda row, values: row.at[self.d2t[...]].set(values)
    wide = jax.vmap(write)(nothing - jnp.inf, logits)
    vocab = sharding.Axis('vocab', vocab_size)
    return sharding.constrain(wide, 'batch', vocab)

  def target_ids(self, ids: Array) -> Array:
    """Maps ids [B, ...] of draft tokens to the target's ids."""
    if self.d2t is None:
      return ids
    places = sharding.of_new('batch', *[None] * (ids.ndim - 1))
    return self.d2t[...].at[ids].get(out_sharding=places)

  def draft_ids(self, tokens: Array, vocab_size: int) -> tuple[Array, Array]:
    """Finds tokens [...] in `d2t` (0 if absent), and says which are there."""
    if self.d2t is None:
      return tokens, jnp.ones_like(tokens, bool)
    d2t = self.d2t[...]
    index = jnp.full(vocab_size, -1).at[d2t].set(jnp.arange(d2t.size))
    others = [None] * (tokens.ndim - 1)
    places = sharding.of_new('batch', *others)
    found = index.at[tokens].get(out_sharding=places)
    return jnp.maximum(found, 0), found >= 0


def make(config: Any) -> DraftVocabulary | None:
  """Makes a drafter's vocabulary; None if it uses the target's unembedding."""
  has_ids = config.draft_vocab_size is not None
  if not has_ids and not config.own_unembedding:
    return None
  size = config.draft_vocab_size if has_ids else config.model.vocab_size
  return DraftVocabulary(config.model.dim, size, has_ids, softcap_of(config))


def softcap_of(config: Any) -> float | None:
  """Returns the softcap of the logits that a drafter reads; None without one.

  A drafter's own unembedding was not made for the target's softcap.
  """
  made_for = config.layer_config if config.own_unembedding else config.model
  is_known = isinstance(made_for, transformer.Transformer)
  return made_for.logit_softcap if is_known else None


def of_target(model: Model, target_params: Params, d2t: ArrayLike) -> Params:
  """Cuts the parameters of a `DraftVocabulary` out of the target's, in float32.

  Args:
    model: the target, whose `unembed` is linear apart from a `logit_softcap`,
      which the columns leave out.
    target_params: its parameters.
    d2t: [V'] integers, ids in the target's vocabulary, each at most once.

  Raises:
    ValueError: d2t is anything else.
  """
  ids = np.asarray(d2t)
  check_d2t(ids, model.vocab_size)
  if isinstance(model, transformer.Transformer):
    # Unit vectors recover the matrix only if `unembed` is linear.
    model = dataclasses.replace(model, logit_softcap=None)
  num_rows = math.gcd(model.dim, _UNIT_VECTORS)

  @jax.jit
  def columns(target_params, ids):
    # Logits of a few unit vectors at a time, because [D, V] may be large.
    def of_block(first):
      units = jax.nn.one_hot(first + jnp.arange(num_rows), model.dim)
      logits = model.unembed(
        target_params, sharding.constrain(units, None, None)
      )
      return jnp.take(sharding.constrain(logits, None, None), ids, axis=1)

    firsts = sharding.constrain(jnp.arange(0, model.dim, num_rows), None)
    blocks = jax.lax.map(of_block, firsts)
    return sharding.constrain(
      blocks.reshape(model.dim, -1), None, sharding.Axis('vocab', ids.size)
    )

  ids = ids.astype(np.int32)
  # Without this, an accelerator would round these sums of one number and zeros.
  with jax.default_matmul_precision('highest'):
    return {
      'd2t': jnp.asarray(ids),
      'unembedding': columns(target_params, ids),
    }


def check_d2t(ids: np.ndarray, vocab_size: int) -> None:
  """Raises ValueError unless ids name tokens of the target, each once."""
  if ids.ndim != 1 or not ids.size or ids.dtype.kind not in 'iu':
    raise ValueError(
      f'd2t is {ids.dtype} of shape {ids.shape}: give the ids of the tokens '
      'to draft as a list of integers'
    )
  outside = ids[(ids < 0) | (ids >= vocab_size)]
  if outside.size:
    raise ValueError(
      f'd2t holds id {outside[0]}, outside the vocabulary of {vocab_size}: '
      "was it made for another model's tokenizer?"
    )
  if np.unique(ids).size < ids.size:
    raise ValueError('d2t names a token twice: name each at most once')
