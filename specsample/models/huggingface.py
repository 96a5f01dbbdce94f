"""Models in Hugging Face's layout: config.json and safetensors."""

from collections.abc import Sequence
from concurrent import futures
import dataclasses
import os
import sys

from etils import epath

from specsample import files
from specsample.models import config as config_lib
from specsample.models import deepseek
from specsample.models import family as family_lib
from specsample.models import gemma
from specsample.models import gpt_oss
from specsample.models import llama
from specsample.models import quantised
from specsample.models import qwen
from specsample.models import safetensors_file
from specsample.models import tensors
from specsample.models import transformer
from specsample.types import Params

_WEIGHTS = ('model.safetensors', 'model.safetensors.index.json')
# Files of a hub repository that `load` and the tokenizer read.
FILE_PATTERNS = (
  'config.json',
  'generation_config.json',
  'model*.safetensors',
  *_WEIGHTS[1:],
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'chat_template.jinja',
)
PICKLE_SUFFIXES = ('.bin', '.pt', '.pth', '.pkl', '.ckpt')

_FAMILIES = {
  'deepseek_v3': deepseek.DEEPSEEK_V3,
  'gemma2': gemma.GEMMA2,
  'gemma3': gemma.GEMMA3,
  'gemma3_text': gemma.GEMMA3,
  'gemma4': gemma.GEMMA4,
  'gemma4_text': gemma.GEMMA4,
  'gemma4_unified': gemma.GEMMA4,
  'gemma4_unified_text': gemma.GEMMA4,
  'gpt_oss': gpt_oss.GPT_OSS,
  'llama': llama.LLAMA,
  'mistral': llama.MISTRAL,
  'mixtral': llama.MIXTRAL,
  'qwen2': qwen.QWEN2,
  'qwen3': qwen.QWEN3,
  'qwen3_5': qwen.QWEN3_5,
  'qwen3_5_moe': qwen.QWEN3_5_MOE,
  'qwen3_5_moe_text': qwen.QWEN3_5_MOE,
  'qwen3_5_text': qwen.QWEN3_5,
  'qwen3_moe': qwen.QWEN3_MOE,
  'qwen3_next': qwen.QWEN3_NEXT,
}
# Config key: how many multi-token prediction modules follow the layers.
NUM_MODULES = 'num_nextn_predict_layers'
# Number of headers that are read from a bucket at a time.
_NUM_THREADS = 16


def load(
  path: str | os.PathLike[str], dtype: str, convert: tensors.Convert | None
) -> tuple[transformer.Transformer, Params]:
  """Returns the model in a folder and its parameters as `dtype`.

  Quantised matrices are dequantised (`models.quantised`). On a mesh each
  process reads the parts that its devices hold. See `tensors.fill` for
  `convert`.
  """
  folder = files.at(path)
  origin = folder / 'config.json'
  config = config_lib.Config(files.read_json(origin), str(origin))
  family = family_of(config)
  model = family.model(config, dtype)
  file = of_model(open_tensors(folder, config, dtype), config, model)
  if _has_own_unembedding(family, model, file):
    print(
      f'{folder}: {family.names["unembedding"]} differs from the embedding, so '
      'it is used although tie_word_embeddings is true',
      file=sys.stderr,
    )
    model = dataclasses.replace(model, tie_embeddings=False)
  if convert is not None:
    family.check(file)
  ignored = _ignored_names(family, model)
  return model, tensors.fill(model, file, family.names, ignored, convert)


def _has_own_unembedding(family, model, file):
  """Returns whether a tied model's file has an unembedding of its own.

  Others use it too: such files come from training that has untied the two.
  """
  tied, stored = family.names['embedding'], family.names['unembedding']
  if not model.tie_embeddings or stored not in file.shapes:
    return False
  return tied not in file.shapes or not tensors.are_equal(
    file.open(stored), file.open(tied)
  )


def of_model(
  stored: tensors.TensorFile,
  config: config_lib.Config,
  model: transformer.Transformer,
) -> tensors.TensorFile:
  """Returns the model's tensors in a folder, by the names of its family."""
  # The tensors of a drafter, which `loading.published.mtp` reads.
  of_drafter = mtp_prefixes(model.num_layers, config)
  is_own = lambda name: not name.startswith(of_drafter)
  return _chosen(stored, config, model, is_own)


def of_modules(
  stored: tensors.TensorFile,
  config: config_lib.Config,
  model: transformer.Transformer,
  prefixes: tuple[str, ...],
) -> tensors.TensorFile:
  """Does the same as `of_model` for modules with these `mtp_prefixes`."""
  of_model(stored, config, model)  # refuses folders that were converted
  is_own = lambda name: name.startswith(prefixes)
  return _chosen(stored, config, model, is_own)


def _chosen(stored, config, model, is_chosen):
  found = {}
  for name, tensor in stored.tensors().items():
    own = family_lib.own_name(name)
    if own is not None and is_chosen(own):
      found[own] = tensor
  divided = tensors.divided(
    found, family_of(config).parts(model), stored.origin
  )
  return tensors.file_of(stored.origin, tensors.stacked(divided))


def _ignored_names(family, model):
  """Returns names of tensors that are sometimes stored, but not used.

  They are a tied unembedding, and what would make the keys and values of layers
  that read those of others.
  """
  names = {
    family.names[f'layers.{{}}.attention.{name}'].format(i)
    for name in ('key.kernel', 'value.kernel', 'key_norm.scale')
    for i in range(model.num_layers)
    if model.kv_source(i) != i
  }
  return names | (
    {family.names['unembedding']} if model.tie_embeddings else set()
  )


def family_of(config: config_lib.Config) -> family_lib.Family:
  """Returns the family of a configuration; ValueError if it is not known."""
  kind = config.get('model_type', str)
  if kind not in _FAMILIES:
    raise ValueError(
      f'{config.origin}: model_type is {kind!r}, but the supported types are '
      f'{", ".join(_FAMILIES)}'
    )
  return _FAMILIES[kind]


def mtp_prefixes(num_layers: int, config: config_lib.Config) -> tuple[str, ...]:
  """Returns the prefixes of the names of the modules of a model.

  They are those that a configuration counts, or that of the family.
  """
  family = _FAMILIES.get(config.get('model_type', str, ''))
  if family is not None and family.mtp_prefix is not None:
    return (family.mtp_prefix,)
  if config.get(NUM_MODULES, int, 0) < 1:
    return ()
  numbers = range(num_layers, num_layers + config.layers(NUM_MODULES))
  return tuple(f'model.layers.{i}.' for i in numbers)


def open_tensors(
  folder: epath.Path, config: config_lib.Config, dtype: str
) -> tensors.TensorFile:
  """Returns the tensors of a folder's safetensors files; reads no weights.

  Tensors that are quantised, as the configuration says, are dequantised to
  `dtype` as they are read.
  """
  found: dict[str, safetensors_file.Tensor] = {}
  with futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
    paths = shard_paths(folder)
    if not paths:
      refuse_pickles(*sorted(folder.iterdir()))
      raise ValueError(
        f'{folder} holds neither model.safetensors nor its index: download the '
        'weights'
      )
    for header in pool.map(safetensors_file.read_header, paths):
      found |= header
  return quantised.opened(config, found, str(folder), dtype)


def shard_paths(
  folder: epath.Path, names: Sequence[str] = _WEIGHTS
) -> list[epath.Path]:
  """Returns a folder's `weight_files`; ValueError if any are missing."""
  found = weight_files(folder, names)
  absent = absent_files(folder, found)
  if absent:
    raise ValueError(
      f'{folder} lacks {", ".join(absent)}, which its index names: download '
      'what is missing'
    )
  return [folder / name for name in found]


def weight_files(
  folder: epath.Path, names: Sequence[str] = _WEIGHTS
) -> list[str]:
  """Returns the first file of these names that there is, in a list.

  In place of an index these are the files that it names, which may be missing.
  """
  found = [name for name in names if (folder / name).exists()][:1]
  if found and found[0].endswith('.index.json'):
    return _files_of_index(folder / found[0])
  return found


def absent_files(folder: epath.Path, names: Sequence[str]) -> list[str]:
  """Returns the names of which a folder has no file."""
  # Listed once, because each request to a bucket takes some 50 ms.
  present = {path.name for path in folder.iterdir()}
  return [name for name in names if name not in present]


def _files_of_index(index: epath.Path) -> list[str]:
  """Returns the files that an index names; ValueError if it is damaged."""
  shard_of = files.read_json(index).get('weight_map')
  if not isinstance(shard_of, dict) or not shard_of:
    raise ValueError(f'{index} has no weight_map: download it again')
  for name, file in shard_of.items():
    if not isinstance(file, str):
      raise ValueError(
        f'{index}: the file of tensor {name} is {file!r}, expected a string: '
        'download it again'
      )
  return sorted(set(shard_of.values()))


def refuse_pickles(
  *paths: epath.Path,
  remedy: str = 'convert it where it is trusted, with save_pretrained(..., '
  'safe_serialization=True) of transformers, and load the folder that this '
  'writes',
) -> None:
  """Raises ValueError for the first path that may be that of a pickle."""
  for path in paths:
    if path.suffix in PICKLE_SUFFIXES:
      raise ValueError(
        f'{path} may be a pickle, which can run any code when it is read: '
        f'{remedy}'
      )
