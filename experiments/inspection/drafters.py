"""Reports on drafters, saved or published, from the headers of their files."""

import dataclasses
import math
import re

from etils import epath

from experiments.inspection import headers as headers_lib
from experiments.inspection import memory
from experiments.inspection import models
from experiments.inspection import report
from specsample.drafters import trainable
from specsample.loading import card as card_lib
from specsample.loading import drafter as drafter_lib
from specsample.loading import load
from specsample.loading.published import eagle
from specsample.loading.published import layouts
from specsample.loading.published import source as source_lib
from specsample.models import config as config_lib
from specsample.models import gemma
from specsample.models import safetensors_file
from specsample.models import transformer

_Facts = list[tuple[str, str]]
# Settings that are reported elsewhere.
_TOLD = ('model', 'layer_config', 'num_draft_tokens')
# The fewest layers to assume for a target, if a drafter does not say.
_NUM_LAYERS = 8


def published(
  headers: headers_lib.Headers,
  layout: layouts.Layout,
  target: transformer.Transformer | None,
) -> report.Report:
  """Reports on a drafter in a published layout, for a target if given."""
  facts: _Facts = []
  problems = list(headers.problems)
  try:
    model = target or _stand_in(headers.source)
    plan = layout.plan(headers.source, _without_weights(model), None)
    facts += [
      ('drafter', type(plan.drafter).__name__),
      ('of a target', f'{model.dim:,} wide, of {model.vocab_size:,} tokens'),
      *_of(plan.drafter),
    ]
    problems += report.differences(source_lib.compare(plan))
  except (ValueError, TypeError, LookupError) as error:
    problems.append(report.of_error(error))
  supported = safetensors_file.DTYPES
  problems += headers_lib.unsupported(headers.tensors, supported)
  return report.Report(
    path=str(headers.folder),
    what=f'a drafter, in the layout of {layout.name}',
    facts=(
      *headers_lib.facts(headers.tensors),
      *facts,
      _checked_against(target is not None),
    ),
    problems=tuple(problems),
  )


def saved(
  folder: epath.Path, target: transformer.Transformer | None
) -> report.Report:
  """Reports on a drafter that `save_drafter` wrote, for a target if given."""
  facts: _Facts = []
  problems: list[report.Problem] = []
  card, stored = {}, None
  try:
    card = card_lib.read(folder)
    name = card.get('target', 'a model')
    facts += [
      ('drafter', card['kind']),
      ('target', f'{name}, fingerprint {card["fingerprint"]}'),
      *((key, str(value)) for key, value in card['settings'].items()),
    ]
  except ValueError as error:
    problems.append(report.of_error(error))
  try:
    card_lib.check_present(folder / drafter_lib.NAME)
    stored = safetensors_file.read_header(folder / drafter_lib.NAME)
    facts = [*headers_lib.facts(stored), *facts]
  except ValueError as error:
    problems.append(report.of_error(error))
  if card and target is not None:
    try:
      # The fingerprint cannot be checked without weights: use the card's.
      loaded = _without_weights(target, card['fingerprint'])
      drafter = card_lib.drafter_of(card, folder, loaded)
      facts.append(_weights(drafter))
      if stored is not None:
        different = drafter_lib.compare(drafter, stored)
        problems += report.differences(different)
    except (ValueError, TypeError) as error:
      problems.append(report.of_error(error))
  return report.Report(
    path=str(folder),
    what='a drafter that this library saved',
    facts=(*facts, _checked_against(target is not None)),
    problems=tuple(problems),
  )


def _without_weights(model, fingerprint=None):
  return load.Loaded(model, None, None, exact_fingerprint=fingerprint)


def _checked_against(is_given):
  if is_given:
    return 'checked', 'against the sizes of the target, not its weights'
  return 'checked', 'against itself; --target=PATH checks it against a target'


def _of(drafter: trainable.Trainable) -> _Facts:
  """Returns facts on a drafter: K, settings other than defaults, and sizes."""
  facts = [('drafts', f'{drafter.num_draft_tokens} tokens')]
  for field in dataclasses.fields(drafter):
    value = getattr(drafter, field.name)
    if field.name not in _TOLD and value != field.default:
      facts.append((field.name, str(value)))
  config = getattr(drafter, 'layer_config', None)
  if config is not None:
    facts += models.of_layers(config)
  return [*facts, _weights(drafter)]


def _weights(drafter):
  sizes = report.sizes(memory.of_drafter(drafter))
  return 'weights as', sizes


def _stand_in(source: source_lib.Source) -> transformer.Transformer:
  """Returns a model with the sizes that a drafter's target must have.

  Raises:
    ValueError: the drafter's tensors and configuration do not give them.
  """
  if 'backbone_hidden_size' in source.config.values:
    # An assistant's layers follow layers that are like the target's.
    return dataclasses.replace(
      gemma.assistant(source.config, 'bfloat16'),
      dim=source.config.size('backbone_hidden_size'),
      num_shared=0,
    )
  rows = {name: x.shape[0] for name, x in source.tensors.items() if x.shape}
  matrices = [x.shape for x in source.tensors.values() if len(x.shape) == 2]
  # An unembedding has more rows than any other matrix.
  num_rows, num_columns = max(matrices, default=(1, 1))
  config = eagle.of_layer(source.config)
  given = {**source.config.values, **config.values}
  size = config_lib.Config(given, source.config.origin).size
  dim = size('hidden_size', rows.get('fc.weight', num_columns))
  # Hydra's layer has the target's shape: assume the fewest possible heads.
  prefix = 'prefix_embeding_layer.layers.0.'
  queries, keys = (
    rows.get(f'{prefix}self_attn.{part}_proj.weight', dim) for part in 'qk'
  )
  head_dim = math.gcd(queries, keys)
  return transformer.Transformer(
    vocab_size=size('vocab_size', rows.get('t2d', num_rows)),
    num_layers=size('num_target_layers', _num_layers(source)),
    dim=dim,
    num_heads=queries // head_dim,
    num_kv_heads=keys // head_dim,
    head_dim=head_dim,
    mlp_dim=rows.get(f'{prefix}mlp.gate_proj.weight', dim),
    max_length=size('max_position_embeddings', 1),
  )


def _num_layers(source):
  """Returns more layers than any number that a configuration names."""
  named = [
    number
    for key, value in _flat(source.config.values)
    if re.search(r'layer_ids$', key) and isinstance(value, list)
    for number in value
    if isinstance(number, int)
  ]
  return max([_NUM_LAYERS, *(number + 2 for number in named)])


def _flat(values):
  """Yields the items of an object and of the objects in it."""
  for key, value in values.items():
    yield key, value
    if isinstance(value, dict):
      yield from _flat(value)
