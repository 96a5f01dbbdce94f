"""DFlash, DFlash 2 and DSpark, as their authors and others write them.

Chen et al., 2602.06036; DSpark is from DeepSpec. Settings of the block are in
`dflash_config`, where SpecForge has those of DSpark too, or at the top level,
where DeepSpec and `speculators` have them.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specsample import drafters
from specsample.drafters import dspark
from specsample.loading.published import layer
from specsample.loading.published import source as source_lib
from specsample.loading.published import writing

# The names of the token of the masks; the second is of DeepSpec's DSpark.
_MASKS = ('mask_token_id', 'dspark_noise_token_id')
MARKOV = 'markov_head.markov_w1.weight'
SELECTOR = 'candidate_selector.hidden_projection.weight'


def _mask(source):
  token = _mask_token_id(source)
  return source_lib.embed(source.target, [token])[0]


_TABLE = source_lib.VOCABULARY | {
  'fuse.kernel': 'fc.weight',
  'fused_norm.scale': 'hidden_norm.weight',
  'norm.scale': 'norm.weight',
  'mask': _mask,
  'markov.before': MARKOV,
  'markov.behind': 'markov_head.markov_w2.weight',
  'markov.gate.kernel': 'markov_head.gate_proj.weight',
  'markov.gate.bias': 'markov_head.gate_proj.bias',
  'markov.joint.kernel': 'markov_head.joint_proj.weight',
  'markov.joint.bias': 'markov_head.joint_proj.bias',
  'confidence.kernel': 'confidence_head.proj.weight',
  'confidence.bias': 'confidence_head.proj.bias',
  'selector.hidden.kernel': SELECTOR,
  'selector.predecessor': 'candidate_selector.predecessor_codebook',
  'selector.successor': 'candidate_selector.successor_codebook',
  **{
    f'layers.{{}}.{conv}.{ours}': f'layers.{{}}.{conv}.{theirs}'
    for conv in ('attention_conv', 'mlp_conv')
    for ours, theirs in (
      ('base', 'base_kernel'),
      ('projection.kernel', 'kernel_projection.weight'),
    )
  },
}


def _table(like=None):
  return _TABLE | layer.table('layers.{}.', 'layers.{}.', like)


def plan(source: source_lib.Source) -> source_lib.Plan:
  """Plans DFlash, DSpark if there is a Markov head, or DFlash 2."""
  config = _of_block(source.config)
  config.only('draft_shift', False)  # of JetSpec: reads other slots
  config.only('use_aux_hidden_state', True)
  if config.get('projector_type', str) == 'domino':
    raise ValueError(
      f"{config.origin}: projector_type is 'domino', whose heads are not "
      'supported: give a DFlash, DSpark or DFlash 2 drafter'
    )
  own_mask = source.folder / 'mask_embedding.pt'
  if own_mask.exists():
    raise ValueError(
      f'{own_mask} is a mask of its own, which is not supported: give a '
      'drafter whose mask is the embedding of mask_token_id'
    )
  is_spark = MARKOV in source.tensors
  _check_heads(source, config, is_spark)
  layers = layer.config_of(source, source.layer_config, 'layers.0.')
  from_pending = _drafts_from_pending(source.config)
  num_draft_tokens = source.num_draft_tokens
  if num_draft_tokens is None:
    size = config.size_of_one('block_size', 'dspark_block_size')
    num_draft_tokens = size if from_pending else size - 1
  settings: dict[str, Any] = {
    'model': source.target.model,
    'num_draft_tokens': num_draft_tokens,
    **source.vocabulary_settings(),
    'feature_layers': _feature_layers(source, config),
    'num_layers': layers.num_layers,
    'drafts_from_pending': from_pending,
    'mask_token_id': _mask_token_id(source),
    'layer_config': layers,
    'causal_layers': _causal_layers(source, layers),
  }
  drafter: drafters.DFlash
  if is_spark:
    drafter = drafters.DSpark(
      **settings,
      rank=source.shape(MARKOV)[-1],
      reads_all_tokens=True,
      head=config.get('markov_head_type', str, 'vanilla'),
    )
  elif SELECTOR in source.tensors:
    drafter = drafters.DFlash2(**settings, **_of_selector(config))
  else:
    drafter = drafters.DFlash(**settings)
  return source_lib.Plan(drafter, _table(layers))


def write(request: writing.Request) -> writing.Content:
  """Returns the files of a DFlash or a DSpark."""
  drafter, is_spark = request.drafter, type(request.drafter) is drafters.DSpark
  _check_written(request, is_spark)
  layers = writing.feature_layers(request)
  size = drafter.num_draft_tokens + (not drafter.drafts_from_pending)
  config = {
    'block_size': size,
    'mask_token_id': drafter.mask_token_id,
    'draft_vocab_size': drafter.draft_vocab_size or drafter.model.vocab_size,
  }
  if is_spark:
    config |= {
      'markov_rank': drafter.rank,
      'markov_head_type': drafter.head,
      'enable_confidence_head': True,
      'confidence_head_with_markov': True,
    }
  of_layers = layer.settings(request, 'qwen3')
  has_windows = any(drafter.windows)
  if request.of_speculators:
    kind, name = ('dspark', 'DSpark') if is_spark else ('dflash', 'DFlash')
    config |= {
      **writing.for_speculators(request, kind, f'{name}Speculator'),
      'transformer_layer_config': of_layers,
      'target_hidden_size': drafter.model.dim,
      'aux_hidden_state_layer_ids': [i + 1 for i in layers],
      'sample_from_anchor': drafter.drafts_from_pending,
      'sliding_window_non_causal': has_windows and not drafter.causal_layers,
    }
  else:
    name = 'Qwen3DSparkModel' if is_spark else 'DFlashDraftModel'
    of_block = {
      'block_size': size,
      'mask_token_id': drafter.mask_token_id,
      'target_layer_ids': list(layers),
    }
    config |= {
      **of_layers,
      **(of_block if is_spark else {'dflash_config': of_block}),
      'architectures': [name],
      'num_target_layers': drafter.model.num_layers,
      'dtype': 'bfloat16',
      'torch_dtype': 'bfloat16',
    }
    # Without this, layers with a window are causal, and the others are not.
    if has_windows or drafter.causal_layers:
      is_causal = len(drafter.causal_layers) == drafter.num_layers
      if is_causal or not drafter.causal_layers:
        config['is_causal'] = is_causal
  return writing.Content(
    config=config, weights={'model.safetensors': _tensors(request, is_spark)}
  )


def _check_written(request, is_spark):
  drafter, of_speculators = request.drafter, request.of_speculators
  if drafter.mask_token_id is None:
    raise request.no_room(
      'mask_token_id = None, a mask that is a vector of its own',
      'train with the number of a token that no text uses, whose embedding is '
      'the mask',
    )
  is_whole = drafter.own_unembedding and drafter.draft_vocab_size is None
  if is_whole and (of_speculators or not is_spark):
    raise request.no_room(
      'own_unembedding = True without a draft vocabulary',
      "train with a draft vocabulary (engines would use the target's "
      'unembedding instead)',
    )
  is_rnn = is_spark and drafter.head == 'rnn'
  if is_rnn and of_speculators and not drafter.drafts_from_pending:
    raise request.no_room(
      "head = 'rnn' with drafts_from_pending = False, whose state there begins "
      'at the pending token',
      'train with drafts_from_pending = True',
    )


def _tensors(request, is_spark):
  values = request.values()
  found = writing.named(request, _table()) | writing.vocabulary(request)
  if is_spark:
    for name in ('confidence.kernel', 'confidence.bias'):
      found[_TABLE[name]] = values[name].astype(np.float32).T
    if 'vocabulary.d2t' in values and not request.drafter.reads_all_tokens:
      # A token that is never drafted changes nothing.
      before = np.zeros(
        (request.drafter.model.vocab_size, request.drafter.rank), jnp.bfloat16
      )
      own = writing.to_bfloat16(values['markov.before'])
      before[values['vocabulary.d2t']] = own
      found[MARKOV] = before
  return found


def _of_block(config):
  """Returns a configuration with the settings of `dflash_config` as its own."""
  nested = config.part('dflash_config').values
  given = {key: value for key, value in nested.items() if value is not None}
  for key, value in given.items():
    outer = config.values.get(key)
    config.agreed({key: outer, f'{key} of dflash_config': value})
  return dataclasses.replace(config, values={**config.values, **given})


def _of_selector(config) -> dict[str, Any]:
  """Returns the settings that DFlash 2 has besides those of DFlash."""
  default = {
    field.name: field.default for field in dataclasses.fields(drafters.DFlash2)
  }
  counts = (
    *('conv_group_size', 'conv_kernel_size'),
    *('selector_rank', 'selector_top_k'),
  )
  scales = ('output_multiplier', 'input_embedding_scale')
  softcap = 'final_logit_softcapping'
  return {
    **{name: config.size(name, default[name]) for name in counts},
    **{name: config.number(name, default[name]) for name in scales},
    softcap: config.optional_number(softcap),
  }


def _mask_token_id(source):
  config = _of_block(source.config)
  return source_lib.mask_token_id(config, source.target, _MASKS)


def _check_heads(source, config, is_spark):
  """Raises ValueError if a Markov head is of another kind or incomplete."""
  if is_spark:
    if config.get('markov_head_type', str, 'vanilla') not in dspark.HEADS:
      raise config.unexpected('markov_head_type', f'one of {dspark.HEADS}')
    config.only('confidence_head_with_markov', True)
  rank = config.of_one(int, 'markov_rank', 'dspark_markov_rank')
  if rank is not None and bool(rank) != is_spark:
    there = 'a' if is_spark else 'no'
    raise ValueError(
      f'{config.origin}: markov_rank is {rank!r}, but {source.folder} has '
      f'{there} tensor {MARKOV}: one of the two belongs to '
      'another drafter; download both again'
    )


def _causal_layers(source, layer_config):
  """Returns the layers in which a block's tokens see no later ones.

  Settings for all layers come first: vLLM's, ModelOpt's and JetSpec's. Without
  them it is the layers with windows, unless these follow from `use_swa` alone.
  (`speculators` trains full layers without this even where vLLM serves all
  layers alike.)
  """
  config, of_blocks = source.config, source.config.part('dflash_config')
  layers = range(layer_config.num_layers)
  for part, key in (
    (config, 'is_causal'),
    (of_blocks, 'causal'),
    (of_blocks, 'causal_head'),
    (config, 'dflash_query_causal'),
  ):
    if part.get(key, bool) is not None:
      return tuple(layers) if part.flag(key) else ()
  is_named = source.layer_config.get('layer_types', list[str]) is not None
  if config.flag('sliding_window_non_causal') or (
    of_blocks.flag('use_swa') and not is_named
  ):
    return ()
  return tuple(i for i in layers if layer_config.window(i) is not None)


def _drafts_from_pending(config) -> bool:
  """Returns whether the pending token's output gives the first draft token.

  It does for drafters that DeepSpec trains, and for SpecForge's DSpark. In
  `speculators` the setting sample_from_anchor decides, and files from before
  there was this setting fill in the masks.
  """
  key = 'sample_from_anchor'
  masked = config.get('dspark_bonus_anchor', bool)
  found = config.agreed(
    {
      key: config.get(key, bool),
      f'{key} of dflash_config': config.part('dflash_config').get(key, bool),
      'the opposite of dspark_bonus_anchor': None
      if masked is None
      else not masked,
    }
  )
  if found is not None:
    return found
  if config.get('speculators_model_type', str) is not None:
    return False
  if config.get('dflash_config', dict) is not None:
    return config.part('dflash_config').get('projector_type', str) == 'dspark'
  return (
    config.of_one(list[int], 'target_layer_ids', 'dspark_target_layer_ids')
    is not None
  )


def _feature_layers(source, config):
  # The numbers of `speculators` count the embedding as the first.
  counted = config.get('aux_hidden_state_layer_ids', list[int], ())
  plain = {
    key: tuple(config.get(key, list[int], ())) or None
    for key in ('target_layer_ids', 'dspark_target_layer_ids')
  }
  less_one = tuple(i - 1 for i in counted) or None
  ids = config.agreed({'aux_hidden_state_layer_ids, less 1,': less_one} | plain)
  if not ids:
    raise ValueError(
      f'{config.origin}: target_layer_ids is missing, so it is not known which '
      "of the target's layers are read: add a list of their numbers"
    )
  if not counted:
    source.check_outputs(ids)
  return ids
