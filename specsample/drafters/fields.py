"""Types of drafters' fields, and checks of what they name of a target."""

from collections.abc import Sequence
import dataclasses
from typing import Annotated, Any

from specsample import settings
from specsample.models import transformer
from specsample.types import Params

DraftLength = Annotated[
  int,
  settings.rule(
    settings.is_count,
    'at least 1 token per round; NoDraft() decodes without drafts',
  ),
]


def check_shape(drafter: Any) -> None:
  """Raises ValueError unless a drafter's layers can be made.

  Args:
    drafter: has a `model`, a `layer_config` and a `shape` from one of the two.
  """
  name, given = type(drafter).__name__, drafter.layer_config or drafter.model
  if not isinstance(given, transformer.Transformer):
    own = {field.name for field in dataclasses.fields(drafter)}
    remedy = ', or give a layer_config' if 'layer_config' in own else ''
    raise ValueError(
      f'{name} has layers with the shape of {given}, which is not a '
      f'Transformer: choose a Transformer as the target{remedy}'
    )
  if given.dim != drafter.model.dim:
    raise ValueError(
      f'layer_config has vectors of {given.dim} numbers, but those of the '
      f'target have {drafter.model.dim}: give a layer_config whose vectors are '
      "as wide as the target's"
    )
  if drafter.shape.latent is None and drafter.shape.head_dim % 2:
    raise ValueError(
      f'{name} has layers with a head_dim of {drafter.shape.head_dim}, but '
      'positions rotate pairs of numbers: give a layer_config with an even '
      'head_dim'
    )


def own(drafter: Any, params: Params) -> Params:
  """Returns a drafter's own part of the whole tree of parameters."""
  if 'drafter' not in params:
    raise ValueError(
      f'params has the keys {sorted(params)}, but {type(drafter).__name__} '
      "reads params['drafter']: put its parameters there"
    )
  return params['drafter']


def check_dtype(of_target: Any, own: Any) -> None:
  """Raises ValueError unless target and drafter compute in the same dtype."""
  if of_target != own:
    raise ValueError(
      f'the target computes in {of_target}, but the weights of the drafter are '
      f'{own}: load both with the same dtype'
    )


def alike(shape: Any) -> Any:
  """Returns a Transformer's shape with layers of attention that are all alike.

  None of them reads the keys and values of others.
  """
  return dataclasses.replace(
    shape,
    full_head_dim=None,
    full_kv_heads=None,
    values_are_keys=False,
    num_shared=0,
    shared_mlp_dim=None,
    layer_input_dim=0,
    has_layer_scalars=False,
    delta=None,
  )


def plain_shape(shape: Any) -> Any:
  """Returns a shape with ordinary attention and one feed-forward per layer.

  Its layers are `alike`. Without latent attention its query scale is dropped
  too: queries are scaled for heads of the shape's own `head_dim`.
  """
  return dataclasses.replace(
    alike(shape),
    latent=None,
    query_scale=shape.query_scale if shape.latent is None else None,
    experts=None,
  )


def check_mask(mask_token_id: int, vocab_size: int) -> None:
  """Raises ValueError unless a mask is a token of the vocabulary."""
  is_id = settings.is_count(mask_token_id, least=0)
  if not is_id or mask_token_id >= vocab_size:
    raise ValueError(
      f'mask_token_id is {mask_token_id!r}, but the target has tokens 0 to '
      f'{vocab_size - 1}: give one that no text uses, or the one that the '
      'drafter was trained with'
    )


def check_layers(
  name: str, layers: Sequence[int], num_layers: int, first: int = 0
) -> None:
  """Raises ValueError unless the target has these layers, and there are any.

  They are counted from `first`, which is -1 if its embedding counts too.
  """
  is_some = isinstance(layers, Sequence) and len(layers) > 0
  if not is_some or not all(i in range(first, num_layers) for i in layers):
    more = ', or -1 for its embedding' if first < 0 else ''
    raise ValueError(
      f'{name} are {layers!r}, but the target has layers 0 to '
      f'{num_layers - 1}: name at least one of them{more}'
    )
