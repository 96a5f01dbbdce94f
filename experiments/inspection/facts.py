"""What is said about a checkpoint: its files, sizes and memory."""

from collections.abc import Mapping
import dataclasses

from etils import epath

from experiments.inspection import memory
from specsample import files
from specsample.loading import drafter as drafter_lib
from specsample.models import transformer

# Each a name and a value.
Facts = tuple[tuple[str, str], ...]
# The length of the cache whose bytes are reported.
_CACHE_TOKENS = 4096
# Settings that are reported elsewhere.
_TOLD = ('model', 'layer_config', 'num_draft_tokens')


def of_files(path: epath.Path) -> Facts:
  """Returns how many files there are, and their size."""
  paths = [path]
  if files.is_folder(path):
    paths = [x for x in path.iterdir() if not files.is_folder(x)]
  total = sum(files.size(x) for x in paths)
  return (('files', f'{len(paths):,} of {size(total)}'),)


def of_drafter(found: drafter_lib.LoadedDrafter) -> Facts:
  """Returns a drafter's kind, K, settings other than defaults, and sizes."""
  drafter = found.drafter
  facts = [
    ('drafter', type(drafter).__name__),
    ('drafts', f'{drafter.num_draft_tokens} tokens'),
  ]
  for field in dataclasses.fields(drafter):
    value = getattr(drafter, field.name)
    if field.name not in _TOLD and value != field.default:
      facts.append((field.name, str(value)))
  config = getattr(drafter, 'layer_config', None)
  if config is not None:
    facts += of_layers(config)
  if hasattr(drafter, 'abstract_params'):
    facts.append(('weights as', sizes(memory.of_drafter(drafter))))
  return tuple(facts)


def of_model(model: transformer.Transformer) -> Facts:
  """Returns a model's main sizes, and the memory that it takes."""
  params = model.abstract_params()
  tied = ', the embedding is the unembedding' if model.tie_embeddings else ''
  weights = memory.of_model(model)
  cache = memory.of_cache(model, _CACHE_TOKENS)
  devices = '; '.join(
    f'{kind} {_devices(weights[kind] + cache)}' for kind in ('bfloat16', 'int8')
  )
  return (
    ('parameters', f'{memory.num_parameters(params):,}'),
    ('layers', f'{model.num_layers}'),
    *of_layers(model),
    ('vocabulary', f'{model.vocab_size:,}{tied}'),
    ('context', f'{model.max_length:,} tokens'),
    ('weights as', sizes(weights)),
    (
      'cache',
      f'{size(cache)} for {_CACHE_TOKENS:,} tokens, bfloat16',
    ),
    ('devices', devices),
  )


def _devices(num_bytes):
  """Returns '1 of v4, v5p or 2 of v5e', the devices that hold the bytes."""
  by_count: dict[int, list[str]] = {}
  for name, count in memory.num_devices(num_bytes).items():
    by_count.setdefault(count, []).append(name)
  parts = (f'{x} of {", ".join(by_count[x])}' for x in sorted(by_count))
  return ' or '.join(parts)


def of_layers(model: transformer.Transformer) -> Facts:
  """Returns what each layer consists of."""
  facts = [
    ('width', f'{model.dim:,}'),
    ('heads', _heads(model)),
    ('feed-forward', _feed_forward(model)),
  ]
  windows = [i for i in range(model.num_layers) if model.window(i) is not None]
  if windows:
    text = f'{model.sliding_window:,} tokens in {len(windows)} layers'
    facts.append(('window', text))
  if model.num_shared:
    text = (
      f'the last {model.num_shared} layers read the keys and values of earlier '
      'layers'
    )
    facts.append(('shared', text))
  if model.layer_input_dim:
    text = f'{model.layer_input_dim} numbers per token for each layer'
    facts.append(('inputs', text))
  delta = model.delta
  if delta is not None:
    text = (
      f'{len(delta.layers)} layers with {delta.num_value_heads} states of '
      f'{delta.key_dim} x {delta.value_dim}, without keys and values'
    )
    facts.append(('recurrent', text))
  experts = model.experts
  if experts is not None:
    shared = f', {experts.shared_dim:,} shared' if experts.shared_dim else ''
    text = (
      f'{experts.num_experts} of {experts.mlp_dim:,}{shared}, '
      f'{experts.num_per_token} per token, in '
      f'{model.num_layers - len(experts.dense_layers)} layers'
    )
    facts.append(('experts', text))
  return tuple(facts)


def _feed_forward(model):
  if model.shared_mlp_dim is None:
    return f'{model.mlp_dim:,}'
  return (
    f'{model.mlp_dim:,}, {model.shared_mlp_dim:,} in the last '
    f'{model.num_shared} layers'
  )


def _heads(model):
  latent = model.latent
  if latent is None:
    of = lambda head_dim, num_kv_heads: (
      f'{model.num_heads} of {head_dim}, {num_kv_heads} of keys and values'
    )
    text = of(model.head_dim, model.num_kv_heads)
    if model.full_head_dim is not None:
      own = of(model.full_head_dim, model.full_kv_heads or model.num_kv_heads)
      text += f'; without a window {own}'
    return f'{text}, with sinks' if model.has_sinks else text
  return (
    f'{model.num_heads} of {latent.head_dim} + {latent.rope_dim} over latent '
    f'vectors of {latent.kv_rank} + {latent.rope_dim}'
  )


def size(num_bytes: int) -> str:
  """Returns a size in units that are powers of 1000."""
  value = float(num_bytes)
  for unit in ('B', 'kB', 'MB'):
    if value < 1000:
      return f'{value:.4g} {unit}'
    value /= 1000
  return f'{value:.4g} GB'


def sizes(by_name: Mapping[str, int]) -> str:
  """Returns 'BF16 2.472 GB, F32 1.2 kB', the largest first."""
  ordered = sorted(by_name.items(), key=lambda item: -item[1])
  return ', '.join(f'{name} {size(number)}' for name, number in ordered)
