"""Small checkpoints under the names of published ones.

They have the same file names, tensor names and settings as the published
checkpoints, except for their sizes and random weights. They lie in the layout
of the Hugging Face cache, so that a configuration finds them unchanged.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy
import safetensors.torch
import tokenizers
import torch
import transformers

from tests.loading.published import by_hand
from tests.models import fp8_by_hand

_DIM, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP = 64, 16, 8, 8, 96
_QWEN_LAYERS = 5
# As published: bytes, the special tokens of chats, and a few unused tokens.
_VOCAB, _DRAFTED, _MASK = 272, 96, 260
_SPECIAL = ('<|begin|>', '<|start|>', '<|end|>')
_BEGIN, _END = 256, 258
_TEMPLATE = (
  "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>"
  '{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n'
  '{% if enable_thinking is defined and not enable_thinking %}\n{% endif %}'
  '{% endif %}'
)
_SIZES = {
  'vocab_size': _VOCAB,
  'hidden_size': _DIM,
  'intermediate_size': _MLP,
  'num_attention_heads': _HEADS,
  'max_position_embeddings': 16384,
  'bos_token_id': _BEGIN,
  'eos_token_id': _END,
  # Large enough that neither drafts nor the target are uniform distributions.
  'initializer_range': 0.3,
}
_LLAMA = {
  'num_key_value_heads': _KV_HEADS,
  'head_dim': _HEAD_DIM,
  'rope_parameters': {
    'rope_type': 'llama3',
    'rope_theta': 500_000.0,
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
  },
}


def write(hub: pathlib.Path) -> None:
  """Writes every model that the configurations of `configs/full` name."""
  torch.manual_seed(0)
  # Each model has enough layers for the features that its drafter reads.
  for name, layers in (
    ('Llama-3.1-70B', 2),
    ('Llama-3.1-8B', 6),
    ('Llama-3.2-1B', 1),
  ):
    _causal_lm(
      _repository(hub, f'meta-llama/{name}-Instruct'),
      transformers.LlamaForCausalLM,
      transformers.LlamaConfig(
        **_SIZES,
        **_LLAMA,
        num_hidden_layers=layers,
        tie_word_embeddings=name == 'Llama-3.2-1B',
      ),
    )
  _write_drafter(
    _repository(hub, 'yuhuili/EAGLE3-LLaMA3.1-Instruct-8B'),
    'pytorch_model.bin',
    _eagle3(_DRAFTED),
    _drafter_config('llama', 1) | {'draft_vocab_size': _DRAFTED},
  )
  _write_vicuna(hub)
  _write_qwen(hub)
  _write_qwen3_5(hub)
  _write_deepseek(hub)


def _write_vicuna(hub):
  for name, layers in (('lmsys/vicuna-7b-v1.3', 2), ('double7/vicuna-68m', 1)):
    _causal_lm(
      _repository(hub, name),
      transformers.LlamaForCausalLM,
      transformers.LlamaConfig(**_SIZES, num_hidden_layers=layers),
    )
  config = {'base_model_name_or_path': 'lmsys/vicuna-7b-v1.3'}
  _write_drafter(
    _repository(hub, 'FasterDecoding/medusa-vicuna-7b-v1.3'),
    'medusa_lm_head.pt',
    _medusa(5),
    config | {'medusa_num_heads': 2, 'medusa_num_layers': 1},
  )
  _write_drafter(
    _repository(hub, 'ankner/hydra-vicuna-7b-v1.3'),
    'hydra_lm_head.pt',
    _hydra(4, num_layers=4),
    config | {'hydra_num_heads': 4, 'hydra_num_layers': 4},
  )
  _write_drafter(
    _repository(hub, 'yuhuili/EAGLE-Vicuna-7B-v1.3'),
    'pytorch_model.bin',
    _layer('layers.0.', _DIM, _HEADS, _DIM // _HEADS, with_input_norm=False)
    | _matrices({'fc.weight': (_DIM, 2 * _DIM), 'fc.bias': (_DIM,)})
    | _embedding(hub, 'lmsys/vicuna-7b-v1.3'),
    _drafter_config('llama', 1)
    | {'num_key_value_heads': _HEADS, 'head_dim': _DIM // _HEADS, 'bias': True},
  )


def _write_qwen(hub):
  for size, layers in (('8B', _QWEN_LAYERS), ('4B', _QWEN_LAYERS)):
    _causal_lm(
      _repository(hub, f'Qwen/Qwen3-{size}'),
      transformers.Qwen3ForCausalLM,
      transformers.Qwen3Config(
        **_SIZES,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        num_hidden_layers=layers,
        tie_word_embeddings=size != '8B',
      ),
    )
  _causal_lm(
    _repository(hub, 'Qwen/Qwen3-Coder-30B-A3B-Instruct'),
    transformers.Qwen3MoeForCausalLM,
    transformers.Qwen3MoeConfig(
      **_SIZES,
      num_key_value_heads=_KV_HEADS,
      head_dim=_HEAD_DIM,
      num_hidden_layers=_QWEN_LAYERS,
      moe_intermediate_size=16,
      num_experts=8,
      num_experts_per_tok=2,
      norm_topk_prob=True,
    ),
  )
  of_block = _drafter_config('qwen3', 2) | {
    'layer_types': ['full_attention'] * 2,
    'num_target_layers': _QWEN_LAYERS,
  }
  layers = [1, 3]
  nested = {'mask_token_id': _MASK, 'target_layer_ids': layers}
  for name, settings in {
    'z-lab/Qwen3-8B-DFlash-b16': {},
    'z-lab/Qwen3-4B-DFlash-b16': {},
    'z-lab/Qwen3-Coder-30B-A3B-DFlash': {},
    'JetSpec/jetspec-qwen3-8b': {'causal_head': True},
  }.items():
    _write_drafter(
      _repository(hub, name),
      'model.safetensors',
      _dflash(len(layers)),
      of_block
      | {
        'architectures': ['DFlashDraftModel'],
        'block_size': 16,
        'dflash_config': nested | settings,
      },
    )
  own = nested | {'block_size': 7}
  rank = 4
  embedding = _embedding(hub, 'Qwen/Qwen3-8B')
  head = _matrices({'lm_head.weight': (_VOCAB, _DIM)})
  deepspec = {
    'eagle3_qwen3_8b_ttt7': (
      _eagle3(_VOCAB, 'layers.0.', qk_norm=True) | embedding,
      _drafter_config('qwen3', 1)
      | {'target_layer_ids': [1, 2, 3], 'ttt_length': 7},
    ),
    'dflash_qwen3_8b_block7': (
      _dflash(len(layers)) | embedding | head,
      of_block | own | {'architectures': ['Qwen3DFlashModel']},
    ),
    'dspark_qwen3_8b_block7': (
      _dflash(len(layers))
      | embedding
      | head
      | _matrices(
        {
          'markov_head.markov_w1.weight': (_VOCAB, rank),
          'markov_head.markov_w2.weight': (_VOCAB, rank),
          'confidence_head.proj.weight': (1, _DIM + rank),
          'confidence_head.proj.bias': (1,),
        }
      ),
      of_block
      | own
      | {
        'architectures': ['Qwen3DSparkModel'],
        'enable_confidence_head': True,
        'confidence_head_with_markov': True,
        'markov_rank': rank,
        'markov_head_type': 'vanilla',
      },
    ),
  }
  for name, (tensors, config) in deepspec.items():
    folder = _repository(hub, f'deepseek-ai/{name}')
    _write_drafter(folder, 'model.safetensors', tensors, config)


def _write_qwen3_5(hub):
  """Writes targets with linear attention, and drafters with windows."""
  text = transformers.Qwen3_5TextConfig(
    **_SIZES,
    num_key_value_heads=_KV_HEADS,
    head_dim=_HEAD_DIM,
    num_hidden_layers=8,
    linear_num_key_heads=_KV_HEADS // 2,
    linear_num_value_heads=_KV_HEADS,
    linear_key_head_dim=_HEAD_DIM,
    linear_value_head_dim=_HEAD_DIM,
  )
  images = {
    'depth': 1,
    'hidden_size': 16,
    'intermediate_size': 16,
    'num_heads': 2,
    'num_position_embeddings': 16,
    'out_hidden_size': _DIM,
  }
  for name, is_tied in (('Qwen3.5-4B', True), ('Qwen3.8-27B', False)):
    _causal_lm(
      _repository(hub, f'Qwen/{name}'),
      transformers.Qwen3_5ForConditionalGeneration,
      transformers.Qwen3_5Config(
        text_config=text.to_dict() | {'tie_word_embeddings': is_tied},
        vision_config=images,
        tie_word_embeddings=is_tied,
      ),
    )
  layers = [1, 3]
  with_windows = _drafter_config('qwen3', 2) | {
    'is_causal': False,
    'layer_types': ['sliding_attention'] * 2,
    'sliding_window': 16,
    'use_sliding_window': True,
  }
  of_block = {'mask_token_id': _MASK, 'target_layer_ids': layers}
  for name, kind, tensors, settings in (
    ('z-lab/Qwen3.5-4B-DFlash', 'DFlash', _dflash(2), {'block_size': 16}),
    (
      'incoai/Qwen3.8-27B-DFlash2',
      'DFlash2',
      _dflash(2) | _selector(rank=4, group=16),
      {'block_size': 8, 'selector_rank': 4},
    ),
  ):
    _write_drafter(
      _repository(hub, name),
      'model.safetensors',
      tensors,
      with_windows
      | {
        'architectures': [f'{kind}DraftModel'],
        'dflash_config': of_block | settings,
      },
    )


def _write_deepseek(hub):
  """Writes DeepSeek-V3 in 8 bits, with its MTP module after the last layer."""
  layers = 2
  config = transformers.DeepseekV3Config(
    **_SIZES,
    # transformers doesn't read MTP modules, so an extra layer becomes one.
    num_hidden_layers=layers + 1,
    num_key_value_heads=_HEADS,
    moe_intermediate_size=16,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=16,
    n_group=8,
    topk_group=4,
    num_experts_per_tok=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    rope_parameters={
      'rope_type': 'yarn',
      'rope_theta': 10_000.0,
      'factor': 40.0,
      'original_max_position_embeddings': 4096,
      'beta_fast': 32.0,
      'beta_slow': 1.0,
      'mscale': 1.0,
      'mscale_all_dim': 1.0,
    },
  )
  folder = _repository(hub, 'deepseek-ai/DeepSeek-V3')
  wide = hub / 'deepseek'
  wide.mkdir()
  _causal_lm(wide, transformers.DeepseekV3ForCausalLM, config)
  path, prefix = wide / 'model.safetensors', f'model.layers.{layers}.'
  tensors = safetensors.numpy.load_file(path)
  tensors |= {
    prefix + name: tensor
    for name, tensor in _matrices(
      {
        'enorm.weight': (_DIM,),
        'hnorm.weight': (_DIM,),
        'eh_proj.weight': (_DIM, 2 * _DIM),
        'shared_head.norm.weight': (_DIM,),
      }
    ).items()
  }
  tensors[f'{prefix}embed_tokens.weight'] = tensors['model.embed_tokens.weight']
  tensors[f'{prefix}shared_head.head.weight'] = tensors['lm_head.weight']
  safetensors.numpy.save_file(tensors, path)
  _change(wide, {'num_hidden_layers': layers, 'num_nextn_predict_layers': 1})
  folder.rmdir()
  fp8_by_hand.write(wide, folder, (16, 16), plain=hub / 'plain')
  _tokenizer(folder)


def _repository(hub, name):
  """Makes an empty folder where the hub's package looks for a repository."""
  cached = hub / f'models--{name.replace("/", "--")}'
  commit = '0' * 40
  (cached / 'refs').mkdir(parents=True)
  (cached / 'refs' / 'main').write_text(commit)
  folder = cached / 'snapshots' / commit
  folder.mkdir(parents=True)
  return folder


def _causal_lm(folder, kind, config):
  kind(config).to(torch.bfloat16).save_pretrained(folder)
  _tokenizer(folder)


def _tokenizer(folder):
  """Writes a byte tokenizer with an optional-thinking template, as Qwen's."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  model = tokenizers.models.BPE(
    {text: i for i, text in enumerate(alphabet)}, []
  )
  of_bytes = tokenizers.Tokenizer(model)
  of_bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  of_bytes.decoder = tokenizers.decoders.ByteLevel()
  of_bytes.add_special_tokens(list(_SPECIAL))
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=of_bytes,
    bos_token=_SPECIAL[0],
    eos_token=_SPECIAL[-1],
    chat_template=_TEMPLATE,
  ).save_pretrained(folder)


def _write_drafter(folder, name, tensors, config):
  (folder / 'config.json').write_text(json.dumps(config))
  if name.endswith('.safetensors'):
    safetensors.numpy.save_file(tensors, folder / name)
    return
  torch.save(
    {key: torch.from_numpy(x) for key, x in tensors.items()}, folder / name
  )


def _change(folder, settings):
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def _drafter_config(model_type, num_layers):
  return {
    'architectures': [f'{model_type.capitalize()}ForCausalLM'],
    'model_type': model_type,
    'hidden_act': 'silu',
    'hidden_size': _DIM,
    'intermediate_size': _MLP,
    'num_attention_heads': _HEADS,
    'num_key_value_heads': _KV_HEADS,
    'head_dim': _HEAD_DIM,
    'num_hidden_layers': num_layers,
    'max_position_embeddings': 2048,
    'rms_norm_eps': 1e-6,
    'rope_theta': 1e6,
    'vocab_size': _VOCAB,
  }


def _matrices(shapes):
  """Draws matrices; norm scales are vectors around 1."""
  rng = np.random.default_rng(len(shapes))
  return {
    name: by_hand.normal(rng, *shape) + np.float32('norm' in name)
    for name, shape in shapes.items()
  }


def _layer(
  name, in_dim, kv_heads, head_dim, *, qk_norm=False, with_input_norm=True
):
  shapes = {
    'self_attn.q_proj': (_HEADS * head_dim, in_dim),
    'self_attn.k_proj': (kv_heads * head_dim, in_dim),
    'self_attn.v_proj': (kv_heads * head_dim, in_dim),
    'self_attn.o_proj': (_DIM, _HEADS * head_dim),
    'mlp.gate_proj': (_MLP, _DIM),
    'mlp.up_proj': (_MLP, _DIM),
    'mlp.down_proj': (_DIM, _MLP),
    'post_attention_layernorm': (_DIM,),
  }
  if with_input_norm:
    shapes['input_layernorm'] = (_DIM,)
  if qk_norm:
    shapes |= {f'self_attn.{part}_norm': (head_dim,) for part in 'qk'}
  return _matrices(
    {f'{name}{part}.weight': shape for part, shape in shapes.items()}
  )


def _embedding(hub, name):
  """Returns the target's embedding, which the drafter's file also holds."""
  (path,) = hub.glob(
    f'models--{name.replace("/", "--")}/snapshots/*/*.safetensors'
  )
  tensors = safetensors.torch.load_file(path)
  found = tensors['model.embed_tokens.weight'].float().numpy()
  return {'embed_tokens.weight': found}


def _medusa(num_heads):
  shapes = {}
  for i in range(num_heads):
    shapes |= {
      f'{i}.0.linear.weight': (_DIM, _DIM),
      f'{i}.0.linear.bias': (_DIM,),
      f'{i}.1.weight': (_VOCAB, _DIM),
    }
  return _matrices(shapes)


def _hydra(num_heads, num_layers):
  """Returns Hydra++: a layer of the target's kind before the heads."""
  shapes = {}
  for i in range(num_heads):
    head = f'hydra_mlp.{i}'
    for part in ('linear', 'res_connection'):
      shapes[f'{head}.1.{part}.weight'] = (_DIM, (i + 2) * _DIM)
      shapes[f'{head}.1.{part}.bias'] = (_DIM,)
    for j in range(1, num_layers):
      shapes[f'{head}.{1 + 2 * j}.linear.weight'] = (_DIM, _DIM)
      shapes[f'{head}.{1 + 2 * j}.linear.bias'] = (_DIM,)
    shapes[f'hydra_lm_head.{i}.1.weight'] = (_VOCAB, _DIM)
    shapes[f'hydra_lm_head.{i}.1.bias'] = (_VOCAB,)
  prefix = 'prefix_embeding_layer'
  shapes[f'{prefix}.norm.weight'] = (_DIM,)
  shapes[f'{prefix}.embed_tokens.weight'] = (_VOCAB, _DIM)
  head_dim = _DIM // _HEADS
  return _matrices(shapes) | _layer(
    f'{prefix}.layers.0.', _DIM, _HEADS, head_dim
  )


def _eagle3(drafted, name='midlayer.', *, qk_norm=False):
  tensors = _layer(name, 2 * _DIM, _KV_HEADS, _HEAD_DIM, qk_norm=qk_norm)
  tensors |= _matrices(
    {
      f'{name}hidden_norm.weight': (_DIM,),
      'norm.weight': (_DIM,),
      'fc.weight': (_DIM, 3 * _DIM),
      'lm_head.weight': (drafted, _DIM),
    }
  )
  if drafted < _VOCAB:
    ids = np.arange(drafted) + 32  # the bytes of letters
    tensors['d2t'] = ids - np.arange(drafted)
    tensors['t2d'] = np.isin(np.arange(_VOCAB), ids)
  return tensors


def _dflash(num_features):
  tensors = {}
  for i in range(2):
    tensors |= _layer(f'layers.{i}.', _DIM, _KV_HEADS, _HEAD_DIM, qk_norm=True)
  return tensors | _matrices(
    {
      'fc.weight': (_DIM, num_features * _DIM),
      'hidden_norm.weight': (_DIM,),
      'norm.weight': (_DIM,),
    }
  )


def _selector(rank, group, taps=2):
  """Returns what DFlash 2 has besides the tensors of DFlash."""
  of_convs = {}
  for i in range(2):
    for conv in ('attention_conv', 'mlp_conv'):
      of_convs |= {
        f'layers.{i}.{conv}.base_kernel': (2, taps, _DIM),
        f'layers.{i}.{conv}.kernel_projection.weight': (
          2 * taps * _DIM // group,
          _DIM,
        ),
      }
  return _matrices(
    of_convs
    | {
      'candidate_selector.hidden_projection.weight': (rank, _DIM),
      'candidate_selector.predecessor_codebook': (_VOCAB, rank),
      'candidate_selector.successor_codebook': (_VOCAB, rank),
    }
  )
