"""The model card of a drafter that is written for others: README.md."""

from collections.abc import Iterator, Mapping
from typing import Any

from specsample.loading import card as card_lib
from specsample.loading import load
from specsample.loading.published import writing

# Flags with which vLLM finds the kind of a drafter; `speculators` says its own.
_METHODS = {
  'DFlash': 'dflash',
  'DSpark': 'dspark',
  'Eagle3': 'eagle3',
  'MTP': 'mtp',
  'Medusa': 'medusa',
}


def text(request: writing.Request, card: Mapping[str, Any]) -> str:
  """Returns the text, with what `card` says about training and acceptance."""
  return '\n'.join(_lines(request, card)) + '\n'


def _lines(request, card) -> Iterator[str]:
  kind = type(request.drafter).__name__
  name = request.target_name
  yield '---'
  if name is not None and load.is_hub_id(name):
    yield f'base_model: {name}'
  yield 'tags:\n- speculative-decoding\n- specsample\n---\n'
  yield f'# {kind} for {name or card.get("target", "its target")}\n'
  yield (
    f'A drafter for speculative decoding, trained in JAX with specsample and '
    f'written in the {request.layout} layout. It drafts '
    f'{request.drafter.num_draft_tokens} tokens per round; the target decides '
    'which of them are kept.'
  )
  yield from _section('Use', _use(request, kind))
  yield from _section('Settings', _settings(request.drafter))
  yield from _section('Measured by specsample', _measured(card))
  yield from _section('Training', _training(card))


def _section(title, lines) -> Iterator[str]:
  lines = list(lines)
  if lines:
    yield from ('', f'## {title}', '', *lines)


def _use(request, kind):
  yield '```python'
  yield f"target = specsample.load('{request.target_name or 'TARGET'}')"
  yield "drafter = specsample.load_drafter('THIS_REPOSITORY', target)"
  yield '```\n'
  if request.of_speculators:
    command = 'vllm serve THIS_REPOSITORY'
    if kind == 'MTP':
      command = 'speculators stitch-mtp THIS_REPOSITORY TARGET'
    yield f'```\n{command}\n```'
    return
  config = (
    f'{{"method": "{_METHODS[kind]}", "num_speculative_tokens": '
    f'{request.drafter.num_draft_tokens}'
  )
  model = 'THIS_REPOSITORY'
  if kind != 'MTP':
    config += f', "model": "{model}"'
    model = request.target_name or 'TARGET'
  yield f"```\nvllm serve {model} --speculative-config '{config}}}'\n```"


def _settings(drafter):
  yield '| setting | value |'
  yield '|---|---|'
  settings = card_lib.fields_of(drafter)
  for name, value in settings.items():
    if name not in ('model', 'layer_config'):
      yield f'| {name} | {value} |'
  layers = settings.get('feature_layers', ())
  if layers:
    yield ''
    yield (
      f"It reads the outputs of the target's layers {_listed(layers)}, counted "
      f'from 0: what enters layers {_listed(i + 1 for i in layers)}.'
    )


def _measured(card):
  for key in reversed(card_lib.MEASURED):
    found = card.get(key)
    if isinstance(found, Mapping) and 'tokens_per_round' in found:
      kept = found.get('acceptance_by_position', ())
      rates = ', '.join(f'{x:.3f}' for x in kept)
      yield f'* {found.get("what", key)}:'
      yield f'  {found["tokens_per_round"]:.3f} tokens per round; drafts kept'
      yield f'  by position: {rates}'


def _training(card):
  training = card.get('training')
  if not isinstance(training, Mapping):
    return
  for key in ('command', 'git_commit', 'steps', 'answer_tokens_seen', 'hours'):
    if key in training:
      yield f'* {key}: `{training[key]}`'


def _listed(numbers):
  return ', '.join(map(str, numbers))
