"""Comparison of drafts with the text and the target, a few places at a time.

Logits are by far the largest arrays of a training step: n drafts of T tokens
have n * T * V' of them. Therefore only the logits of a few places are in memory
at once, and the backward pass keeps the gradient itself, which is as large as
the vectors that the logits are computed from. Places where nothing is learned
are left out.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample.types import Array, Params


class Drafts(NamedTuple):
  """Constants that the n drafts at each place are compared with."""

  hidden: Array  # [B, T, D], the target's, from which teacher logits follow
  ids: Array  # [B, T] int32, the tokens to draft, as draft vocabulary ids
  is_drafted: Array  # [B, T] bool, whether they are in the draft vocabulary
  is_learned: Array  # [B, T] bool, whether any draft is learned
  token_scale: Array  # [B, T, n], weight of the cross-entropy
  teacher_scale: Array  # [B, T, n], weight of the teacher's loss


class Compared(NamedTuple):
  """The result where something is learned; only `losses` has a gradient."""

  losses: Array  # [B, T, n]
  log_probs: Array  # [B, T, n] of the tokens to draft, -inf if not drafted
  match: Array  # [B, T, n] bool, whether those are the most likely tokens


class Comparison(NamedTuple):
  """The way in which vectors are compared; hashable."""

  # compare(read, vectors [B, T, n, D], fixed, drafts), for any T; it may close
  # over no array. `read` holds the parameters that logits are computed with,
  # `fixed` whatever else it needs.
  compare: Callable[[Params, Array, Any, Drafts], Compared]
  vocab_size: int  # V', which determines how many places fit in memory
  # Whether logits are recomputed for the gradient if `read` is trained.
  recompute: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_places(
  comparison: Comparison,
  read: Params,
  vectors: Array,
  fixed: Any,
  drafts: Drafts,
) -> Compared:
  """Returns `comparison.compare` of all places, computed chunk by chunk.

  The result at a place must depend on that place alone. Its gradient is
  computed together with it, so that logits are computed once and not kept. If
  `read` is trained, all places are compared at once instead.

  Args:
    comparison: how vectors are compared.
    read: the parameters that logits are computed with.
    vectors: [B, T, n, D].
    fixed: inputs without a gradient.
    drafts: the data that vectors are compared with.
  """
  of_chunk = lambda vectors, drafts: comparison.compare(
    read, vectors, fixed, drafts
  )
  return _over_chunks(of_chunk, comparison.vocab_size, vectors, drafts)


def _forward(comparison, *args):
  is_trained = any(x.perturbed for x in jax.tree.leaves(args[0]))
  read, vectors, fixed, drafts = jax.tree.map(lambda x: x.value, args)

  def losses_of(read, vectors, drafts):
    found = comparison.compare(read, vectors, fixed, drafts)
    return found.losses, found

  if is_trained:
    of_all = losses_of
    if comparison.recompute:
      of_all = jax.checkpoint(losses_of)
    _, pull, found = jax.vjp(
      lambda read, vectors: of_all(read, vectors, drafts),
      read,
      vectors,
      has_aux=True,
    )
    return found, pull

  def of_chunk(vectors, drafts):
    losses, pull, found = jax.vjp(
      lambda vectors: losses_of(read, vectors, drafts), vectors, has_aux=True
    )
    (gradient,) = pull(jnp.ones_like(losses))
    return found, gradient

  return _over_chunks(of_chunk, comparison.vocab_size, vectors, drafts)


def _backward(comparison, kept, cotangents):
  del comparison
  losses = cotangents.losses
  if isinstance(losses, jax.custom_derivatives.SymbolicZero):
    losses = sharding.zeros(losses.shape, losses.dtype, 'batch', None, None)
  if callable(kept):
    return *kept(losses), None, None
  return None, losses[..., None].astype(kept.dtype) * kept, None, None


by_places.defvjp(_forward, _backward, symbolic_zeros=True)


def _over_chunks(function, vocab_size, vectors, drafts):
  """Applies function(vectors, drafts) where something is learned."""
  if not jax.sharding.get_abstract_mesh().empty:
    return _loop(function, vocab_size, vectors, drafts)
  # All rows are merged into one, with the learned places first.
  shape = drafts.is_learned.shape
  order = jnp.argsort(~drafts.is_learned.reshape(-1))
  back = jnp.argsort(order)
  flat = lambda x: x.reshape(1, -1, *x.shape[2:])
  pack = lambda x: jnp.take(flat(x), order, axis=1)
  found = _loop(function, vocab_size, *jax.tree.map(pack, (vectors, drafts)))
  unpack = lambda x: jnp.take(x, back, axis=1).reshape(*shape, *x.shape[2:])
  return jax.tree.map(unpack, found)


def _loop(function, vocab_size, vectors, drafts):
  """Applies function(vectors, drafts) up to the last learned place."""
  batch, size, count, _ = vectors.shape
  fitting = max(_num_logits() // (batch * count * vocab_size), 1)
  width = -(-size // -(-size // fitting))
  missing = -size % width
  pad = lambda x: jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))
  args = jax.tree.map(pad, (vectors, drafts))
  cut = lambda x, i: jax.lax.dynamic_slice_in_dim(x, i * width, width, axis=1)
  write = lambda x, new, i: jax.lax.dynamic_update_slice_in_dim(
    x, new, i * width, axis=1
  )

  def body(i, found):
    new = function(*jax.tree.map(lambda x: cut(x, i), args))
    return jax.tree.map(lambda x, y: write(x, y, i), found, new)

  is_any = jnp.any(drafts.is_learned, axis=0)
  end = jnp.max(jnp.where(is_any, jnp.arange(size) + 1, 0))
  zeros = lambda x: sharding.zeros(
    (batch, size + missing, *x.shape[2:]),
    x.dtype,
    'batch',
    *[None] * (x.ndim - 1),
  )
  nothing = jax.tree.map(zeros, jax.eval_shape(function, vectors, drafts))
  found = jax.lax.fori_loop(0, -(-end // width), body, nothing)
  return jax.tree.map(lambda x: x[:, :size], found)


def _num_logits():
  """Returns how many logits are in memory at once, in float32.

  On a CPU 16 MiB, which mostly fits its caches. An accelerator wants many rows
  in a product, and pays for every turn of the loop: 256 MiB.
  """
  return 2**22 if jax.default_backend() == 'cpu' else 2**26
