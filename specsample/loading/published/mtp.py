"""Modules for multi-token prediction, in the folder of their own target.

In DeepSeek-V3's layout, module i is layer L + i of the files, after the L
layers of the target. Qwen3-Next and Qwen3.5 have one module, whose tensors are
named `mtp.`; it continues from its output after the last norm.
"""

import math

from etils import epath
import jax.numpy as jnp
import numpy as np

from specsample import files
from specsample.drafters import mtp
from specsample.drafters import trainable
from specsample.loading import load as load_lib
from specsample.loading.published import eagle
from specsample.loading.published import layer
from specsample.loading.published import source as source_lib
from specsample.loading.published import writing
from specsample.models import config as config_lib
from specsample.models import huggingface
from specsample.models import safetensors_file
from specsample.models import tensors
from specsample.models import transformer
from specsample.types import Params

# The parameters of a module besides its layer, as DeepSeek and Qwen name them.
_TABLE = {
  'embedding_norm.scale': 'enorm.weight',
  'feature_norm.scale': 'hnorm.weight',
  'project.linear.kernel': 'eh_proj.weight',
  'norm.scale': 'shared_head.norm.weight',
}
_QWEN_TABLE = {
  'embedding_norm.scale': 'pre_fc_norm_embedding.weight',
  'feature_norm.scale': 'pre_fc_norm_hidden.weight',
  'project.linear.kernel': 'fc.weight',
  'norm.scale': 'norm.weight',
}
# In `speculators` there is one module, with a layer of Qwen 3.
_SPECULATORS_TABLE = layer.table('layers.{}.layer.', 'mtp_layers.{}.') | {
  'layers.{}.embedding_norm.scale': 'mtp_layers.{}.token_layernorm.weight',
  'layers.{}.feature_norm.scale': 'mtp_layers.{}.hidden_layernorm.weight',
  'layers.{}.project.linear.kernel': 'mtp_layers.{}.input_proj.weight',
  'layers.{}.norm.scale': 'mtp_layers.{}.final_layernorm.weight',
}
# Copies of the target's embedding and unembedding, which the modules share.
_COPIES = ('embed_tokens.weight', 'shared_head.head.weight')


def load(
  folder: epath.Path,
  model: transformer.Transformer,
  num_draft_tokens: int | None,
  convert: tensors.Convert | None,
) -> tuple[mtp.MTP, Params]:
  """Loads the modules and their parameters, in the target's dtype.

  Args:
    folder: the target's own, with config.json and safetensors.
    model: the target.
    num_draft_tokens: K, None for the number of modules.
    convert: as for `tensors.fill`.
  """
  path = folder / 'config.json'
  config = config_lib.Config(files.read_json(path), str(path))
  if not huggingface.weight_files(folder, source_lib.weight_names(folder)):
    present = ', '.join(sorted(x.name for x in folder.iterdir()))
    raise ValueError(
      f'{folder} has no weights under a name that is read (it has {present}): '
      'give them the name model.safetensors, or download them'
    )
  if not huggingface.mtp_prefixes(model.num_layers, config):
    count = config.get(huggingface.NUM_MODULES, int)
    raise ValueError(
      f'{path}: {huggingface.NUM_MODULES} is {count!r}, so the model has no '
      'modules for multi-token prediction: give a folder that save_drafter '
      'wrote, or one in the layout of Medusa, Hydra, EAGLE, EAGLE-3, P-EAGLE, '
      "DFlash, DFlash 2, DSpark, PARD or Gemma 4's assistants"
    )
  stored = huggingface.open_tensors(folder, config, model.dtype)
  drafter, found, names, copies = _plan(stored, config, model, num_draft_tokens)
  _check_copies(stored, config, model, found, copies)
  params = tensors.fill(
    trainable.InDtype(drafter), found, names, copies, convert
  )
  return drafter, params


def _plan(stored, config, model, num_draft_tokens):
  """Returns a drafter, its tensors, their names, and tensors to ignore."""
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
  of_layer = {
    ours.replace('layers.{}.', 'layer.'): theirs.replace(
      'model.layers.{}.', 'layers.0.' if is_qwen else ''
    )
    for ours, theirs in family.names.items()
    if ours.startswith('layers.{}.')
  }
  of_module = of_layer | (_QWEN_TABLE if is_qwen else _TABLE)
  names = {
    f'layers.{i}.{ours}': prefix + theirs
    for i, prefix in enumerate(prefixes)
    for ours, theirs in of_module.items()
  }
  unnamed = tensors.by_name(drafter.abstract_params()).keys() - names.keys()
  if unnamed:
    raise ValueError(
      f"{stored.origin} has modules whose layers are not like the target's, as "
      f'model_type {config.values["model_type"]!r} has them (they lack '
      f'{tensors.listed(unnamed)}): load the target from the same folder'
    )
  copies = {prefix + name for prefix in prefixes for name in _COPIES}
  found = huggingface.of_modules(stored, config, model, prefixes)
  return drafter, found, names, copies


def _check_copies(stored, config, model, found, copies):
  """Raises ValueError if modules do not share the target's (un)embedding."""
  names = huggingface.family_of(config).names
  of_target = huggingface.of_model(stored, config, model)
  for copy in sorted(copies & found.shapes.keys()):
    is_head = copy.endswith(_COPIES[1]) and not model.tie_embeddings
    theirs = names['unembedding' if is_head else 'embedding']
    if theirs not in of_target.shapes or not tensors.are_equal(
      found.open(copy), of_target.open(theirs)
    ):
      raise ValueError(
        f'{stored.origin}: tensor {copy} is not a copy of {theirs}: modules '
        'with an embedding or unembedding of their own are not supported'
      )


def plan_speculators(source: source_lib.Source) -> source_lib.Plan:
  """Plans the module of a folder of `speculators`."""
  config = source.layer_config
  config.only('model_type', 'qwen3')
  source.config.only(huggingface.NUM_MODULES, 1)
  drafter = mtp.MTP(
    model=source.target.model,
    num_draft_tokens=eagle.num_draft_tokens(source),
    feeds_back_normed=True,
    own_unembedding=source.has_own_unembedding(),
    layer_config=layer.config_of(source, config, 'mtp_layers.0.'),
  )
  table = source_lib.VOCABULARY | _SPECULATORS_TABLE
  return source_lib.Plan(drafter, table)


def write(request: writing.Request) -> writing.Content:
  """Returns the files of modules.

  In Hugging Face's layout they are those of the target, with the modules in
  place of any that it has.
  """
  if request.drafter.draft_vocab_size is not None:
    raise request.no_room(
      f'draft_vocab_size = {request.drafter.draft_vocab_size}',
      'train with draft_vocab_size = None',
    )
  if request.of_speculators:
    return _for_speculators(request)
  return _with_target(request)


def _for_speculators(request):
  num_layers = request.drafter.model.num_layers
  of_layer = layer.settings(request, 'qwen3')
  # All layers of the target are described, as by the module's own.
  of_layer['layer_types'] *= num_layers
  of_layer['num_hidden_layers'] = num_layers
  config = {
    **writing.for_speculators(request, 'mtp', 'MTPDraftModel'),
    'transformer_layer_config': of_layer,
    huggingface.NUM_MODULES: 1,
  }
  found = writing.named(request, _SPECULATORS_TABLE)
  return writing.Content(config=config, weights={'model.safetensors': found})


def _with_target(request):
  folder = load_lib.folder_of(request.target)
  if folder is None:
    raise request.no_room(
      f'the target {request.target.name!r}, in whose folder the modules are',
      'load the target from a folder with config.json and safetensors',
    )
  path, drafter = folder / 'config.json', request.drafter
  values = files.read_json(path)
  config = config_lib.Config(values, str(path))
  config.only('quantization_config', None)
  family = huggingface.family_of(config)
  if family.mtp_prefix is None:
    count = values.get(huggingface.NUM_MODULES) or 0
    if count > drafter.num_modules:
      raise request.no_room(
        f"{count - drafter.num_modules} more of the target's {count} modules",
        f'train num_modules = {count}',
      )
    values[huggingface.NUM_MODULES] = drafter.num_modules
  stored = huggingface.open_tensors(folder, config, drafter.model.dtype)
  found = _modules(request, stored, config)
  paths = huggingface.shard_paths(folder)
  weights: dict[str, dict[str, np.ndarray]] = {}
  copied: dict[str, epath.Path] = {
    path.name: path
    for path in folder.iterdir()
    if not path.is_dir()
    and path.suffix not in ('.safetensors', *huggingface.PICKLE_SUFFIXES)
    and not path.name.endswith('.index.json')
  }
  places: dict[str, str] = {}
  count = len(paths) + 1
  name_of = lambda i: f'model-{i + 1:05}-of-{count:05}.safetensors'
  for i, shard in enumerate(paths):
    header = safetensors_file.read_header(shard)
    kept = header.keys() - found.keys()
    places |= dict.fromkeys(sorted(kept), name_of(i))
    if len(kept) == len(header):
      copied[name_of(i)] = shard
    else:
      weights[name_of(i)] = {name: _whole(header[name]) for name in kept}
  weights[name_of(len(paths))] = found
  places |= dict.fromkeys(sorted(found), name_of(len(paths)))
  index = {'metadata': {}, 'weight_map': places}
  return writing.Content(
    config=values,
    weights=weights,
    others={'model.safetensors.index.json': index},
    copied=copied,
    is_of_target=True,
  )


def _whole(tensor):
  return tensor[(slice(None),) * len(tensor.shape)]


def _modules(request, stored, config) -> dict[str, np.ndarray]:
  """Returns the tensors of the modules, in the form of the target's family.

  Families divide tensors into several parameters and reorder their rows. The
  reader says how: given the number of each entry, it returns for each parameter
  the numbers of the entries that it is made of.
  """
  drafter, shapes = request.drafter, dict(stored.shapes)
  model, count = drafter.model, drafter.num_draft_tokens
  prefixes = huggingface.mtp_prefixes(model.num_layers, config)
  given = request.values()
  read, _, names, copies = _plan(stored, config, model, count)
  writing.check_settings(request, read)
  if not any(name.startswith(prefixes) for name in shapes):
    shapes |= {
      tensors.source_name(name, names): x.shape[::-1]
      for name, x in given.items()
    }
  chosen = {
    name: shape
    for name, shape in shapes.items()
    if name.startswith(prefixes) and not name.endswith(_COPIES)
  }
  sizes = [math.prod(shape) for shape in chosen.values()]
  starts = dict(zip(chosen, np.cumsum([0, *sizes]).tolist(), strict=False))

  def numbers(name):
    shape = shapes[name]
    return starts[name] + np.arange(math.prod(shape)).reshape(shape)

  numbered = tensors.TensorFile(stored.origin, shapes, numbers)
  _, found, _, _ = _plan(numbered, config, model, count)
  tensors.fill(drafter, found, names, copies, convert=None)  # compares shapes
  flat = np.full(sum(sizes), np.nan, np.float32)
  routers = set()
  for name, of_name in given.items():
    places = _whole(found.open(tensors.source_name(name, names)))
    flat[places] = of_name.astype(np.float32).T
    if tensors.is_of_router(name):
      routers.add(int(places.flat[0]))
  written = {}
  for name, shape in chosen.items():
    start = starts[name]
    values = flat[start : start + math.prod(shape)].reshape(shape)
    written[name] = values if start in routers else values.astype(jnp.bfloat16)
  return written
