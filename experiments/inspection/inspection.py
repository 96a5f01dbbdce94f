"""Loads a model or a drafter as the library does, but for its weights.

What the loader would refuse, the report says, and nothing else can be wrong:
there is no second reading of any layout.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import math
import os
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp

from experiments.tpu import libtpu
from specsample import files
from specsample.cost import chips
from specsample.drafters import trainable
from specsample.loading import card
from specsample.loading import drafter as drafter_lib
from specsample.loading import load
from specsample.loading.published import layouts
from specsample.loading.published import source as source_lib
from specsample.models import huggingface
from specsample.models import int8
from specsample.models import transformer
from specsample.types import Params

# Each a name and a value.
Facts = tuple[tuple[str, str], ...]
# The length of the cache whose bytes are reported.
_CACHE_TOKENS = 4096
_WEIGHTS = ('.safetensors', *huggingface.PICKLE_SUFFIXES)
# The forms in which parameters are loaded; int8 leaves the rest in bfloat16.
KINDS = ('float32', 'bfloat16', 'int8')
# The memory of one device, in bytes.
DEVICES = {name: chips.CHIPS[name].hbm_bytes for name in libtpu.TPUS}
DEVICES['H200'] = chips.CHIPS['h200'].hbm_bytes
# The share of a device's memory to fill; the rest is for what a step computes.
_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Report:
  """The result of `inspect`."""

  path: str
  what: str  # the kind of checkpoint
  facts: Facts = ()
  problem: str | None = None  # why it cannot be loaded

  def lines(self) -> Iterator[str]:
    """Yields the lines of the report."""
    yield f'{self.path}: {self.what}'
    width = max((len(name) for name, _ in self.facts), default=0)
    for name, value in self.facts:
      yield f'  {name:{width}}  {value}'
    if self.problem is None:
      yield 'it can be loaded'
    else:
      yield f'PROBLEM {self.problem}'


def inspect(name_or_path: str, target: str | None = None) -> Report:
  """Reports what `specsample.load` or `specsample.load_drafter` would find.

  Nothing is downloaded: a name of the hub is looked up among earlier downloads.
  If `target` is None, a drafter's is the one that its card names.
  """
  path = _find(name_or_path)
  if path.suffix in _WEIGHTS and not files.is_folder(path):
    path = path.parent
  facts, problem = _file_facts(path), None
  if target is None and _is_drafter(path):
    target = target_of(path)
  described = load.describe(_find(target)) if target is not None else None
  try:
    if described is None:
      facts += _model_facts(load.describe(path).model)
    else:
      found = drafter_lib.describe_drafter(path, described)
      facts += _drafter_facts(found.drafter)
  except ValueError as error:
    problem = ' '.join(str(error).split())
  what = 'a model' if target is None else f'a drafter for {target}'
  return Report(str(path), what, facts, problem)


def _file_facts(path: epath.Path) -> Facts:
  paths = [path]
  if files.is_folder(path):
    paths = [x for x in path.iterdir() if not files.is_folder(x)]
  total = sum(files.size(x) for x in paths)
  return (('files', f'{len(paths):,} of {_size(total)}'),)


def _drafter_facts(drafter: Any) -> Facts:
  facts = [
    ('drafter', type(drafter).__name__),
    ('drafts', f'{drafter.num_draft_tokens} tokens'),
    *_settings(drafter),
    *_settings(getattr(drafter, 'layer_config', None)),
  ]
  if hasattr(drafter, 'abstract_params'):
    facts.append(('weights as', _sizes(drafter_bytes(drafter))))
  return tuple(facts)


def _model_facts(model: transformer.Transformer) -> Facts:
  weights = model_bytes(model)
  cache = cache_bytes(model, _CACHE_TOKENS)
  devices = '; '.join(
    f'{kind} {_devices(weights[kind] + cache)}' for kind in ('bfloat16', 'int8')
  )
  return (
    ('parameters', f'{num_parameters(model.abstract_params()):,}'),
    *_settings(model),
    ('weights as', _sizes(weights)),
    ('cache', f'{_size(cache)} for {_CACHE_TOKENS:,} tokens, bfloat16'),
    ('devices', devices),
  )


def _settings(component: Any) -> Iterator[tuple[str, str]]:
  """Yields a component's settings that are not the defaults."""
  for field in dataclasses.fields(component) if component else ():
    value = getattr(component, field.name)
    told_elsewhere = field.name in ('model', 'layer_config', 'num_draft_tokens')
    if not told_elsewhere and value != field.default:
      yield field.name, str(value)


def _devices(num_bytes: int) -> str:
  """Returns '1 of v4, v5p or 2 of v5e', the devices that hold the bytes."""
  by_count: dict[int, list[str]] = {}
  for name, count in num_devices(num_bytes).items():
    by_count.setdefault(count, []).append(name)
  parts = (f'{x} of {", ".join(by_count[x])}' for x in sorted(by_count))
  return ' or '.join(parts)


def _size(num_bytes: int) -> str:
  """Returns a size in units that are powers of 1000."""
  value = float(num_bytes)
  for unit in ('B', 'kB', 'MB'):
    if value < 1000:
      return f'{value:.4g} {unit}'
    value /= 1000
  return f'{value:.4g} GB'


def _sizes(by_name: Mapping[str, int]) -> str:
  """Returns 'BF16 2.472 GB, F32 1.2 kB', the largest first."""
  ordered = sorted(by_name.items(), key=lambda item: -item[1])
  return ', '.join(f'{name} {_size(number)}' for name, number in ordered)


def _is_drafter(path: epath.Path) -> bool:
  """Returns whether a folder holds a drafter, which also needs a target."""
  if not files.is_folder(path):
    return False
  if any((path / name).exists() for name in (card.NAME, drafter_lib.NAME)):
    return True
  try:
    opened = source_lib.open_folder(path)
    return opened is not None and layouts.find(*opened) is not None
  except ValueError:
    return False  # the loader of models says what is wrong


def target_of(path: epath.Path) -> str:
  """Returns the target that a drafter's card names."""
  named = None
  if (path / card.NAME).exists():
    named = card.read(path).get('target')
  if not isinstance(named, str):
    raise ValueError(
      f'{path} is a drafter, and does not say for which model: give '
      '--target=MODEL'
    )
  return named


def _find(name: str) -> epath.Path:
  shipped = card.shipped()
  if name in shipped:
    return files.at(shipped[name])
  path = load.find(name)
  if path is not None:
    return path
  if not load.is_hub_id(name):
    raise ValueError(f'{name!r} is neither a file nor a folder: check the path')
  # Imported here because it takes as long as the rest of the library.
  import huggingface_hub  # noqa: PLC0415
  from huggingface_hub import errors  # noqa: PLC0415

  try:
    return files.at(
      huggingface_hub.snapshot_download(name, local_files_only=True)
    )
  except (errors.HfHubHTTPError, OSError, ValueError) as error:
    raise ValueError(
      f'{name!r} is not a path, and was not downloaded from the hub to '
      f'{os.environ.get("HF_HOME", "its usual cache")}: check the path, or '
      f'run `hf download {name}` first'
    ) from error


def num_parameters(params: Params) -> int:
  """Returns the number of parameters."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def model_bytes(model: transformer.Transformer) -> dict[str, int]:
  """Returns the bytes of the weights, by `KINDS`."""
  as_dtype = lambda dtype: dataclasses.replace(
    model, dtype=dtype
  ).abstract_params()
  return _of(as_dtype('float32'), as_dtype('bfloat16'))


def drafter_bytes(drafter: trainable.Trainable) -> dict[str, int]:
  """Returns the bytes of a drafter's own weights, by `KINDS`."""
  params = drafter.abstract_params()
  return _of(_cast(params, 'float32'), _cast(params, 'bfloat16'))


def cache_bytes(model: transformer.Transformer, num_tokens: int) -> int:
  """Returns the bytes of the cache of one sequence in bfloat16.

  Layers with a window keep the window and 64 more tokens.
  """
  model = dataclasses.replace(model, dtype='bfloat16')
  cache = jax.eval_shape(lambda: model.init_cache(1, num_tokens, 64))
  return files.array_bytes(cache)


def num_devices(num_bytes: int) -> dict[str, int]:
  """Returns how many of each of `DEVICES` hold the bytes, a power of two.

  A tenth of the memory is left for what a step computes, and the bytes are
  divided evenly. `compile_tpu` says what really fits on TPUs.
  """
  least = lambda size: math.ceil(math.log2(max(num_bytes / (_SHARE * size), 1)))
  return {name: 2 ** least(size) for name, size in DEVICES.items()}


def _of(wide, narrow):
  of_int8 = jax.eval_shape(int8.weights, narrow)
  sizes = map(files.array_bytes, (wide, narrow, of_int8))
  return dict(zip(KINDS, sizes, strict=True))


def _cast(params, dtype):
  def cast(leaf):
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    new = jnp.dtype(dtype) if is_float else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, new)

  return jax.tree.map(cast, params)
