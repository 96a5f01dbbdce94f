"""Mistakes in the model's cache and in the loop itself.

A mistake that no broken component can make replaces one small function of the
library for the length of a `with` block. The loop has to be compiled in that
block, for a model of its own (`Marked`).
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from specsample import drafts
from specsample import sampling as sampling_lib
from specsample import stopping
from specsample import streams
from specsample.testing.hash_model import HashModel
from specsample.types import StopReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneLength(HashModel):
  """A model that keeps as many tokens in every row as in the longest one."""

  def commit(self, cache, length, path=None):
    longest = jnp.broadcast_to(jnp.max(length), length.shape)
    return super().commit(cache, longest, path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marked(HashModel):
  """A hash model; programs that are compiled for one mark serve no other."""

  mark: str


@contextlib.contextmanager
def replaced(
  module: ModuleType, name: str, function: Callable[..., Any]
) -> Iterator[None]:
  shipped = vars(module)[name]
  setattr(module, name, function)
  try:
    yield
  finally:
    setattr(module, name, shipped)


def reused_uniforms():
  """Makes every round of a row draw the same bits."""
  return replaced(streams, 'round_key', lambda row_key, round: row_key)


def greedy_decided_by_batch():
  """Makes rows at temperature 0 sample at 1 if another row samples."""
  shipped = sampling_lib.per_row

  def per_row(sampling, batch_size, vocab_size):
    rows = shipped(sampling, batch_size, vocab_size)
    temperature = np.asarray(rows.temperature)
    if temperature.any():
      temperature = np.where(temperature == 0, 1, temperature)
    return dataclasses.replace(rows, temperature=temperature)

  return replaced(sampling_lib, 'per_row', per_row)


def penalties_once_a_round():
  """Leaves the tokens drafted in this round out of the penalties' counts."""
  shipped = sampling_lib.warp

  def warp(sampling, counts, logits, drafted, is_greedy):
    unknown = jnp.full_like(drafted, -1)
    return shipped(sampling, counts, logits, unknown, is_greedy)

  return replaced(sampling_lib, 'warp', warp)


def penalties_of_all_nodes():
  """Puts all earlier nodes of a tree on the path to each node."""

  def on_the_way(draft):
    num_drafts = draft.tokens.shape[-1]
    return jnp.tri(num_drafts + 1, num_drafts, -1, dtype=bool)

  return replaced(drafts, 'on_the_way', on_the_way)


def drafts_of_unknown_tokens():
  """Keeps draft tokens whose id is beyond the vocabulary."""
  return replaced(drafts, 'exist', lambda draft, vocab_size: draft.tokens >= -1)


def stops_at_the_last_token_only():
  """Ignores an EOS inside an accepted run."""
  shipped = stopping.reasons

  def reasons(state, tokens, stop):
    # After the accepted run there are only copies of the token after it.
    equal = tokens == tokens[:, -1:]
    is_last = jnp.cumprod(equal[:, ::-1], axis=1)[:, ::-1] > 0
    return jnp.where(is_last, shipped(state, tokens, stop), StopReason.RUNNING)

  return replaced(stopping, 'reasons', reasons)
