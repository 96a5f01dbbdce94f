"""The same weights in `transformers`, for comparison with this library."""

from collections.abc import Callable
import dataclasses
import importlib.util
import sys
from typing import Any

import jax
import numpy as np

import specsample
from specsample.models import int8
from specsample.models import llama as llama_lib
from specsample.models import packed
from specsample.models import tensors

# Fields that `llama` passes on; all others must have their default values.
_BUILT = {
  *('vocab_size', 'num_layers', 'dim', 'num_heads', 'num_kv_heads'),
  *('head_dim', 'mlp_dim', 'max_length', 'rope_theta', 'norm_eps'),
  *('tie_embeddings', 'attention_bias', 'attention_out_bias', 'dtype'),
}


def check(loaded: specsample.Loaded) -> None:
  """Checks that `generator` can build a model that it would compare."""
  if _why_not(loaded) is None:
    _check_fields(loaded.model)


def _why_not(loaded):
  """Returns why a fair comparison is impossible, None if it is possible."""
  if not all(map(importlib.util.find_spec, ('torch', 'transformers'))):
    return 'it or torch is not installed'
  if jax.default_backend() != 'cpu':
    return (
      f'it runs on the CPU here, but this model runs on {jax.default_backend()}'
    )
  if loaded.model.dtype != 'float32':
    return (
      'it computes in float32 here, but this model computes in '
      f'{loaded.model.dtype}'
    )
  if int8.names(loaded.params):
    return 'its weights are float32 here, but those of this model are int8'
  return None


def _check_fields(ours):
  unknown = [
    field.name
    for field in dataclasses.fields(ours)
    if field.name not in _BUILT and getattr(ours, field.name) != field.default
  ]
  if unknown:
    raise ValueError(
      f'{ours} sets {", ".join(unknown)}, which the comparison with '
      'transformers does not support: bind Benchmark.loaded = None'
    )


def generator(
  loaded: specsample.Loaded, prompt: list[int], max_new_tokens: int
) -> Callable[[], Any] | None:
  """Returns a call of transformers' eager greedy `generate`, or None.

  `check` says whether the model can be built. The call decodes exactly
  `max_new_tokens` tokens, in float32, on all cores. If torch or transformers is
  missing, or our model has another dtype or int8 weights, or runs on an
  accelerator, one line on stderr says why the comparison is left out.
  """
  why_not = _why_not(loaded)
  if why_not is not None:
    print(f'transformers is left out: {why_not}', file=sys.stderr)
    return None
  import torch  # noqa: PLC0415
  import transformers  # noqa: PLC0415

  transformers.logging.set_verbosity_error()
  model = llama(loaded)
  tokens = torch.tensor([prompt])

  def generate():
    with torch.inference_mode():
      return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
      ).numpy()

  return generate


def llama(loaded: specsample.Loaded) -> Any:
  """Returns a transformers.LlamaForCausalLM with our parameters."""
  import torch  # noqa: PLC0415
  import transformers  # noqa: PLC0415

  ours = loaded.model
  _check_fields(ours)
  config = transformers.LlamaConfig(
    vocab_size=ours.vocab_size,
    hidden_size=ours.dim,
    intermediate_size=ours.mlp_dim,
    num_hidden_layers=ours.num_layers,
    num_attention_heads=ours.num_heads,
    num_key_value_heads=ours.num_kv_heads,
    head_dim=ours.head_dim,
    max_position_embeddings=ours.max_length,
    rms_norm_eps=ours.norm_eps,
    rope_theta=ours.rope_theta,
    rope_parameters={'rope_type': 'default', 'rope_theta': ours.rope_theta},
    tie_word_embeddings=ours.tie_embeddings,
    attention_bias=ours.attention_bias,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
  )
  model = transformers.LlamaForCausalLM(config).eval()
  # As a file of this family has them.
  params = packed.plain(loaded.params)
  state = {
    tensors.source_name(name, llama_lib.NAMES): torch.tensor(
      np.asarray(leaf, np.float32).T
    )
    for name, leaf in tensors.by_name(params).items()
  }
  model.load_state_dict(state, strict=not ours.tie_embeddings)
  return model
