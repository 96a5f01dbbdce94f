"""What drafters share that read the target's last hidden vectors.

Head i, from 0, proposes the token i + 1 places behind the pending one, from
the hidden vector of the token before the pending one: the pending token has not
been through the target yet.
"""

import abc
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import checks
from specsample import sharding
from specsample import types
from specsample.drafters import pausable
from specsample.drafters import settings
from specsample.drafters import trainable
from specsample.drafters import vocabulary as vocabulary_lib
from specsample.models import int8
from specsample.models import layers
from specsample.models import matrices
from specsample.types import Array, Params


@types.pytree
class HeadsState:
  """What the heads read of the tokens before the pending one."""

  hidden: Array  # [B, D], of the last of them; 0 where there is none
  length: Array  # [B] int32, how many they are
  cache: types.Cache = None  # of a prefix layer


class ResidualBlock(nnx.Module):
  """x + SiLU(linear(x)), at first the identity; the output is divided."""

  def __init__(self, dim: int):
    self.width = sharding.Axis('mlp', dim)
    self.linear = layers.Linear(
      dim, dim, axes=(None, self.width), bias=True, keys=None, dtype=jnp.float32
    )

  def __call__(self, x: Array) -> Array:
    added = jax.nn.silu(self.linear(sharding.constrain(x, 'batch', None)))
    return sharding.constrain(x, 'batch', self.width) + added


class Projection(nnx.Module):
  """A linear map of a divided input, at first the identity.

  Published heads have an unembedding [D, V] of their own each; here they share
  the target's, behind a map [D, D] of their own. Without it, all that a head
  could add to the hidden vector would be SiLU's, which is never below -0.28.
  """

  def __init__(self, dim: int):
    width = sharding.Axis('mlp', dim)
    self.linear = layers.Linear(
      dim, dim, axes=(width, None), keys=None, dtype=jnp.float32
    )
    self.linear.kernel = nnx.Param(jnp.eye(dim), axes=(width, None))

  def __call__(self, x: Array) -> Array:
    return self.linear(x)


class Unembedding(nnx.Module):
  """Logits [n, V] of rows [n, D], for one head."""

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
  """The blocks that a head ends with, and a linear map.

  The map is an unembedding where the head has one of its own, and otherwise a
  `Projection` to what the target's reads.
  """

  def __init__(self, config: Any, num_blocks: int):
    dim = config.model.dim
    # Published heads apply one block again and again.
    num_kept = min(num_blocks, 1) if config.shares_blocks else num_blocks
    self.blocks = nnx.List([ResidualBlock(dim) for _ in range(num_kept)])
    self.order = tuple(i % num_kept for i in range(num_blocks))
    is_own = config.own_unembedding
    self.project = None if is_own else Projection(dim)
    self.unembed = Unembedding(dim, config.model.vocab_size) if is_own else None

  def finish(self, x: Array) -> Array:
    """What the unembedding reads, of rows [n, D]."""
    for i in self.order:
      x = self.blocks[i](x)
    return x if self.project is None else self.project(x)


def vocabulary(config: Any) -> vocabulary_lib.DraftVocabulary | None:
  """That of all heads, None where they draft all tokens."""
  return None if config.own_unembedding else vocabulary_lib.make(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads(pausable.NothingMissed, trainable.Trainable, abc.ABC):
  """The parts of `types.Drafter` that are the same for all kinds of heads.

  There is a head for each of the K tokens, of `num_layers` layers. The network
  holds them as `heads`. With `own_unembedding` each has one, and a bias.

  Attributes:
    shares_blocks: a head's layers, but for Hydra's first, are one.
  """

  num_layers: int = 1
  shares_blocks: bool = False

  def __post_init__(self):
    """Refuses heads without layers, and what `Trainable` refuses."""
    super().__post_init__()
    if not checks.is_count(self.num_layers):
      raise ValueError(
        f'num_layers is {self.num_layers!r}: a head has at least 1 layer'
      )
    settings.check_flag('shares_blocks', self.shares_blocks)
    if self.own_unembedding and self.draft_vocab_size is not None:
      raise ValueError(
        f'draft_vocab_size is {self.draft_vocab_size}, and heads with '
        'own_unembedding draft all tokens: leave one of the two out'
      )

  @abc.abstractmethod
  def vectors(
    self, params: Params, tokens: Array, hidden: Array
  ) -> list[Array]:
    """What the unembedding reads: K of [B, T, D], one for each head.

    Args:
      params: the whole tree.
      tokens: [B, T], which go on as the heads are to read them.
      hidden: [B, T, D], the target's, of all of them.

    Returns:
      Vectors [b, t] follow from hidden[b, : t + 1] and, for head i, from
      tokens[b, t + 1 : t + i + 2]; where those run out, from zeros.
    """

  def head_logits(self, params: Params, number: int, vectors: Array) -> Array:
    """Logits [..., V'] of vectors [..., D] of the head of that number."""
    unembed = self.merge(params).heads[number].unembed
    if unembed is None:
      return self.logits(params, vectors)
    rows = unembed(vectors.reshape(-1, vectors.shape[-1]))
    return rows.reshape(*vectors.shape[:-1], -1)

  def init(self, params, batch_size, max_length):
    """See `types.Drafter`."""
    del max_length
    dtype = int8.dtype_of(self.own(params)['heads'])
    return HeadsState(
      hidden=sharding.zeros((batch_size, self.model.dim), dtype, 'batch', None),
      length=sharding.zeros((batch_size,), jnp.int32, 'batch'),
    )

  def extend(self, params, tokens, count, output, state):
    """See `types.Drafter`."""
    del tokens
    return self._take_in(params, output.hidden, state.length + count, state)

  def update(self, params, tokens, length, output, verdict, state):
    """See `types.Drafter`."""
    del tokens, verdict
    return self._take_in(params, output.hidden, length - 1, state)

  def _take_in(self, params, hidden, length, state):
    del params
    check_dtype(hidden, state)
    return take_in(state, hidden, length)


def check_dtype(hidden: Array, state: HeadsState) -> None:
  """Raises ValueError unless target and heads compute in one dtype."""
  if hidden.dtype != state.hidden.dtype:
    raise ValueError(
      f'the target computes in {hidden.dtype} and the weights of the heads are '
      f'{state.hidden.dtype}: load both with one dtype'
    )


def take_in(state: HeadsState, hidden: Array, length: Array) -> HeadsState:
  """Moves the state on by vectors [B, T, D] behind those that it has.

  Args:
    state: of `state.length` tokens.
    hidden: of the tokens from there on.
    length: [B] int32, tokens of the new state.
  """
  count = (length - state.length)[:, None, None]
  last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0), axis=1)
  return dataclasses.replace(
    state,
    hidden=jnp.where(count > 0, last, state.hidden[:, None])[:, 0],
    length=length,
  )
