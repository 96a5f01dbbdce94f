"""EAGLE 1, 2 and 3, as their authors and others write them.

Li et al., 2401.15077, 2406.16858 and 2503.01840. The layer of EAGLE-3 is called
`midlayer` by its authors and `layers.0` by others; that of EAGLE is `layers.0`,
or `transformer` if `speculators` wrote it.
"""

import dataclasses

from specsample import drafters
from specsample.loading.published import layer
from specsample.loading.published import source as source_lib
from specsample.loading.published import writing

# The default length of a chain, as deep as EAGLE's own trees.
_NUM_DRAFT_TOKENS = 5
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
_TABLE = source_lib.VOCABULARY | {
  'project.linear.kernel': 'fc.weight',
  'project.linear.bias': 'fc.bias',
  'joint_norm.scale': 'input_norm.weight',
  'feature_norms.norms.{}.scale': 'fc_norm.{}.weight',
  'norm.scale': 'norm.weight',
  'mask_hidden': lambda source: source.read('mask_hidden').reshape(-1),
}


def _table(prefix, like=None):
  """Returns the table, given the prefix of the first layer's tensors."""
  of_layer = layer.table('layer.', prefix, like)
  return (
    _TABLE
    | of_layer
    | {
      'embedding_norm.scale': f'{prefix}input_layernorm.weight',
      'feature_norm.scale': f'{prefix}hidden_norm.weight',
    }
  )


def plan_eagle(source: source_lib.Source) -> source_lib.Plan:
  """Plans an EAGLE 1 or 2 drafter; the two differ only in their trees."""
  # In `speculators`, HASS with norms around the projection and before the head.
  source.config.only('layernorms', False)
  is_renamed = 'fusion_fc.weight' in source.tensors
  prefix = 'transformer.' if is_renamed else 'layers.0.'
  project = 'fusion_fc' if is_renamed else 'fc'
  drafter = drafters.Eagle(
    model=source.target.model,
    num_draft_tokens=num_draft_tokens(source),
    own_unembedding=source.has_own_unembedding(),
    bias=f'{project}.bias' in source.tensors,
    layer_config=_one_layer(source, prefix),
  )
  table = _table(prefix, drafter.layer_config) | {
    'project.linear.kernel': f'{project}.weight',
    'project.linear.bias': f'{project}.bias',
  }
  return source_lib.Plan(drafter, table)


def plan_eagle3(source: source_lib.Source) -> source_lib.Plan:
  """Plans an EAGLE-3 drafter."""
  config, prefix = source.config, _prefix(source)
  of_speculators = config.get('speculators_model_type', str) is not None
  of_eagle = config.part('eagle_config')
  drafter = drafters.Eagle3(
    **_settings(source),
    # Files of `speculators` from before there was this setting have the norm.
    norm_before_residual=config.flag('norm_before_residual', of_speculators),
    # The second is TensorRT-LLM's name.
    feeds_back_normed=(
      config.flag('norm_output') or of_eagle.flag('return_hidden_post_norm')
    ),
    layer_config=_one_layer(source, prefix),
  )
  return source_lib.Plan(drafter, _table(prefix, drafter.layer_config))


def plan_p_eagle(source: source_lib.Source) -> source_lib.Plan:
  """Plans a P-EAGLE drafter, whose embedding is its own if it has one."""
  config, prefix = source.config, _prefix(source)
  layers = layer.config_of(source, source.layer_config, prefix)
  drafter = drafters.PEagle(
    **_settings(source),
    own_embedding=_TABLE['embedding'] in source.tensors,
    norm_before_residual=config.flag('norm_before_residual'),
    mask_token_id=source_lib.mask_token_id(config, source.target, _MASKS),
    num_layers=layers.num_layers,
    layer_config=layers,
  )
  table = _table(prefix, layers)
  for i in range(1, layers.num_layers):
    table |= layer.table(f'layers.{i - 1}.', f'layers.{i}.', layers)
  return source_lib.Plan(drafter, table, ignored={'mask_hidden'})


def _prefix(source):
  is_there = any(name.startswith('midlayer.') for name in source.tensors)
  return 'midlayer.' if is_there else 'layers.0.'


def _settings(source):
  """Returns the settings that EAGLE-3 and P-EAGLE share."""
  key, config = 'norm_before_fc', source.config
  nested = config.part('eagle_config').get(key, bool)
  given = {key: config.get(key, bool), f'{key} of eagle_config': nested}
  return {
    'model': source.target.model,
    'num_draft_tokens': num_draft_tokens(source),
    **source.vocabulary_settings(),
    'feature_layers': _feature_layers(source),
    'has_feature_norms': config.flag('fc_norm'),
    'has_joint_norm': bool(config.agreed(given)),
  }


def _one_layer(source, prefix):
  config = source.layer_config
  if prefix == 'midlayer.' and config.get('num_hidden_layers', int) != 1:
    # There is one, whatever the number says: it may be the target's.
    one = {'num_hidden_layers': 1, 'layer_types': None}
    config = dataclasses.replace(config, values={**config.values, **one})
  made = layer.config_of(source, config, prefix)
  if made.num_layers != 1:
    raise ValueError(
      f'{source.config.origin}: num_hidden_layers is {made.num_layers}, but '
      'only drafters with one layer are supported'
    )
  return made


def _feature_layers(source):
  """Returns the layers whose outputs are read, () if no configuration says.

  The numbers of `speculators` count the embedding as the first.
  """
  config = source.config
  nested = config.part('eagle_config')
  for key, supported in _ONLY.items():
    nested.only(key, supported)
  config.only('is_causal', True)
  numbers = lambda part, key, less=0: tuple(
    i - less for i in part.get(key, list[int], ())
  )
  # SGLang's numbers, in eagle_config, are those of layer outputs.
  given = {
    _LAYERS: numbers(config, _LAYERS, less=1),
    f'{_LAYERS} of eagle_config': numbers(nested, _LAYERS),
    'layer_ids of eagle_config': numbers(nested, 'layer_ids', less=1),
    _OF_ANGELSLIM: numbers(config, _OF_ANGELSLIM),
    'target_layer_ids': numbers(config, 'target_layer_ids'),
  }
  ids = config.agreed({key: ids or None for key, ids in given.items()}) or ()
  if given['target_layer_ids'] or given[_OF_ANGELSLIM]:
    source.check_outputs(ids)
  return ids


def num_draft_tokens(source: source_lib.Source) -> int:
  """Returns K: the wanted one, or that of the configuration, or the default."""
  config = source.config
  try:
    (method,) = config.values['speculators_config']['proposal_methods']
    default = int(method['speculative_tokens'])
  except (KeyError, TypeError, ValueError):
    default = config.size('ttt_length', _NUM_DRAFT_TOKENS)
  return source.num_drafts(default)


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
  named = writing.named(request, _table(prefix))
  found = named | writing.vocabulary(request)
  return writing.Content(config=config, weights={'model.safetensors': found})


def _of_authors(request):
  """Returns the settings of the layer, which is Llama's without biases."""
  drafter = request.drafter
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
