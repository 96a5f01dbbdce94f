"""PARD: an ordinary language model whose configuration names a mask token.

An et al., 2504.18583. config.json has spd_type and pard_token besides the
model's own settings.
"""

from etils import epath

from specsample import drafters
from specsample import files
from specsample.loading import load as load_lib
from specsample.loading import padding
from specsample.loading.published import source as source_lib
from specsample.models import config as config_lib
from specsample.types import Params

# How many drafts the paper trains.
_NUM_DRAFT_TOKENS = 8


def load(
  folder: epath.Path,
  target: load_lib.Loaded,
  num_draft_tokens: int | None,
  reads: bool,
) -> tuple[drafters.PARD, Params] | None:
  """Loads a drafter and its parameters; returns None if it is not PARD's.

  Its vocabulary becomes as large as the target's (`padding.match_vocabulary`).
  As with `load`, its matrices may be packed on a CPU. Without `reads`,
  parameters are None.
  """
  path = folder / 'config.json'
  config = config_lib.Config(files.read_json(path), str(path))
  if config.get('spd_type', str) != 'pard':
    return None
  load = load_lib.load if reads else load_lib.describe
  loaded = load(folder, dtype=target.model.dtype)
  draft = padding.match_vocabulary(loaded, target)
  drafter = drafters.PARD(
    model=draft.model,
    num_draft_tokens=(
      _NUM_DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens
    ),
    mask_token_id=source_lib.mask_token_id(config, target, ('pard_token',)),
  )
  return drafter, draft.params
