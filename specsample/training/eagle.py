"""The objective of drafters that continue from the target's features."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specsample import settings
from specsample import sharding
from specsample.drafters import feature_chain
from specsample.drafters import p_eagle
from specsample.training import objective
from specsample.training import rows as rows_lib
from specsample.training import slots
from specsample.training import unrolled
from specsample.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureObjective(objective.Objective):
  """The losses of unrolled drafts at all positions: an `objective.Objective`.

  Draft i is computed from the outputs of the drafts before it, as in decoding
  ("training-time test"), but with the batch's tokens. Published recipes:

    EAGLE-3 (Li et al., 2503.01840): the default, soft labels.
    EAGLE-1 (Li et al., 2401.15077, sections 4.2 and 5): num_steps = 1,
      teacher_weight = 0.1, feature_weight = 1, feature_noise = 0.1.
    Multi-token prediction (DeepSeek-V3, 2412.19437, equations 24 and 25) with
      weight w: token_weight = w / num_steps, teacher_weight = 0, decay = 1.

  A batch may hold precomputed `features` [B, T, n * D], the concatenated
  outputs of the drafter's `feature_layers`.

  Attributes:
    drafter: Eagle, Eagle3 or MTP.
    num_steps: the number of drafts that are learned.
    decay: the weight of draft i is decay ** i, from 0 (0.8 in EAGLE-3's code).
    slot_weights: one of `slots`, whose weights replace those of `decay`.
    feature_weight: weight of the smooth L1 distance between `vectors` and the
      target's hidden states.
    feature_noise: a; uniform noise between -a and a is added to the features,
      so that drafts learn to cope with features that are only estimates.
  """

  drafter: feature_chain.FeatureChain
  num_steps: settings.Count = 5
  decay: float = 0.8
  slot_weights: slots.SlotWeights | None = None
  feature_weight: float = 0.0
  feature_noise: float = 0.0
  token_weight: float = 0.0
  teacher_weight: float = 1.0
  _kind: ClassVar[type] = feature_chain.FeatureChain

  def _check(self):
    super()._check()
    if isinstance(self.drafter, p_eagle.PEagle):
      raise ValueError(
        'drafter is PEagle, whose drafts are not unrolled, and which is not '
        'trained here: give Eagle, Eagle3 or MTP'
      )

  def __call__(self, params, batch):
    """Returns the loss [] and a report of the drafts.

    `draft_loss` [num_steps] holds their losses; the rest is from
    `objective.acceptance`, for the learned drafts and at most K of them.
    """
    found, rows = self._compare(
      params, batch, self.num_steps, self.feature_noise
    )
    loss = slots.total(found, rows, self.decay, self.slot_weights)
    match = found.match[: self.drafter.num_draft_tokens]
    accepted = objective.acceptance(match, rows.after_first(len(match)))
    of_drafts = jnp.sum(found.losses, axis=(1, 2))
    return loss, {'draft_loss': of_drafts} | accepted

  def matches(self, params, batch):
    num_drafts = self.drafter.num_draft_tokens
    found, rows = self._compare(params, batch, num_drafts)
    return found.match & rows.after_first(num_drafts)

  def num_rows(self, matrix, batch):
    found = super().num_rows(matrix, batch)
    if matrix == 'unembedding':
      return self.num_steps * found
    fuses = bool(self.drafter.feature_layers) and matrix.startswith('project.')
    if matrix == 'target' or fuses:
      return found
    last = min(self.drafter.num_modules, self.num_steps) - 1
    kind, module, *_ = matrix.split('.')
    if kind == 'layers' and int(module) != last:
      return found if int(module) < last else 0
    places = batch.get('places', batch['tokens']).size
    # Drafts at any place see the entries of all tokens.
    makes_entries = {'key', 'value', 'project'} & {*matrix.split('.')}
    others = found - places if makes_entries else 0
    return (self.num_steps - last) * places + others

  def _compare(self, params, batch, num_steps, noise=0.0):
    """Returns the comparison of the drafts with the text, and the rows."""
    rows = rows_lib.of(batch)
    hidden, of_layers = self.of_target(params, batch)
    features = self.drafter.features(params, hidden, of_layers)
    if noise:
      features += _noise(batch['tokens'], noise, features)
    outputs = unrolled.outputs(self.drafter, params, batch, features, num_steps)
    hidden = rows_lib.crop(batch, hidden)
    # Draft i, given features up to token t, is for token t + i + 2.
    vectors = [
      self.drafter.vectors(params, x, i) for i, x in enumerate(outputs)
    ]
    found = self.compare(2, params, vectors, hidden, rows)
    if self.feature_weight:
      distances = [
        self._distance(x, hidden, rows, i) for i, x in enumerate(vectors)
      ]
      found = found._replace(losses=found.losses + jnp.stack(distances))
    return found, rows

  def _distance(self, vectors, hidden, rows, i):
    """Returns the loss of draft i's vectors [B, T, D] at each place, [B, T]."""
    learned = rows.learned(i + 2)
    distance = smooth_l1(vectors, rows_lib.behind(hidden, i + 1))
    share = learned / jnp.maximum(jnp.sum(learned), 1)
    return self.feature_weight * share * jnp.where(learned, distance, 0)


def _noise(tokens, scale, like):
  """Returns noise between -scale and scale, seeded by the batch's tokens."""
  weights = jnp.arange(1, tokens.size + 1, dtype=jnp.uint32)
  mixed = jnp.sum(tokens.astype(jnp.uint32) * weights.reshape(tokens.shape))
  key = jax.random.key(mixed)
  values = jax.random.uniform(key, like.shape, minval=-scale, maxval=scale)
  return sharding.constrain(values.astype(like.dtype), 'batch', None, None)


def smooth_l1(vectors: Array, others: Array) -> Array:
  """Returns the smooth L1 distance of vectors [..., D], averaged over D: [...].

  It is x^2 / 2 for |x| < 1, and |x| - 1 / 2 otherwise.
  """
  distance = jnp.abs(vectors.astype(jnp.float32) - others.astype(jnp.float32))
  small = distance < 1
  value = jnp.where(small, jnp.square(distance) / 2, distance - 0.5)
  return jnp.mean(value, axis=-1)
