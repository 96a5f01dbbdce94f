"""Checks of settings and arguments, shared by several modules."""

from collections.abc import Sequence
import functools
import operator
import reprlib
from typing import Any

import jax
import numpy as np

from specsample import settings
from specsample.drafter import Drafter
from specsample.types import Params


def is_drafter(name: str, value: Any) -> None:
  """Raises ValueError unless an argument of that name is a drafter."""
  if isinstance(value, type):
    raise ValueError(
      f'{name} is the class {value.__name__}: give an instance, such as '
      f'{value.__name__}(...)'
    )
  if not isinstance(value, Drafter):
    raise ValueError(
      f'{name} is {value!r}: give a drafter that derives from '
      'specsample.Drafter, such as drafters.NoDraft()'
    )
  try:
    hash(value)
  except TypeError as error:
    raise ValueError(
      f'{name} is {type(value).__name__}, which is compiled in, but is an '
      f'{error}: make it a frozen dataclass, and keep arrays in params or in '
      'the state'
    ) from error


def count(name: str, value: Any, least: int = 1) -> int:
  """Returns a count as an `int`; raises ValueError if it is below `least`."""
  is_one = settings.is_count(value, least)
  _require(name, value, is_one, f'an integer of at least {least}')
  return operator.index(value)


def share(name: str, value: float) -> None:
  """Raises ValueError unless a setting is a number from 0 to 1."""
  if not 0 <= value <= 1:
    raise ValueError(f'{name} is {value}: give a number from 0 to 1')


def field(owner: Any, name: str, holds: bool, expected: str) -> None:
  """Raises ValueError, naming a field and what to give, unless `holds`."""
  full = f'{type(owner).__name__}.{name}'
  _require(full, vars(owner)[name], holds, expected)


def seed(name: str, value: Any, num_seeds: int = 1) -> None:
  """Raises ValueError unless `num_seeds` seeds from a value on fit in 32 bits.

  JAX makes keys of 32 bits and drops the others without a word: 2**32 would
  draw what 0 draws.
  """
  most = 2**32 - num_seeds
  is_seed = settings.is_count(value, 0) and value <= most
  _require(name, value, is_seed, f'an integer from 0 to {most}')


def _require(name, value, holds, expected):
  if not holds:
    raise ValueError(f'{name} is {value!r}: give {expected}')


def what(value: Any) -> str:
  """Says what was given instead of an object of the right kind."""
  if isinstance(value, type):
    return f'the class {value.__name__}'
  return 'None' if value is None else f'of type {type(value).__name__}'


def has(name: str, value: Any, attributes: Sequence[str], remedy: str) -> None:
  """Raises ValueError unless a value is an object with these attributes."""
  is_object = not isinstance(value, type)
  if not (is_object and all(hasattr(value, x) for x in attributes)):
    raise ValueError(f'{name} is {what(value)}: {remedy}')


def model(value: Any) -> None:
  """Raises ValueError unless a value is a `types.Model`, not its class."""
  has(
    'model',
    value,
    ('vocab_size', 'max_length', 'init_cache', 'apply'),
    'give a model, such as the `model` of what specsample.load returns',
  )


def draft_model(value: Any) -> None:
  """Raises ValueError unless a value is a model that can draft.

  Its cache goes back by as many tokens as were drafted, and is fed several
  times before a commit. A recurrent state can do neither.
  """
  model(value)
  if getattr(value, 'is_recurrent', False):
    raise ValueError(
      'the draft model is recurrent, so its state cannot go back to the token '
      'before a rejected draft: draft with a model without recurrent layers, '
      'or with a drafter that reads the features of the target'
    )


def verifier(value: Any) -> None:
  """Raises ValueError unless a value is a `types.Verifier`, not its class."""
  has(
    'verify',
    value,
    ('positional', 'draft_kinds', '__call__'),
    'give a rule, such as verify.chain or verify.Typical()',
  )


def instance(name: str, value: Any, wanted: type, remedy: str) -> None:
  """Raises ValueError unless a value is an instance of the class `wanted`."""
  if not isinstance(value, wanted):
    raise ValueError(f'{name} is {what(value)}: {remedy}')


def integers(name: str, value: Any, remedy: str) -> Any:
  """Returns an array of integers, on the host unless it is being traced."""
  return numbers(name, value, remedy, 'iu')


def numbers(name: str, value: Any, remedy: str, kinds: str = 'iuf') -> Any:
  """Does the same as `integers` for numbers of the given kinds of dtypes."""
  given = value
  try:
    if not isinstance(value, jax.core.Tracer):
      given = np.asarray(jax.device_get(value))
  except (TypeError, ValueError) as error:  # rows of several lengths, say
    raise ValueError(f'{name} is {reprlib.repr(value)}: {remedy}') from error
  if given.size and given.dtype.kind not in kinds:
    shown = f'of dtype {given.dtype}' if given.ndim else reprlib.repr(value)
    raise ValueError(f'{name} is {shown}: {remedy}')
  return given


def parameters(name: str, owner: Any, params: Params) -> None:
  """Raises ValueError unless parameters have the shapes of their owner's.

  Matrices may be stored in any of the forms of `models.matrices`.

  Args:
    name: what the message calls the parameters.
    owner: a model or a drafter. One without `abstract_params` does not say what
      its parameters are.
    params: a tree of arrays, or of their shapes and dtypes.
  """
  if not hasattr(owner, 'abstract_params'):
    return
  difference = mismatch(owner, params)
  if difference:
    raise ValueError(
      f'{name} are not those of this {type(owner).__name__} ({difference}): '
      'give the parameters that were loaded or made with it, or settings that '
      'fit them'
    )


def mismatch(owner: Any, params: Params) -> str | None:
  """Describes the first parameter that does not fit its owner, if any.

  Args:
    owner, params: as in `parameters`.
  """
  # Names take several times as long, and every prefill comes here.
  if _flat(params) == _flat_of(owner):
    return None
  expected, found = _named(owner.abstract_params()), _named(params)
  for name in sorted(found.keys() | expected.keys()):
    if name not in found:
      return f'parameter {name} of shape {expected[name]} is missing'
    if name not in expected:
      return f'parameter {name} of shape {found[name]} is unknown'
    if found[name] != expected[name]:
      return f'parameter {name} has shape {found[name]}, not {expected[name]}'
  return None


@functools.lru_cache(maxsize=64)
def _flat_of(owner):
  return _flat(owner.abstract_params())


def _flat(params):
  leaves, structure = jax.tree.flatten(params, is_leaf=_has_shape)
  return structure, list(map(np.shape, leaves))


def _named(params):
  """Returns the shape of each parameter by its path in the tree."""
  leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_has_shape)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator='.')
  return {name(path): np.shape(leaf) for path, leaf in leaves}


def _has_shape(leaf):
  return hasattr(leaf, 'shape')
