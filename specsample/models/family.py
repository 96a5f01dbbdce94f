"""Families of published models, and how their files are read."""

from collections.abc import Callable, Mapping
import dataclasses

from specsample.models import config as config_lib
from specsample.models import tensors
from specsample.models import transformer


def own_name(name: str) -> str | None:
  """Returns a tensor's name in `Family.names`, None if it is not read.

  Some folders leave out the `model.` that other names begin with. Old ones hold
  rotary frequencies, which are now computed from the configuration.
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


def _undivided(
  model: transformer.Transformer, file: tensors.TensorFile
) -> tensors.TensorFile:
  del model
  return file


@dataclasses.dataclass(frozen=True)
class Family:
  """The rules for reading a family's configuration and tensors.

  Attributes:
    model: makes the model from a config.json and a dtype.
    names: the tensor of each parameter, as for `tensors.fill`; '*' stands for
      the numbers of the experts, whose tensors are stacked.
    own_name: maps a tensor's name in a file to its name in `names`, or to None
      if it is not read.
    rearranged: given the model, a tensor's name and the tensor, returns the
      tensor, reordered if the library's order is not the family's.
    divided: given the model and the tensors by the names in `names`, returns
      the tensors, with those that hold several parameters divided; see `parts`.
    mtp_prefix: begins the names of a single module for multi-token prediction;
      None if modules are stored as layers after the last one.
  """

  model: Callable[[config_lib.Config, str], transformer.Transformer]
  names: Mapping[str, str]
  own_name: Callable[[str], str | None] = own_name
  rearranged: Callable[
    [transformer.Transformer, str, tensors.Tensor], tensors.Tensor
  ] = _as_stored
  divided: Callable[
    [transformer.Transformer, tensors.TensorFile], tensors.TensorFile
  ] = _undivided
  mtp_prefix: str | None = None
