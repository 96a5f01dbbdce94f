"""EAGLE 1, 2 and 3, as their authors and others write them.

Li et al., 2401.15077, 2406.16858 and 2503.01840. The layer of EAGLE-3 is called
`midlayer` by its authors and `layers.0` by others; that of EAGLE is `layers.0`,
or `transformer` if `speculators` wrote it.
"""

import dataclasses

import numpy as np

from specsample import drafters
from specsample.drafters import vocabulary
from specsample.loading import load
from specsample.loading.published import layer
from specsample.loading.published import source as source_lib
from specsample.loading.published import writing
from specsample.models import config as config_lib

# The default length of a chain, as deep as EAGLE's own trees.
_NUM_DRAFT_TOKENS = 5
_EMBEDDING = 'embed_tokens.weight'
_LAYERS = 'eagle_aux_hidden_state_layer_ids'
# AngelSlim's name, whose numbers are those of layer outputs.
_OF_ANGELSLIM = 'aux_hidden_states_layer_ids'
# Settings in eagle_config that other trainers and engines have, with the only
# value supported here.
_ONLY = {
  'use_aux_hidden_state': True,
  'eh_proj_before_attn': False,
  'use_last_layernorm': True,
  'use_input_layernorm_in_first_layer': True,
  'use_mtp_layernorm': False,
}
# The names of P-EAGLE's mask token.
_MASKS = ('mask_token_id', 'pard_token', 'ptd_token_id')


def plan_eagle(
  source: source_lib.Source,
  target: load.Loaded,
  num_draft_tokens: int | None,
) -> source_lib.Plan:
  """Plans an EAGLE 1 or 2 drafter; the two differ only in their trees."""
  # In `speculators`, HASS with norms around the projection and before the head.
  source.config.only('layernorms', False)
  is_renamed = 'fusion_fc.weight' in source.tensors
  prefix = 'transformer.' if is_renamed else 'layers.0.'
  project = 'fusion_fc' if is_renamed else 'fc'
  drafter = drafters.Eagle(
    model=target.model,
    num_draft_tokens=num_draft_tokens_of(source.config, num_draft_tokens),
    own_unembedding=source_lib.has_own_unembedding(source, target),
    bias=f'{project}.bias' in source.tensors,
    layer_config=_one_layer(source, target, prefix),
  )
  names = _names(prefix, drafter.layer_config) | {
    'project.linear.kernel': f'{project}.weight',
    'project.linear.bias': f'{project}.bias',
  }
  ignored = source_lib.check_embedding(source, 'embed_tokens.weight', target)
  ignored |= _not_read(source, drafter, prefix)
  return source_lib.Plan(
    drafter=drafter, source=source, names=names, ignored=ignored
  )


def plan_eagle3(
  source: source_lib.Source,
  target: load.Loaded,
  num_draft_tokens: int | None,
) -> source_lib.Plan:
  """Plans an EAGLE-3 drafter."""
  config = source.config
  of_speculators = config.get('speculators_model_type') is not None
  is_there = any(name.startswith('midlayer.') for name in source.tensors)
  prefix = 'midlayer.' if is_there else 'layers.0.'
  ids, ignored = read_ids(source, target)
  drafter = drafters.Eagle3(
    model=target.model,
    num_draft_tokens=num_draft_tokens_of(config, num_draft_tokens),
    draft_vocab_size=None if ids is None else len(ids),
    own_unembedding=(
      ids is not None or source_lib.has_own_unembedding(source, target)
    ),
    feature_layers=_feature_layers(source, target),
    has_feature_norms=config.flag('fc_norm'),
    has_joint_norm=_has_joint_norm(config),
    # Files of `speculators` from before there was this setting have the norm.
    norm_before_residual=config.flag('norm_before_residual', of_speculators),
    feeds_back_normed=_feeds_back_normed(config),
    layer_config=_one_layer(source, target, prefix),
  )
  names = _names_of_eagle3(
    prefix, len(drafter.feature_layers), drafter.layer_config
  )
  ignored |= source_lib.check_embedding(source, 'embed_tokens.weight', target)
  ignored |= _not_read(source, drafter, prefix)
  made = {} if ids is None else {'vocabulary.d2t': ids}
  return source_lib.Plan(
    drafter=drafter, source=source, names=names, made=made, ignored=ignored
  )


def plan_p_eagle(
  source: source_lib.Source,
  target: load.Loaded,
  num_draft_tokens: int | None,
) -> source_lib.Plan:
  """Plans a P-EAGLE drafter, whose embedding is its own if it has one."""
  config = source.config
  is_there = any(name.startswith('midlayer.') for name in source.tensors)
  prefix = 'midlayer.' if is_there else 'layers.0.'
  made = layer.config_of(source, of_layer(config), target, prefix)
  ids, ignored = read_ids(source, target)
  mask = source.read('mask_hidden').reshape(-1)
  drafter = drafters.PEagle(
    model=target.model,
    num_draft_tokens=num_draft_tokens_of(config, num_draft_tokens),
    draft_vocab_size=None if ids is None else len(ids),
    own_unembedding=(
      ids is not None or source_lib.has_own_unembedding(source, target)
    ),
    own_embedding=_EMBEDDING in source.tensors,
    feature_layers=_feature_layers(source, target),
    has_feature_norms=config.flag('fc_norm'),
    has_joint_norm=_has_joint_norm(config),
    norm_before_residual=config.flag('norm_before_residual'),
    mask_token_id=source_lib.mask_token_id(config, target, _MASKS),
    num_layers=made.num_layers,
    layer_config=made,
  )
  names = _names_of_eagle3(prefix, len(drafter.feature_layers), made)
  names['embedding'] = _EMBEDDING
  for i in range(1, made.num_layers):
    names |= layer.names(f'layers.{i - 1}.', f'layers.{i}.', made)
  ignored |= _not_read(source, drafter, prefix) | {'mask_hidden'}
  values = {'mask_hidden': mask}
  if ids is not None:
    values['vocabulary.d2t'] = ids
  return source_lib.Plan(
    drafter=drafter, source=source, names=names, made=values, ignored=ignored
  )


def write_eagle3(request: writing.Request) -> writing.Content:
  """Returns the files of an EAGLE-3 drafter.

  In Hugging Face's layout vLLM counts the layers that are read by what enters
  them, from 1 on, and SGLang by their outputs, so both numbers are written.
  """
  drafter = request.drafter
  layers = writing.feature_layers(request)
  num_drafted = drafter.draft_vocab_size or drafter.model.vocab_size
  counted = [i + 1 for i in layers]
  if request.of_speculators:
    if drafter.has_feature_norms and drafter.has_joint_norm:
      raise request.no_room(
        'has_feature_norms and has_joint_norm', 'train with one of the two'
      )
    prefix = 'layers.0.'
    model_type = 'qwen3' if drafter.shape.qk_norm else 'llama'
    config = {
      **writing.for_speculators(request, 'eagle3', 'Eagle3Speculator'),
      'transformer_layer_config': layer.settings(request, model_type),
      'draft_vocab_size': num_drafted,
      'norm_before_residual': drafter.norm_before_residual,
      'norm_before_fc': drafter.has_joint_norm,
      'fc_norm': drafter.has_feature_norms,
      'norm_output': drafter.feeds_back_normed,
      'target_hidden_size': drafter.model.dim,
      _LAYERS: counted,
    }
  else:
    prefix = 'midlayer.'
    config = _of_authors(request) | {
      'draft_vocab_size': num_drafted,
      'ttt_length': drafter.num_draft_tokens,
      _LAYERS: counted,
      'eagle_config': {
        _LAYERS: list(layers),
        'use_aux_hidden_state': True,
        'norm_before_fc': drafter.has_joint_norm,
      },
    }
  made = {'vocabulary.d2t', 'vocabulary.unembedding'}
  names = _names_of_eagle3(prefix, len(layers))
  found = writing.named(request, names, made) | writing.vocabulary(request)
  return writing.Content(config=config, weights={'model.safetensors': found})


def _of_authors(request):
  """Returns the settings of the layer, which is Llama's without biases."""
  drafter = request.drafter
  for name in (
    'has_feature_norms',
    'norm_before_residual',
    'feeds_back_normed',
  ):
    if getattr(drafter, name):
      raise request.no_room(
        f'{name} = True', "choose layout='speculators', which has room for it"
      )
  if drafter.window is not None:
    raise request.no_room(
      f'a window of {drafter.window} tokens', "choose layout='speculators'"
    )
  if drafter.shape.attention_bias:
    raise request.no_room(
      'attention_bias = True', 'train with a layer_config without biases'
    )
  return {
    'architectures': ['LlamaForCausalLMEagle3'],
    **layer.settings(request, 'llama'),
    'dtype': 'bfloat16',
    'torch_dtype': 'bfloat16',
  }


def _has_joint_norm(config) -> bool:
  key = 'norm_before_fc'
  nested = config.part('eagle_config').get(key)
  given = {key: config.get(key), f'{key} of eagle_config': nested}
  return bool(config.agreed(given))


def _feeds_back_normed(config) -> bool:
  # The second is TensorRT-LLM's name.
  of_eagle = config.part('eagle_config')
  return config.flag('norm_output') or of_eagle.flag('return_hidden_post_norm')


def read_ids(
  source: source_lib.Source, target: load.Loaded
) -> tuple[np.ndarray | None, set[str]]:
  """Returns the target's ids of the draft vocabulary, and tensors to ignore.

  d2t holds the ids, each minus its index in the draft vocabulary, and t2d flags
  them in the target's vocabulary. The ids are None if there is no d2t.
  """
  wanted = source.config.get('draft_vocab_size')
  ignored = {'d2t', 't2d'} & source.tensors.keys()
  if 'd2t' not in source.tensors:
    if wanted is not None and wanted != target.model.vocab_size:
      raise ValueError(
        f'{source.config.origin}: draft_vocab_size is {wanted}, but '
        f'{source.folder} has no tensor d2t to map these tokens to the '
        f"target's {target.model.vocab_size}: the checkpoint is incomplete, or "
        'was made for another target'
      )
    return None, ignored
  offsets = source.read('d2t')
  if wanted is not None and offsets.shape != (wanted,):
    raise ValueError(
      f'{source.config.origin}: draft_vocab_size is {wanted}, but tensor d2t '
      f'has shape {offsets.shape}: one of the two belongs to another drafter; '
      'download both again'
    )
  ids = offsets + np.arange(offsets.size).reshape(offsets.shape)
  try:
    vocabulary.check_d2t(ids, target.model.vocab_size)
  except ValueError as error:
    raise ValueError(f'{source.folder}: {error}') from error
  if 't2d' in source.tensors:
    flags = source.read('t2d').astype(bool)
    if not np.array_equal(np.flatnonzero(flags), np.sort(ids)):
      raise ValueError(
        f'{source.folder}: tensors d2t and t2d name different tokens: one of '
        'the two is damaged or belongs to another drafter; download both again'
      )
  return ids.astype(np.int32), ignored


def of_outputs(
  source: source_lib.Source, target: load.Loaded, layers: tuple[int, ...]
) -> tuple[int, ...]:
  """Returns the layers, checked to be outputs that transformers provides."""
  if target.model.num_layers - 1 in layers:
    raise ValueError(
      f'{source.config.origin}: the drafter reads the output of layer '
      f'{target.model.num_layers - 1}, the last layer, after the norm: only '
      'earlier layers are supported'
    )
  return layers


def of_layer(config: config_lib.Config) -> config_lib.Config:
  """Returns the part of a configuration that describes the drafter's layers."""
  nested = config.part('transformer_layer_config')
  return nested if nested.values else config


def _one_layer(source, target, prefix):
  config = of_layer(source.config)
  if prefix == 'midlayer.' and config.get('num_hidden_layers') != 1:
    # There is one, whatever the number says: it may be the target's.
    config = dataclasses.replace(
      config,
      values={**config.values, 'num_hidden_layers': 1, 'layer_types': None},
    )
  made = layer.config_of(source, config, target, prefix)
  if made.num_layers != 1:
    raise ValueError(
      f'{source.config.origin}: num_hidden_layers is {made.num_layers}, but '
      'only drafters with one layer are supported'
    )
  return made


def _feature_layers(source, target):
  """Returns the layers whose outputs are read, () if no configuration says.

  The numbers of `speculators` count the embedding as the first.
  """
  config = source.config
  nested = config.part('eagle_config')
  for key, supported in _ONLY.items():
    nested.only(key, supported)
  config.only('is_causal', True)
  counted = lambda part, key: tuple(
    i - 1 for i in source_lib.numbers(part, key)
  )
  # SGLang's numbers, in eagle_config, are those of layer outputs.
  given = {
    _LAYERS: counted(config, _LAYERS),
    f'{_LAYERS} of eagle_config': source_lib.numbers(nested, _LAYERS),
    'layer_ids of eagle_config': counted(nested, 'layer_ids'),
    _OF_ANGELSLIM: source_lib.numbers(config, _OF_ANGELSLIM),
    'target_layer_ids': source_lib.numbers(config, 'target_layer_ids'),
  }
  ids = config.agreed({key: ids or None for key, ids in given.items()}) or ()
  if given['target_layer_ids'] or given[_OF_ANGELSLIM]:
    return of_outputs(source, target, ids)
  return ids


def _not_read(source, drafter, prefix):
  """Returns tensors that may exist, but are computed or the target's own."""
  names = {prefix + layer.FREQUENCIES} | layer.unit_scalars(source)
  return names if drafter.own_unembedding else names | {source_lib.UNEMBEDDING}


def _names(prefix, like=None):
  return layer.names('layer.', prefix, like) | {
    'vocabulary.unembedding': source_lib.UNEMBEDDING
  }


def _names_of_eagle3(prefix, num_features, like=None):
  return _names(prefix, like) | {
    'joint_norm.scale': 'input_norm.weight',
    'project.linear.kernel': 'fc.weight',
    'embedding_norm.scale': f'{prefix}input_layernorm.weight',
    'feature_norm.scale': f'{prefix}hidden_norm.weight',
    'norm.scale': 'norm.weight',
    **{
      f'feature_norms.norms.{i}.scale': f'fc_norm.{i}.weight'
      for i in range(num_features)
    },
  }


def num_draft_tokens_of(config: config_lib.Config, wanted: int | None) -> int:
  """Returns K: the wanted one, or that of a configuration, or the default."""
  if wanted is not None:
    return wanted
  try:
    (method,) = config.values['speculators_config']['proposal_methods']
    return int(method['speculative_tokens'])
  except (KeyError, TypeError, ValueError):
    return config.size('ttt_length', _NUM_DRAFT_TOKENS)
