"""Modules for multi-token prediction in the folder of their own target.

DeepSeek-V3's layout: module i is layer L + i of the files, behind the target's
L layers.
"""

import dataclasses

from etils import epath
import jax

from specsample import files
from specsample.drafters import mtp
from specsample.models import huggingface
from specsample.models import llama
from specsample.models import tensors
from specsample.models import transformer
from specsample.types import Params

_NAMES = {
  'embedding_norm.scale': 'enorm.weight',
  'feature_norm.scale': 'hnorm.weight',
  'project.linear.kernel': 'eh_proj.weight',
  'norm.scale': 'shared_head.norm.weight',
} | {
  ours.replace('layers.{}', 'layer'): theirs.removeprefix('model.layers.{}.')
  for ours, theirs in llama.NAMES.items()
  if ours.startswith('layers.')
}
# Of the target's embedding and unembedding, which the modules share.
_COPIES = ('embed_tokens.weight', 'shared_head.head.weight')


def load(
  folder: epath.Path,
  model: transformer.Transformer,
  num_draft_tokens: int | None,
) -> tuple[mtp.MTP, Params]:
  """The modules and their parameters, in the dtype of the target.

  Args:
    folder: of config.json and safetensors, the target's own.
    model: the target.
    num_draft_tokens: K, None for as many as there are modules.

  Raises:
    ValueError: there are none, or they are not of such a model.
  """
  config = folder / 'config.json'
  count = files.read_json(config).get(huggingface.NUM_MODULES)
  if not isinstance(count, int) or count < 1:
    raise ValueError(
      f'{config}: {huggingface.NUM_MODULES} is {count!r}: the folder is of a '
      'model without modules for multi-token prediction, give one that '
      'save_drafter wrote, or one of a published layout: Medusa, Hydra, EAGLE, '
      'EAGLE-3, DFlash or DSpark'
    )
  stored = huggingface.open_tensors(folder)
  drafter, found, names, copies = plan(stored, model, count, num_draft_tokens)
  params = tensors.fill(drafter, found, names, ignored=copies)
  return drafter, jax.tree.map(lambda x: x.astype(model.dtype), params)


def plan(
  stored: tensors.TensorFile,
  model: transformer.Transformer,
  count: int,
  num_draft_tokens: int | None,
) -> tuple[mtp.MTP, tensors.TensorFile, dict[str, str], set[str]]:
  """So many modules, their tensors and names, and those that are not read.

  Raises:
    ValueError: they are of layers that they cannot be made of.
  """
  if model.latent is not None or model.experts is not None:
    raise ValueError(
      f'{stored.origin}: modules of attention over latent vectors or of many '
      'experts are not supported: load the model without them, or train an '
      'MTP with a layer_config'
    )
  prefixes = huggingface.mtp_prefixes(model.num_layers, count)
  drafter = mtp.MTP(
    model=model,
    num_draft_tokens=(
      len(prefixes) if num_draft_tokens is None else num_draft_tokens
    ),
    num_modules=len(prefixes),
  )
  names, copies = {}, set()
  for i, prefix in enumerate(prefixes):
    for ours, theirs in _NAMES.items():
      names[f'layers.{i}.{ours}'] = prefix + theirs
    copies |= {prefix + name for name in _COPIES}
  shapes = {
    name: shape
    for name, shape in stored.shapes.items()
    if name.startswith(prefixes)
  }
  return drafter, dataclasses.replace(stored, shapes=shapes), names, copies
