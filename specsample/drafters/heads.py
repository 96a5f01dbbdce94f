"""What drafters share that read the target's last hidden vectors.

Head i, from 0, proposes the token i + 1 places behind the pending one, from
the hidden vector of the token before the pending one: the pending token has not
been through the target yet.
"""

import abc
from collections.abc import Callable
import dataclasses
from typing import Any, ClassVar

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.drafters import settings
from specsample.drafters import vocabulary
from specsample.models import layers
from specsample.models import network
from specsample.types import Array, ArrayLike, Params


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
class Heads(abc.ABC):
  """The parts of `types.Drafter` that are the same for all kinds of heads.

  Attributes:
    model: the target.
    num_draft_tokens: K, a head for each.
    num_layers: of each head.
    draft_vocab_size: V' of a `vocabulary.DraftVocabulary`; None drafts all
      tokens, with the target's own unembedding.
  """

  model: Any
  num_draft_tokens: int
  num_layers: int = 1
  draft_vocab_size: int | None = None
  feature_layers = ()
  # Made of (self, keys); holds the heads and `vocabulary`, None for all tokens.
  _network: ClassVar[Callable[..., Any]]

  def __post_init__(self):
    """Refuses an empty draft, heads without layers and too many tokens."""
    settings.check_num_draft_tokens(self.num_draft_tokens)
    if not settings.is_count(self.num_layers):
      raise ValueError(
        f'num_layers is {self.num_layers!r}: a head has at least 1 layer'
      )
    size = self.draft_vocab_size
    if size is not None and not 1 <= size <= self.model.vocab_size:
      raise ValueError(
        f'draft_vocab_size is {size}: draft at least 1 and at most the '
        f"target's {self.model.vocab_size} tokens, None for all of them"
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

  @property
  def vocab_size(self) -> int:
    """The target's own."""
    return self.model.vocab_size

  def init_params(
    self,
    key: Array,
    target_params: Params = None,
    d2t: ArrayLike | None = None,
  ) -> Params:
    """Parameters before training, in float32.

    Args:
      key: a PRNG key.
      target_params, d2t: the draft vocabulary's, as `vocabulary.of_target`.

    Raises:
      ValueError: d2t is not of draft_vocab_size tokens of the target.
    """
    if (None if d2t is None else len(d2t)) != self.draft_vocab_size:
      raise ValueError(
        f'd2t names {d2t if d2t is None else len(d2t)} tokens and '
        f'draft_vocab_size is {self.draft_vocab_size}: name as many'
      )
    params = network.init(self._network, self, key)
    if d2t is not None:
      cut = vocabulary.of_target(self.model, target_params, d2t)
      params['vocabulary'] = cut
    return params

  def abstract_params(self) -> Params:
    """The parameters' shapes and dtypes, nothing allocated."""
    return network.abstract_params(self._network, self)

  def param_axes(self) -> Params:
    """The `sharding.Axes` of each parameter's axes, a tuple each."""
    return network.param_axes(self._network, self)

  def is_trained(self) -> Params:
    """Whether each parameter is trained, or a part of the target: bool."""
    return network.is_trained(self._network, self)

  def merge(self, params: Params) -> Any:
    """The network, given the whole tree of parameters."""
    if 'drafter' not in params:
      raise ValueError(
        f'params holds {sorted(params)}, and {type(self).__name__} reads '
        "params['drafter']: put the heads' parameters there"
      )
    return network.merge(self._network, self, params['drafter'])

  def logits(self, params: Params, vectors: Array) -> Array:
    """Logits [..., V'] (all V without a draft vocabulary) of [..., D]."""
    own = self.merge(params).vocabulary
    if own is None:
      return self.model.unembed(params['target'], vectors)
    rows = own(vectors.reshape(-1, vectors.shape[-1]))
    return rows.reshape(*vectors.shape[:-1], -1)

  def target_logits(self, params: Params, vectors: Array) -> Array:
    """Logits [..., V] of vectors [..., D]: -inf where nothing is drafted."""
    own = self.merge(params).vocabulary
    logits = self.logits(params, vectors)
    if own is None:
      return logits
    rows = own.to_target(logits.reshape(-1, logits.shape[-1]), self.vocab_size)
    return rows.reshape(*vectors.shape[:-1], -1)

  def of_drafted(self, params: Params, values: Array) -> Array:
    """The values [..., V'] of the tokens drafted, out of [..., V]."""
    own = self.merge(params).vocabulary
    return values if own is None else own.of_drafted(values)

  def draft_ids(self, params: Params, tokens: Array) -> tuple[Array, Array]:
    """Where tokens [...] are among those drafted, and whether they are."""
    own = self.merge(params).vocabulary
    if own is None:
      return tokens, jnp.ones_like(tokens, bool)
    return own.draft_ids(tokens, self.vocab_size)

  def init(self, params, batch_size, max_length):
    """See `types.Drafter`."""
    del max_length
    self.merge(params)  # says what is missing
    dtype = jax.tree.leaves(params['drafter']['heads'])[0].dtype
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
