"""A small draft model that begins as a few of the target's layers.

It is of the target's own kind (Leviathan et al., 2211.17192), shares the
target's embedding and is distilled from it (Zhou et al., 2310.08461).
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import checks
from specsample.drafters import chain
from specsample.drafters import fields
from specsample.drafters import steps
from specsample.drafters import trainable
from specsample.drafters import vocabulary
from specsample.models import decoder_layer
from specsample.models import layers
from specsample.models import matrices
from specsample.types import Array, Params


class _Network(nnx.Module):
  """The parameters; `Decoder` runs them as the target's own kind of model."""

  def __init__(self, config, keys):
    model = dataclasses.replace(config.model, dtype='float32')
    self.layers = nnx.List(
      [decoder_layer.DecoderLayer(model, keys, i) for i in config.layers]
    )
    self.norm = layers.RMSNorm(model.dim, model.norm_eps, jnp.float32)
    self.vocabulary = vocabulary.make(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel(chain.OverModel, trainable.Trainable):
  """A drafter like `Chain` over a decoder of its own layers and last norm.

  Before training these are the target's `layers` (counted from 0) and its last
  norm; the target is of the Llama family. The embedding is the target's, and so
  is the unembedding, restricted to the draft vocabulary if there is one.
  """

  layers: Sequence[int]
  _network = _Network

  def _check(self):
    super()._check()
    fields.check_shape(self)
    fields.check_layers('layers', self.layers, self.model.num_layers)
    checks.draft_model(self.model.keep_layers(self.layers))

  def _begin(self, key, target_params):
    del key
    if target_params is None:
      raise ValueError(
        'target_params is None, but a draft model starts as layers of the '
        "target: give the target's parameters"
      )
    of_target = self.model.keep_params(target_params, self.layers)
    return jax.tree.map(
      lambda x: jnp.array(matrices.dense(x, jnp.float32)),
      _own(of_target),
      is_leaf=matrices.is_stored,
    )

  @property
  def draft_model(self) -> 'Decoder':
    """The draft model by itself, for the whole tree of parameters."""
    return Decoder(self)

  def draft_params(self, params):
    return params

  def init(self, params, batch_size, max_length):
    self.own(params)  # raises if parameters are missing
    return super().init(params, batch_size, max_length)

  # The decoder's logits are over all tokens.
  target_ids = steps.Steps.target_ids
  widen = steps.Steps.widen

  def target_logits(self, params, vectors):
    """See `Trainable`: here `widen` leaves the decoder's logits as they are."""
    return trainable.Trainable.widen(self, params, self.logits(params, vectors))


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A draft model as a `types.Model` that takes the whole tree of parameters.

  Its logits are -inf for tokens outside the draft vocabulary.
  """

  drafter: DraftModel

  @property
  def vocab_size(self) -> int:
    return self.drafter.model.vocab_size

  @property
  def dtype(self) -> str:
    return self._model.dtype

  @property
  def dim(self) -> int:
    return self.drafter.model.dim

  @property
  def max_length(self) -> int:
    return self.drafter.model.max_length

  @property
  def _model(self) -> Any:
    return self.drafter.model.keep_layers(self.drafter.layers)

  def init_cache(self, batch_size, max_length, max_new=None):
    return self._model.init_cache(batch_size, max_length, max_new)

  def apply(self, params, tokens, cache, features=(), parents=None):
    own = self.drafter.own(params)
    fields.check_dtype(jnp.dtype(self._model.dtype), own['norm']['scale'].dtype)
    output, cache = self._model.apply(
      params['target'] | _own(own), tokens, cache, features, parents
    )
    logits = self.drafter.target_logits(params, output.hidden)
    return dataclasses.replace(output, logits=logits), cache

  def commit(self, cache, length, path=None):
    return self._model.commit(cache, length, path)

  def embed(self, params, ids):
    return self.drafter.model.embed(params['target'], ids)

  def unembed(self, params: Params, hidden: Array) -> Array:
    return self.drafter.target_logits(params, hidden)


def _own(params):
  """Returns the parameters that a draft model and its target do not share."""
  return {name: params[name] for name in ('layers', 'norm')}
