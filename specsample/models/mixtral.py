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
  fields = llama.shape(config, dtype) | llama.rope(config)
  return transformer.Transformer(
    **fields,
    sliding_window=(
      config.size('sliding_window') if config.get('sliding_window') else None
    ),
    experts=experts.Experts(
      num_experts=config.size('num_local_experts', 8),
      num_per_token=config.size('num_experts_per_tok', 2),
      mlp_dim=fields['mlp_dim'],
    ),
  )


MIXTRAL = family.Family(_mixtral, _NAMES)
