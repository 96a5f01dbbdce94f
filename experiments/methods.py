"""A decoding method as the gin files put it together."""

from collections.abc import Callable, Sequence
import dataclasses
import functools

import gin
import jax

import specsample
from specsample import request
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
  # Of a drafter whose parameters depend on K: loads it with another.
  load: Callable[[int], specsample.LoadedDrafter] | None = None


@gin.configurable
def trained(
  name: str, target: specsample.Loaded, num_draft_tokens: int | None = None
) -> Method:
  """The method of a trained drafter, as `specsample.load_drafter` finds it."""
  load = functools.partial(specsample.load_drafter, name, target)
  loaded = load(num_draft_tokens)
  return Method(drafter=loaded.drafter, params=loaded.params, load=load)


@gin.configurable
def model(loaded: specsample.Loaded) -> Model:
  """The model of `specsample.load`, for drafters that need it."""
  return loaded.model


@gin.configurable
def params(loaded: specsample.Loaded) -> Params:
  """The parameters of `specsample.load`, for a method with a draft model."""
  return loaded.params


def all_params(target: Params, method: Method) -> Params:
  """The tree that `specsample.generate` takes, given the target's."""
  if method.params is None:
    return {'target': target}
  return {'target': target, 'drafter': method.params}


def check(
  method: Method,
  tokens: Sequence[list[int]],
  *,
  model: Model,
  target: Params,
  sampling: specsample.Sampling,
  max_new_tokens: int,
) -> None:
  """Refuses what `specsample.generate` would, before anything is compiled.

  Args:
    method: how to decode them.
    tokens: the prompts.
    model: the target. target: its parameters.
    sampling: as `specsample.generate` takes it, as is max_new_tokens.

  Raises:
    ValueError: a setting out of range, or a prompt that does not fit.
  """
  prompts, lengths = specsample.pad_prompts(list(tokens))
  request.check(
    params=all_params(target, method),
    prompts=prompts,
    lengths=lengths,
    key=jax.random.key(0),
    request_ids=None,
    model=model,
    drafter=method.drafter,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    max_length=None,
  )


def file_name(component: Drafter | Verifier) -> str:
  """What a drafter or verifier is called: the file it is defined in."""
  return type(component).__module__.rpartition('.')[2]
