"""PARD: an ordinary language model whose configuration names a mask token.

An et al., 2504.18583. config.json has spd_type and pard_token besides the
model's own settings.
"""

from etils import epath

from specsample import drafters
from specsample import files
from specsample.loading import load as load_lib
from specsample.models import config as config_lib
from specsample.types import Params
from specsample.vocabularies import padding

_MASK = 'pard_token'
# How many drafts the paper trains.
_NUM_DRAFT_TOKENS = 8


def load(
  folder: epath.Path,
  target: load_lib.Loaded,
  num_draft_tokens: int | None,
  reads: bool = True,
) -> tuple[drafters.PARD, Params] | None:
  """Loads a drafter and its parameters; returns None if it is not PARD's.

  As with `load`, its matrices may be packed on a CPU.

  Args:
    folder: holds config.json and safetensors.
    target: the model that it was trained for. Its dtype is used for the
      parameters, and its vocabulary's size (`padding.match_vocabulary`).
    num_draft_tokens: K, None for 8.
    reads: whether parameters are read; without, they are None.
  """
  path = folder / 'config.json'
  config = config_lib.Config(files.read_json(path), str(path))
  if config.get('spd_type') != 'pard':
    return None
  if num_draft_tokens is None:
    num_draft_tokens = _NUM_DRAFT_TOKENS
  mask_id = config.get(_MASK)
  load = load_lib.load if reads else load_lib.describe
  loaded = load(folder, dtype=target.model.dtype)
  draft = padding.match_vocabulary(loaded, target)
  size = draft.model.vocab_size
  if mask_id is None or not 0 <= mask_id < size:
    raise ValueError(
      f'{path}: {_MASK} is {mask_id!r}, but drafter and target share tokens 0 '
      f'to {size - 1}: the drafter was made for another target'
    )
  drafter = drafters.PARD(
    model=draft.model,
    num_draft_tokens=num_draft_tokens,
    mask_token_id=mask_id,
  )
  return drafter, draft.params
