"""Modules for multi-token prediction, in the folder of their own target.

In DeepSeek-V3's layout, module i is layer L + i of the files, after the L
layers of the target. Qwen3-Next and Qwen3.5 have one module, whose tensors are
named `mtp.`; it continues from its output after the last norm.
"""

from etils import epath
import jax

from specsample import files
from specsample.drafters import mtp
from specsample.drafters import trainable
from specsample.models import config as config_lib
from specsample.models import huggingface
from specsample.models import tensors
from specsample.models import transformer
from specsample.types import Params

# The parameters of a module besides its layer, as DeepSeek and Qwen name them.
_NAMES = {
  'embedding_norm.scale': 'enorm.weight',
  'feature_norm.scale': 'hnorm.weight',
  'project.linear.kernel': 'eh_proj.weight',
  'norm.scale': 'shared_head.norm.weight',
}
_QWEN_NAMES = {
  'embedding_norm.scale': 'pre_fc_norm_embedding.weight',
  'feature_norm.scale': 'pre_fc_norm_hidden.weight',
  'project.linear.kernel': 'fc.weight',
  'norm.scale': 'norm.weight',
}
_OF_LAYER = 'layers.{}.', 'model.layers.{}.'
# Copies of the target's embedding and unembedding, which the modules share.
_COPIES = ('embed_tokens.weight', 'shared_head.head.weight')


def load(
  folder: epath.Path,
  model: transformer.Transformer,
  num_draft_tokens: int | None,
) -> tuple[mtp.MTP, Params]:
  """Loads the modules and their parameters, in the target's dtype.

  Args:
    folder: the target's own, with config.json and safetensors.
    model: the target.
    num_draft_tokens: K, None for the number of modules.

  Raises:
    ValueError: there are no modules, or they are for another model.
  """
  path = folder / 'config.json'
  config = config_lib.Config(files.read_json(path), str(path))
  if not huggingface.mtp_prefixes(model.num_layers, config):
    count = config.get(huggingface.NUM_MODULES)
    raise ValueError(
      f'{path}: {huggingface.NUM_MODULES} is {count!r}, so the model has no '
      'modules for multi-token prediction: give a folder that save_drafter '
      'wrote, or one in the layout of Medusa, Hydra, EAGLE, EAGLE-3, P-EAGLE, '
      "DFlash, DFlash 2, DSpark, PARD or Gemma 4's assistants"
    )
  stored = huggingface.open_tensors(folder, config, model.dtype)
  drafter, found, names, copies = plan(stored, config, model, num_draft_tokens)
  params = tensors.fill(trainable.InDtype(drafter), found, names, copies)
  return drafter, params


def plan(
  stored: tensors.TensorFile,
  config: config_lib.Config,
  model: transformer.Transformer,
  num_draft_tokens: int | None = None,
) -> tuple[mtp.MTP, tensors.TensorFile, dict[str, str], set[str]]:
  """Returns a drafter, its tensors, their names, and tensors to ignore.

  Raises:
    ValueError: the modules are of another family than the model, or have
      settings that are not supported.
  """
  prefixes = huggingface.mtp_prefixes(model.num_layers, config)
  family = huggingface.family_of(config)
  is_qwen = family.mtp_prefix is not None
  for part in (config, config.part('text_config')) if is_qwen else ():
    part.only('mtp_num_hidden_layers', 1)
    part.only('mtp_use_dedicated_embeddings', False)
  drafter = mtp.MTP(
    model=model,
    num_draft_tokens=(
      len(prefixes) if num_draft_tokens is None else num_draft_tokens
    ),
    num_modules=len(prefixes),
    norm_offset=model.norm_offset if is_qwen else 0.0,
    feeds_back_normed=is_qwen,
  )
  ours_of_layer, theirs_of_layer = _OF_LAYER
  own_of_layer = 'layers.0.' if is_qwen else ''
  of_module = (_QWEN_NAMES if is_qwen else _NAMES) | {
    'layer.' + ours.removeprefix(ours_of_layer): own_of_layer
    + theirs.removeprefix(theirs_of_layer)
    for ours, theirs in family.names.items()
    if ours.startswith(ours_of_layer)
  }
  names, copies = {}, set()
  for i, prefix in enumerate(prefixes):
    for ours, theirs in of_module.items():
      names[f'layers.{i}.{ours}'] = prefix + theirs
    copies |= {prefix + name for name in _COPIES}
  leaves = jax.tree_util.tree_leaves_with_path(drafter.abstract_params())
  unnamed = {tensors.key(path) for path, _ in leaves} - names.keys()
  if unnamed:
    raise ValueError(
      f'{stored.origin} has modules of model_type '
      f"{config.get('model_type')!r}, whose layers are not like the target's "
      f'(they lack {tensors.listed(unnamed)}): load the target from the same '
      'folder'
    )
  found = huggingface.of_modules(stored, config, model, prefixes)
  return drafter, found, names, copies
