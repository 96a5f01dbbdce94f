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


@dataclasses.dataclass(frozen=True)
class Layout:
  """The layout in which a kind of drafter is published.

  Attributes:
    name: the name of the kind.
    of_speculators: its speculators_model_type, None if it has none.
    plan: returns a drafter and its table.
    marks: tensors that none of the layouts after it has.
  """

  name: str
  of_speculators: str | None
  plan: Callable[[source_lib.Source], source_lib.Plan]
  marks: tuple[str, ...] = ()


_OF_EAGLE3 = ('midlayer.hidden_norm.weight', 'layers.0.hidden_norm.weight')
_OF_HYDRA = ('hydra_mlp.0.0.linear.weight', 'hydra_mlp.0.1.linear.weight')
_OF_MEDUSA = (
  'medusa_head.0.0.linear.weight',
  'blocks.0.layers.0.weight',
  '0.0.linear.weight',
)
ALL = (
  Layout('P-EAGLE', 'peagle', eagle.plan_p_eagle, ('mask_hidden',)),
  Layout('EAGLE-3', 'eagle3', eagle.plan_eagle3, _OF_EAGLE3),
  Layout('DSpark', 'dspark', dflash.plan, (dflash.MARKOV,)),
  Layout('DFlash 2', 'dflash2', dflash.plan, (dflash.SELECTOR,)),
  Layout('DFlash', 'dflash', dflash.plan, ('hidden_norm.weight',)),
  Layout('EAGLE', 'eagle', eagle.plan_eagle, ('fc.weight',)),
  Layout('Hydra', None, heads.plan_hydra, _OF_HYDRA),
  Layout('Medusa', None, heads.plan_medusa, _OF_MEDUSA),
  Layout("Gemma 4's assistants", None, assistant.plan, (assistant.MARK,)),
  Layout('MTP', 'mtp', mtp.plan_speculators),
)
_WRITERS: dict[type, Callable[[writing.Request], writing.Content]] = {
  drafters.Medusa: heads.write_medusa,
  drafters.Eagle3: eagle.write_eagle3,
  drafters.DFlash: dflash.write,
  drafters.DSpark: dflash.write,
  drafters.MTP: mtp.write,
}


def find(config: config_lib.Config, tensors: Collection[str]) -> Layout | None:
  """Returns the layout of a folder, None if it is not a known one."""
  kind = config.get('speculators_model_type', str)
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
  convert: tensors_lib.Convert | None,
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
  kind = type(request.drafter)
  if kind not in _WRITERS:
    raise ValueError(
      f'{kind.__name__} has no published layout that can be written: export '
      f'one of {", ".join(x.__name__ for x in _WRITERS)}'
    )
  content = _WRITERS[kind](request)
  if content.is_of_target:
    return content
  source = writing.as_source(request, content)
  layout = find(source.config, source.tensors)
  assert layout is not None, source
  plan = layout.plan(source)
  assert type(plan.drafter) is kind, layout
  writing.check_settings(request, plan.drafter)
  source_lib.fill(source, plan, convert=None)  # refuses what it would not read
  return content
