"""Checks of the properties that every `Draft` has to have.

A rule relies on all of them, but sees no values while it is traced.
"""

from collections.abc import Iterator
import itertools

import jax
import numpy as np

from specsample.types import Draft, DraftKind


def problems(draft: Draft) -> Iterator[str]:
  """Yields a sentence for each problem.

  Args:
    draft: a batch of drafts, tokens [B, N], on the host or a device.
  """
  host = jax.device_get(draft)
  for row, tokens in enumerate(np.asarray(host.tokens)):
    parents = list(range(tokens.size))
    if host.parents is not None:
      parents = [int(parent) for parent in host.parents[row]]
    probs = None if host.probs is None else np.asarray(host.probs[row])
    found = itertools.chain(
      _of_shape(draft, parents, tokens),
      _of_siblings(draft, parents, tokens, probs),
      _of_probs(tokens, probs),
    )
    yield from (f'row {row}: {problem}' for problem in found)


def _of_shape(draft, parents, tokens):
  depths, ranks = [0], [0]
  for i, parent in enumerate(parents):
    if not 0 <= parent <= i:
      yield (
        f'node {i + 1} has the parent {parent}, which must be one of 0 to {i}: '
        'list parents before children'
      )
      return  # depths are undefined from here on
    depths.append(depths[parent] + 1)
    ranks.append(parents[:i].count(parent))
    if tokens[i] < 0:
      continue
    if draft.depth is not None and depths[-1] > draft.depth:
      yield (
        f'node {i + 1} is at depth {depths[-1]}, but Draft.depth is '
        f'{draft.depth}: a longer path is cut off'
      )
    most = draft.num_children
    if most is not None and ranks[-1] >= most[parent]:
      yield (
        f'node {i + 1} has {ranks[-1]} siblings before it, but '
        f'Draft.num_children is {most[parent]} for node {parent}: it is never '
        'tried'
      )


def _of_siblings(draft, parents, tokens, probs):
  drafted = [i for i, token in enumerate(tokens) if token >= 0]
  for i, j in itertools.combinations(drafted, 2):
    if parents[i] != parents[j]:
      continue
    both = f'nodes {i + 1} and {j + 1} (children of node {parents[i]})'
    if draft.kind is DraftKind.SAMPLED:
      if not np.array_equal(probs[i], probs[j]):
        yield (
          f'{both} are drawn from different distributions, but siblings of '
          f'kind {draft.kind.value!r} must be drawn from the same one'
        )
    elif tokens[i] == tokens[j]:
      yield (
        f'{both} are both token {tokens[i]}, but siblings of kind '
        f'{draft.kind.value!r} must be distinct'
      )
    elif probs is not None and probs[j, tokens[i]] > 0:
      yield (
        f'{both} are of kind {draft.kind.value!r}, but the distribution of the '
        f'second node gives the token of the first, {tokens[i]}, probability '
        f'{probs[j, tokens[i]]:.3g}: exclude that token'
      )


def _of_probs(tokens, probs):
  if probs is None:
    return
  for i, token in enumerate(tokens):
    if token >= 0 and not probs[i, token] > 0:
      yield (
        f'node {i + 1} is token {token}, to which its row of Draft.probs gives '
        f'{probs[i, token]:.3g}: it cannot have been drawn from that row'
      )
