"""Token sequences that drafts are looked up in, as a sorted suffix array.

A place is an index into the texts. Places are sorted by the tokens that follow
them, so all occurrences of the same words are neighbours, and two binary
searches find them (REST, He et al., 2311.08252; SuffixDecoding, Oliaro et al.,
2411.04975). A store is a pytree of fixed shapes, so another store of the same
capacity compiles nothing.

A token takes 8 bytes on a device and 2 in a file (4 if ids exceed 65,535).
"""

from collections.abc import Iterable, Sequence
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np

from specsample import types
from specsample.types import Array

_logger = logging.getLogger(__name__)

# Follows every text. No context contains it, and drafts end before it.
SEPARATOR = -1
# Places that agree in this many tokens are in no particular order.
_SORTED_DEPTH = 16


@types.pytree
class Store:
  """Texts and the sorted order of their places."""

  tokens: Array  # [C] int32, each text followed by SEPARATOR
  order: Array  # [C] int32, the first `size` are places sorted by what follows
  size: Array  # [] int32, tokens in use, separators included

  @property
  def capacity(self) -> int:
    """The number of tokens C that there is room for."""
    return self.tokens.shape[0]


@types.pytree
class Found:
  """The tokens that followed the longest repeated suffix of one sequence."""

  tokens: Array  # [K] int32, -1 after the last
  matched: Array  # [] int32, length of the suffix; 0 if it is not in the store
  # [K] float32, the share of the places agreeing so far that continue with this
  # token, (count - 1/2) / (all + 1/2): one place alone is not certainty.
  share: Array


def build(
  texts: Iterable[Sequence[int] | np.ndarray],
  *,
  vocab_size: int,
  capacity: int | None = None,
) -> Store:
  """Sorts texts into a store, on the host.

  Takes about a second per million tokens.

  Args:
    texts: token ids of each text; no draft continues from one into the next.
    vocab_size: V of the target.
    capacity: the number of tokens there is room for, including a separator per
      text. If the texts have more, the first ones are left out, which is
      logged. Default: just enough.

  Raises:
    ValueError: if there is no text, a token id is outside of [0, V), or the
      last text does not fit.
  """
  arrays = [np.asarray(text) for text in texts]
  arrays = [text for text in arrays if text.size]
  if not arrays:
    raise ValueError('the store has no text: give at least one token')
  check_ids(arrays, vocab_size)
  sizes = np.array([text.size + 1 for text in arrays])
  capacity = int(sizes.sum()) if capacity is None else capacity
  fits = np.cumsum(sizes[::-1])[::-1] <= capacity
  if not fits.any():
    raise ValueError(
      f'capacity is {capacity:,} tokens, but the last text needs '
      f'{sizes[-1]:,}: raise the capacity'
    )
  num_left_out = int(np.argmax(fits))
  if num_left_out:
    _logger.warning(
      'the first %d of %d texts (%d tokens) are left out: the store has room '
      'for %d tokens',
      num_left_out,
      len(arrays),
      sum(map(len, arrays[:num_left_out])),
      capacity,
    )
  kept = arrays[num_left_out:]
  ended = [np.append(text, SEPARATOR) for text in kept]
  tokens = np.concatenate(ended).astype(np.int32)
  size = tokens.size
  padding = (0, capacity - size)
  return Store(
    tokens=jnp.asarray(np.pad(tokens, padding, constant_values=SEPARATOR)),
    order=jnp.asarray(np.pad(_sorted_places(tokens), padding)),
    size=jnp.asarray(size, jnp.int32),
  )


def empty(capacity: int) -> Store:
  """Returns a store without texts and with room for `capacity` tokens."""
  return Store(
    tokens=jnp.full(capacity, SEPARATOR, jnp.int32),
    order=jnp.zeros(capacity, jnp.int32),
    size=jnp.zeros((), jnp.int32),
  )


def texts_of(store: Store) -> list[np.ndarray]:
  """Returns the texts of a store, oldest first."""
  tokens = np.asarray(store.tokens)[: int(store.size)]
  pieces = np.split(tokens, np.flatnonzero(tokens == SEPARATOR))
  texts = [piece[piece != SEPARATOR] for piece in pieces]
  return [text for text in texts if text.size]


def look_up(
  store: Store,
  tokens: Array,
  length: Array,
  *,
  max_match: int,
  num_tokens: int,
  num_places: int = 32,
) -> Found:
  """Finds what usually followed the longest suffix that the store contains.

  Token by token, it takes the most frequent one among the places that agree
  with the tokens before it (SuffixDecoding's path of the largest counts).

  Args:
    store: the texts.
    tokens: [S] int32, one sequence.
    length: [] int32, how many of the tokens are valid.
    max_match: the longest suffix to look for.
    num_tokens: K, how many tokens to return.
    num_places: how many of the places are read, spread evenly if there are
      more.

  Raises:
    ValueError: if max_match is more tokens than places are sorted by.
  """
  if max_match > _SORTED_DEPTH:
    raise ValueError(
      f'max_match is {max_match}, but a store is sorted by only '
      f'{_SORTED_DEPTH} tokens: give at most that many'
    )
  low, high = _intervals(store, _context(tokens, length, max_match))
  sizes = jnp.arange(1, max_match + 1)
  matched = jnp.max(jnp.where(high > low, sizes, 0))
  index = jnp.maximum(matched - 1, 0)
  low, high = low[index], high[index]
  count = jnp.where(matched > 0, high - low, 0)
  # Reads every place if there are few of them.
  rank = jnp.arange(num_places)
  spread = (rank * 2 + 1) * (count / (2 * num_places))
  is_few = count <= num_places
  rank = jnp.where(is_few, rank, spread.astype(jnp.int32))
  alive = rank < count
  place = store.order[jnp.where(alive, low + rank, 0)] + matched
  found = _read(store, place[:, None] + jnp.arange(num_tokens))  # [places, K]
  drafted, shares = [], []
  for i in range(num_tokens):
    here = found[:, i]
    same = (here == here[:, None]) & alive
    votes = jnp.where(alive & (here >= 0), jnp.sum(same, axis=1), 0)
    best = jnp.argmax(votes)
    goes_on = votes[best] > 0
    drafted.append(jnp.where(goes_on, here[best], -1))
    share = (votes[best] - 0.5) / (jnp.sum(alive) + 0.5)
    shares.append(jnp.where(goes_on, share, 0.0))
    alive &= goes_on & (here == here[best])
  return Found(
    tokens=jnp.stack(drafted), matched=matched, share=jnp.stack(shares)
  )


def _context(tokens: Array, length: Array, size: int) -> Array:
  """Returns the last tokens [size], with -2 before the first token."""
  index = length - size + jnp.arange(size)
  return jnp.where(index >= 0, tokens[jnp.maximum(index, 0)], -2)


def _read(store: Store, place: Array) -> Array:
  """Returns the tokens at places [...], with separators past the end."""
  inside = place < store.size
  return jnp.where(inside, store.tokens[jnp.where(inside, place, 0)], SEPARATOR)


def _intervals(store: Store, context: Array) -> tuple[Array, Array]:
  """Returns the ranks [L] that bound the places of the last 1, ..., L tokens.

  The places that begin with the last m tokens have ranks low[m - 1] up to, but
  not including, high[m - 1].
  """
  most = context.size
  sizes = jnp.arange(1, most + 1)
  place = jnp.arange(most)
  # Row m - 1 is the last m tokens of the context; the rest of it is not read.
  query = context[jnp.minimum(most - sizes[:, None] + place, most - 1)]
  is_read = place < sizes[:, None]

  def narrow(_, bounds):
    low, high = bounds  # [2, L], for the lower and for the upper end
    middle = (low + high) // 2
    text = _read(store, store.order[middle][..., None] + place)
    differs = is_read & (text != query)
    first = jnp.argmax(differs, axis=-1)[..., None]
    ahead = jnp.take_along_axis(text, first, axis=-1) - jnp.take_along_axis(
      jnp.broadcast_to(query, text.shape), first, axis=-1
    )
    ahead = jnp.where(jnp.any(differs, axis=-1), ahead[..., 0], 0)
    # The lower end is after all smaller places, the upper after equal ones too.
    is_before = ahead < jnp.array([[0], [1]])
    is_before &= low < high
    return (
      jnp.where(is_before, middle + 1, low),
      jnp.where(is_before, high, middle),
    )

  # Derived from the context, so that they live where it does.
  start = jnp.broadcast_to(0 * context, (2, most))
  end = store.size + start
  steps = math.ceil(math.log2(store.capacity + 1))
  (low, high), _ = jax.lax.fori_loop(0, steps, narrow, (start, end))
  return low, high


def _sorted_places(tokens: np.ndarray) -> np.ndarray:
  """Returns the places sorted by the tokens that follow, by prefix doubling."""
  rank = (tokens + 1).astype(np.int64)
  depth = 1
  while True:
    behind = np.zeros_like(rank)
    behind[:-depth] = rank[depth:] + 1
    key = rank * (behind.max() + 1) + behind
    order = np.argsort(key, kind='stable')
    sorted_key = key[order]
    is_new = np.diff(sorted_key, prepend=sorted_key[:1] - 1) > 0
    depth *= 2
    if depth >= _SORTED_DEPTH or is_new.all():
      return order.astype(np.int32)
    rank = np.empty_like(rank)
    rank[order] = np.cumsum(is_new)


def check_ids(arrays: Sequence[np.ndarray], vocab_size: int) -> None:
  """Raises ValueError unless texts hold ids below the vocabulary's size."""
  for i, text in enumerate(arrays):
    if text.dtype.kind not in 'iu':
      raise ValueError(
        f'text {i} has dtype {text.dtype}: give token ids, which are integers'
      )
    low, high = text.min(), text.max()
    if low < 0 or high >= vocab_size:
      raise ValueError(
        f'text {i} has the token {low if low < 0 else high}, but the target '
        f'has {vocab_size:,} tokens: build the store with its tokenizer'
      )
