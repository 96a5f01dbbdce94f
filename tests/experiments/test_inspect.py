"""Reports of `inspect` on whole and on broken checkpoints."""

import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import transformers

from experiments.inspection import inspection
from experiments.inspection import memory
import specsample
from specsample import testing
from specsample.models import checkpoint
from tests.loading.published import test_assistant
from tests.loading.published import test_dflash
from tests.loading.published import test_dflash2
from tests.loading.published import test_eagle
from tests.loading.published import test_heads
from tests.loading.published import test_p_eagle
from tests.models import fp8_by_hand

_SIZES = {
  'vocab_size': 96,
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 48,
  'max_position_embeddings': 64,
}
_EXPERTS = {'num_experts_per_tok': 2, 'moe_intermediate_size': 20}
_LATENT = _EXPERTS | {
  'q_lora_rank': 20,
  'kv_lora_rank': 16,
  'qk_rope_head_dim': 8,
  'qk_nope_head_dim': 10,
  'v_head_dim': 6,
  'n_routed_experts': 8,
  'n_group': 4,
  'topk_group': 2,
  'first_k_dense_replace': 1,
  'num_key_value_heads': 4,
  'num_nextn_predict_layers': 0,
}
# A family's own settings, its file, and facts that only its models have.
_FAMILIES = {
  'llama': ({}, 'llama', {'heads': '4 of 8, 2 of keys and values'}),
  'mistral': (
    {'sliding_window': 7},
    'llama',
    {'window': '7 tokens in 2 layers'},
  ),
  'mixtral': (
    {'num_local_experts': 4, 'num_experts_per_tok': 2},
    'mixtral',
    {'experts': '4 of 48, 2 per token, in 2 layers'},
  ),
  'qwen2': ({}, 'qwen', {'vocabulary': '96'}),
  'qwen3': (
    {'head_dim': 12, 'tie_word_embeddings': True},
    'qwen',
    {'vocabulary': '96, the embedding is the unembedding'},
  ),
  'qwen3_moe': (
    _EXPERTS | {'num_experts': 6, 'mlp_only_layers': [1]},
    'qwen',
    {'experts': '6 of 20, 2 per token, in 1 layers'},
  ),
  'qwen3_5_text': (
    {
      'head_dim': 16,
      'layer_types': ['linear_attention', 'full_attention'],
      'linear_key_head_dim': 8,
      'linear_value_head_dim': 6,
      'linear_num_key_heads': 2,
      'linear_num_value_heads': 4,
    },
    'qwen3_5',
    {'recurrent': '1 layers with 4 states of 8 x 6, without keys and values'},
  ),
  'gemma2': (
    {'head_dim': 12, 'sliding_window': 7},
    'gemma',
    {'window': '7 tokens in 1 layers'},
  ),
  'gemma3_text': (
    {'head_dim': 12, 'sliding_window': 7},
    'gemma',
    {'window': '7 tokens in 2 layers'},
  ),
  'gemma4_text': (
    {
      'num_hidden_layers': 4,
      'layer_types': ['sliding_attention', 'full_attention'] * 2,
      'head_dim': 12,
      'global_head_dim': 16,
      'num_kv_shared_layers': 2,
      'use_double_wide_mlp': True,
      'hidden_size_per_layer_input': 6,
      'vocab_size_per_layer_input': 96,
      'sliding_window': 7,
    },
    'gemma',
    {
      'heads': '4 of 12, 2 of keys and values; without a window 4 of 16, 2 of '
      'keys and values',
      'shared': 'the last 2 layers read the keys and values of earlier layers',
      'feed-forward': '48, 96 in the last 2 layers',
      'inputs': '6 numbers per token for each layer',
    },
  ),
  'gpt_oss': (
    {'num_local_experts': 4, 'head_dim': 8, 'sliding_window': 7},
    'gpt_oss',
    {
      'heads': '4 of 8, 2 of keys and values, with sinks',
      'window': '7 tokens in 1 layers',
      'experts': '4 of 48, 4 per token, in 2 layers',
    },
  ),
  'deepseek_v3': (
    _LATENT,
    'deepseek',
    {'heads': '4 of 10 + 8 over latent vectors of 16 + 8'},
  ),
}


def _save(folder, kind='llama', **options):
  settings, _, _ = _FAMILIES[kind]
  config = transformers.AutoConfig.for_model(kind, **_SIZES | settings)
  model = transformers.AutoModelForCausalLM.from_config(config)
  model.save_pretrained(folder, **options)
  return model


def _change(path, **changes):
  content = json.loads(path.read_text()) | changes
  path.write_text(json.dumps(content))


def _problems(path, target=None):
  """Returns the problems' texts, and everything that they are about."""
  report = inspection.inspect(str(path), target and str(target))
  texts = [problem.text for problem in report.problems]
  return texts, [x for problem in report.problems for x in problem.about]


@pytest.mark.parametrize('kind', _FAMILIES)
def test_families_are_told_with_their_sizes(tmp_path, kind):
  reference = _save(tmp_path, kind)
  report = inspection.inspect(str(tmp_path))
  assert report.problems == ()
  facts = dict(report.facts)
  _, file, own = _FAMILIES[kind]
  assert facts['family'] == f'{kind}, specsample/models/{file}.py'
  assert facts | own == facts
  count = sum(x.numel() for x in reference.parameters())
  # Buffers: biases of a router, and scalars of layers.
  count += {'deepseek_v3': 8, 'gemma4_text': 4}.get(kind, 0)
  assert facts['parameters'] == f'{count:,}'
  assert facts['stored'].startswith(f'{count:,} numbers in ')
  assert facts['bytes'] == f'F32 {4 * count / 1000:.4g} kB'
  assert facts['weights as'].startswith(f'float32 {4 * count / 1000:.4g} kB')


def test_the_part_for_images_is_named(tmp_path):
  _save(tmp_path, 'gemma3_text')
  path = tmp_path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  named = {f'language_model.{key}': x for key, x in tensors.items()}
  named['vision_tower.patch.weight'] = np.zeros(4, np.float32)
  safetensors.numpy.save_file(named, path)
  config = json.loads((tmp_path / 'config.json').read_text())
  content = {'model_type': 'gemma3', 'text_config': config}
  (tmp_path / 'config.json').write_text(json.dumps(content))
  report = inspection.inspect(str(tmp_path))
  assert report.problems == ()
  not_read = dict(report.facts)['not read']
  assert not_read == '1 tensors (vision_tower.patch.weight)'


def test_gguf_is_told_with_its_types():
  report = inspection.inspect('smollm2-135m-instruct')
  assert report.problems == ()
  facts = dict(report.facts)
  assert facts['architecture'] == 'llama'
  assert facts['parameters'] == '134,515,008'
  assert facts['bytes'].startswith('Q4_1 66.36 MB, Q8_0 30.08 MB, F32')
  # 2 bytes each; int8 has scales of 4 bytes.
  assert 'bfloat16 269 MB, int8 135' in facts['weights as']
  # Keys and values of 3 heads of 64 numbers in 30 layers.
  assert facts['cache'] == '94.37 MB for 4,096 tokens, bfloat16'
  assert facts['devices'].startswith('bfloat16 1 of v4, v5e, v5p, v6e, tpu7x')


@pytest.mark.parametrize(
  ('num_bytes', 'v5e', 'h200'),
  # Nine tenths of 16 * 2**30 and of 141 * 10**9 bytes.
  [(15_400_000_000, 1, 1), (15_500_000_000, 2, 1), (127 * 10**9, 16, 2)],
)
def test_devices_hold_nine_tenths_of_their_memory(num_bytes, v5e, h200):
  found = memory.num_devices(num_bytes)
  assert (found['v5e'], found['H200']) == (v5e, h200)


def test_models_of_the_library_are_told(tmp_path):
  model = testing.tiny_llama()
  params = model.init(jax.random.key(0))
  checkpoint.save(tmp_path / 'whole', model, params)
  report = inspection.inspect(str(tmp_path / 'whole'))
  assert report.problems == ()
  count = sum(x.size for x in jax.tree.leaves(params))
  facts = dict(report.facts)
  assert facts['parameters'] == f'{count:,}'
  assert facts['bytes'] == f'float32 {4 * count / 1000:.4g} kB'

  _change(tmp_path / 'whole' / 'specsample.json', num_layers=1, mlp_dim=40)
  texts, names = _problems(tmp_path / 'whole')
  assert texts == [
    '9 tensors unknown',
    '3 tensors of another shape than the configuration says',
  ]
  assert 'layers.1.mlp.up.kernel' in names
  _change(tmp_path / 'whole' / 'params' / '_METADATA', tree_metadata=5)
  texts, _ = _problems(tmp_path / 'whole')
  assert 'the parameters: its metadata is damaged' in texts[0]
  with pytest.raises(ValueError, match='its metadata is damaged'):
    specsample.load(tmp_path / 'whole')
  shutil.rmtree(tmp_path / 'whole' / 'params')
  assert _problems(tmp_path / 'whole')[0] == ['12 tensors missing']
  _change(tmp_path / 'whole' / 'specsample.json', max_length=[1])
  assert 'specsample.json: ' in _problems(tmp_path / 'whole')[0][0]
  (tmp_path / 'whole' / 'specsample.json').write_text('{}')
  texts, _ = _problems(tmp_path / 'whole')
  assert 'does not describe a model' in texts[0]


# For each layout: its tensors, its configuration and the resulting class.
_PUBLISHED = {
  'Medusa': (test_heads.medusa_tensors, None, 'Medusa'),
  'Hydra': (test_heads.hydra_tensors, None, 'Hydra'),
  'EAGLE': (test_eagle.eagle_tensors, test_eagle.CONFIG, 'Eagle'),
  'EAGLE-3': (test_eagle.eagle3_tensors, test_eagle.CONFIG, 'Eagle3'),
  'P-EAGLE': (
    test_p_eagle.p_eagle_tensors,
    test_p_eagle.CONFIG,
    'PEagle',
  ),
  'DFlash': (
    test_dflash.dflash_tensors,
    {
      key: value
      for key, value in test_dflash.DSPARK.items()
      if 'markov' not in key and 'confidence' not in key
    },
    'DFlash',
  ),
  'DFlash 2': (test_dflash2.tensors, test_dflash2.config(), 'DFlash2'),
  'DSpark': (
    lambda: test_dflash.dflash_tensors(rank=test_dflash.RANK, has_head=True),
    test_dflash.DSPARK,
    'DSpark',
  ),
}
_TARGETS = {
  'Medusa': test_heads.TARGET,
  'Hydra': test_heads.TARGET,
  'EAGLE': test_eagle.TARGET,
  'EAGLE-3': test_eagle.TARGET,
  'P-EAGLE': test_eagle.TARGET,
  'DFlash': test_dflash.TARGET,
  'DFlash 2': test_dflash.TARGET,
  'DSpark': test_dflash.TARGET,
}


def _publish(folder, layout, changes=()):
  """Writes a small drafter in a layout; `changes` replace or drop tensors."""
  make, config, _ = _PUBLISHED[layout]
  folder.mkdir()
  tensors = {k: x for k, x in (make() | dict(changes)).items() if x is not None}
  if config is None:
    name = f'{layout.lower()}_lm_head.pt'
    return test_heads.save(folder, name, tensors), tensors
  return test_eagle.save(folder, tensors, config), tensors


@pytest.mark.parametrize('layout', _PUBLISHED)
def test_published_drafters_are_told(tmp_path, layout):
  folder, tensors = _publish(tmp_path / 'drafter', layout)
  target = _TARGETS[layout]
  checkpoint.save(tmp_path / 'target', target.model, target.params)
  report = inspection.inspect(str(folder))
  assert report.problems == ()
  assert report.what == f'a drafter, in the layout of {layout}'
  facts = dict(report.facts)
  assert facts['drafter'] == _PUBLISHED[layout][2]
  unique = {id(x): x.size for x in tensors.values()}
  assert facts['stored'].startswith(f'{sum(unique.values()):,} numbers in ')
  assert facts['of a target'] == '16 wide, of 32 tokens'
  against = inspection.inspect(str(folder), str(tmp_path / 'target'))
  assert against.problems == ()
  loaded = specsample.load_drafter(folder, target)
  assert facts['drafts'] == f'{loaded.drafter.num_draft_tokens} tokens'

  wide = testing.tiny_llama(dim=24, num_layers=6)
  checkpoint.save(tmp_path / 'wide', wide, wide.init(jax.random.key(0)))
  texts, names = _problems(folder, tmp_path / 'wide')
  assert ' 16' in ' '.join(texts + names)
  assert '24' in ' '.join(texts + names)


_SPOILT = {
  'Medusa': ('1.0.linear.bias', '2.2.weight'),
  'Hydra': ('hydra_mlp.1.1.linear.bias', 'hydra_lm_head.2.1.weight'),
  'EAGLE': ('layers.0.mlp.up_proj.weight', 'layers.0.mlp.down_proj.weight'),
  'EAGLE-3': ('norm.weight', 'midlayer.mlp.down_proj.weight'),
  'P-EAGLE': (
    'layers.1.self_attn.q_proj.weight',
    'layers.2.mlp.down_proj.weight',
  ),
  'DFlash': ('fc.weight', 'layers.0.mlp.gate_proj.weight'),
  'DFlash 2': ('norm.weight', 'layers.1.mlp_conv.base_kernel'),
  'DSpark': ('norm.weight', 'layers.1.mlp.down_proj.weight'),
}


@pytest.mark.parametrize('layout', _SPOILT)
def test_all_that_is_wrong_with_a_drafter_is_listed(tmp_path, layout):
  absent, other = _SPOILT[layout]
  tensors = _PUBLISHED[layout][0]()
  narrow = np.ascontiguousarray(tensors[other][:, :-1])
  changes = {absent: None, other: narrow}
  folder, _ = _publish(tmp_path / 'drafter', layout, changes)
  texts, names = _problems(folder)
  assert texts == [
    '1 tensor missing',
    '1 tensor of another shape than the configuration says',
  ]
  assert names == [
    absent,
    f'tensor {other} has shape {narrow.shape}, expected {tensors[other].shape}',
  ]


def test_a_kind_of_speculator_that_is_not_known_is_named(tmp_path):
  folder, _ = _publish(tmp_path / 'drafter', 'EAGLE')
  _change(folder / 'config.json', speculators_model_type='mlp')
  texts, _ = _problems(folder)
  assert len(texts) == 1
  assert (
    "is 'mlp', but the supported types are eagle, eagle3, peagle, dflash, "
    in texts[0]
  )


def test_drafters_of_the_library_are_told(tmp_path):
  model = testing.tiny_llama()
  target = specsample.Loaded(model, model.init(jax.random.key(0)), None)
  checkpoint.save(tmp_path / 'target', model, target.params)
  drafter = specsample.drafters.Medusa(model=model, num_draft_tokens=2)
  params = drafter.init_params(jax.random.key(1))
  folder = tmp_path / 'drafter'
  specsample.save_drafter(
    folder,
    drafter,
    params,
    target=target,
    card={'target': str(tmp_path / 'target')},
  )
  report = inspection.inspect(str(folder))
  assert report.problems == ()
  facts = dict(report.facts)
  assert facts['drafter'] == 'medusa'
  assert facts['checked'].startswith('against the sizes of the target')
  count = sum(x.size for x in jax.tree.leaves(params))
  assert facts['bytes'] == f'BF16 {2 * count / 1000:.4g} kB'

  shutil.rmtree(tmp_path / 'target')
  facts = dict(inspection.inspect(str(folder)).facts)
  assert facts['checked'].startswith('against itself')
  wide = dataclasses.replace(model, dim=24)
  checkpoint.save(tmp_path / 'wide', wide, wide.init(jax.random.key(0)))
  texts, names = _problems(folder, tmp_path / 'wide')
  assert 'of another shape' in texts[0]
  assert 'BF16 (16, 16), expected BF16 (24, 24)' in ' '.join(names)

  os.truncate(folder / 'drafter.safetensors', 500)
  (folder / 'card.json').write_text('{"format": 1}')
  texts, _ = _problems(folder)
  assert len(texts) == 2
  assert 'kind is None, expected str' in texts[0]
  assert 'not a complete safetensors file' in texts[1]
  (folder / 'card.json').unlink()
  texts, _ = _problems(folder / 'drafter.safetensors')
  assert 'card.json is missing' in texts[0]


def test_shards_that_are_missing_or_cut_off_are_named(tmp_path):
  _save(tmp_path, max_shard_size='20KB')
  shards = sorted(tmp_path.glob('model-*.safetensors'))
  assert len(shards) > 3
  for shard in shards[:2]:
    shard.unlink()
  os.truncate(shards[2], 300)
  texts, names = _problems(tmp_path)
  assert '2 files missing that the index names' in texts[0]
  assert {shard.name for shard in shards[:2]} <= set(names)
  assert f'{shards[2].name} is not a complete safetensors file' in texts[1]
  assert 'tensors missing' in texts[2]
  index = json.loads((tmp_path / 'model.safetensors.index.json').read_text())
  gone = {shard.name for shard in shards[:3]}
  absent = {k for k, name in index['weight_map'].items() if name in gone}
  assert absent <= set(names)


@pytest.mark.parametrize(
  ('changes', 'expected', 'num_names'),
  [
    (
      {'model_type': 'mamba'},
      "is 'mamba', but the supported types are ... qwen3_moe",
      0,
    ),
    ({'hidden_act': 'gelu'}, "hidden_act is 'gelu', but only 'silu' is", 0),
    ({'hidden_size': None}, 'hidden_size is None, expected an integer', 0),
    ({'num_hidden_layers': 4}, '18 tensors missing', 18),
    ({'num_hidden_layers': 1}, '9 tensors unknown', 9),
    ({'vocab_size': 97}, '2 tensors of another shape', 2),
    (
      {'quantization_config': {'quant_method': 'gptq'}},
      "quant_method of quantization_config is 'gptq', but only 'fp8' or",
      0,
    ),
  ],
)
def test_a_configuration_that_does_not_fit_is_told(
  tmp_path, changes, expected, num_names
):
  _save(tmp_path)
  _change(tmp_path / 'config.json', **changes)
  texts, names = _problems(tmp_path)
  assert len(texts) == 1
  for part in expected.split(' ... '):
    assert part in texts[0]
  assert len(names) == num_names


def test_matrices_of_8_bits_are_told_with_their_scales(tmp_path):
  wide = _save(tmp_path / 'wide', 'deepseek_v3')
  folder = tmp_path / 'fp8'
  fp8_by_hand.write(
    tmp_path / 'wide', folder, (16, 16), plain=tmp_path / 'plain'
  )
  report = inspection.inspect(str(folder))
  assert report.problems == ()
  facts = dict(report.facts)
  assert facts['quantised'].startswith('F8_E4M3, each block of 16 x 16 with a')
  matrices = [x for name, x in wide.state_dict().items() if '_proj' in name]
  count = sum(x.numel() for x in matrices)
  assert f'F8_E4M3 {count / 1000:.4g} kB' in facts['bytes']
  plain = inspection.inspect(str(tmp_path / 'plain')).facts
  assert facts['weights as'] == dict(plain)['weights as']

  path = folder / 'model.safetensors'
  tensors = safetensors.torch.load_file(path)
  absent, other = (
    f'model.layers.0.{name}_proj.weight_scale_inv'
    for name in ('self_attn.o', 'mlp.up')
  )
  del tensors[absent]
  tensors[other] = torch.ones(1, 2)
  safetensors.torch.save_file(tensors, path)
  texts, names = _problems(folder)
  assert texts == [
    '1 tensor missing',
    '1 tensor of another shape than the configuration says',
  ]
  assert names == [
    absent,
    f'tensor {other} has shape (1, 2), expected (3, 2)',
  ]


def test_weights_that_cannot_be_read_are_named(tmp_path):
  model = _save(tmp_path / 'fp8')
  tensors = {k: x.contiguous() for k, x in model.state_dict().items()}
  name = 'model.layers.0.mlp.up_proj.weight'
  tensors[name] = tensors[name].to(torch.float8_e4m3fn)
  path = tmp_path / 'fp8' / 'model.safetensors'
  safetensors.torch.save_file(tensors, path)
  texts, names = _problems(tmp_path / 'fp8')
  assert len(texts) == 1
  assert (
    '1 tensor stored as F8_E4M3, but the supported types are F64' in texts[0]
  )
  assert names == [name]
  facts = dict(inspection.inspect(str(tmp_path / 'fp8')).facts)
  assert 'F8_E4M3 1.536 kB' in facts['bytes']

  path.unlink()
  torch.save(model.state_dict(), tmp_path / 'fp8' / 'pytorch_model.bin')
  texts, _ = _problems(tmp_path / 'fp8')
  assert len(texts) == 1
  assert 'pytorch_model.bin may be a pickle' in texts[0]
  (tmp_path / 'fp8' / 'pytorch_model.bin').write_bytes(b'cos\nabort\n(tR.')
  texts, _ = _problems(tmp_path / 'fp8')
  assert 'does not hold named tensors as torch.save writes them' in texts[0]
  (tmp_path / 'fp8' / 'pytorch_model.bin').unlink()
  texts, names = _problems(tmp_path / 'fp8')
  assert texts == ['no weight files: download them', '21 tensors missing']
  assert len(names) == 21


def test_an_assistant_is_told_without_its_target(tmp_path):
  test_assistant.save(tmp_path, is_ordered=True)
  report = inspection.inspect(str(tmp_path))
  assert report.problems == ()
  facts = dict(report.facts)
  assert facts['drafter'] == 'Assistant'
  assert facts['of a target'] == '16 wide, of 32 tokens'


def test_modules_for_more_tokens_are_told(tmp_path):
  _save(tmp_path)
  _change(tmp_path / 'config.json', num_nextn_predict_layers=1)
  report = inspection.inspect(str(tmp_path))
  assert dict(report.facts)['modules'].endswith('layers: none is stored')
  assert report.problems == ()
  path = tmp_path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  tensors['model.layers.2.enorm.weight'] = np.ones(32, np.float32)
  safetensors.numpy.save_file(tensors, path)
  texts, names = _problems(tmp_path)
  assert texts == ['12 tensors missing']
  assert 'model.layers.2.eh_proj.weight' in names


def test_a_module_in_a_folder_of_qwen3_5_is_told(tmp_path):
  _save(tmp_path, 'qwen3_5_text')
  report = inspection.inspect(str(tmp_path))
  assert 'modules' not in dict(report.facts)
  assert report.problems == ()
  path = tmp_path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  tensors['mtp.fc.weight'] = np.ones((32, 64), np.float32)
  safetensors.numpy.save_file(tensors, path)
  report = inspection.inspect(str(tmp_path))
  text = '1 for multi-token prediction, named mtp.'
  assert dict(report.facts)['modules'] == text
  _change(tmp_path / 'config.json', mtp_num_hidden_layers=2)
  texts, _ = _problems(tmp_path)
  assert len(texts) == 1
  assert 'mtp_num_hidden_layers is 2, but only 1 is supported' in texts[0]


def test_modules_of_latent_attention_and_experts_are_told(tmp_path):
  _save(tmp_path, 'deepseek_v3')
  _change(tmp_path / 'config.json', num_nextn_predict_layers=1)
  path = tmp_path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  tensors['model.layers.2.enorm.weight'] = np.ones(32, np.float32)
  safetensors.numpy.save_file(tensors, path)
  _, names = _problems(tmp_path)
  assert 'model.layers.2.self_attn.kv_b_proj.weight' in names
  assert 'model.layers.2.mlp.experts.*.up_proj.weight' in names


def test_broken_gguf_files_are_told(tmp_path, write_gguf):
  path = tmp_path / 'model.gguf'
  sizes = {
    'llama.vocab_size': 32,
    'llama.block_count': 1,
    'llama.context_length': 64,
    'llama.embedding_length': 32,
    'llama.feed_forward_length': 64,
    'llama.attention.head_count': 4,
  }
  tensors = {
    'token_embd.weight': np.zeros((32, 16)),
    'extra.weight': np.zeros(8),
  }
  write_gguf(path, sizes, tensors)
  texts, names = _problems(path)
  assert texts == [
    '10 tensors missing',
    '1 tensor unknown',
    '1 tensor of another shape than the configuration says',
  ]
  assert len(names) == 12
  os.truncate(path, path.stat().st_size - 1000)
  assert 'is not a complete GGUF file (tensor ' in _problems(path)[0][0]
  path.unlink()
  write_gguf(path, {'general.architecture': 'mamba'})
  message = "is 'mamba', but the supported architectures are llama, gemma3,"
  assert message in _problems(path)[0][0]


def test_files_alone_are_told(tmp_path):
  folder, _ = _publish(tmp_path / 'medusa', 'Medusa')
  report = inspection.inspect(str(folder / 'medusa_lm_head.pt'))
  assert report == inspection.inspect(str(folder))
  path = tmp_path / 'adapter.safetensors'
  safetensors.numpy.save_file({'a': np.ones((2, 3), 'f2')}, path)
  report = inspection.inspect(str(path))
  assert dict(report.facts)['bytes'] == 'F16 12 B'
  assert 'a file of this name holds neither a model nor a drafter' in (
    report.problems[0].text
  )
  path.rename(tmp_path / 'model.safetensors')
  texts, _ = _problems(tmp_path)
  assert len(texts) == 1
  assert 'layouts are Medusa, Hydra, EAGLE, EAGLE-3, P-EAGLE, ' in texts[0]


def test_the_command_ends_as_the_checkpoint_is(tmp_path, commands):
  _save(tmp_path / 'whole')
  shutil.copytree(tmp_path / 'whole', tmp_path / 'broken')
  _change(tmp_path / 'broken' / 'config.json', num_hidden_layers=3)
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'notes.txt').write_text('')
  paths = ('whole', 'broken', 'empty', 'notes.txt', 'nowhere')
  calls = [['inspect', str(tmp_path / path)] for path in paths]
  calls += [
    ['inspect', 'organisation/name'],
    ['inspect'],
    ['inspect', 'a', 'b'],
    ['inspect', str(tmp_path / 'whole'), '--target=' + str(tmp_path / 'empty')],
  ]
  whole, broken, *others = commands.run_all(calls)
  assert whole.code == 0, whole.err
  assert whole.out.endswith('nothing is missing, unknown or of another shape\n')
  assert 'family        llama, specsample/models/llama.py' in whole.out
  assert broken.code == 1
  assert 'PROBLEM 9 tensors missing\n  model.layers.2.' in broken.out
  expected = (
    'empty has no checkpoint: give a folder',
    'notes.txt is not a weight file: give a .gguf',
    "nowhere' is neither a file nor a folder: check the path",
    "'organisation/name' is not a path, and was not downloaded from the hub",
    '0 arguments: give one PATH',
    '2 arguments: give one PATH',
    'empty is not a model: give a folder with config.json',
  )
  for outcome, words in zip(others, expected, strict=True):
    assert outcome.code == 2
    assert outcome.out == ''
    assert words in outcome.err
    assert outcome.err.count('\n') == 1


def test_what_was_downloaded_from_the_hub_is_inspected(tmp_path, commands):
  cached = tmp_path / 'hub' / 'models--organisation--model'
  commit = '0' * 40
  _save(cached / 'snapshots' / commit)
  (cached / 'refs').mkdir()
  (cached / 'refs' / 'main').write_text(commit)
  calls = [['inspect', f'organisation/{name}'] for name in ('model', 'absent')]
  model, absent = commands.run_all(calls, variables={'HF_HOME': str(tmp_path)})
  assert model.code == 0, model.err
  assert f'{commit}: a model, config.json and 1 file of weights' in model.out
  assert absent.code == 2
  assert f'not downloaded from the hub to {tmp_path}' in absent.err
