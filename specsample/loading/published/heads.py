"""Medusa and Hydra heads, in the files that their authors' code writes.

Cai et al., 2401.10774; Ankner et al., 2402.05109. Each head has an unembedding
of its own. A head's blocks of equal width may share one set of weights, stored
once or several times. vLLM has names of its own for Medusa's tensors, and heads
over some of the tokens, whose ids are `token_map`.
"""

from collections.abc import Callable, Sequence
import re

import numpy as np

from specsample import drafters
from specsample.drafters import heads as heads_lib
from specsample.drafters import vocabulary
from specsample.loading import load
from specsample.loading.published import layer
from specsample.loading.published import source as source_lib
from specsample.loading.published import writing

_PREFIX = 'prefix_embeding_layer.'  # as its authors spell it
_TOKEN_MAP = 'token_map'
# vLLM's names of Medusa's blocks and unembeddings.
_BLOCK, _UNEMBED = 'blocks.{}.layers.{}.', 'lm_heads.{}.weight'


def plan_medusa(
  source: source_lib.Source,
  target: load.Loaded,
  num_draft_tokens: int | None,
) -> source_lib.Plan:
  """Plans a Medusa drafter with the first heads of medusa_lm_head."""
  source.config.only('logit_scale', 1)  # vLLM's
  source = _without(source, 'medusa_head.')
  if _UNEMBED.format(0) in source.tensors:
    of_head, block = r'(?:blocks|lm_heads)\.(\d+)\.', _BLOCK.format
    num_layers = _count(source, r'blocks\.0\.layers\.(\d+)\.')
    unembed = _UNEMBED.format
  else:
    of_head, block = r'(\d+)\.', '{}.{}.linear.'.format
    num_layers = _count(source, r'0\.(\d+)\.linear\.weight')
    unembed = f'{{}}.{num_layers}.weight'.format
  num_heads = _count(source, of_head)
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
    names[f'heads.{i}.unembed.kernel'] = unembed(i)
    made[f'heads.{i}.unembed.bias'] = np.zeros(target.model.vocab_size, 'f4')
    if _TOKEN_MAP in source.tensors:
      kernel, bias = _widened(source, unembed(i), target.model.vocab_size)
      made[f'heads.{i}.unembed.kernel'] = kernel
      made[f'heads.{i}.unembed.bias'] = bias
  ignored = _others(source, drafter, of_head)
  if _TOKEN_MAP in source.tensors:
    ignored |= {_TOKEN_MAP, *map(unembed, range(num_heads))}
  ignored |= _copies(drafter, block, range(num_layers))
  return source_lib.Plan(
    drafter=drafter, source=source, names=names, made=made, ignored=ignored
  )


def _widened(source, name, vocab_size):
  """Returns a head's unembedding [V, D] and its bias, -inf for other tokens."""
  ids = source.read(_TOKEN_MAP)
  try:
    vocabulary.check_d2t(ids, vocab_size)
  except ValueError as error:
    raise ValueError(
      f'{source.folder}, tensor {_TOKEN_MAP}: {error}'
    ) from error
  kernel = np.zeros((vocab_size, *source.shape(name)[1:]), 'f4')
  kernel[ids] = source.read(name)
  bias = np.full(vocab_size, -np.inf, 'f4')
  bias[ids] = 0
  return kernel, bias


def write_medusa(request: writing.Request) -> writing.Content:
  """Returns the files of a Medusa, with vLLM's names.

  A head that shares the target's unembedding is written as one unembedding: the
  product of the head's own map and of the target's columns.
  """
  drafter, values = request.drafter, request.values()
  if request.of_speculators:
    raise request.no_room(
      'Medusa is no speculators_model_type', "choose layout='huggingface'"
    )
  if drafter.model.logit_softcap is not None and not drafter.own_unembedding:
    raise request.no_room(
      f"the target's logit_softcap = {drafter.model.logit_softcap}",
      'train another drafter for this target',
    )
  columns = None if drafter.own_unembedding else _columns(request, values)
  numbers, found = range(drafter.num_layers), {}
  for i in range(drafter.num_draft_tokens):
    for j in numbers:
      stored = 0 if drafter.shares_blocks else j
      for ours, theirs in _linear('', _BLOCK.format(i, j)[:-1]).items():
        own = values[f'heads.{i}.blocks.{stored}.linear{ours}']
        found[theirs] = writing.to_bfloat16(own)
    if columns is not None:
      kernel = values[f'heads.{i}.project.linear.kernel']
      kernel = kernel.astype('f4') @ columns
    elif values[f'heads.{i}.unembed.bias'].any():
      raise request.no_room(
        f'heads.{i}.unembed.bias, which is not 0', 'train without biases'
      )
    else:
      kernel = values[f'heads.{i}.unembed.kernel']
    found[_UNEMBED.format(i)] = writing.to_bfloat16(kernel)
  num_drafted = drafter.draft_vocab_size or drafter.model.vocab_size
  if drafter.draft_vocab_size is not None:
    found[_TOKEN_MAP] = values['vocabulary.d2t'].astype(np.int64)
  config = {
    'architectures': ['MedusaModel'],
    'model_type': 'medusa',
    'base_model_name_or_path': request.target_name,
    'hidden_size': drafter.model.dim,
    'vocab_size': drafter.model.vocab_size,
    'truncated_vocab_size': num_drafted,
    'num_heads': drafter.num_draft_tokens,
    'num_hidden_layers': drafter.num_layers,
    'medusa_fc_bias': True,
    'torch_dtype': 'bfloat16',
    'dtype': 'bfloat16',
  }
  return writing.Content(config=config, weights={'model.safetensors': found})


def _columns(request, values):
  """Returns the target's unembedding [D, V'] of the tokens that are drafted."""
  if 'vocabulary.unembedding' in values:
    return values['vocabulary.unembedding'].astype('f4')
  model, ids = request.target.model, np.arange(request.target.model.vocab_size)
  cut = vocabulary.of_target(model, request.target.params, ids)
  return np.asarray(cut['unembedding'], 'f4')


def plan_hydra(
  source: source_lib.Source,
  target: load.Loaded,
  num_draft_tokens: int | None,
) -> source_lib.Plan:
  """Plans a Hydra drafter with the first heads of hydra_lm_head.

  In Hydra++ each part of a head comes after dropout, so its number is odd,
  and all heads come after a layer of the target's shape.
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
    # The layer reads hidden vectors, so that its embedding is never used.
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
    example = pattern.replace(r'(\d+)', '0').replace('\\', '')
    example = example.replace('(?:blocks|lm_heads)', 'blocks')
    raise ValueError(
      f'{source.folder} has no tensors named like {example}, which heads have: '
      'the checkpoint is incomplete or has another layout'
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
