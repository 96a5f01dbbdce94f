"""The parts of published drafters in NumPy, and two rounds of a drafter.

Everything is for one sequence and in float64; weights are [out, in], as in the
files.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specsample.types import Verdict


def wide(x):
  return np.asarray(x, np.float64)


def linear(tensors, name, x):
  y = x @ wide(tensors[f'{name}.weight']).T
  bias = tensors.get(f'{name}.bias')
  return y if bias is None else y + wide(bias)


def silu(x):
  return x / (1 + np.exp(-x))


def norm(tensors, name, x, eps):
  scaled = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)
  return scaled * wide(tensors[f'{name}.weight'])


def mlp(tensors, name, x):
  gate = silu(linear(tensors, f'{name}.gate_proj', x))
  up = linear(tensors, f'{name}.up_proj', x)
  return linear(tensors, f'{name}.down_proj', gate * up)


def heads(x, head_dim):
  """Splits rows [T, H * size] into heads [H, T, size]."""
  return x.reshape(len(x), -1, head_dim).swapaxes(0, 1)


def rotate(x, positions, theta):
  """Rotates heads [H, T, size] to positions [T]."""
  half = x.shape[-1] // 2
  angles = positions[:, None] * theta ** (-np.arange(half) / half)
  first, second = x[..., :half], x[..., half:]
  cos, sin = np.cos(angles), np.sin(angles)
  return np.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


def attend(query, key, value, mask):
  """Returns the attention [T, H * size] of heads [H, T, size].

  `key` and `value` are [G, S, size], and the mask is [T, S].
  """
  mixed = []
  for i, of_head in enumerate(query):
    group = i * len(key) // len(query)
    scores = of_head @ key[group].T / np.sqrt(query.shape[-1])
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed.append(weights @ value[group] / weights.sum(axis=-1, keepdims=True))
  return np.concatenate(mixed, axis=-1)


def causal_attention(
  tensors, name, x, head_dim, theta, eps=1e-6, *, window=None
):
  """Applies self-attention to rows [T, D], from position 0 on.

  A row sees the last `window` rows, itself included; None for all.
  """
  positions = np.arange(len(x))
  of = lambda part: heads(linear(tensors, f'{name}.{part}_proj', x), head_dim)
  query, key, value = of('q'), of('k'), of('v')
  if f'{name}.q_norm.weight' in tensors:
    query = norm(tensors, f'{name}.q_norm', query, eps)
    key = norm(tensors, f'{name}.k_norm', key, eps)
  behind = positions[:, None] - positions
  mixed = attend(
    rotate(query, positions, theta),
    rotate(key, positions, theta),
    value,
    (behind >= 0) & (behind < (window or len(x))),
  )
  return linear(tensors, f'{name}.o_proj', mixed)


@dataclasses.dataclass(frozen=True)
class Round:
  """The tokens that a drafter drew after a text, and their logits."""

  text: list[int]
  drafts: list[int]
  logits: np.ndarray  # [K, V]
  hidden: np.ndarray  # [T - 1, D], the target's for all but the last token
  features: list[np.ndarray]  # as many rows, for each layer that is read


def two_rounds(loaded, target, prompt, kept, token):
  """Returns the drafts after a prompt, and after `kept` of them and `token`.

  Each draft is the third most likely token, so that an argmax would be noticed.
  """
  drafter, model = loaded.drafter, target.model
  params = {'target': target.params, 'drafter': loaded.params}
  layers = tuple(drafter.feature_layers)

  def row(text):
    tokens = np.zeros((1, 32), np.int32)
    tokens[0, : len(text)] = text
    return jnp.asarray(tokens), jnp.asarray([len(text)])

  @jax.jit
  def start(params, tokens):
    cache = model.init_cache(1, 32)
    output, cache = model.apply(params['target'], tokens, cache, layers)
    state = drafter.init(params, 1, 32)
    count = jnp.asarray([tokens.shape[1]])
    return drafter.observe(params, tokens, count, output, None, state), cache

  @jax.jit
  def propose(params, tokens, length, state):
    return drafter.propose(
      params,
      lambda logits, position: jnp.argsort(logits, axis=-1)[:, -3],
      lambda logits, drafted: logits,
      tokens,
      length,
      state,
    )

  @jax.jit
  def score(params, fed, cache):
    return model.apply(params['target'], fed, cache, layers)[0]

  @jax.jit
  def observe(params, fed, output, state):
    verdict = Verdict(
      num_accepted=jnp.asarray([kept]), next_token=jnp.asarray([token])
    )
    count = jnp.asarray([kept + 1])
    return drafter.observe(params, fed, count, output, verdict, state)

  def as_round(text, draft):
    whole = jnp.asarray(text[:-1])[None]
    output, _ = model.apply(
      target.params, whole, model.init_cache(1, 0), layers
    )
    return Round(
      text=text,
      drafts=np.asarray(draft.tokens[0]).tolist(),
      logits=wide(draft.probs[0]),
      hidden=wide(output.hidden[0]),
      features=[wide(x[0]) for x in output.features],
    )

  state, cache = start(params, jnp.asarray(prompt[:-1])[None])
  draft, state = propose(params, *row(prompt), state)
  first = as_round(prompt, draft)
  fed = jnp.asarray([[prompt[-1], *first.drafts]])
  output = score(params, fed, cache)
  text = [*prompt, *first.drafts[:kept], token]
  state = observe(params, fed, output, state)
  draft, _ = propose(params, *row(text), state)
  return first, as_round(text, draft)


def embedding(target):
  """Returns the embedding [V, D]."""
  return wide(target.params['embedding']).T


def unembedding(target):
  """Returns the unembedding [V, D]."""
  return wide(target.params['unembedding']).T


def as_published(model):
  """Returns random float32 parameters that bfloat16 holds exactly."""
  params = model.init(jax.random.key(0))
  return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)


def normal(rng, *shape):
  """Returns float32 numbers that bfloat16 holds, as weights are published."""
  x = rng.normal(0, shape[-1] ** -0.5, shape)
  return x.astype(jnp.bfloat16).astype(np.float32)
