"""What drafters share that read the target's last hidden vectors.

Head i, from 0, proposes the token i + 1 places behind the pending one, from
the hidden vector of the token before the pending one: the pending token has not
been through the target yet.
"""

import abc
import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.drafters import settings
from specsample.drafters import trainable
from specsample.models import layers
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads(trainable.Trainable, abc.ABC):
  """The parts of `types.Drafter` that are the same for all kinds of heads.

  There is a head for each of the K tokens, of `num_layers` layers. The network
  holds them as `heads`.
  """

  num_layers: int = 1

  def __post_init__(self):
    """Refuses heads without layers, and what `Trainable` refuses."""
    super().__post_init__()
    if not settings.is_count(self.num_layers):
      raise ValueError(
        f'num_layers is {self.num_layers!r}: a head has at least 1 layer'
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

  def init(self, params, batch_size, max_length):
    """See `types.Drafter`."""
    del max_length
    dtype = jax.tree.leaves(self.own(params)['heads'])[0].dtype
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
