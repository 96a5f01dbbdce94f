"""Small models, and outputs of a mesh compared with those of one device."""

import dataclasses
from typing import Any

import jax
import numpy as np

from specsample import drafters
from specsample import sharding
from specsample import testing
from specsample.models import transformer

_FIELDS = ('tokens', 'lengths', 'origin', 'accepted', 'stop_reason')


def target(vocab_size: int, **changes: Any) -> transformer.Transformer:
  """Returns a Llama with fewer key-value heads than 4 or 8 devices."""
  model = transformer.Transformer(
    vocab_size=vocab_size,
    num_layers=1,
    dim=32,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    max_length=128,
  )
  return dataclasses.replace(model, **changes)


def draft(vocab_size: int) -> transformer.Transformer:
  """Returns a smaller one with as many key-value heads as query heads."""
  return target(vocab_size, dim=16, num_heads=4, num_kv_heads=4, mlp_dim=24)


def pair() -> tuple[transformer.Transformer, transformer.Transformer]:
  """Returns a target of 64 tokens and a draft model, both of four numbers."""
  sizes = {'dim': 16, 'num_heads': 4, 'head_dim': 4, 'mlp_dim': 24}
  model = target(64, **sizes)
  return model, dataclasses.replace(model, num_heads=2, mlp_dim=8)


def drafter_params(drafter: Any, of_target: Any) -> Any:
  """Returns noisy parameters; every seventh token of the target is drafted."""
  size = drafter.draft_vocab_size
  d2t = None if size is None else 7 * np.arange(size)
  own = drafter.init_params(jax.random.key(1), of_target, d2t)
  return testing.with_noise(own, jax.random.key(2))


def chain(model: Any, num_draft_tokens: int = 3) -> drafters.Chain:
  """Returns a chain of a draft model."""
  return drafters.Chain(model=model, num_draft_tokens=num_draft_tokens)


def place(params: Any, **models: Any) -> Any:
  """Places parts of the parameters as their models or drafters say."""
  axes = {name: model.param_axes() for name, model in models.items()}
  return sharding.place(params, axes)


def assert_same(found: Any, expected: Any) -> None:
  """Compares the tokens of two outputs, and their log-probabilities."""
  for name in _FIELDS:
    np.testing.assert_array_equal(
      getattr(found, name), getattr(expected, name), name
    )
  # Sums over a sharded axis are taken in another order.
  np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)


def assert_all_same(found: Any, expected: Any, *rounded: str) -> None:
  """Compares all arrays, those in the fields `rounded` up to rounding."""
  others = {name: getattr(expected, name) for name in rounded}
  for name, values in others.items():
    np.testing.assert_allclose(getattr(found, name), values, atol=1e-4)
  same = dataclasses.replace(found, **others)
  jax.tree.map(np.testing.assert_array_equal, same, expected)
