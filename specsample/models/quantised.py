"""The forms of quantised safetensors, by the settings in config.json."""

from typing import Protocol

from specsample.models import config as config_lib
from specsample.models import fp8
from specsample.models import mxfp4
from specsample.models import safetensors_file
from specsample.models import tensors


class Form(Protocol):
  """How the matrices of a folder are stored."""

  @property
  def kinds(self) -> tuple[str, ...]:
    """The safetensors dtypes of matrices and scales in this form."""

  def describe(self) -> str:
    """Returns a description for `inspect`, empty if nothing is quantised."""

  def compare(self, found: safetensors_file.Tensors) -> tensors.Differences:
    """Returns how the scales differ from those that the matrices need."""

  def dequantised(
    self, found: safetensors_file.Tensors, origin: str, dtype: str
  ) -> tensors.TensorFile:
    """Returns the tensors without the scales, dequantised as they are read.

    Args:
      found: the stored tensors, which `compare` accepts unless only shapes are
        read.
      origin: `TensorFile.origin` of the result.
      dtype: the dtype to which each part is dequantised.
    """


class Exact:
  """The `Form` of a folder that is not quantised."""

  kinds = ()

  def describe(self) -> str:
    return ''

  def compare(self, found: safetensors_file.Tensors) -> tensors.Differences:
    del found
    return tensors.Differences()

  def dequantised(
    self, found: safetensors_file.Tensors, origin: str, dtype: str
  ) -> tensors.TensorFile:
    del dtype
    shapes = {name: tensor.shape for name, tensor in found.items()}
    return tensors.TensorFile(origin, shapes, found.__getitem__)


def form_of(config: config_lib.Config) -> Form:
  """Returns the form that a model's configuration names."""
  part = config.part('quantization_config')
  if not part.values:
    return Exact()
  method = part.get('quant_method')
  if method == 'mxfp4':
    return mxfp4.Mxfp4()
  if method != 'fp8':
    raise fp8.unsupported(part, 'quant_method', "'fp8' or 'mxfp4'")
  return fp8.Fp8(fp8.block_size(part))


def kinds(form: Form) -> tuple[str, ...]:
  """Returns the safetensors dtypes that tensors of a folder may have."""
  return (*safetensors_file.WEIGHT_DTYPES, *form.kinds)
