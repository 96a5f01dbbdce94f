"""A decoding method as the gin files put it together."""

import dataclasses

import gin

import specsample
from specsample.types import Drafter, Model, Params, Verifier

# The method that every speedup is measured against.
BASELINE = 'autoregressive'

# So that a binding can name them: --gin_bindings='Method.verify = @Block()'.
for _verify in (
  specsample.verify.block,
  specsample.verify.chain,
  specsample.verify.coupled,
):
  gin.external_configurable(type(_verify), module='specsample.verify')


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False)
class Method:
  """A drafter, the rule that verifies its drafts, and its own parameters."""

  drafter: Drafter
  verify: Verifier = specsample.verify.chain
  params: Params = None  # None for a drafter without parameters of its own


@gin.configurable
def model(loaded: specsample.Loaded) -> Model:
  """The model of `specsample.load`, for drafters that need it."""
  return loaded.model


@gin.configurable
def params(loaded: specsample.Loaded) -> Params:
  """The parameters of `specsample.load`, for a method with a draft model."""
  return loaded.params


def all_params(target: specsample.Loaded, method: Method) -> Params:
  """The tree that `specsample.generate` takes."""
  if method.params is None:
    return {'target': target.params}
  return {'target': target.params, 'drafter': method.params}


def file_name(component: Drafter | Verifier) -> str:
  """What a drafter or verifier is called: the file it is defined in."""
  return type(component).__module__.rpartition('.')[2]
