"""Writing a drafter for other engines, in the layouts in which others publish.

`published.layouts` says what the files hold.
"""

from collections.abc import Iterator, Mapping
import os
from typing import Any

from etils import epath

from specsample import checks
from specsample import files
from specsample.drafters import trainable
from specsample.loading import card as card_lib
from specsample.loading import load
from specsample.loading.published import layouts
from specsample.loading.published import writing
from specsample.models import int8
from specsample.models import packed
from specsample.models import safetensors_file
from specsample.types import Params

# Flags with which vLLM finds the kind of a drafter; `speculators` says its own.
_METHODS = {
  'DFlash': 'dflash',
  'DSpark': 'dspark',
  'Eagle3': 'eagle3',
  'MTP': 'mtp',
  'Medusa': 'medusa',
}


def export_drafter(
  path: str | os.PathLike[str],
  drafter: trainable.Trainable,
  params: Params,
  *,
  target: load.Loaded,
  layout: str,
  target_name: str | None = None,
  card: Mapping[str, Any] | None = None,
) -> None:
  """Writes a folder that vLLM, SGLang or `speculators` reads, or nothing.

  `load_drafter` reads it too, as the same drafter: what a layout has no room
  for is refused before anything is written. Weights become bfloat16. README.md
  is a model card for the hub.

  Args:
    path: the folder, which must not exist; gs:// works too.
    drafter: an Eagle3, DFlash, DSpark, Medusa or MTP.
    params: its own parameters, whole on this host.
    target: the model that it drafts for.
    layout: 'huggingface' for the names of each kind's authors or, for Medusa,
      vLLM's. Modules of an MTP are then written beside their target's weights,
      which are copied. 'speculators' for those of vLLM's library; it has no
      Medusa.
    target_name: the target's name for others, on the hub or a folder; None for
      the name that it was loaded by.
    card: facts about the drafter, as in `load_drafter(...).card`.

  Raises:
    ValueError: `path` exists, the parameters are int8, such drafters have no
      such layout, it has no room for a part of the drafter, or it needs the
      target's name and there is none.
  """
  if layout not in writing.LAYOUTS:
    raise ValueError(
      f'layout is {layout!r}: give one of {", ".join(writing.LAYOUTS)}'
    )
  checks.instance(
    'target', target, load.Loaded, 'give what specsample.load returned'
  )
  int8.refuse(params)
  params = packed.plain(params)
  folder = load.folder_of(target)
  architectures = ()
  if folder is not None:
    config = files.read_json(folder / 'config.json')
    architectures = tuple(config.get('architectures') or ())
  request = writing.Request(
    drafter=drafter,
    params=params,
    target=target,
    target_name=target_name or name_of(target),
    architectures=architectures,
    layout=layout,
  )
  content = layouts.write(request)
  readme = '\n'.join(_readme(request, card or {})) + '\n'
  with files.new_folder(path) as new:
    files.on_first_process(lambda: _write(new, content, readme))


def _write(folder: epath.Path, content: writing.Content, readme: str) -> None:
  for name, origin in content.copied.items():
    origin.copy(folder / name)
  for name, tensors in content.weights.items():
    safetensors_file.write(folder / name, tensors)
  for name, values in content.others.items():
    files.write_json(folder / name, dict(values))
  (folder / 'README.md').write_text(readme)
  # Written last, because it marks the folder as complete.
  files.write_json(folder / 'config.json', dict(content.config))


def _readme(request, card) -> Iterator[str]:
  """Yields the lines of the model card, with what `card` says of training."""
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


def name_of(target: load.Loaded) -> str | None:
  """Returns the name that a target was loaded by if others know it too."""
  return None if load.folder_of(target) is None else target.name


def upload(path: str | os.PathLike[str], name: str) -> str:
  """Uploads an exported folder to the Hugging Face hub; returns its address.

  `name` is a new repository, 'owner/name'. The folder stays if it fails.
  """
  # Imported only when it is used: it takes as long as the rest of the library.
  import huggingface_hub  # noqa: PLC0415
  from huggingface_hub import errors  # noqa: PLC0415

  try:
    created = huggingface_hub.create_repo(name, repo_type='model')
    huggingface_hub.upload_folder(
      repo_id=name, folder_path=os.fspath(path), repo_type='model'
    )
  except (errors.HfHubHTTPError, OSError, ValueError) as error:
    reason = ' '.join(str(error).split())
    raise ValueError(
      f'{path} was written, but not uploaded to {name} ({reason}): log in with '
      f'`hf auth login`, then run `hf upload {name} {path}`'
    ) from error
  return str(created)


def check_upload(
  path: str | os.PathLike[str], name: str, target_name: str | None
) -> None:
  """Raises ValueError if the folder cannot be uploaded, or would be no use.

  `target_name` is the target's in the folder's files, None if they name none.
  """
  if not load.is_hub_id(name):
    raise ValueError(f"{name!r} is no repository of the hub: give 'owner/name'")
  if files.is_remote(path):
    raise ValueError(
      f'{path} is in a bucket, but only a local folder can be uploaded: export '
      'to one'
    )
  if target_name is None or not load.is_hub_id(target_name):
    raise ValueError(
      f'the target {target_name!r} is not on the hub, where others would look '
      "for it: give target_name='organisation/name'"
    )
