"""Float64 tables of the distribution after every string of tokens.

The strings of t tokens are indexed in lexicographic order, 0 .. V^t - 1; they
follow a fixed prompt.
"""

from collections.abc import Callable
import functools

import jax
import numpy as np

from specsample import sampling as sampling_lib
from specsample import types
from specsample.sampling import Sampling
from specsample.testing import precision
from specsample.tree import Topology
from specsample.types import Array, Model, Params, TokenCounts

# conditional(t, committed) -> [V^t, V] float64: the distribution after every
# string of t tokens, of which the first `committed` were emitted in earlier
# rounds and the others are draft tokens of this one.
Conditional = Callable[[int, int], np.ndarray]
# logits(t) -> [V^t, V]: a model's logits after every string of t tokens.
Logits = Callable[[int], np.ndarray]
# A function with the arguments and the result of `sampling.warp`.
Warp = Callable[[Sampling, TokenCounts | None, Array, Array], Array]

_BLOCK = 2048  # rows per compiled call; a fixed shape compiles only once


def strings(vocab_size: int, length: int) -> np.ndarray:
  """Returns all strings [V^length, length] int32, in lexicographic order."""
  number = np.arange(vocab_size**length)[:, None]
  place = vocab_size ** np.arange(length - 1, -1, -1)
  return (number // place % vocab_size).astype(np.int32)


def index(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
  """Returns the index [...] of strings of tokens [..., t]; -1 reads as 0."""
  place = vocab_size ** np.arange(tokens.shape[-1] - 1, -1, -1)
  return np.maximum(tokens, 0) @ place.astype(np.int64)


def at_nodes(
  conditional: Conditional, t: int, tokens: np.ndarray, topology: Topology
) -> np.ndarray:
  """Returns the distributions [n, D, N + 1, V] after the nodes of trees.

  Args:
    conditional: the tables.
    t: the length of the n strings that the trees follow, n = V^t.
    tokens: [n, D, N] int32; -1 reads as token 0.
    topology: the shape of the trees.
  """
  count = len(tokens)
  # The index of each node's string, including the string that the tree follows.
  string = [np.broadcast_to(np.arange(count)[:, None], tokens.shape[:2])]
  vocab_size = conditional(t, t).shape[-1]
  for i, parent in enumerate(topology.parents):
    drafted = np.maximum(tokens[..., i], 0)
    string.append(string[parent] * vocab_size + drafted)
  depths = (0, *topology.depths)
  rows = [
    conditional(t + depth, t)[index]
    for depth, index in zip(depths, string, strict=True)
  ]
  return np.stack(rows, axis=2)


def from_model(
  model: Model,
  params: Params,
  prompt: tuple[int, ...],
  sampling: Sampling = Sampling(temperature=1.0),
) -> Conditional:
  """Returns the distributions that `sampling` gives for a model's logits.

  Args:
    model: any model.
    params: its own tree (what params['target'] holds).
    prompt: at least one token.
    sampling: scalar settings, except for the bias [V].
  """
  return from_logits(logits_after(model, params, prompt), prompt, sampling)


def logits_after(
  model: Model, params: Params, prompt: tuple[int, ...]
) -> Logits:
  """Returns a model's logits after the prompt and every string.

  They have the model's own precision. Each table is computed once.
  """
  return functools.cache(lambda t: _logits_after_all(model, params, prompt, t))


def from_logits(
  logits: Logits,
  prompt: tuple[int, ...],
  sampling: Sampling,
  by: Warp = sampling_lib.warp,
) -> Conditional:
  """Returns the distributions that `sampling` gives for logits, in float64.

  Penalties and a constraint take committed tokens and draft tokens separately,
  as `decode` does.

  Args:
    logits: from `logits_after` with the same prompt.
    prompt: at least one token.
    sampling: scalar settings, except for the bias [V].
    by: the function that applies the settings.
  """

  @functools.cache
  def conditional(t, committed):
    table = logits(t).astype(np.float64)
    vocab_size = table.shape[1]
    emitted, drafted = np.split(strings(vocab_size, t), [committed], axis=1)
    in_prompt, generated = None, None
    if sampling.penalised:
      counts = count_tokens(prompt, emitted, vocab_size)
      in_prompt, generated = counts.prompt, counts.generated
    # Where the tokens do not matter, they would only add a new shape.
    if sampling.constraint is None:
      emitted = emitted[:, :0]
      drafted = drafted if sampling.penalised else drafted[:, :0]
    missing = -emitted.shape[1] % 16
    emitted = np.pad(emitted, ((0, 0), (missing, 0)), constant_values=-1)
    drafted = np.pad(drafted, ((0, 0), (1, 0)), constant_values=-1)
    with precision.float64():
      return in_blocks(
        lambda *rows: _warp_block(by, sampling, in_prompt, rows),
        (generated, table, emitted, drafted),
      )

  if sampling.penalised or sampling.constraint is not None:
    return conditional
  return lambda t, committed: conditional(t, t)


def ending(conditional: Conditional, eos_id: int) -> Conditional:
  """Returns the same distributions, but only `eos_id` can follow `eos_id`."""

  def ended(t, committed):
    table = conditional(t, committed)
    vocab_size = table.shape[-1]
    is_over = (strings(vocab_size, t) == eos_id).any(axis=1, keepdims=True)
    return np.where(is_over, np.eye(vocab_size)[eos_id], table)

  return ended


def joint_law(conditional: Conditional, length: int) -> np.ndarray:
  """Returns the law [V^length] of the first `length` plainly sampled tokens."""
  law = np.ones(1)
  for t in range(length):
    law = (law[:, None] * conditional(t, t)).reshape(-1)
  return law


def total_variation(law: np.ndarray, other: np.ndarray) -> float:
  """Returns the largest difference in any event's probability, in [0, 1]."""
  return float(np.abs(law - other).sum() / 2)


def count_tokens(
  prompt: tuple[int, ...], generated: np.ndarray, vocab_size: int
) -> TokenCounts:
  """Returns penalty counts: prompt [V], and [n, V] of generated [n, t]."""
  count = lambda tokens: (
    np.asarray(tokens)[..., None] == np.arange(vocab_size)
  ).sum(axis=-2)
  return TokenCounts(prompt=count(prompt), generated=count(generated))


def in_blocks(function, arrays):
  """Computes function(*arrays) for arrays [n, ...] in calls of a fixed size."""
  leaves, tree = jax.tree.flatten(arrays)
  size = len(leaves[0])
  results = []
  for start in range(0, size, _BLOCK):
    block = [leaf[start : start + _BLOCK] for leaf in leaves]
    pad = _BLOCK - len(block[0])
    block = [np.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1)) for x in block]
    results.append(jax.device_get(function(*jax.tree.unflatten(tree, block))))
  return jax.tree.map(lambda *x: np.concatenate(x)[:size], *results)


@functools.partial(jax.jit, static_argnums=0)
def _warp_block(by, sampling, prompt, rows):
  def row(generated, logits, emitted, drafted):
    counts = None
    if generated is not None:
      counts = types.TokenCounts(prompt=prompt, generated=generated)
    now = sampling_lib.after(sampling, emitted)
    return by(now, counts, logits, drafted)

  return jax.vmap(row)(*rows)


def _logits_after_all(model, params, prompt, t):
  tokens = strings(model.vocab_size, t)
  head = np.broadcast_to(np.asarray(prompt), (len(tokens), len(prompt)))
  tokens = np.concatenate([head, tokens], axis=1).astype(np.int32)
  last = tokens.shape[1] - 1
  # Padding after a token does not change its logits.
  width = -(-tokens.shape[1] // 16) * 16
  padded = np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
  return in_blocks(
    lambda rows: _last_logits(model, params, rows, last), (padded,)
  )


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(model, params, tokens, last):
  cache = model.init_cache(*tokens.shape)
  output, _ = model.apply(params, tokens, cache)
  return output.logits[:, last]
