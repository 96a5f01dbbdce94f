"""Rules of the library as samplers of other kinds, to be audited."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from experiments.certificate.planted import rules
from specsample import sampling as sampling_lib
from specsample.testing.auditing import Sampler
from specsample.testing.conditional import Warp
from specsample.types import Draft, DraftKind, Law, Verifier
from specsample.verify import rule


def _equality(draft, target_probs):
  """Draws y from the target and keeps the draft if it equals y.

  A draft that is not kept is replaced by y, which is any token but the draft.
  """
  own = rule.of_tokens(target_probs[:-1], draft.tokens)
  others = rule.without_children(target_probs, draft)
  return Law(
    stop=rule.stop_at_rejection(own),
    next=rule.normalise(others, target_probs),
  )


# A lossless rule that the library does not have.
EQUALITY = rules.Rule(law=_equality)


def of_rule(verifier: Verifier, warp: Warp = sampling_lib.warp) -> Sampler:
  """Returns a sampler that takes two uniforms in place of a key.

  Args:
    verifier: a rule of chains.
    warp: applies the settings.
  """

  def row(tokens, probs, logits, sampling, uniforms):
    none = jnp.full(1, -1)
    target_probs = jax.vmap(lambda x: warp(sampling, None, x, none))(logits)
    kind = DraftKind.POINT_MASS if probs is None else DraftKind.SAMPLED
    draft = Draft(tokens=tokens, probs=probs, kind=kind)
    law = verifier.law(draft, target_probs)
    kept = _pick(law.stop, uniforms[0])
    token = _pick(law.next[kept], uniforms[1])
    slot = jnp.arange(tokens.size + 1)
    drafted = jnp.where(slot < kept, jnp.append(tokens, -1), -1)
    return jnp.where(slot == kept, token, drafted)

  return jax.jit(jax.vmap(row))


def with_key(sampler: Sampler) -> Sampler:
  """Returns a sampler of two uniforms as one that draws them from a key."""

  def keyed(tokens, probs, logits, sampling, key):
    uniforms = np.asarray(jax.random.uniform(key, (len(tokens), 2)))
    return sampler(tokens, probs, logits, sampling, uniforms)

  return keyed


def in_numpy(tokens, probs, logits, sampling, uniforms):
  """Decides each row by the token rule, with K + 1 uniforms."""
  target_probs = np.exp(logits / sampling.temperature[:, None, None])
  target_probs /= target_probs.sum(axis=-1, keepdims=True)
  rows = zip(tokens, probs, target_probs, uniforms, strict=True)
  return np.asarray([_textbook(*row) for row in rows])


def in_torch(tokens, probs, logits, sampling, uniforms):
  """Does the same in torch."""
  tokens, probs, logits, temperature, uniforms = map(
    torch.from_numpy, (tokens, probs, logits, sampling.temperature, uniforms)
  )
  target_probs = torch.softmax(logits / temperature[:, None, None], dim=-1)
  rows = zip(tokens, probs, target_probs, uniforms, strict=True)
  return torch.tensor([_textbook(*row) for row in rows])


def _textbook(tokens, draft_probs, target_probs, uniforms):
  """Returns a row's tokens, then -1 (Leviathan et al., algorithm 1)."""
  emitted = []
  for i, token in enumerate(tokens):
    draft, target = draft_probs[i], target_probs[i]
    if uniforms[i] * draft[token] >= target[token]:
      weights = (target - draft).clip(0)
      break
    emitted.append(int(token))
  else:
    weights = target_probs[-1]
  emitted.append(int(_pick(weights, uniforms[-1])))
  return emitted + [-1] * (len(target_probs) - len(emitted))


def _pick(weights, uniform):
  """Returns the index at a share `uniform` of the cumulative weights."""
  cumulative = weights.cumsum(0)
  index = (uniform * cumulative[-1] >= cumulative).sum()
  return index.clip(0, len(weights) - 1)
