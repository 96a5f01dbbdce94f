"""Drafts of a `FeatureChain` behind every prefix of a text at once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample.drafters import feature_chain
from specsample.types import Array, Params


def outputs(
  drafter: feature_chain.FeatureChain,
  params: Params,
  tokens: Array,
  features: Array,
  num_steps: int,
  pick: Callable[[Array], Array] = lambda x: x,
) -> list[Array]:
  """What decoding would have behind every prefix, if all drafts were right.

  Args:
    drafter: whose modules are run.
    params: the whole tree.
    tokens: [B, T].
    features: [B, T, D], from `drafter.features`.
    num_steps: n.
    pick: takes the places that drafts are wanted at, [B, A, ...] of [B, T,
      ...]; by default all. What lies behind T is 0 there.

  Returns:
    n of [B, A, D]. At place t, number i is of the entry of token t + i, made
    of features up to token t and of outputs behind it; `drafter.vectors` of it
    are for token t + i + 2. Where tokens run out it is of zeros.
  """
  batch, size = tokens.shape
  embedded = drafter.model.embed(params['target'], tokens)
  empty = drafter.empty_cache(batch, 0, features.dtype)
  keys, values = empty.keys[0], empty.values[0]
  roots = jnp.broadcast_to(jnp.arange(size), (batch, size))
  roots = sharding.constrain(roots, 'batch', None)
  end = min(drafter.num_modules, num_steps) - 1
  modules = drafter.modules(params)
  found = []
  for i in range(num_steps):
    # Drafts of the last module follow drafts of its own.
    step = max(0, i - end)
    mask = _step_mask(step, roots, size, drafter.window)
    behind = _behind(embedded, i + 1)
    rows, new_keys, new_values = modules[min(i, end)](
      _rows(pick(behind) if step else behind),
      _rows(features),
      drafter.rope(roots + step),
      sharding.constrain(mask, 'batch', None, None),
      keys,
      values,
    )
    features = rows.reshape(features.shape)
    if i >= end:
      keys, values = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves, axis=2),
        (keys, values),
        (new_keys, new_values),
      )
    if i == end:
      # Every entry is seen by those behind it, those picked go on.
      features, roots = pick(features), pick(roots)
    found.append(features if i >= end else pick(features))
  return found


def _step_mask(step: int, roots: Array, size: int, window: int | None) -> Array:
  """What the entries of a step see [B, A, T + step * A], by their roots [B, A].

  The root is the last token whose feature was the target's. Of the first step
  an entry sees those up to its root, of every later one that of its root.
  """
  ahead = jnp.arange(size) - roots[..., None]
  near = lambda back: True if window is None else back < window
  own = jnp.broadcast_to(
    jnp.eye(roots.shape[1], dtype=bool), (*roots.shape, roots.shape[1])
  )
  own = sharding.constrain(own, 'batch', None, None)
  seen = [(ahead <= 0) & near(step - ahead)]
  seen += [own & near(step - i) for i in range(1, step + 1)]
  return jnp.concatenate(seen, axis=2)


def _behind(x, count):
  return jnp.pad(x, ((0, 0), (0, count), (0, 0)))[:, count:]


def _rows(x):
  return x.reshape(-1, x.shape[-1])
