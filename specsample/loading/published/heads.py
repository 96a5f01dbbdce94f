"""Medusa and Hydra heads, in the files that their authors' code writes.

Cai et al., 2401.10774; Ankner et al., 2402.05109. Each head has an unembedding
of its own. Its blocks of the same width may all be one, which is then stored
once or several times.
"""

from collections.abc import Callable, Sequence
import re

import numpy as np

from specsample import drafters
from specsample.drafters import heads as heads_lib
from specsample.loading import load
from specsample.loading.published import layer
from specsample.loading.published import source as source_lib

_PREFIX = 'prefix_embeding_layer.'  # as its authors spell it


def plan_medusa(
  source: source_lib.Source,
  target: load.Loaded,
  num_draft_tokens: int | None,
) -> source_lib.Plan:
  """Plans a Medusa drafter with the first heads of medusa_lm_head.

  Raises:
    ValueError: there are fewer heads than K, or they are for another target.
  """
  source = _without(source, 'medusa_head.')
  num_heads = _count(source, r'(\d+)\.')
  num_layers = _count(source, r'0\.(\d+)\.linear\.weight')
  block = '{}.{}.linear.'.format
  reads = target.params is not None
  shares = _shares(source, block, num_heads, range(num_layers), reads)
  drafter = drafters.Medusa(
    model=target.model,
    num_draft_tokens=_check_count(source, num_draft_tokens, num_heads),
    num_layers=num_layers,
    own_unembedding=True,
    shares_blocks=shares,
  )
  names: dict[str, str] = {}
  made: dict[str, np.ndarray] = {}
  for i in range(drafter.num_draft_tokens):
    names |= _blocks(drafter, i, block, range(num_layers))
    names[f'heads.{i}.unembed.kernel'] = f'{i}.{num_layers}.weight'
    made[f'heads.{i}.unembed.bias'] = np.zeros(target.model.vocab_size, 'f4')
  ignored = _others(source, drafter, r'(\d+)\.')
  ignored |= _copies(drafter, block, range(num_layers))
  return source_lib.Plan(
    drafter=drafter, source=source, names=names, made=made, ignored=ignored
  )


def plan_hydra(
  source: source_lib.Source,
  target: load.Loaded,
  num_draft_tokens: int | None,
) -> source_lib.Plan:
  """Plans a Hydra drafter with the first heads of hydra_lm_head.

  In Hydra++ each part of a head comes after dropout, so that its number is odd,
  and all heads come after a layer of the target's shape.

  Raises:
    ValueError: there are fewer heads than K, they read no draft tokens, or they
      are for another target.
  """
  # Only heads that read the last hidden states are supported.
  source.config.only('hidden_state_offset', 0)
  num_heads = _count(source, r'hydra_mlp\.(\d+)\.')
  has_prefix = any(name.startswith(_PREFIX) for name in source.tensors)
  first, step = (1, 2) if has_prefix else (0, 1)
  numbers = range(
    first, _count(source, r'hydra_mlp\.0\.(\d+)\.linear\.weight'), step
  )
  block = 'hydra_mlp.{}.{}.linear.'.format
  drafter = drafters.Hydra(
    model=target.model,
    num_draft_tokens=_check_count(source, num_draft_tokens, num_heads),
    num_layers=len(numbers),
    own_unembedding=True,
    shares_blocks=_shares(
      source, block, num_heads, numbers[1:], target.params is not None
    ),
    prefix_attention=has_prefix,
    has_prefix_norm=has_prefix,
    has_linear_residual=True,
  )
  names: dict[str, str] = {}
  for i in range(drafter.num_draft_tokens):
    unembed = f'hydra_lm_head.{i}.1' if has_prefix else f'hydra_lm_head.{i}'
    around = f'hydra_mlp.{i}.{first}.res_connection'
    names |= _linear(f'heads.{i}.read', block(i, first).removesuffix('.'))
    names |= _linear(f'heads.{i}.around', around)
    names |= _blocks(drafter, i, block, numbers[1:])
    names |= _linear(f'heads.{i}.unembed', unembed)
  ignored = _others(source, drafter, r'hydra_\w+\.(\d+)\.')
  ignored |= _copies(drafter, block, numbers[1:])
  if has_prefix:
    of_layer = f'{_PREFIX}layers.0.'
    names |= layer.names('prefix.layer.', of_layer)
    names['prefix.norm.scale'] = f'{_PREFIX}norm.weight'
    ignored |= {f'{_PREFIX}embed_tokens.weight', of_layer + layer.FREQUENCIES}
  return source_lib.Plan(
    drafter=drafter, source=source, names=names, ignored=ignored
  )


def _without(source, prefix):
  """Keeps the tensors with a prefix, stripped of it, or all if none has it."""
  found = {
    name.removeprefix(prefix): tensor
    for name, tensor in source.tensors.items()
    if name.startswith(prefix)
  }
  tensors = found or source.tensors
  return source_lib.Source(source.folder, source.config, tensors)


def _count(source, pattern):
  """Returns 1 + the highest number that the pattern finds in the names."""
  matches = [re.match(pattern, name) for name in source.tensors]
  numbers = [int(match[1]) for match in matches if match]
  if not numbers:
    raise ValueError(
      f'{source.folder} has no tensors {pattern!r}, which heads have: the '
      'checkpoint is incomplete or has another layout'
    )
  return 1 + max(numbers)


def _check_count(source, wanted, num_heads):
  if wanted is not None and wanted > num_heads:
    raise ValueError(
      f'num_draft_tokens is {wanted}, but {source.folder} has {num_heads} '
      'heads: draft at most one token per head'
    )
  return num_heads if wanted is None else wanted


def _linear(ours: str, theirs: str) -> dict[str, str]:
  return {
    f'{ours}.kernel': f'{theirs}.weight',
    f'{ours}.bias': f'{theirs}.bias',
  }


def _blocks(
  drafter: heads_lib.Heads,
  head: int,
  block: Callable[[int, int], str],
  numbers: Sequence[int],
) -> dict[str, str]:
  """Returns the tensor names of a head's blocks, by parameter."""
  kept = numbers[:1] if drafter.shares_blocks else numbers
  names: dict[str, str] = {}
  for i, number in enumerate(kept):
    theirs = block(head, number).removesuffix('.')
    names |= _linear(f'heads.{head}.blocks.{i}.linear', theirs)
  return names


def _copies(drafter, block, numbers) -> set[str]:
  """Returns the tensors of blocks that repeat the first one."""
  again = numbers[1:] if drafter.shares_blocks else ()
  return {
    block(head, number) + part
    for head in range(drafter.num_draft_tokens)
    for number in again
    for part in ('weight', 'bias')
  }


def _shares(source, block, num_heads, numbers, reads) -> bool:
  """Returns whether all blocks of a head are one.

  They are compared by their place in the file and, if `reads`, by value.
  """
  if len(numbers) < 2:
    return False
  for head in range(num_heads):
    for part in ('weight', 'bias'):
      first = block(head, numbers[0]) + part
      for number in numbers[1:]:
        name = block(head, number) + part
        if name not in source.tensors or first not in source.tensors:
          continue
        if source.tensors[name] == source.tensors[first]:
          continue  # the same bytes of the same file
        if not reads or not _are_equal(source, name, first):
          return False
  return True


def _are_equal(source, name, other) -> bool:
  return np.array_equal(source.read(name), source.read(other))


def _others(source, drafter, pattern) -> set[str]:
  """Returns the tensors of heads beyond the first K."""
  matches = {name: re.match(pattern, name) for name in source.tensors}
  return {
    name
    for name, match in matches.items()
    if match and int(match[1]) >= drafter.num_draft_tokens
  }
