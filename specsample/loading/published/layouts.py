"""The layout in which a folder's drafter is published, or is to be."""

from collections.abc import Callable
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
from specsample.models import tensors
from specsample.types import Params


@dataclasses.dataclass(frozen=True)
class Layout:
  """The layout in which a kind of drafter is published.

  Attributes:
    name: the name of the kind.
    plan: (source, target, K or None) -> a drafter and where its parameters are.
      If the target's params are None, only the shapes count.
    kind: the class of the drafters that can be written.
    write: returns the files of such a drafter; None if none are written.
  """

  name: str
  plan: Callable[
    [source_lib.Source, load_lib.Loaded, int | None], source_lib.Plan
  ]
  kind: type | None = None
  write: Callable[[writing.Request], writing.Content] | None = None


_MEDUSA = Layout(
  'Medusa', heads.plan_medusa, drafters.Medusa, heads.write_medusa
)
_HYDRA = Layout('Hydra', heads.plan_hydra)
_EAGLE = Layout('EAGLE', eagle.plan_eagle)
_EAGLE3 = Layout(
  'EAGLE-3', eagle.plan_eagle3, drafters.Eagle3, eagle.write_eagle3
)
_P_EAGLE = Layout('P-EAGLE', eagle.plan_p_eagle)
_DFLASH = Layout('DFlash', dflash.plan, drafters.DFlash, dflash.write)
_DFLASH2 = Layout('DFlash 2', dflash.plan)
_DSPARK = Layout('DSpark', dflash.plan, drafters.DSpark, dflash.write)
_MTP = Layout('MTP', mtp.plan_speculators, drafters.MTP, mtp.write)
_ASSISTANT = Layout("Gemma 4's assistants", assistant.plan)
ALL = (
  *(_MEDUSA, _HYDRA, _EAGLE, _EAGLE3, _P_EAGLE, _DFLASH, _DFLASH2, _DSPARK),
  *(_ASSISTANT, _MTP),
)
# By speculators_model_type.
_OF_SPECULATORS = {
  'eagle': _EAGLE,
  'eagle3': _EAGLE3,
  'peagle': _P_EAGLE,
  'dflash': _DFLASH,
  'dflash2': _DFLASH2,
  'dspark': _DSPARK,
  'mtp': _MTP,
}
# By a tensor that none of the layouts below it has.
_BY_TENSOR = {
  'mask_hidden': _P_EAGLE,
  'midlayer.hidden_norm.weight': _EAGLE3,
  'layers.0.hidden_norm.weight': _EAGLE3,
  'markov_head.markov_w1.weight': _DSPARK,
  'candidate_selector.hidden_projection.weight': _DFLASH2,
  'hidden_norm.weight': _DFLASH,
  'fc.weight': _EAGLE,
  'hydra_mlp.0.0.linear.weight': _HYDRA,
  'hydra_mlp.0.1.linear.weight': _HYDRA,
  'pre_projection.weight': _ASSISTANT,
  'medusa_head.0.0.linear.weight': _MEDUSA,
  'blocks.0.layers.0.weight': _MEDUSA,
  '0.0.linear.weight': _MEDUSA,
}


def find(source: source_lib.Source) -> Layout | None:
  """Returns the layout of a folder, None if it is not a known one."""
  kind = source.config.get('speculators_model_type')
  if kind is not None:
    if not isinstance(kind, str) or kind not in _OF_SPECULATORS:
      raise ValueError(
        f'{source.config.origin}: speculators_model_type is {kind!r}, but the '
        f'supported types are {", ".join(_OF_SPECULATORS)}'
      )
    return _OF_SPECULATORS[kind]
  for name, layout in _BY_TENSOR.items():
    if name in source.tensors:
      return layout
  return None


def load(
  folder: epath.Path,
  target: load_lib.Loaded,
  num_draft_tokens: int | None,
  convert: tensors.Convert | None = tensors.as_read,
) -> tuple[Any, Params] | None:
  """Loads the drafter in a folder; returns None if it may be a model.

  Args:
    folder: holds config.json and weights, in safetensors or torch files.
    target: the model that it was trained for. Its dtype is used for the
      parameters.
    num_draft_tokens: K, None for what the folder says.
    convert: as for `tensors.fill`.
  """
  source = source_lib.open_folder(folder)
  if source is None:
    return None
  layout = find(source)
  if layout is not None:
    plan = layout.plan(source, target, num_draft_tokens)
    return plan.drafter, source_lib.fill(plan, convert)
  if not source.config.values:
    raise ValueError(
      f'{folder} is not in a known drafter layout (it has '
      f'{tensors.listed(source.tensors)}): give a drafter in the layout of one '
      f'of {", ".join(x.name for x in ALL)}'
    )
  return None


def write(request: writing.Request) -> writing.Content:
  """Returns the files of a drafter, from which it would be read unchanged."""
  written = {layout.kind: layout for layout in ALL if layout.kind is not None}
  layout = written.get(type(request.drafter))
  if layout is None or layout.write is None:
    raise ValueError(
      f'{type(request.drafter).__name__} has no published layout that can be '
      f'written: export one of {", ".join(x.__name__ for x in written)}'
    )
  content = layout.write(request)
  if content.is_of_target:
    return content
  source = writing.as_source(content)
  found = find(source)
  assert found is layout, (found, layout)
  # Without the target's weights, because only the shapes are compared.
  target = load_lib.Loaded(request.drafter.model, None, None)
  plan = layout.plan(source, target, request.drafter.num_draft_tokens)
  source_lib.fill(plan, convert=None)  # refuses what would not be read
  writing.check_settings(request, plan.drafter)
  return content
