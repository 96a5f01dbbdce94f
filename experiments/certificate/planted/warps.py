"""Mistakes in how the settings are applied, by drafter and target alike.

The drafts are verified against the distributions they were drawn from, so only
a law that is computed without `warp` shows these mistakes.
"""

import dataclasses

import jax.numpy as jnp

from specsample import sampling as sampling_lib
from specsample import types
from specsample.constraint import Constraint
from specsample.sampling import Sampling


def bias_after_penalties(sampling, counts, logits, drafted):
  """Adds the bias to penalised logits."""
  own = Sampling(
    temperature=1.0,
    repetition_penalty=sampling.repetition_penalty,
    presence_penalty=sampling.presence_penalty,
    frequency_penalty=sampling.frequency_penalty,
  )
  penalised = sampling_lib.warp(own, counts, logits, drafted)
  return sampling_lib.warp(sampling, None, jnp.log(penalised), drafted)


def temperature_after_filters(sampling, counts, logits, drafted):
  """Chooses the tokens to keep at temperature 1."""
  own = dataclasses.replace(sampling, temperature=1.0)
  kept = sampling_lib.warp(own, counts, logits, drafted)
  return _go_on(Sampling(temperature=sampling.temperature), kept, drafted)


def top_p_before_top_k(sampling, counts, logits, drafted):
  """Applies top-p to all tokens, not to those that top-k keeps."""
  own = dataclasses.replace(sampling, top_k=None, min_p=None)
  kept = sampling_lib.warp(own, counts, logits, drafted)
  last = Sampling(temperature=1.0, top_k=sampling.top_k, min_p=sampling.min_p)
  return _go_on(last, kept, drafted)


def min_p_of_the_sum(sampling, counts, logits, drafted):
  """Keeps tokens at least as likely as min-p itself, and the best one."""
  own = dataclasses.replace(sampling, min_p=None)
  probs = sampling_lib.warp(own, counts, logits, drafted)
  kept = (probs >= jnp.asarray(sampling.min_p)) | (probs == jnp.max(probs))
  probs = jnp.where(kept, probs, 0)
  return probs / jnp.sum(probs)


def constraint_after_top_k(sampling, counts, logits, drafted):
  """Lets forbidden tokens be among the k that top-k keeps."""
  own = dataclasses.replace(sampling, constraint=None, top_p=None, min_p=None)
  kept = sampling_lib.warp(own, counts, logits, drafted)
  last = Sampling(
    temperature=1.0,
    constraint=sampling.constraint,
    top_p=sampling.top_p,
    min_p=sampling.min_p,
  )
  return _go_on(last, kept, drafted)


def penalties_of_the_prompt(sampling, counts, logits, drafted):
  """Counts the prompt's tokens for the penalties of emitted tokens, too."""
  counts = dataclasses.replace(
    counts, generated=counts.prompt + counts.generated
  )
  return sampling_lib.warp(sampling, counts, logits, drafted)


def repetitions_of_the_output(sampling, counts, logits, drafted):
  """Leaves the prompt out of the repetition penalty."""
  counts = dataclasses.replace(counts, prompt=0 * counts.prompt)
  return sampling_lib.warp(sampling, counts, logits, drafted)


@types.pytree
class ForgetsDrafts(Constraint):
  """A constraint that the draft tokens do not advance, only emitted ones."""

  def mask(self, drafted):
    return super().mask(drafted[:0])


def _go_on(sampling, probs, drafted):
  return sampling_lib.warp(sampling, None, jnp.log(probs), drafted)


# By the names that the certificate has.
MISTAKES = {
  'the bias added after the penalties': bias_after_penalties,
  'the temperature applied after the filters': temperature_after_filters,
  'top-p before top-k': top_p_before_top_k,
  'min-p of the sum, not of the largest': min_p_of_the_sum,
  'a forbidden token among the k of top-k': constraint_after_top_k,
  "presence and frequency penalties that count the prompt's tokens": (
    penalties_of_the_prompt
  ),
  'a repetition penalty that overlooks the prompt': repetitions_of_the_output,
}
