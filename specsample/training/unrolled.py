"""Drafts of a `FeatureChain` after every prefix of a text, all at once."""

import functools

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample.drafters import feature_chain
from specsample.models import attention
from specsample.models import int8
from specsample.training import rows as rows_lib
from specsample.training.step import Batch
from specsample.types import Array, Params


def outputs(
  drafter: feature_chain.FeatureChain,
  params: Params,
  batch: Batch,
  features: Array,
  num_steps: int,
) -> list[Array]:
  """Returns the outputs after every prefix, as if all drafts were right.

  Args:
    drafter: the drafter whose modules are run.
    params: the whole tree.
    batch: `tokens` [B, T], `starts` if it is packed, and `places` [B, A] to
      draft at; all by default.
    features: [B, T, D], from `drafter.features`.
    num_steps: n.

  Returns:
    n arrays [B, A, D], equal to the outputs in decoding. At place t, array i is
    the output of the entry of token t + 1 + i, computed from features up to
    token t and from outputs after it; its `drafter.vectors` are for token
    t + i + 2. Where tokens run out, zeros replace them.
  """
  num_rows, size = batch['tokens'].shape
  pick = lambda x: rows_lib.crop(batch, x)
  embedded = drafter.model.embed(params['target'], batch['tokens'])
  empty = drafter.empty_cache(num_rows, 0, features.dtype)
  roots = jnp.broadcast_to(jnp.arange(size), (num_rows, size))
  roots = sharding.constrain(roots, 'batch', None)
  begins = rows_lib.begins(batch)
  end = min(drafter.num_modules, num_steps) - 1
  modules = drafter.modules(params)
  found = []
  for i in range(end + 1):
    entries = (
      _rows(rows_lib.behind(embedded, i + 1)),
      _rows(features),
      drafter.shape.rope(roots - begins, drafter.window),
      _known_mask(0, roots, begins, size, drafter.window),
      empty.keys[0],
      empty.values[0],
    )
    rows, keys, values = modules[i](*entries)
    if i < end:
      features = rows.reshape(features.shape)
      found.append(pick(features))
  # All later entries see the last module's entries, but only picked ones go on:
  # for the others, the compiler drops everything except keys and values.
  features, roots, begins = map(pick, (features, roots, begins))
  leaves: tuple[tuple, ...] = ((keys,), (values,))
  for step in range(num_steps - end):
    rows, *new = modules[end](
      _rows(pick(rows_lib.behind(embedded, end + 1 + step))),
      _rows(features),
      drafter.shape.rope(roots - begins + step, drafter.window),
      _known_mask(step, roots, begins, size, drafter.window),
      *leaves,
      functools.partial(_attend, sees_new=step > 0),
    )
    features = rows.reshape(features.shape)
    found.append(features)
    if step:
      leaves = tuple((*old, x) for old, x in zip(leaves, new, strict=True))
    if drafter.window is not None:
      # An entry sees the window - 1 entries before it.
      first = max(1, len(leaves[0]) - max(drafter.window - 1, 0))
      leaves = tuple((old[0], *old[first:]) for old in leaves)
  return found


def _known_mask(
  step: int, roots: Array, begins: Array, size: int, window: int | None
) -> Array:
  """Returns which of the first T entries the entries of a step see, [B, A, T].

  They see the entries of their dialogue, which begins at `begins` [B, A], up to
  their root [B, A], the last token whose feature was the target's. (Only
  entries with the same root see those made after it.)
  """
  entries = jnp.arange(size)
  ahead = entries - roots[..., None]
  seen = (ahead <= 0) & (entries >= begins[..., None])
  if window is not None:
    seen &= step - ahead < window
  return sharding.constrain(seen, 'batch', None, None)


def _attend(
  query: Array,
  mask: Array,
  keys: tuple,
  values: tuple,
  softcap: float | None = None,
  sinks: Array | None = None,
  *,
  sees_new: bool,
) -> Array:
  """Attends to the first entries, and to the later entries of the same root.

  Like `attention.attend`, but the cache is a tuple: the first T entries
  [B, H, T, D], and an array [B, H, A, D] for each later step. Only query a sees
  entry a of a later step, so its scores are an elementwise product of
  [A, D] with [A, D], where a mask would need the product of [A, D] with [D, A].

  Args:
    query: [B, H, G * A, D].
    mask: [B, A, T], for the first entries.
    keys, values: the cache, and the new entries of this step.
    softcap, sinks: see `attention.attend`.
    sees_new: whether to attend to the new entries too; False in the first step,
      where they are among the first entries.
  """
  (first, *own), new = keys
  (first_values, *own_values), new_values = values
  if sees_new:
    own, own_values = [*own, new], [*own_values, new_values]
  group = query.shape[2] // mask.shape[1]
  tile = lambda x: jnp.tile(x, (1, 1, group, 1))
  wide = query.astype(jnp.float32)
  capped = functools.partial(attention.capped, softcap=softcap)
  # Joined, the two parts would be copied, and their last axis of more than T
  # entries could not be divided evenly over devices.
  scores = capped(int8.scores(query, first))
  scores = jnp.where(jnp.tile(mask, (1, group, 1))[:, None], scores, -1e30)
  of_own = [
    capped(jnp.sum(wide * tile(x), axis=-1, keepdims=True)) for x in own
  ]
  highest = jnp.max(scores, axis=-1, keepdims=True)
  if sinks is not None:
    sinks = sinks.astype(jnp.float32)[None, :, :, None]
    of_own.append(jnp.broadcast_to(sinks, highest.shape))
  highest = functools.reduce(jnp.maximum, [highest, *of_own])
  highest = jax.lax.stop_gradient(highest)
  weights, *of_own = (jnp.exp(x - highest) for x in (scores, *of_own))
  total = jnp.sum(weights, axis=-1, keepdims=True) + sum(of_own)
  mixed = int8.mix(weights, first_values, query.dtype)
  # A sink has no value.
  for weight, x in zip(of_own, own_values, strict=False):
    mixed += weight * tile(x)
  return mixed / total


def _rows(x):
  return x.reshape(-1, x.shape[-1])
