"""Mixtral: Mistral with experts (Jiang et al., 2401.04088)."""

from specsample.models import config as config_lib
from specsample.models import experts
from specsample.models import family
from specsample.models import llama
from specsample.models import transformer

_MOE = 'model.layers.{}.block_sparse_moe.'
_NAMES = llama.NAMES | {
  'layers.{}.mlp.router.kernel': _MOE + 'gate.weight',
  'layers.{}.mlp.expert_gate.kernel': _MOE + 'experts.*.w1.weight',
  'layers.{}.mlp.expert_up.kernel': _MOE + 'experts.*.w3.weight',
  'layers.{}.mlp.expert_down.kernel': _MOE + 'experts.*.w2.weight',
}


def _mixtral(config: config_lib.Config, dtype: str) -> transformer.Transformer:
  config.only('hidden_act', 'silu')
  fields = llama.shape(config, dtype) | llama.rope(config, 1_000_000.0)
  return transformer.Transformer(
    **fields,
    sliding_window=llama.window(config),
    experts=experts.Experts(
      num_experts=config.size_of_one(
        *('num_local_experts', 'num_experts'), default=8
      ),
      num_per_token=config.size('num_experts_per_tok'),
      mlp_dim=fields['mlp_dim'],
    ),
  )


_DEFAULTS = {
  'num_key_value_heads': 8,
  'max_position_embeddings': 131_072,
  'rms_norm_eps': 1e-5,
  'num_experts_per_tok': 2,
}
MIXTRAL = family.Family(_mixtral, _NAMES, defaults=_DEFAULTS)
