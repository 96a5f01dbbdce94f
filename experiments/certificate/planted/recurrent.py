"""Mistakes in how a recurrent layer's state forgets rejected drafts.

Most of them were made by engines that decode hybrids of attention and gated
delta networks with drafts.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.certificate.planted import loop
from experiments.certificate.planted.detectors import Reading
from specsample import testing
from specsample.models import gated_delta
from specsample.types import Params

_MODEL = dataclasses.replace(
  testing.tiny_llama(vocab_size=16, num_layers=2),
  delta=gated_delta.Delta(
    layers=(0,), num_key_heads=2, num_value_heads=4, key_dim=4, value_dim=4
  ),
)
# Float32 rounds the hidden vectors of the shipped code by less.
_ROUNDING = 1e-4


@functools.cache
def _params() -> Params:
  params = _MODEL.init(jax.random.key(0))
  return testing.with_noise(params, jax.random.key(1), 0.5)


# What is kept of a draft for three rows, and the draft's parents. A row that is
# done keeps nothing, others some nodes or as many as they can.
_SCENES = (
  (((), (0, 1), (0, 1, 2, 3, 4)), None),
  (((0,), (0, 1, 2, 3), ()), None),
  (((), (0, 2, 4), (0, 1)), (0, 0, 1, 2)),
)


def _after(scene, params, texts, lengths, drafts, following):
  """Returns the hidden vectors [3, n, D] of `following` [3, n]."""
  kept, parents = scene
  num_rows, path = len(lengths), None
  if parents is not None:
    parents = jnp.asarray([parents] * num_rows, jnp.int32)
    width = drafts.shape[1]
    padded = [[*path] + [0] * (width - len(path)) for path in kept]
    path = lengths[:, None] + np.asarray(padded)
  _, cache = _MODEL.apply(params, texts, _MODEL.init_cache(num_rows, 32))
  cache = _MODEL.commit(cache, lengths)
  _, cache = _MODEL.apply(params, drafts, cache, parents=parents)
  counts = np.asarray([len(path) for path in kept])
  cache = _MODEL.commit(cache, lengths + counts, path)
  return _MODEL.apply(params, following, cache)[0].hidden


def _expected(scene, params, texts, lengths, drafts, following):
  """Returns the same from a pass over each row's text, without a cache."""
  rows = []
  for row, path in enumerate(scene[0]):
    text = texts[row, : lengths[row]], drafts[row, list(path)], following[row]
    joined = jnp.asarray(np.concatenate(text)[None])
    output, _ = _MODEL.apply(params, joined, _MODEL.init_cache(1, 0))
    rows.append(output.hidden[0, -following.shape[1] :])
  return np.stack(rows)


@functools.cache
def rejected(
  mistake: Callable[[], contextlib.AbstractContextManager] = (
    contextlib.nullcontext
  ),
) -> Reading:
  """Returns how far passes after rejected drafts are from the text alone.

  It is the largest difference of a hidden vector.
  """
  rng = np.random.default_rng(0)
  draw = lambda width: rng.integers(16, size=(3, width), dtype=np.int32)
  given = _params(), draw(6), np.asarray([6, 1, 4]), draw(5), draw(4)
  errors = []
  for scene in _SCENES:
    with mistake():
      # Traced anew, because the mistake is part of the program.
      found = jax.jit(lambda *given, scene=scene: _after(scene, *given))(*given)
    errors.append(np.abs(found - _expected(scene, *given)).max())
  return Reading(
    float(max(errors)),
    _ROUNDING,
    'hidden vectors after rejected drafts, against those of the text alone',
  )


def _committing(change):
  """Returns a mistake in what a commit does.

  `change` is called in place of the library's function, which it gets first.
  """

  def mistake():
    return loop.replaced(
      gated_delta, '_commit', functools.partial(change, gated_delta._commit)
    )

  return mistake


@_committing
def keeps_all_in_the_state(shipped, state, log, count):
  """Leaves the rejected drafts in the state, and drops them from the tail."""
  everything = jnp.full_like(count, log.decays.shape[1])
  whole = shipped(state, log, everything)
  tail = shipped(state, log, count).tail
  return dataclasses.replace(whole, tail=tail)


@_committing
def keeps_all_in_the_tail(shipped, state, log, count):
  """Leaves the rejected drafts among the inputs of the convolution."""
  everything = jnp.full_like(count, log.decays.shape[1])
  whole = shipped(state, log, everything)
  return dataclasses.replace(shipped(state, log, count), tail=whole.tail)


@_committing
def keeps_at_least_one(shipped, state, log, count):
  """Takes it for granted that a row keeps its pending token."""
  return shipped(state, log, jnp.maximum(count, 1))


@_committing
def keeps_at_most_three(shipped, state, log, count):
  """Rolls the state forward by no more tokens than the convolution sees."""
  made = shipped(state, log, count)
  most = state.tail.key.shape[1]
  memory = shipped(state, log, jnp.minimum(count, most)).memory
  return dataclasses.replace(made, memory=memory)


@_committing
def stale_without_drafts(shipped, state, log, count):
  """Reads the old state after a round that kept one token alone."""
  made = shipped(state, log, count)
  choose = lambda old, new: jnp.where(
    (count == 1).reshape(-1, *[1] * (new.ndim - 1)), old, new
  )
  return jax.tree.map(choose, state, made)


@_committing
def logs_of_the_row_beside(shipped, state, log, count):
  """Folds the log of the row before into each row, as a bad index would."""
  beside = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), log)
  return shipped(state, beside, count)


def first_nodes():
  """Folds a tree's first nodes into the state, not the accepted path."""
  shipped = gated_delta.commit
  return loop.replaced(
    gated_delta,
    'commit',
    lambda state, log, count, nodes: shipped(state, log, count),
  )


@_committing
def rounded_state(shipped, state, log, count):
  """Keeps the state in bfloat16."""
  made = shipped(state, log, count)
  memory = made.memory.astype(jnp.bfloat16).astype(jnp.float32)
  return dataclasses.replace(made, memory=memory)


def sees_siblings():
  """Lets the nodes of a tree follow each other as in a chain."""
  shipped = gated_delta.order
  return loop.replaced(
    gated_delta,
    'order',
    lambda batch, num_new, parents: shipped(batch, num_new, None),
  )


# By the names that the certificate has.
MISTAKES = {
  'rejected drafts left in a recurrent state': keeps_all_in_the_state,
  "rejected drafts left in a convolution's tail": keeps_all_in_the_tail,
  'a recurrent state that always keeps the pending token': keeps_at_least_one,
  'a recurrent state rolled forward by at most three tokens': (
    keeps_at_most_three
  ),
  'the old state read after a round that kept no draft': stale_without_drafts,
  'the log of the row beside folded into a recurrent state': (
    logs_of_the_row_beside
  ),
  "a tree's first nodes folded into a recurrent state": first_nodes,
  'a recurrent state that passes through the siblings of a node': sees_siblings,
  'a recurrent state rounded to bfloat16': rounded_state,
}
