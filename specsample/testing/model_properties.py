"""A property test of models: passes over a cache equal a pass without one."""

import dataclasses
import functools
import itertools

import jax
import numpy as np

from specsample.testing import passes
from specsample.testing.passes import Kind
from specsample.testing.passes import Subject
from specsample.types import Cache, Model, Params, Readable

_ROWS = 3

# The ends of messages: what differs, and what to do.
_LATER = (
  'when the tokens after it change: apply must mask what comes after a token'
)
_OTHER_PATHS = (
  'when the tokens on other paths of the tree change: with parents, apply must '
  "mask the nodes that aren't on a token's path"
)
_DROPPED = 'when the tokens that were dropped change: '
_ALONE = 'from those of a pass over the row alone, without a cache: '
_KEEP = (
  'commit must keep the first length[row] tokens of each row, and apply must '
  'mask what follows them'
)
_NEXT = (
  'apply must write the tokens of a row after its first length[row] tokens, '
  'and their positions must go on from there'
)
_MOVE = (
  'commit must move the entries at path to consecutive places, from path[:, 0] '
  'on, before it cuts'
)
_APPEND = (
  'append must write the tokens at path, in that order, as if they were a chain'
)
_NODES = (
  'with parents, a token must see all before the tree and the nodes on its '
  'path, and its position must be that of node 0 plus its depth'
)


def assert_model(
  model: Model,
  params: Params,
  *,
  features: tuple[int, ...] = (),
  has_trees: bool = True,
  feeds_once: bool = False,
  has_embeddings: bool = True,
  length: int = 48,
  max_new: int = 6,
  tolerance: float = 1e-4,
  seed: int = 0,
) -> None:
  """Asserts that a model and its cache do what `types.Model` says.

  Rows of random tokens are fed as the loop feeds them, several at a time, and
  each row keeps another number of them, until one has `length` tokens. In every
  pass the logits, hidden vectors and features of each token have to equal
  those of a pass over its row alone, without a cache. They must not depend at
  all on tokens that come later, are on another path of a tree, or were dropped
  by a commit. The message names the first row and position where they do.

  The methods of `types.Readable` are checked if the model has them.

  Args:
    model: the model.
    params: its own tree (what params['target'] holds), with random values. If
      a layer starts as zeros, mistakes in it change nothing: add noise
      (`testing.with_noise`).
    features: layers whose outputs are compared too.
    has_trees: whether `apply` takes `parents`, and `commit` a path.
    feeds_once: whether each pass is followed by a commit, as those of a target
      are. A recurrent model supports nothing else: it can't be a draft model.
    has_embeddings: whether there are `embed` and `unembed`, which trained
      drafters need.
    length: tokens of the longest row. For a sliding window give several
      windows; if it is `model.max_length`, passes also run past that, as the
      loop's do.
    max_new: the most tokens that are fed before a commit, at least 3.
    tolerance: the largest allowed difference from the pass without a cache;
      where values above 1 occur, relative to the largest of them.
    seed: determines the tokens and how many of them are kept.

  Raises:
    ValueError: `length` or `max_new` is out of range.
  """
  if not 3 <= max_new < length <= model.max_length:
    raise ValueError(
      f'max_new is {max_new} and length is {length}: give a max_new of at '
      'least 3, and a length above it of at most the max_length of the model, '
      f'{model.max_length}'
    )
  subject = Subject(model, params, features, length, max_new, tolerance)
  rng = np.random.default_rng(seed)
  _check_shapes(subject, feeds_once)
  _check_whole(subject, rng, has_embeddings)
  chain, tree = Kind((max_new,)), Kind((max_new,), is_tree=True)
  kinds = [chain, Kind((1, 2))]
  if has_trees:
    # A chain follows each tree: it tells whether the path was moved.
    kinds += [tree, chain, Kind((2, max_new - 2), is_tree=True)]
  if isinstance(model, Readable):
    kinds.append(Kind((2,), widened_to=max_new))
    if has_trees:
      # The kept path alone is appended.
      kinds += [dataclasses.replace(tree, widened_to=max_new), chain]
  if feeds_once:
    kinds = [kind for kind in kinds if len(kind.parts) == 1]
    # Fewer tokens than a convolution sees.
    kinds.append(Kind((1,)))
  rows = _empty_rows(subject, max_new)
  for kind in itertools.cycle(kinds):
    rows = _round(subject, rows, kind, rng)
    if max(map(len, rows.texts)) == subject.most:
      break
  _round(subject, rows, chain, rng)
  if feeds_once:
    return
  # The cache of a draft model has no `max_new`, and goes back further.
  rows = _empty_rows(subject, None)
  for kind in (chain, tree if has_trees else chain, chain):
    rows = _round(subject, rows, kind, rng)
  fewer = [text[: rng.integers(len(text) + 1)] for text in rows.texts]
  _round(subject, _committed(subject, rows.caches, fewer), chain, rng)


@dataclasses.dataclass(frozen=True)
class _Rows:
  """Rows after a commit, in two caches that differ in what was dropped."""

  texts: list[list[int]]
  caches: tuple[Cache, Cache]
  events: list[str]  # what happened to each row
  of_path: str | None = None  # the remedy if the path of a tree was kept


def _check_shapes(subject, feeds_once):
  """Checks what a compiled loop relies on, without computing anything."""
  model, width = subject.model, subject.max_new
  ints = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)
  for batch in (_ROWS, _ROWS + 1):
    init = functools.partial(model.init_cache, batch, subject.slots, width)
    empty = jax.eval_shape(init)
    for path, leaf in jax.tree.leaves_with_path(empty):
      assert leaf.shape[:1] == (batch,), (
        f'in the cache of {batch} rows, the array at '
        f'{jax.tree_util.keystr(path)!r} has shape {leaf.shape}: the first '
        'axis of every array must be the rows'
      )
    apply = functools.partial(model.apply, features=subject.features)
    output, after = jax.eval_shape(
      apply, subject.params, ints(batch, width), empty
    )
    committed = jax.eval_shape(model.commit, after, ints(batch))
    returned = {'apply': after, 'commit': committed}
    if feeds_once:
      # A cache that goes from one pass to the next was committed.
      del returned['apply']
    for name, cache in returned.items():
      assert _types(cache) == _types(empty), (
        f'{name} returns a cache of {_types(cache)} for one of {_types(empty)}:'
        ' shapes, dtypes and structure must stay as they are'
      )
    found = [output.logits, output.hidden, *output.features]
    sizes = [model.vocab_size, *[model.dim] * (1 + len(subject.features))]
    assert [x.shape for x in found] == [(batch, width, n) for n in sizes], (
      f'for {width} tokens of {batch} rows apply returns logits '
      f'{found[0].shape}, hidden vectors {found[1].shape} and features '
      f'{[x.shape for x in found[2:]]}: the last axis must be vocab_size, '
      f'{model.vocab_size}, or dim, {model.dim}, and every feature asked for '
      'must be there'
    )


def _types(cache):
  return jax.tree.map(lambda leaf: f'{leaf.dtype}{list(leaf.shape)}', cache)


def _check_whole(subject, rng, has_embeddings):
  """Checks the pass without a cache, with which the others are compared."""
  where = 'in a pass without a cache, row 0'
  text = subject.draw(rng, subject.limit)
  found = subject.whole(text)
  for name, values in found.items():
    bad = np.flatnonzero(np.isnan(values).any(axis=-1))
    assert not bad.size, f'{where}, position {bad[0]}: the {name} are NaN'
  half = slice(subject.limit // 2)
  changed = subject.others(rng, text)
  changed[half] = text[half]
  expected = passes.take(found, half)
  passes.compare(where, 0, subject.whole(changed), expected, 0, _LATER)
  if not has_embeddings:
    return
  model, params = subject.model, subject.params
  logits = {'logits': model.unembed(params, found['hidden vectors'])}
  than = 'from those that unembed returns for the hidden vectors'
  passes.compare(where, 0, found, logits, subject.tolerance, than)
  if -1 in subject.features:
    embedded = {passes.feature(-1): model.embed(params, text)}
    than = 'from what embed returns for the tokens'
    passes.compare(where, 0, found, embedded, subject.tolerance, than)


def _empty_rows(subject, max_new):
  cache = subject.model.init_cache(_ROWS, subject.slots, max_new)
  return _Rows(
    texts=[[] for _ in range(_ROWS)],
    caches=(cache, cache),
    events=['in an empty cache'] * _ROWS,
  )


def _round(subject, rows, kind, rng):
  """Feeds tokens, checks the outputs, and commits what each row keeps."""
  width = sum(kind.parts)
  tokens = subject.draw(rng, _ROWS, width)
  parents = np.tile(np.arange(width - 1, dtype=np.int32), (_ROWS, 1))
  if kind.is_tree:
    parents = rng.integers(np.arange(1, width), size=parents.shape)
    parents = parents.astype(np.int32)
  paths = [_paths(of_row) for of_row in parents.tolist()]
  kept = _kept(subject, rows, paths, kind, rng)
  changed = subject.others(rng, tokens)
  for row, path in enumerate(kept):
    changed[row, path] = tokens[row, path]
  of_tree = parents if kind.is_tree else None
  nodes = np.zeros_like(tokens)
  for row, path in enumerate(kept):
    nodes[row, : len(path)] = path
  feed = lambda cache, tokens: subject.feed(cache, tokens, kind, of_tree, nodes)
  found, after = feed(rows.caches[0], tokens)
  of_changed, twin = feed(rows.caches[0], changed)
  of_twin, _ = feed(rows.caches[1], tokens)

  starts = [len(text) for text in rows.texts]
  places = [
    (f'{event}, in {kind}, row {row}', start)
    for row, (event, start) in enumerate(zip(rows.events, starts, strict=True))
  ]
  unseen = _OTHER_PATHS if kind.is_tree else _LATER
  for row, path in enumerate(kept):
    expected = passes.take(found[row], path)
    others = passes.take(of_changed[row], path)
    passes.compare(*places[row], others, expected, 0, unseen)
  leaves = [
    (row, path)
    for row in range(_ROWS)
    for path in paths[row]
    if path[-1] not in parents[row]
  ]
  remedy = _DROPPED + (rows.of_path or _KEEP)
  for row, path in leaves:
    expected = passes.take(found[row], path)
    others = passes.take(of_twin[row], path)
    passes.compare(*places[row], others, expected, 0, remedy)
  remedy = _ALONE + (_NODES if kind.is_tree else rows.of_path or _NEXT)
  for row, path in leaves:
    of_path = passes.take(found[row], path)
    whole = subject.whole([*rows.texts[row], *tokens[row, path]])
    expected = passes.take(whole, slice(starts[row], starts[row] + len(path)))
    passes.compare(*places[row], of_path, expected, subject.tolerance, remedy)

  texts = [
    [*text, *tokens[row, kept[row]].tolist()]
    for row, text in enumerate(rows.texts)
  ]
  if not kind.is_tree:
    return _committed(subject, (after, twin), texts)
  if kind.widened_to is not None:
    committed = _committed(subject, (after, twin), texts)
    return dataclasses.replace(committed, of_path=_APPEND)
  # As in the loop, the slot of node 0 stands for no node.
  slots = np.asarray(starts, np.int32)[:, None] + nodes
  return _committed(subject, (after, twin), texts, slots)


def _kept(subject, rows, paths, kind, rng):
  """Returns the nodes that each row keeps: the first as many as it can."""
  kept = [max(paths[0], key=len)]
  for of_row in paths[1:]:
    path = of_row[rng.integers(len(of_row))]
    # A row that is done keeps nothing, not even node 0.
    kept.append(path[: rng.integers(len(path) + 1)])
  room = [subject.most - len(text) for text in rows.texts]
  return [path[:most] for path, most in zip(kept, room, strict=True)]


def _committed(subject, caches, texts, path=None):
  lengths = np.asarray([len(text) for text in texts], np.int32)
  events = [f'after commit(length={length})' for length in lengths]
  if path is not None:
    events = [
      f'after commit(length={length}, path={of_row.tolist()})'
      for length, of_row in zip(lengths, path, strict=True)
    ]
  return _Rows(
    texts=texts,
    caches=tuple(subject.commit(cache, lengths, path) for cache in caches),
    events=events,
    of_path=None if path is None else _MOVE,
  )


def _paths(parents):
  """Returns the nodes from node 0 to each node of a tree."""
  paths = [[0]]
  for i, parent in enumerate(parents):
    paths.append([*paths[parent], i + 1])
  return paths
