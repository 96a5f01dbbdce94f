"""The gated delta rule: a state that each token decays and corrects.

Yang et al., 2412.06464. A token with key k, value v, log decay g <= 0 and rate
b changes the state S [dk, dv] to

  S <- e^g S,  u = b (v - S^T k),  S <- S + k u^T,

and reads S^T q. Chains and trees of tokens are computed by products, and no
state is stored per token.
"""

import functools

import jax
import jax.numpy as jnp

from specsample import types
from specsample.types import Array

# A longer chain is read in parts, because the products of a part grow with the
# square of its length.
_PART = 64
# A TPU would round the factors of a product to bfloat16, and the state with
# them: the errors of thousands of tokens add up in it.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@types.pytree
class Tokens:
  """The inputs of the recurrence for T tokens, in float32."""

  query: Array  # [B, T, H, dk], of norm dk^-1/2
  key: Array  # [B, T, H, dk], of norm 1
  value: Array  # [B, T, H, G, dv]
  rate: Array  # [B, T, H, G], b
  decay: Array  # [B, T, H, G], g


def run(
  memory: Array, tokens: Tokens, ancestors: Array | None
) -> tuple[Array, Array]:
  """Returns the outputs and u [B, T, H, G, dv] of tokens after a state.

  Args:
    memory: the state, [B, H, G, dk, dv] float32.
    tokens: T of each row.
    ancestors: of a tree, as for `attend`; None for a chain.
  """
  if ancestors is not None:
    return attend(memory, tokens, ancestors)
  batch, num_new = tokens.rate.shape[:2]
  if num_new <= _PART:
    return attend(memory, tokens, _chain(batch, num_new))
  return _by_parts(memory, tokens)


def attend(
  memory: Array, tokens: Tokens, ancestors: Array
) -> tuple[Array, Array]:
  """Runs the recurrence of a tree of tokens, or of a chain, as products.

  Yang et al., 2412.06464, section 3.3, where the tokens before a token are
  those on its path. With E_ij the decay from node j to node i, the u solve

    u_i + sum_j b_i E_ij (k_i k_j) u_j = b_i (v_i - decay_i S^T k_i).

  Args:
    memory: [B, H, G, dk, dv].
    tokens: T of each row.
    ancestors: [B, T, T] bool; nodes follow their parents.

  Returns:
    The outputs and u [B, T, H, G, dv].
  """
  num_new = ancestors.shape[-1]
  on_path = ancestors.astype(jnp.float32)
  rates, decays = (jnp.moveaxis(x, 1, -1) for x in (tokens.rate, tokens.decay))
  # Sums of the decays in between: the difference of two long sums would be
  # rounded as they are.
  of_path = on_path[:, None, None] * decays[..., None, :]
  between = _einsum('bhgim,bjm->bhgij', of_path, 1 - on_path)
  seen = ancestors[:, None, None]
  factor = jnp.where(seen, jnp.exp(between), 0)
  total = jnp.exp(jnp.sum(of_path, axis=-1))  # [B, H, G, T]
  # In one product, so that the state is read once.
  rows = jnp.concatenate([tokens.key, tokens.query], axis=1)
  read = _einsum('bihk,bhgkv->bhgiv', rows, memory)
  of_keys, of_queries = (
    total[..., None] * part for part in jnp.split(read, 2, axis=3)
  )
  alike = _einsum('bihk,bjhk->bhij', rows, tokens.key)[:, :, None]
  of_others = jnp.where(jnp.eye(num_new, dtype=bool), 0, factor)
  lower = rates[..., None] * of_others * alike[..., :num_new, :]
  left = rates[..., None] * (jnp.moveaxis(tokens.value, 1, 3) - of_keys)
  updates = _einsum('bhgij,bhgjv->bhgiv', _inverse(lower), left)
  weights = factor * alike[..., num_new:, :]
  mixed = of_queries + _einsum('bhgij,bhgjv->bhgiv', weights, updates)
  return jnp.moveaxis(mixed, 3, 1), jnp.moveaxis(updates, 3, 1)


def _chain(batch, num_new):
  return jnp.broadcast_to(
    jnp.tri(num_new, dtype=bool), (batch, num_new, num_new)
  )


def _inverse(lower):
  """Returns (I + lower)^-1 of strictly lower triangular matrices [..., n, n].

  Blocks on the diagonal are inverted, in pairs each twice as large as before:
  (A 0; C D)^-1 = (A^-1 0; -D^-1 C A^-1 D^-1). The sum of the powers of -lower
  takes as many products, but its terms grow like binomial coefficients if keys
  are alike, as those of a repeated token are, and nothing is left of float32.
  """
  place = jnp.arange(lower.shape[-1])
  found = jnp.broadcast_to(jnp.eye(len(place)), lower.shape)
  size = 1
  while size < len(place):
    block, pair = place // size, place // (2 * size)
    is_new = (block[:, None] != block) & (pair[:, None] == pair)
    new = jnp.where(is_new, lower, 0)
    if size > 1:
      new = _einsum('...ij,...jk,...kl->...il', found, new, found)
    found -= new
    size *= 2
  return found


def _by_parts(memory, tokens):
  """Runs `attend` over parts of a chain; the state goes from one to the next.

  Zeros fill the last part: such keys and decays change nothing.
  """
  batch, num_new = tokens.rate.shape[:2]
  num_parts = -(-num_new // _PART)

  def divided(x):
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, num_parts * _PART - num_new)
    parts = jnp.pad(x, padding).reshape(batch, num_parts, _PART, *x.shape[2:])
    return jnp.swapaxes(parts, 0, 1)

  def joined(parts):
    x = jnp.swapaxes(parts, 0, 1)
    return x.reshape(batch, -1, *x.shape[3:])[:, :num_new]

  def go_on(memory, part):
    mixed, updates = attend(memory, part, _chain(batch, _PART))
    memory = folded(memory, part.key, updates, part.decay)
    return memory, (mixed, updates)

  _, (mixed, updates) = jax.lax.scan(
    go_on, memory, jax.tree.map(divided, tokens)
  )
  return joined(mixed), joined(updates)


def folded(memory: Array, keys: Array, updates: Array, decays: Array) -> Array:
  """Returns the state after a path of tokens [B, n, ...], by one product."""
  num_new = decays.shape[1]
  is_later = jnp.tri(num_new, num_new, -1, dtype=jnp.float32).T
  after = jnp.exp(_einsum('jm,bmhg->bjhg', is_later, decays))
  new = _einsum('bjhk,bjhgv->bhgkv', keys, after[..., None] * updates)
  total = jnp.exp(jnp.sum(decays, axis=1))
  return total[..., None, None] * memory + new
