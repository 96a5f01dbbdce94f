"""Passes of a model, with a cache and without, and comparisons of them."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from specsample.types import Cache, Params

# The outputs of a model for n tokens: arrays [n, ...] by name.
Outputs = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Kind:
  """How tokens are fed between two commits."""

  parts: tuple[int, ...]  # the tokens of each pass
  is_tree: bool = False
  widened_to: int | None = None  # as a `types.Readable`, instead of by `apply`

  def __str__(self):
    """Returns the words of a message."""
    count = 'a pass' if len(self.parts) == 1 else 'passes'
    return f'{count} of {" and ".join(map(str, self.parts))} tokens'


@dataclasses.dataclass(frozen=True)
class Subject:
  """A model under test; see `model_properties.assert_model`."""

  model: Any  # a Model, perhaps Readable
  params: Params
  features: tuple[int, ...]
  length: int
  max_new: int
  tolerance: float

  @property
  def slots(self) -> int:
    """The room that the loop gives to rows of `length` tokens."""
    return self.length + self.max_new

  @property
  def most(self) -> int:
    """The most tokens that are kept: all but a row's last, which is pending."""
    return self.length - 1

  @property
  def limit(self) -> int:
    """The positions that are compared; those from `max_length` on are not."""
    return min(self.slots, self.model.max_length)

  def draw(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns random tokens."""
    return rng.integers(self.model.vocab_size, size=shape, dtype=np.int32)

  def others(self, rng: np.random.Generator, tokens: np.ndarray) -> np.ndarray:
    """Returns random tokens that differ from the given ones everywhere."""
    size = self.model.vocab_size
    return (tokens + rng.integers(1, size, tokens.shape, np.int32)) % size

  def feed(
    self,
    cache: Cache,
    tokens: np.ndarray,
    kind: Kind,
    parents: np.ndarray | None = None,
    path: np.ndarray | None = None,
  ) -> tuple[list[Outputs], Cache]:
    """Returns the outputs for each row of tokens [B, T], and the cache.

    If a tree is widened, only the nodes of path [B, T] are appended.
    """
    names = ['logits', 'hidden vectors', *map(feature, self.features)]
    passes: list[tuple[jax.Array, ...]] = []
    end = 0
    for count in kind.parts:
      start, end = end, end + count
      output, cache = _pass(
        self.params,
        tokens[:, start:end],
        cache,
        parents=None if parents is None else parents[:, : end - 1],
        path=path if parents is not None else None,
        model=self.model,
        features=self.features,
        widened_to=kind.widened_to,
      )
      passes.append((output.logits, output.hidden, *output.features))
    joined = [
      np.concatenate(parts, axis=1) for parts in zip(*passes, strict=True)
    ]
    rows = zip(*joined, strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows], cache

  def whole(self, text: Sequence[int]) -> Outputs:
    """Returns the outputs for a text from a pass without a cache.

    They are those of all `limit` positions; zeros pad the text.
    """
    padded = np.zeros((1, self.limit), np.int32)
    padded[0, : len(text)] = text[: self.limit]
    empty = self.model.init_cache(1, 0)
    (found,), _ = self.feed(empty, padded, Kind((self.limit,)))
    return found

  def commit(
    self, cache: Cache, lengths: np.ndarray, path: np.ndarray | None
  ) -> Cache:
    """Runs `Model.commit` as the loop does."""
    of_tree = () if path is None else (path,)
    return _commit(cache, lengths, *of_tree, model=self.model)


@functools.partial(jax.jit, static_argnames=('model', 'features', 'widened_to'))
def _pass(params, tokens, cache, *, parents, path, model, features, widened_to):
  of_tree = {} if parents is None else {'parents': parents}
  if widened_to is None:
    return model.apply(params, tokens, cache, features=features, **of_tree)
  output, new = model.read(params, tokens, cache, features=features, **of_tree)
  of_path = () if path is None else (path,)
  return output, model.append(cache, model.widen(new, widened_to), *of_path)


@functools.partial(jax.jit, static_argnames='model')
def _commit(cache, lengths, *path, model):
  return model.commit(cache, lengths, *path)


def feature(layer: int) -> str:
  """Returns what a layer's outputs are called."""
  return f'features of layer {layer}'


def take(outputs: Outputs, index: Any) -> Outputs:
  """Returns the outputs at some positions."""
  return {name: values[index] for name, values in outputs.items()}


def compare(
  where: str,
  start: int,
  found: Outputs,
  expected: Outputs,
  tolerance: float,
  than: str,
) -> None:
  """Asserts that outputs are as expected.

  Args:
    where: what was fed to which row.
    start: the position of the first of the outputs in its row.
    found: the outputs, of at least as many positions as `expected`.
    expected: the outputs to compare; others that were found are not.
    tolerance: the largest allowed difference; where values above 1 are
      expected, relative to the largest of them.
    than: ends the sentence that "they differ".
  """
  differences = {
    name: _differences(found[name], values) for name, values in expected.items()
  }
  # Written so that NaN fails as well.
  bad = [
    (i, name)
    for name, (_, relative) in differences.items()
    for i in np.flatnonzero(~(relative <= tolerance))
  ]
  if bad:
    i, name = min(bad, key=lambda place: place[0])
    raise AssertionError(
      f'{where}, position {start + i}: the {name} differ by '
      f'{differences[name][0][i]:.2g} {than}'
    )


def _differences(found, expected):
  """Returns the largest difference [n] at each position, also relative."""
  expected = np.asarray(expected, np.float32)
  found = np.asarray(found, np.float32)[: len(expected)]
  is_same = (found == expected) | (np.isnan(found) & np.isnan(expected))
  with np.errstate(invalid='ignore'):
    largest = np.where(is_same, 0, np.abs(found - expected)).max(axis=-1)
  scale = np.where(np.isfinite(expected), np.abs(expected), 0).max(axis=-1)
  return largest, largest / np.maximum(scale, 1)
