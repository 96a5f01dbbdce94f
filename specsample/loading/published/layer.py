"""A drafter's layers, in the names and settings of Hugging Face."""

import dataclasses
from typing import Any

from specsample.loading import load
from specsample.loading.published import source as source_lib
from specsample.models import config as config_lib
from specsample.models import llama
from specsample.models import transformer

# Computed from the configuration, but stored by old checkpoints.
FREQUENCIES = 'self_attn.rotary_emb.inv_freq'


def names(ours: str, theirs: str) -> dict[str, str]:
  """Maps a layer's parameter names to tensor names, given both prefixes."""
  return {
    ours + name.removeprefix('layers.{}.'): theirs
    + tensor.removeprefix('model.layers.{}.')
    for name, tensor in llama.NAMES.items()
    if name.startswith('layers.')
  }


def config_of(
  source: source_lib.Source,
  config: config_lib.Config,
  target: load.Loaded,
  layer: str,
) -> transformer.Transformer:
  """Returns a model whose layers are like the drafter's.

  The tensors tell which products have a bias, and whether queries and keys have
  norms, because a drafter's configuration is often a copy of the target's.

  Args:
    source: holds the drafter's tensors.
    config: the configuration of its layers, as transformers writes it.
    target: the model whose hidden states they read.
    layer: the prefix of the first layer's tensor names.

  Raises:
    ValueError: the drafter is of another architecture, or damaged.
  """
  config.only('hidden_act', 'silu')
  config.only('quantization_config', None)
  kinds = config.get('layer_types', [])
  if not isinstance(kinds, list) or any(x != 'full_attention' for x in kinds):
    raise ValueError(
      f'{config.origin}: layer_types is {kinds}, but only layers that see all '
      "tokens, 'full_attention', are supported"
    )
  # Defaults for settings that drafters leave out, or copy from a target.
  given: dict[str, Any] = {
    'vocab_size': target.model.vocab_size,
    'num_hidden_layers': 1,
    'max_position_embeddings': target.model.max_length,
  }
  values = given | {x: y for x, y in config.values.items() if y is not None}
  config = dataclasses.replace(config, values=values)
  has = lambda name: f'{layer}self_attn.{name}' in source.tensors
  return transformer.Transformer(
    **llama.shape(config, target.model.dtype),
    **llama.rope(config),
    attention_bias=has('q_proj.bias'),
    attention_out_bias=has('o_proj.bias'),
    qk_norm=has('q_norm.weight'),
  )
