"""Modules for multi-token prediction, in the folder of their own target.

In DeepSeek-V3's layout, module i is layer L + i of the files, after the L
layers of the target.
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

# The parameters of a module besides its layer.
_NAMES = {
  'embedding_norm.scale': 'enorm.weight',
  'feature_norm.scale': 'hnorm.weight',
  'project.linear.kernel': 'eh_proj.weight',
  'norm.scale': 'shared_head.norm.weight',
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
  count = config.get(huggingface.NUM_MODULES)
  if not isinstance(count, int) or count < 1:
    raise ValueError(
      f'{path}: {huggingface.NUM_MODULES} is {count!r}, so the model has no '
      'modules for multi-token prediction: give a folder that save_drafter '
      'wrote, or one in the layout of Medusa, Hydra, EAGLE, EAGLE-3, P-EAGLE, '
      'DFlash, DSpark or PARD'
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
    ValueError: the modules are of another family than the model.
  """
  prefixes = huggingface.mtp_prefixes(model.num_layers, config)
  drafter = mtp.MTP(
    model=model,
    num_draft_tokens=(
      len(prefixes) if num_draft_tokens is None else num_draft_tokens
    ),
    num_modules=len(prefixes),
  )
  ours_of_layer, theirs_of_layer = _OF_LAYER
  of_module = _NAMES | {
    'layer.' + ours.removeprefix(ours_of_layer): theirs.removeprefix(
      theirs_of_layer
    )
    for ours, theirs in huggingface.family_of(config).names.items()
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
