"""What the library knows of a family of published models."""

from collections.abc import Callable, Mapping
import dataclasses

from specsample.models import config as config_lib
from specsample.models import tensors
from specsample.models import transformer


def own_name(name: str) -> str | None:
  """A tensor's name in `Family.names`, None for one that is not read.

  Some folders leave out the first part of all names; old ones hold what is now
  computed of the configuration.
  """
  if name.endswith('.rotary_emb.inv_freq'):
    return None
  if name.startswith(('embed_tokens.', 'layers.', 'norm.')):
    return f'model.{name}'
  return name


def _as_stored(
  model: transformer.Transformer, name: str, tensor: tensors.Tensor
) -> tensors.Tensor:
  del model, name
  return tensor


@dataclasses.dataclass(frozen=True)
class Family:
  """How the configuration and the tensors of a family are read.

  Attributes:
    model: of a config.json and a dtype the model.
    names: of each parameter the tensor in its files, as of `tensors.fill`; '*'
      in one stands for the numbers of experts, which are stacked.
    own_name: of a tensor's name in a file its name in `names`, None for one
      that is not read.
    rearranged: of the model, a tensor's name and the tensor, with another order
      in it where the library's is not the family's.
  """

  model: Callable[[config_lib.Config, str], transformer.Transformer]
  names: Mapping[str, str]
  own_name: Callable[[str], str | None] = own_name
  rearranged: Callable[
    [transformer.Transformer, str, tensors.Tensor], tensors.Tensor
  ] = _as_stored
