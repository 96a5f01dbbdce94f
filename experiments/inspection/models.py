"""Reports on models in the layouts of `specsample.load`, from their headers."""

from collections.abc import Callable
import dataclasses
from typing import Any

from etils import epath
import jax

from experiments.inspection import headers as headers_lib
from experiments.inspection import memory
from experiments.inspection import report
from specsample import array_bytes
from specsample.loading.published import mtp
from specsample.models import checkpoint
from specsample.models import gguf
from specsample.models import gguf_file
from specsample.models import huggingface
from specsample.models import quantised
from specsample.models import tensors
from specsample.models import transformer
from specsample.text import tokenizer_files

# The length of the cache whose bytes are reported.
_CACHE_TOKENS = 4096
Facts = list[tuple[str, str]]


def of_folder(headers: headers_lib.Headers) -> report.Report:
  """Reports on a model of config.json and safetensors."""
  config = headers.config
  facts: Facts = [('model_type', str(config.get('model_type')))]
  problems = list(headers.problems)
  pickles = [x for x in headers.names if not x.endswith('.safetensors')]
  if pickles:
    text = huggingface.pickle_message(headers.folder / pickles[0])
    problems.append(report.Problem(text))
  form: quantised.Form = quantised.Exact()
  try:
    form = quantised.form_of(config)
  except ValueError as error:
    # Even if the format is not supported, other problems are worth knowing.
    problems.append(report.of_error(error))
  if text := form.describe():
    facts.append(('quantised', f'{text}: dequantised when it is loaded'))
  problems += report.differences(form.compare(headers.tensors))
  stored = form.dequantised(headers.tensors, str(headers.folder), 'bfloat16')
  try:
    family = huggingface.family_of(config)
    file = f'{family.make.__module__.replace(".", "/")}.py'
    facts[0] = ('family', f'{config.get("model_type")}, {file}')
    model = family.model(config, 'bfloat16')
    found = huggingface.of_model(stored, config, model)
    if huggingface.has_own_unembedding(family, model, found):
      model = dataclasses.replace(model, tie_embeddings=False)
      facts.append(
        ('unembedding', 'is stored and used, although it is said to be tied')
      )
    ignored = huggingface.ignored_names(family, model)
    different = tensors.compare(model, found, family.names, ignored)
  except (ValueError, TypeError, LookupError) as error:
    problems.append(report.of_error(error))
  else:
    facts += of_model(model)
    not_read = [x for x in headers.tensors if family.own_name(x) is None]
    if not_read:
      facts.append(('not read', tensors.listed(not_read)))
    problems += report.differences(different)
    problems += _of_modules(stored, config, model, facts)
  problems += _of_tokenizer(lambda: tokenizer_files.load(headers.folder))
  supported = quantised.kinds(form)
  problems += headers_lib.unsupported(headers.tensors, supported)
  return report.Report(
    path=str(headers.folder),
    what='a model, config.json and '
    + (report.count(len(headers.names), 'file') + ' of weights'),
    facts=(*headers_lib.facts(headers.tensors), *facts),
    problems=tuple(problems),
  )


def _of_tokenizer(build: Callable[[], Any]) -> list[report.Problem]:
  """Returns what is wrong with a tokenizer, which `load` builds first."""
  try:
    build()
  except ValueError as error:
    return [report.of_error(error)]
  return []


def _of_modules(stored, config, model, facts: Facts):
  """Returns what is wrong with multi-token prediction modules; adds a fact."""
  prefixes = huggingface.mtp_prefixes(model.num_layers, config)
  is_stored = any(name.startswith(prefixes) for name in stored.shapes)
  own_prefix = huggingface.family_of(config).mtp_prefix
  # A family with a prefix of its own may come without the module.
  if not prefixes or (own_prefix is not None and not is_stored):
    return []
  where = f'named {own_prefix}' if own_prefix else 'after the layers'
  text = f'{len(prefixes)} for multi-token prediction, {where}'
  if not is_stored:
    facts.append(('modules', f'{text}: none is stored'))
    return []
  facts.append(('modules', text))
  try:
    plan = mtp.plan(stored, config, model)
    mtp.check_copies(stored, config, model, plan[1], plan[3])
  except ValueError as error:
    return [report.of_error(error)]
  return report.differences(tensors.compare(*plan))


def of_gguf(path: epath.Path) -> report.Report:
  """Reports on a GGUF file."""
  facts: Facts = []
  problems = []
  try:
    with gguf_file.Reader(path) as reader:
      facts = [
        ('tensors', f'{len(reader.shapes):,}'),
        ('bytes', report.tally(reader.stored.values())),
        ('architecture', str(reader.metadata.get('general.architecture'))),
        ('name', str(reader.metadata.get('general.name'))),
      ]
      _, model = gguf.model_of(reader, 'bfloat16')
      facts += of_model(model)
      problems += report.differences(gguf.compare(reader, model))
      problems += _of_tokenizer(
        lambda: tokenizer_files.from_gguf(reader.metadata)
      )
  except ValueError as error:
    problems.append(report.of_error(error))
  return report.Report(
    str(path), 'a model, a GGUF file', tuple(facts), tuple(problems)
  )


def of_saved(folder: epath.Path) -> report.Report:
  """Reports on a folder that `models.checkpoint.save` wrote."""
  facts: Facts = []
  problems = []
  expected = found = None
  try:
    model = checkpoint.read_model(folder, 'bfloat16')
    expected = _by_name(model.abstract_params())
    facts += of_model(model)
  except (ValueError, TypeError) as error:
    problems.append(report.of_error(error, f'{checkpoint.CONFIG_NAME}: '))
  try:
    stored = checkpoint.read_shapes(folder)
    found = _by_name(stored)
    leaves = jax.tree.leaves(stored)
    by_dtype = ((str(leaf.dtype), array_bytes.total(leaf)) for leaf in leaves)
    facts.insert(0, ('bytes', report.tally(by_dtype)))
  except (OSError, KeyError, ValueError) as error:
    problems.append(report.of_error(error, 'the parameters: '))
  if expected is not None and found is not None:
    different = tensors.differences(expected, found)
    problems += report.differences(different)
  return report.Report(
    path=str(folder),
    what='a model that this library saved',
    facts=tuple(facts),
    problems=tuple(problems),
  )


def _by_name(params):
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {tensors.key(path): tuple(leaf.shape) for path, leaf in leaves}


def model_at(path: epath.Path) -> transformer.Transformer:
  """Returns the model that headers describe, without its weights.

  Raises:
    ValueError: the headers describe no model.
  """
  if path.suffix == '.gguf':
    with gguf_file.Reader(path) as reader:
      return gguf.model_of(reader, 'bfloat16')[1]
  if (path / checkpoint.CONFIG_NAME).exists():
    return checkpoint.read_model(path, 'bfloat16')
  if (path / 'config.json').exists():
    config = headers_lib.read(path).config
    return huggingface.family_of(config).model(config, 'bfloat16')
  raise ValueError(
    f'{path} is not a model: give a folder with config.json, a folder that '
    'models.checkpoint.save wrote, or a .gguf file'
  )


def of_model(model: transformer.Transformer) -> Facts:
  """Returns a model's main sizes, and the memory that it takes."""
  params = model.abstract_params()
  tied = ', the embedding is the unembedding' if model.tie_embeddings else ''
  weights = memory.of_model(model)
  cache = memory.of_cache(model, _CACHE_TOKENS)
  devices = '; '.join(
    f'{kind} {_devices(weights[kind] + cache)}' for kind in ('bfloat16', 'int8')
  )
  return [
    ('parameters', f'{memory.num_parameters(params):,}'),
    ('layers', f'{model.num_layers}'),
    *of_layers(model),
    ('vocabulary', f'{model.vocab_size:,}{tied}'),
    ('context', f'{model.max_length:,} tokens'),
    ('weights as', report.sizes(weights)),
    (
      'cache',
      f'{report.size(cache)} for {_CACHE_TOKENS:,} tokens, bfloat16',
    ),
    ('devices', devices),
  ]


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
  return facts


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
