"""Mistakes in the bounds by which `verify.Certified` finds the best token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from experiments.certificate.planted.detectors import Reading
from specsample import verify
from specsample.models.transformer import Transformer
from specsample.testing import choices


class NoNorm(Transformer):
  """A model whose bounds leave out the length of the hidden vector."""

  def bounds(self, params, shadow, hidden):
    exact = dataclasses.replace(shadow, error=0 * shadow.error)
    upper, rounding = super().bounds(params, exact, hidden)
    return upper + shadow.error, rounding


class NoSlack(Transformer):
  """A model whose bounds forget that products are rounded."""

  def bounds(self, params, shadow, hidden):
    bare = dataclasses.replace(shadow, norm=0 * shadow.norm)
    return super().bounds(params, bare, hidden)


class NoFallback(Transformer):
  """A model whose bounds rule out all tokens but the 8 that seem best."""

  def bounds(self, params, shadow, hidden):
    upper, rounding = super().bounds(params, shadow, hidden)
    last = jax.lax.top_k(upper, 8)[0][..., -1:]
    return jnp.where(upper < last, -jnp.inf, upper), rounding


@functools.cache
def _scenes():
  return {scene.name: scene for scene in choices.scenes()}


def missed_bounds(
  scene: str, model: type[Transformer] = Transformer
) -> Reading:
  """Counts the logits of a scene that are above their bounds."""
  found = _scenes()[scene]
  missed = choices.missed_bounds(found, found.model(model))
  return Reading(missed, 0, 'bounds of all logits')


def wrong_choices(
  scene: str, model: type[Transformer] = Transformer
) -> Reading:
  """Counts the positions of a scene whose choice is not the best token."""
  found = _scenes()[scene]
  made = choices.found(found, found.model(model), 'greedy', verify.certified)
  return Reading(made.wrong, 0, 'best tokens in float64')
