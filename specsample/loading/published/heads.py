"""Medusa and Hydra heads, in the files that their authors' code writes.

Cai et al., 2401.10774; Ankner et al., 2402.05109. Each head has an unembedding
of its own. A head's blocks of equal width may share one set of weights, stored
once or several times. vLLM has names of its own for Medusa's tensors, and heads
over some of the tokens, whose ids are `token_map`.
"""

import re
from typing import Any

import numpy as np

from specsample import drafters
from specsample.drafters import vocabulary
from specsample.loading.published import layer
from specsample.loading.published import source as source_lib
from specsample.loading.published import writing

_PREFIX = 'prefix_embeding_layer.'  # as its authors spell it
_TOKEN_MAP = 'token_map'


def plan_medusa(source: source_lib.Source) -> source_lib.Plan:
  """Plans a Medusa drafter with the first heads of medusa_lm_head."""
  source.config.only('logit_scale', 1)  # vLLM's
  of_all = 'medusa_head.'
  others = {x for x in source.tensors if not x.startswith(of_all)}
  if len(others) == len(source.tensors):
    of_all, others = '', set()
  if f'{of_all}lm_heads.0.weight' in source.tensors:
    of_head = rf'{of_all}(?:blocks|lm_heads)\.(\d+)\.'
    num_layers = _count(source, rf'{of_all}blocks\.0\.layers\.(\d+)\.')
    block, unembed = f'{of_all}blocks.{{}}.layers.{{}}', 'lm_heads.{}.weight'
  else:
    of_head = rf'{of_all}(\d+)\.'
    num_layers = _count(source, rf'{of_all}0\.(\d+)\.linear\.weight')
    block, unembed = f'{of_all}{{}}.{{}}.linear', f'{{}}.{num_layers}.weight'
  unembed = of_all + unembed
  num_heads = _count(source, of_head)
  blocks = [
    [block.format(i, j) for j in range(num_layers)] for i in range(num_heads)
  ]
  drafter = drafters.Medusa(
    model=source.target.model,
    num_draft_tokens=_num_draft_tokens(source, num_heads),
    num_layers=num_layers,
    own_unembedding=True,
    shares_blocks=_are_shared(source, blocks),
  )
  table: dict[str, Any] = _linear('heads.{}.blocks.{}.linear', block)
  table['heads.{}.unembed.kernel'] = unembed
  table['heads.{}.unembed.bias'] = _bias
  ignored = _not_read(source, drafter, of_head, blocks)
  if _TOKEN_MAP in source.tensors:
    table['heads.{}.unembed.kernel'] = lambda source, i: _widened(
      source, unembed.format(i)
    )
    ignored |= {_TOKEN_MAP, *map(unembed.format, range(num_heads))}
  return source_lib.Plan(drafter, table, ignored | others)


def _bias(source, head):
  """Returns a head's bias: 0, and -inf for tokens that are never drafted."""
  del head
  bias = np.zeros(source.target.model.vocab_size, np.float32)
  if _TOKEN_MAP in source.tensors:
    bias -= np.inf
    bias[source.ids(_TOKEN_MAP, source.read(_TOKEN_MAP))] = 0
  return bias


def _widened(source, name):
  """Returns a head's unembedding [V, D], 0 for tokens never drafted."""
  size = source.target.model.vocab_size
  kernel = np.zeros((size, *source.shape(name)[1:]), np.float32)
  ids = source.ids(_TOKEN_MAP, source.read(_TOKEN_MAP))
  kernel[ids] = source.read(name)
  return kernel


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
  found = {}
  for i in range(drafter.num_draft_tokens):
    for j in range(drafter.num_layers):
      stored = 0 if drafter.shares_blocks else j
      block = f'heads.{i}.blocks.{stored}.linear'
      for ours, theirs in _linear(block, f'blocks.{i}.layers.{j}').items():
        found[theirs] = writing.to_bfloat16(values[ours])
    if columns is not None:
      kernel = values[f'heads.{i}.project.linear.kernel']
      kernel = kernel.astype('f4') @ columns
    elif values[f'heads.{i}.unembed.bias'].any():
      raise request.no_room(
        f'heads.{i}.unembed.bias, which is not 0', 'train without biases'
      )
    else:
      kernel = values[f'heads.{i}.unembed.kernel']
    found[f'lm_heads.{i}.weight'] = writing.to_bfloat16(kernel)
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


def plan_hydra(source: source_lib.Source) -> source_lib.Plan:
  """Plans a Hydra drafter with the first heads of hydra_lm_head.

  In Hydra++ each part of a head comes after dropout, so its number is odd,
  and all heads come after a layer of the target's shape.
  """
  # Only heads that read the last hidden states are supported.
  source.config.only('hidden_state_offset', 0)
  num_heads = _count(source, r'hydra_mlp\.(\d+)\.')
  has_prefix = any(name.startswith(_PREFIX) for name in source.tensors)
  first, step = (1, 2) if has_prefix else (0, 1)
  end = _count(source, r'hydra_mlp\.0\.(\d+)\.linear\.weight')
  numbers = range(first, end, step)
  blocks = [
    [f'hydra_mlp.{i}.{j}.linear' for j in numbers[1:]] for i in range(num_heads)
  ]
  drafter = drafters.Hydra(
    model=source.target.model,
    num_draft_tokens=_num_draft_tokens(source, num_heads),
    num_layers=len(numbers),
    own_unembedding=True,
    shares_blocks=_are_shared(source, blocks),
    prefix_attention=has_prefix,
    has_prefix_norm=has_prefix,
    has_linear_residual=True,
  )
  part = f'hydra_mlp.{{}}.{first}'
  unembed = 'hydra_lm_head.{}.1' if has_prefix else 'hydra_lm_head.{}'
  table = {
    **_linear('heads.{}.read', f'{part}.linear'),
    **_linear('heads.{}.around', f'{part}.res_connection'),
    **_linear('heads.{}.unembed', unembed),
    **layer.table('prefix.layer.', f'{_PREFIX}layers.0.'),
    'prefix.norm.scale': f'{_PREFIX}norm.weight',
  }
  for i, of_head in enumerate(blocks):
    for j, block in enumerate(of_head):
      table |= _linear(f'heads.{i}.blocks.{j}.linear', block)
  ignored = _not_read(source, drafter, r'hydra_\w+\.(\d+)\.', blocks)
  # The layer reads hidden vectors, so that its embedding is never used.
  ignored |= {f'{_PREFIX}embed_tokens.weight'}
  return source_lib.Plan(drafter, table, ignored)


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


def _num_draft_tokens(source, num_heads):
  wanted = source.num_drafts(num_heads)
  if wanted > num_heads:
    raise ValueError(
      f'num_draft_tokens is {wanted}, but {source.folder} has {num_heads} '
      'heads: draft at most one token per head'
    )
  return wanted


def _linear(ours: str, theirs: str) -> dict[str, Any]:
  return {
    f'{ours}.kernel': f'{theirs}.weight',
    f'{ours}.bias': f'{theirs}.bias',
  }


def _are_shared(source, blocks) -> bool:
  """Returns whether all blocks of each head are equal."""
  pairs = [
    (f'{block}.{part}', f'{first}.{part}')
    for first, *others in filter(None, blocks)
    for block in others
    for part in ('weight', 'bias')
  ]
  return bool(pairs) and all(
    np.array_equal(source.read(name), source.read(first))
    for name, first in pairs
    if {name, first} <= source.tensors.keys()
  )


def _not_read(source, drafter, pattern, blocks) -> set[str]:
  """Returns the tensors of heads beyond the first K, and of repeated blocks."""
  matches = {name: re.match(pattern, name) for name in source.tensors}
  beyond = {
    name
    for name, match in matches.items()
    if match and int(match[1]) >= drafter.num_draft_tokens
  }
  if not drafter.shares_blocks:
    return beyond
  again = [name for names in blocks for name in names[1:]]
  return beyond | {f'{x}.{part}' for x in again for part in ('weight', 'bias')}
