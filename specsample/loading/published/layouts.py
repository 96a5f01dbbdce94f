"""The layout in which a folder's drafter is published, or is to be."""

from collections.abc import Callable, Collection
import dataclasses
from typing import Any

from etils import epath

from specsample import drafters
from specsample.loading import load as load_lib
from specsample.loading.published import assistant
from specsample.loading.published import dflash
from specsample.loading.published import eagle
from specsample.loading.published import heads
from specsample.loading.published import mtp
from specsample.loading.published import source as source_lib
from specsample.loading.published import writing
from specsample.models import config as config_lib
from specsample.models import tensors as tensors_lib
from specsample.types import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """The layout in which a kind of drafter is published.

  Attributes:
    name: the name of the kind.
    plan: returns a drafter and its table.
    marks: tensors that none of the layouts after it has.
    of_speculators: its speculators_model_type, if it has one.
    kind: the class of the drafters that can be written.
    write: returns the files of such a drafter; None if none are written.
  """

  name: str
  plan: Callable[[source_lib.Source], source_lib.Plan]
  marks: tuple[str, ...] = ()
  of_speculators: str | None = None
  kind: type | None = None
  write: Callable[[writing.Request], writing.Content] | None = None


ALL = (
  Layout(
    name='P-EAGLE',
    plan=eagle.plan_p_eagle,
    marks=('mask_hidden',),
    of_speculators='peagle',
  ),
  Layout(
    name='EAGLE-3',
    plan=eagle.plan_eagle3,
    marks=('midlayer.hidden_norm.weight', 'layers.0.hidden_norm.weight'),
    of_speculators='eagle3',
    kind=drafters.Eagle3,
    write=eagle.write_eagle3,
  ),
  Layout(
    name='DSpark',
    plan=dflash.plan,
    marks=('markov_head.markov_w1.weight',),
    of_speculators='dspark',
    kind=drafters.DSpark,
    write=dflash.write,
  ),
  Layout(
    name='DFlash 2',
    plan=dflash.plan,
    marks=('candidate_selector.hidden_projection.weight',),
    of_speculators='dflash2',
  ),
  Layout(
    name='DFlash',
    plan=dflash.plan,
    marks=('hidden_norm.weight',),
    of_speculators='dflash',
    kind=drafters.DFlash,
    write=dflash.write,
  ),
  Layout(
    name='EAGLE',
    plan=eagle.plan_eagle,
    marks=('fc.weight',),
    of_speculators='eagle',
  ),
  Layout(
    name='Hydra',
    plan=heads.plan_hydra,
    marks=('hydra_mlp.0.0.linear.weight', 'hydra_mlp.0.1.linear.weight'),
  ),
  Layout(
    name="Gemma 4's assistants",
    plan=assistant.plan,
    marks=('pre_projection.weight',),
  ),
  Layout(
    name='Medusa',
    plan=heads.plan_medusa,
    marks=(
      'medusa_head.0.0.linear.weight',
      'blocks.0.layers.0.weight',
      '0.0.linear.weight',
    ),
    kind=drafters.Medusa,
    write=heads.write_medusa,
  ),
  Layout(
    name='MTP',
    plan=mtp.plan_speculators,
    of_speculators='mtp',
    kind=drafters.MTP,
    write=mtp.write,
  ),
)


def find(config: config_lib.Config, tensors: Collection[str]) -> Layout | None:
  """Returns the layout of a folder, None if it is not a known one."""
  kind = config.get('speculators_model_type')
  if kind is None:
    found = (x for x in ALL if any(mark in tensors for mark in x.marks))
    return next(found, None)
  by_kind = {x.of_speculators: x for x in ALL if x.of_speculators is not None}
  if kind not in by_kind:
    raise ValueError(
      f'{config.origin}: speculators_model_type is {kind!r}, but the supported '
      f'types are {", ".join(by_kind)}'
    )
  return by_kind[kind]


def load(
  folder: epath.Path,
  target: load_lib.Loaded,
  num_draft_tokens: int | None,
  convert: tensors_lib.Convert | None = tensors_lib.as_read,
) -> tuple[Any, Params] | None:
  """Loads the drafter in a folder; returns None if it may be a model.

  Args:
    folder: holds config.json and weights, in safetensors or torch files.
    target: the model that it was trained for. Its dtype is used for the
      parameters.
    num_draft_tokens: K, None for what the folder says.
    convert: as for `tensors.fill`.
  """
  opened = source_lib.open_folder(folder)
  if opened is None:
    return None
  config, tensors = opened
  layout = find(config, tensors)
  if layout is not None:
    source = source_lib.Source(
      folder, config, tensors, target, num_draft_tokens
    )
    plan = layout.plan(source)
    return plan.drafter, source_lib.fill(source, plan, convert)
  if not config.values:
    raise ValueError(
      f'{folder} is not in a known drafter layout (it has '
      f'{tensors_lib.listed(tensors)}): give a drafter in the layout of one '
      f'of {", ".join(x.name for x in ALL)}'
    )
  return None


def write(request: writing.Request) -> writing.Content:
  """Returns the files of a drafter, from which it would be read unchanged."""
  written = {x.kind: x for x in ALL if x.kind is not None}
  layout = written.get(type(request.drafter))
  if layout is None or layout.write is None:
    raise ValueError(
      f'{type(request.drafter).__name__} has no published layout that can be '
      f'written: export one of {", ".join(x.__name__ for x in written)}'
    )
  content = layout.write(request)
  if content.is_of_target:
    return content
  source = writing.as_source(request, content)
  found = find(source.config, source.tensors)
  assert found is layout, (found, layout)
  plan = layout.plan(source)
  source_lib.fill(source, plan, convert=None)  # refuses what it would not read
  writing.check_settings(request, plan.drafter)
  return content
