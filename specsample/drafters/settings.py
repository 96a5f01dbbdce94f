"""Checks of drafters' settings, made when a drafter is constructed."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from specsample import checks


def check_drafter(name: str, value: Any) -> None:
  """Raises ValueError unless a setting is a drafter that can sit out rounds."""
  checks.is_drafter(name, value)
  if not value.can_pause:
    raise ValueError(
      f'{name} is {type(value).__name__}, which cannot sit out a round: '
      'give a drafter whose can_pause is True'
    )


def check_num_draft_tokens(num_draft_tokens: int) -> None:
  """Raises ValueError unless K is an integer of at least 1."""
  if not checks.is_count(num_draft_tokens):
    raise ValueError(
      f'num_draft_tokens is {num_draft_tokens!r}: draft at least 1 token per '
      'round; NoDraft() decodes without drafts'
    )


def check_range(name: str, value: float, least: float, most: float) -> None:
  """Raises ValueError unless a setting is in [least, most]."""
  if not least <= value <= most:
    raise ValueError(
      f'{name} is {value!r}: give a number from {least:g} to {most:g}'
    )


def check_flag(name: str, value: bool) -> None:
  """Raises ValueError unless a setting is True or False."""
  if not isinstance(value, bool):
    raise ValueError(f'{name} is {value!r}: give True or False')


def check_shape(drafter: Any) -> None:
  """Raises ValueError unless a drafter's layers can be made from its `shape`.

  Args:
    drafter: has a `model`, a `layer_config` and a `shape` from one of the two.
  """
  if not hasattr(drafter.shape, 'num_kv_heads'):
    raise ValueError(
      f'{type(drafter).__name__} has layers with the shape of {drafter.shape}, '
      'which is not a Transformer: choose a Transformer as the target, or give '
      'a layer_config'
    )
  if drafter.shape.dim != drafter.model.dim:
    raise ValueError(
      f'layer_config has vectors of {drafter.shape.dim} numbers, but those of '
      f'the target have {drafter.model.dim}: give a layer_config whose vectors '
      "are as wide as the target's"
    )
  if drafter.shape.latent is None and drafter.shape.head_dim % 2:
    raise ValueError(
      f'{type(drafter).__name__} has layers with a head_dim of '
      f'{drafter.shape.head_dim}, but positions rotate pairs of numbers: give '
      'a layer_config with an even head_dim'
    )


def alike(shape: Any) -> Any:
  """Returns the shape with layers of attention that are all alike.

  None of them reads the keys and values of others.

  Args:
    shape: a `models.transformer.Transformer`; anything else is returned as is.
  """
  if not hasattr(shape, 'num_shared'):
    return shape
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
  """Returns the shape with ordinary attention and one feed-forward per layer.

  Its layers are `alike`. Without latent attention its query scale is dropped
  too: queries are scaled for heads of the shape's own `head_dim`.

  Args:
    shape: a `models.transformer.Transformer`; anything else is returned as is.
  """
  if not hasattr(shape, 'num_shared'):
    return shape
  return dataclasses.replace(
    alike(shape),
    latent=None,
    query_scale=shape.query_scale if shape.latent is None else None,
    experts=None,
  )


def check_features(features: Sequence[int], num_layers: int) -> tuple[int, ...]:
  """Returns the features; raises ValueError unless the target has them all.

  Args:
    features: layers whose outputs are read, -1 for the embedding; at least one.
    num_layers: the target's.
  """
  features = tuple(features)
  missing = [i for i in features if i not in range(-1, num_layers)]
  if missing or not features:
    raise ValueError(
      f'feature_layers are {features}, but the target has layers 0 to '
      f'{num_layers - 1}: name some of them, or -1 for its embedding'
    )
  return features


def check_mask(mask_token_id: int, vocab_size: int) -> None:
  """Raises ValueError unless a mask is a token of the vocabulary."""
  is_id = checks.is_count(mask_token_id, least=0)
  if not is_id or mask_token_id >= vocab_size:
    raise ValueError(
      f'mask_token_id is {mask_token_id!r}, but the tokens are 0 to '
      f'{vocab_size - 1}: give the token of the masks that the drafter was '
      'trained with'
    )


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
  """Returns the layers; raises ValueError unless the model has them all."""
  given = layers
  layers = tuple(layers) if isinstance(layers, Sequence) else ()
  if not layers or not all(i in range(num_layers) for i in layers):
    raise ValueError(
      f'layers are {given!r}, but the target has layers 0 to {num_layers - 1}: '
      'name at least one of them'
    )
  return layers
