"""Shared parts of drafters that read the target's last hidden vectors.

Head i (from 0) proposes the token i + 1 places after the pending one. It reads
the hidden vector of the token before the pending one, because the pending token
has not been through the target yet.
"""

import abc
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample import types
from specsample.drafters import fields
from specsample.drafters import parts
from specsample.drafters import trainable
from specsample.drafters import vocabulary as vocabulary_lib
from specsample.models import int8
from specsample.models import matrices
from specsample.types import Array, Params


@types.pytree
class HeadsState:
  """The heads' view of the tokens before the pending one."""

  hidden: Array  # [B, D], of the last of those tokens; 0 if there is none
  length: Array  # [B] int32, the number of those tokens
  cache: types.Cache = None  # the prefix layer's, if there is one


class ResidualBlock(nnx.Module):
  """x + SiLU(linear(x)), initially the identity; the output is sharded."""

  def __init__(self, dim: int):
    self.width = sharding.Axis('mlp', dim)
    self.linear = parts.linear(dim, dim, None, (None, self.width), bias=True)

  def __call__(self, x: Array) -> Array:
    added = jax.nn.silu(self.linear(sharding.constrain(x, 'batch', None)))
    return sharding.constrain(x, 'batch', self.width) + added


class Projection(nnx.Module):
  """A linear map of a sharded input, initially the identity.

  Published heads each have an unembedding [D, V]. Here they share the target's,
  each after a map [D, D] of its own. Without that map, a head could only add
  SiLU's outputs to the hidden vector, and those are never below -0.28.
  """

  def __init__(self, dim: int):
    width = sharding.Axis('mlp', dim)
    self.linear = parts.linear(dim, dim, None, (width, None))
    self.linear.kernel = nnx.Param(jnp.eye(dim), axes=(width, None))

  def __call__(self, x: Array) -> Array:
    return self.linear(x)


class Unembedding(nnx.Module):
  """The unembedding of one head: logits [n, V] of rows [n, D]."""

  def __init__(self, dim: int, vocab_size: int):
    self.axis = sharding.Axis('vocab', vocab_size)
    self.kernel = nnx.Param(
      jnp.zeros((dim, vocab_size)), axes=(None, self.axis)
    )
    self.bias = nnx.Param(jnp.zeros(vocab_size), axes=(self.axis,))

  def __call__(self, rows: Array) -> Array:
    logits = matrices.product(
      rows, self.kernel.get_value(), ('batch', self.axis), jnp.float32
    )
    return logits + self.bias[...].astype(jnp.float32)


class Head(nnx.Module):
  """The final blocks of a head, followed by a linear map.

  The map is the head's own unembedding if it has one, and otherwise a
  `Projection` to the input of the target's.
  """

  def __init__(self, config: Any, num_blocks: int):
    dim = config.model.dim
    # Published heads apply a single block repeatedly.
    num_kept = min(num_blocks, 1) if config.shares_blocks else num_blocks
    self.blocks = nnx.List([ResidualBlock(dim) for _ in range(num_kept)])
    self.order = tuple(i % num_kept for i in range(num_blocks))
    is_own = config.own_unembedding
    self.project = None if is_own else Projection(dim)
    self.unembed = Unembedding(dim, config.model.vocab_size) if is_own else None

  def finish(self, x: Array) -> Array:
    """Maps rows [n, D] to the unembedding's inputs."""
    for i in self.order:
      x = self.blocks[i](x)
    return x if self.project is None else self.project(x)


def vocabulary(config: Any) -> vocabulary_lib.DraftVocabulary | None:
  """Returns the vocabulary of all heads; None if they draft all tokens."""
  return None if config.own_unembedding else vocabulary_lib.make(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads(trainable.Trainable, abc.ABC):
  """The parts of `Drafter` that all kinds of heads share.

  There is one head per draft token, K in all, each of `num_layers` layers. The
  network holds them as `heads`. With `own_unembedding` each head has an
  unembedding of its own, with a bias.

  Attributes:
    shares_blocks: whether a head's layers share one set of weights, except for
      Hydra's first layer.
  """

  num_layers: settings.Count = 1
  shares_blocks: settings.Flag = False

  def _check(self):
    super()._check()
    if self.own_unembedding and self.draft_vocab_size is not None:
      raise ValueError(
        f'draft_vocab_size is {self.draft_vocab_size}, but heads with '
        'own_unembedding draft all tokens: leave one of the two out'
      )

  @property
  def reads_prompt(self) -> bool:
    return False

  @abc.abstractmethod
  def vectors(
    self,
    params: Params,
    tokens: Array,
    hidden: Array,
    begins: Array | None = None,
  ) -> list[Array]:
    """Returns the unembedding's inputs: K arrays [B, T, D], one per head.

    Args:
      params: the whole tree.
      tokens: [B, T], including the continuations that the heads read.
      hidden: [B, T, D], the target's hidden vectors at all of these tokens.
      begins: [B, T] int32, the place at which each token's dialogue begins; 0
        by default.

    Returns:
      Vectors [b, t] depend on hidden[b, begins[b, t] : t + 1] and, for head i,
      on tokens[b, t + 1 : t + i + 2]; zeros stand in for tokens past the end.
    """

  def head_logits(self, params: Params, number: int, vectors: Array) -> Array:
    """Returns logits [..., V'] of vectors [..., D] from head `number`."""
    unembed = self.merge(params).heads[number].unembed
    if unembed is None:
      return self.logits(params, vectors)
    rows = unembed(vectors.reshape(-1, vectors.shape[-1]))
    return rows.reshape(*vectors.shape[:-1], -1)

  def init(self, params, batch_size, max_length):
    del max_length
    dtype = int8.dtype_of(self.own(params))
    return HeadsState(
      hidden=sharding.zeros((batch_size, self.model.dim), dtype, 'batch', None),
      length=sharding.zeros((batch_size,), jnp.int32, 'batch'),
    )

  def observe(self, params, tokens, count, output, verdict, state):
    del params, tokens, verdict
    fields.check_dtype(output.hidden.dtype, state.hidden.dtype)
    return take_in(state, output.hidden, state.length + count)


def take_in(state: HeadsState, hidden: Array, length: Array) -> HeadsState:
  """Advances the state by hidden vectors [B, T, D].

  Args:
    state: covers `state.length` tokens.
    hidden: of the tokens that follow those.
    length: [B] int32, tokens that the new state covers.
  """
  count = (length - state.length)[:, None]
  last = indexing.at(hidden, jnp.maximum(count - 1, 0))[:, 0]
  hidden = jnp.where(count > 0, last, state.hidden)
  return dataclasses.replace(state, hidden=hidden, length=length)
