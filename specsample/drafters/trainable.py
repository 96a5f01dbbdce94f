"""Shared parts of drafters that are trained for one target."""

import abc
from collections.abc import Callable
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specsample import checks
from specsample import settings
from specsample import sharding
from specsample.drafters import fields
from specsample.drafters import steps
from specsample.drafters import vocabulary
from specsample.models import network
from specsample.models import tensors
from specsample.types import Array, ArrayLike, Params


@dataclasses.dataclass(frozen=True)
class InDtype:
  """A drafter's parameters, in the dtype of its target.

  Indices and routers keep their own dtypes (see `models.experts`).
  """

  drafter: 'Trainable'

  def abstract_params(self) -> Params:
    """Returns the parameters' shapes and dtypes without allocating any."""
    dtype = jnp.dtype(self.drafter.model.dtype)

    def of(path, leaf):
      is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
      own = is_float and not tensors.is_of_router(tensors.key(path))
      return jax.ShapeDtypeStruct(leaf.shape, dtype if own else leaf.dtype)

    of_drafter = self.drafter.abstract_params()
    return jax.tree_util.tree_map_with_path(of, of_drafter)

  def param_axes(self) -> Params:
    """Returns the `sharding.Axes` of each parameter's axes, as tuples."""
    return self.drafter.param_axes()


class Learnable(steps.Steps):
  """The part of a drafter that a `training.objective.Objective` uses."""

  model: Any
  draft_vocab_size: int | None = None
  own_unembedding: bool = False
  layer_config: Any = None

  @property
  def vocab_size(self) -> int:
    """V of the model, which is the target's."""
    return self.model.vocab_size

  @property
  def reads_prompt(self) -> bool:
    """Whether drafts depend on more than the last two tokens."""
    return True

  @abc.abstractmethod
  def is_trained(self) -> Params:
    """Returns whether each parameter is trained: a tree of bool."""

  @abc.abstractmethod
  def logits(self, params: Params, vectors: Array) -> Array:
    """Returns logits [..., V'] of [..., D] (V without a draft vocabulary)."""

  @abc.abstractmethod
  def unembedding(self, params: Params) -> Params:
    """Returns the part of the whole tree that `logits` reads."""

  def draft_ids(self, params: Params, tokens: Array) -> tuple[Array, Array]:
    """Maps tokens [...] to draft ids; also says which have one."""
    del params
    return tokens, jnp.ones_like(tokens, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainable(Learnable):
  """A drafter with parameters of its own, besides those of its target.

  Attributes:
    model: the target.
    num_draft_tokens: K.
    draft_vocab_size: V' of a `vocabulary.DraftVocabulary`; None drafts all
      tokens.
    own_unembedding: whether logits come from an unembedding [D, V'] among the
      drafter's parameters, as in published drafters, instead of the target's.
      It is not trained here. Its logits are capped as the `logit_softcap` of a
      drafter's `layer_config` says, if there is one.
  """

  model: Any
  num_draft_tokens: fields.DraftLength
  draft_vocab_size: settings.Count | None = None
  own_unembedding: settings.Flag = False
  # Called with (self, keys); has a `vocabulary`, None for all tokens.
  _network: ClassVar[Callable[..., Any]]

  def _check(self):
    checks.model(self.model)
    size = self.draft_vocab_size
    if size is not None and size > self.model.vocab_size:
      raise ValueError(
        f'draft_vocab_size is {size}, but the target has '
        f'{self.model.vocab_size} tokens: give at most as many, or None for '
        'all of them'
      )

  @property
  def shape(self) -> Any:
    """The `models.transformer.Transformer` that gives the shape of layers."""
    return fields.plain_shape(self.layer_config or self.model)

  def _check_number(self, d2t):
    if (None if d2t is None else len(d2t)) != self.draft_vocab_size:
      found = 'is None' if d2t is None else f'names {len(d2t)} tokens'
      raise ValueError(
        f'd2t {found}, but draft_vocab_size is {self.draft_vocab_size}: give '
        'one id per token of the draft vocabulary, or None for both'
      )

  def init_params(
    self,
    key: Array,
    target_params: Params = None,
    d2t: ArrayLike | None = None,
  ) -> Params:
    """Returns untrained parameters in float32, sharded over the mesh.

    Args:
      key: a PRNG key.
      target_params: the target's, from which a draft vocabulary and a draft
        model are made.
      d2t: the tokens of the draft vocabulary; see `vocabulary.of_target`.

    Raises:
      ValueError: d2t does not name draft_vocab_size tokens of the target, the
        target's parameters are missing, or `own_unembedding` is set.
    """
    self._check_number(d2t)
    if d2t is not None and target_params is None:
      raise ValueError(
        'target_params is None, but d2t takes the draft vocabulary from the '
        "target's: give target_params"
      )
    if self.own_unembedding:
      raise ValueError(
        'own_unembedding is for drafters that were trained elsewhere: load '
        'such a drafter, or train with own_unembedding = False'
      )
    params = self._begin(key, target_params)
    if d2t is not None:
      cut = vocabulary.of_target(self.model, target_params, d2t)
      params['vocabulary'] = cut
    return sharding.place(params, self.param_axes())

  def _begin(self, key, target_params):
    """Returns the parameters without those of the vocabulary."""
    del target_params
    return network.init(self._network, self, key)

  def abstract_params(self) -> Params:
    """Returns the parameters' shapes and dtypes without allocating any."""
    return network.abstract_params(self._network, self)

  def param_axes(self) -> Params:
    """Returns the `sharding.Axes` of each parameter's axes, as tuples."""
    return network.param_axes(self._network, self)

  def is_trained(self) -> Params:
    """See `Learnable`.

    Parts of the target, such as the columns of a draft vocabulary, are not.
    """
    return network.is_trained(self._network, self)

  def merge(self, params: Params) -> Any:
    """Returns the network, given the whole tree of parameters."""
    return network.merge(self._network, self, self.own(params))

  def own(self, params: Params) -> Params:
    """Returns the drafter's part of the whole tree of parameters."""
    return fields.own(self, params)

  def logits(self, params, vectors):
    own = self.merge(params).vocabulary
    if own is None:
      return self.model.unembed(params['target'], vectors)
    rows = own(vectors.reshape(-1, vectors.shape[-1]))
    return rows.reshape(*vectors.shape[:-1], -1)

  def unembedding(self, params):
    """See `Learnable`: the draft vocabulary's, or else the target's."""
    own = self.own(params)
    if 'vocabulary' in own:
      return {'drafter': {'vocabulary': own['vocabulary']}}
    return {'target': params['target']}

  def target_logits(self, params: Params, vectors: Array) -> Array:
    """Returns logits [..., V] of [..., D], -inf for tokens never drafted."""
    return self.widen(params, self.logits(params, vectors))

  def widen(self, params, logits):
    own = self.merge(params).vocabulary
    if own is None:
      return logits
    rows = own.to_target(logits.reshape(-1, logits.shape[-1]), self.vocab_size)
    return rows.reshape(*logits.shape[:-1], -1)

  def target_ids(self, params, ids):
    own = self.merge(params).vocabulary
    return ids if own is None else own.target_ids(ids)

  def draft_ids(self, params, tokens):
    own = self.merge(params).vocabulary
    if own is None:
      return super().draft_ids(params, tokens)
    return own.draft_ids(tokens, self.vocab_size)
