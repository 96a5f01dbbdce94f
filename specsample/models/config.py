"""Values of a model's configuration, as foreign formats store them."""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

# More layers than any model has. A model is built layer by layer, some 10 ms
# each, so a damaged count would take hours and all memory.
_MOST_LAYERS = 1000


def _is_list(value, kind):
  return isinstance(value, list) and all(type(x) is kind for x in value)


_KINDS: dict[str, Callable[[Any], bool]] = {
  'an integer': lambda x: type(x) is int,
  'a number': lambda x: type(x) in (int, float),
  'true or false': lambda x: type(x) is bool,
  'a string': lambda x: isinstance(x, str),
  'a list of integers': lambda x: _is_list(x, int),
  'a list of strings': lambda x: _is_list(x, str),
  'an object': lambda x: isinstance(x, dict),
  'true, false or a string': lambda x: isinstance(x, bool | str),
}
# What the values of these keys are, besides null, in config.json and in GGUF
# files. A key that is not here cannot be read.
_KEYS = {
  'an integer': """
    attention.head_count attention.head_count_kv attention.key_length
    attention.sliding_window attention.sliding_window_pattern
    backbone_hidden_size block_count block_size centroid_intermediate_top_k
    context_length conv_group_size conv_kernel_size decoder_sparse_step
    draft_vocab_size dspark_block_size dspark_markov_rank dspark_noise_token_id
    embedding_length expert_count expert_intermediate_size feed_forward_length
    first_k_dense_replace full_attention_interval global_head_dim head_dim
    hidden_size hidden_size_per_layer_input intermediate_size kv_lora_rank
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
    linear_num_value_heads linear_value_head_dim markov_rank mask_token_id
    max_position_embeddings max_window_layers moe_intermediate_size
    moe_layer_freq mtp_num_hidden_layers n_group n_routed_experts
    n_shared_experts num_assistant_tokens num_attention_heads num_centroids
    num_experts num_experts_per_tok num_global_key_value_heads num_hidden_layers
    num_key_value_heads num_kv_shared_layers num_local_experts
    num_nextn_predict_layers num_target_layers original_max_position_embeddings
    pard_token ptd_token_id q_lora_rank qk_nope_head_dim qk_rope_head_dim
    rope.dimension_count selector_rank selector_top_k
    shared_expert_intermediate_size sliding_window sliding_window_pattern
    swa_window_size target_hidden_size top_k_experts topk_group ttt_length
    v_head_dim vocab_size vocab_size_per_layer_input
  """,
  'a number': """
    attention.layer_norm_rms_epsilon attention_factor attention_value_scale
    attn_logit_softcapping beta_fast beta_slow factor final_logit_softcapping
    hidden_state_offset high_freq_factor input_embedding_scale logit_scale
    low_freq_factor mscale mscale_all_dim output_multiplier
    partial_rotary_factor query_pre_attn_scalar rms_norm_eps rope.freq_base
    rope.freq_base_swa rope.scale_linear rope.scaling.factor
    rope_local_base_freq rope_theta routed_scaling_factor swiglu_alpha
    swiglu_limit
  """,
  'true or false': """
    add_swa_attention_sink_bias attention_bias attention_k_eq_v
    attention_sink_bias attn_output_gate causal causal_head
    confidence_head_with_markov dflash_query_causal draft_shift
    dspark_bonus_anchor eh_proj_before_attn embed_requires_grad enable_moe_block
    fc_norm is_causal is_neox_style layernorms mlp_bias
    mtp_use_dedicated_embeddings norm_before_fc norm_before_residual norm_output
    norm_topk_prob return_hidden_post_norm rope_interleave rope_is_neox_style
    sample_from_anchor sliding_window_non_causal tie_word_embeddings truncate
    use_aux_hidden_state use_double_wide_mlp use_input_layernorm_in_first_layer
    use_last_layernorm use_mtp_layernorm use_ordered_embeddings
    use_sliding_window use_swa
  """,
  'a string': """
    hidden_act hidden_activation mamba_ssm_dtype markov_head_type model_type
    projector_type quant_method rope.scaling.type rope_type scoring_func
    spd_type speculators_model_type topk_method type
  """,
  'a list of integers': """
    aux_hidden_state_layer_ids aux_hidden_states_layer_ids
    dspark_target_layer_ids eagle_aux_hidden_state_layer_ids layer_ids
    mlp_only_layers target_layer_ids weight_block_size
  """,
  'a list of strings': 'layer_types',
  'an object': """
    dflash_config eagle_config full_attention per_layer_config
    quantization_config rope_parameters rope_scaling sliding_attention
    text_config transformer_layer_config
  """,
  'true, false or a string': 'use_bidirectional_attention',
}
_KIND_OF = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}

# A null at these keys takes the part away whatever the default is.
_NULL_IS_NONE = {
  'attn_logit_softcapping',
  'final_logit_softcapping',
  'sliding_window',
  'q_lora_rank',
  'num_key_value_heads',
}
# A null at these keys means that the default applies.
_NULL_IS_ABSENT = {'head_dim', 'rope_parameters', 'max_position_embeddings'}


def dtype_name(dtype: DTypeLike) -> str:
  """Returns the name of a dtype such as 'bfloat16' or jnp.bfloat16."""
  try:
    name = jnp.dtype(dtype).name
  except (TypeError, ValueError):
    name = None
  if name not in ('float32', 'bfloat16'):
    raise ValueError(f"dtype is {dtype!r}: give 'float32' or 'bfloat16'")
  return name


@dataclasses.dataclass(frozen=True)
class Config:
  """Configuration values by name, checked when they are read.

  Methods raise ValueError if a value is not as expected. A null value counts as
  missing.
  """

  values: Mapping[str, Any]
  origin: str  # the file, for messages

  def get(self, key: str, default: Any = None) -> Any:
    """Returns a value of the key's type, or the default if it is missing."""
    kind, value = _KIND_OF[key], self.values.get(key)
    if value is None:
      return default
    if not _KINDS[kind](value):
      raise self.unexpected(key, kind)
    return value

  def has(self, key: str) -> bool:
    """Returns whether there is a value, null among them."""
    return key in self.values

  def changed(self, values: Mapping[str, Any]) -> 'Config':
    """Returns the configuration with other values at some keys."""
    return Config({**self.values, **values}, self.origin)

  def filled(self, defaults: Mapping[str, Any]) -> 'Config':
    """Returns the configuration with defaults for the keys that are absent."""
    given = {
      key: value
      for key, value in self.values.items()
      if value is not None or key not in _NULL_IS_ABSENT
    }
    for key in defaults.keys() - _NULL_IS_NONE:
      if key in given and given[key] is None:
        raise self.unexpected(key, 'a value, or no such key')
    return Config({**defaults, **given}, self.origin)

  def of_one(self, *keys: str) -> Any:
    """Returns the value of keys that mean the same; see `agreed`."""
    return self.agreed({key: self.get(key) for key in keys})

  def agreed(self, values: Mapping[str, Any]) -> Any:
    """Returns the one of values of the same meaning, None if all are None."""
    given = {key: x for key, x in values.items() if x is not None}
    first = next(iter(given.values()), None)
    if any(x != first for x in given.values()):
      listed = ' and '.join(f'{key} is {x!r}' for key, x in given.items())
      raise ValueError(
        f'{self.origin}: {listed}, which mean the same: remove what is wrong'
      )
    return first

  def size(self, key: str, default: int | None = None) -> int:
    """Returns an integer of at least 1."""
    value = self.get(key, default)
    if value is None or value < 1:
      raise self.unexpected(key, 'an integer of at least 1')
    return value

  def size_of_one(self, *keys: str, default: int | None = None) -> int:
    """Returns an integer of at least 1 at one of keys that mean the same."""
    self.of_one(*keys)
    given = [key for key in keys if self.get(key) is not None]
    return self.size((given or keys)[0], default)

  def layers(self, key: str, most: int = _MOST_LAYERS) -> int:
    """Returns a number of layers, an integer from 1 to `most`."""
    value = self.size(key)
    if value > most:
      raise self.unexpected(key, f'an integer from 1 to {most}')
    return value

  def number(self, key: str, default: float | None = None) -> float:
    """Returns a finite number above 0."""
    value = self.get(key, default)
    if value is None or not 0 < value < math.inf:
      raise self.unexpected(key, 'a number above 0')
    return float(value)

  def optional_size(self, key: str) -> int | None:
    """Returns an integer of at least 1, or None if it is missing."""
    return None if self.get(key) is None else self.size(key)

  def optional_number(self, key: str) -> float | None:
    """Returns a number above 0, or None if it is missing."""
    return None if self.get(key) is None else self.number(key)

  def flag(self, key: str, default: bool = False) -> bool:
    """Returns true or false."""
    return self.get(key, default)

  def checked(self, key: str, default: Any = None) -> Any:
    """Returns a size, a number or a flag, as the key's type says."""
    readers = {'an integer': self.size, 'a number': self.number}
    return readers.get(_KIND_OF[key], self.flag)(key, default)

  def only(self, key: str, supported: Any) -> None:
    """Raises ValueError unless the value is missing or the supported one."""
    value = self.get(key, supported)
    if value != supported:
      raise ValueError(
        f'{self.origin}: {key} is {value!r}, but only {supported!r} is '
        'supported: give a checkpoint with that setting'
      )

  def part(self, key: str) -> 'Config':
    """Returns the object at a key, empty if it is missing."""
    return Config(self.get(key, {}), self.origin)

  def unexpected(self, key: str, expected: str) -> ValueError:
    """Returns the error for a value that is not what was expected."""
    return ValueError(
      f'{self.origin}: {key} is {self.values.get(key)!r}, expected {expected}: '
      'the file is damaged, or is for another architecture'
    )
