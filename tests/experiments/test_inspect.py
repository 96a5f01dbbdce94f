"""Reports of `inspect` on whole and on broken checkpoints."""

import json
import os
import re
import shutil

from huggingface_hub import constants
import jax
import numpy as np
import pytest
import torch

from experiments.inspection import inspection
import specsample
from specsample import testing
from specsample.models import checkpoint
from tests.loading.published import folders
from tests.loading.published import test_dflash
from tests.loading.published import test_dflash2
from tests.loading.published import test_eagle
from tests.loading.published import test_heads
from tests.loading.published import test_p_eagle
from tests.models import random_models

# Parts of facts that only models of a family have.
_FAMILIES = {
  'llama': {'num_kv_heads': '2', 'vocab_size': '131'},
  'mistral': {'sliding_window': '7'},
  'mixtral': {'experts': 'num_experts=4, num_per_token=2'},
  'qwen2': {'attention_bias': 'True'},
  'qwen3': {'head_dim': '12', 'tie_embeddings': 'True'},
  'qwen3_moe': {'experts': 'mlp_dim=20'},
  'qwen3_5': {'delta': 'num_value_heads=4'},
  'gemma2': {'sliding_window': '7'},
  'gemma3': {'sliding_window': '7'},
  'gemma4': {
    'full_head_dim': '16',
    'num_shared': '2',
    'shared_mlp_dim': '96',
    'layer_input_dim': '8',
  },
  'gpt_oss': {
    'has_sinks': 'True',
    'sliding_window': '7',
    'experts': 'num_experts=6',
  },
  'deepseek_v3': {'latent': 'kv_rank=16'},
}


def _save(folder, kind='llama', **options):
  model = random_models.reference(kind)
  model.save_pretrained(folder, **options)
  return model


def _change(path, **changes):
  content = json.loads(path.read_text()) | changes
  path.write_text(json.dumps(content))


def _problem(path, target=None):
  """Returns why something cannot be loaded: what the loader itself says."""
  report = inspection.inspect(str(path), target and str(target))
  with pytest.raises(ValueError) as caught:
    if target is None:
      specsample.load(path)
    else:
      specsample.load_drafter(path, specsample.load(target))
  assert report.problem == ' '.join(str(caught.value).split())
  return report.problem


@pytest.mark.slow(but=('mistral',))
@pytest.mark.parametrize('kind', _FAMILIES)
def test_families_are_told_with_their_sizes(tmp_path, kind):
  reference = _save(tmp_path, kind)
  report = inspection.inspect(str(tmp_path))
  assert report.problem is None
  facts = dict(report.facts)
  for name, part in _FAMILIES[kind].items():
    assert part in facts[name]
  named = dict(reference.named_parameters(remove_duplicate=False))
  # Biases of a router and scalars of layers are buffers.
  buffers = [x for k, x in reference.state_dict().items() if k not in named]
  count = sum(x.numel() for x in (*reference.parameters(), *buffers))
  assert facts['parameters'] == f'{count:,}'
  assert facts['weights as'].startswith(f'float32 {4 * count / 1000:.4g} kB')


def test_a_gguf_file_is_told():
  report = inspection.inspect('smollm2-135m-instruct')
  assert report.problem is None
  facts = dict(report.facts)
  assert facts['parameters'] == '134,515,008'
  assert facts['files'].startswith('1 of ')
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
  found = inspection.num_devices(num_bytes)
  assert (found['v5e'], found['H200']) == (v5e, h200)


def test_models_of_the_library_are_told(tmp_path):
  model = testing.tiny_llama()
  params = model.init(jax.random.key(0))
  checkpoint.save(tmp_path / 'whole', model, params)
  report = inspection.inspect(str(tmp_path / 'whole'))
  assert report.problem is None
  count = sum(x.size for x in jax.tree.leaves(params))
  assert dict(report.facts)['parameters'] == f'{count:,}'

  _change(tmp_path / 'whole' / 'specsample.json', num_layers=1, mlp_dim=40)
  assert 'does not fit specsample.json' in _problem(tmp_path / 'whole')
  _change(tmp_path / 'whole' / 'params' / '_METADATA', tree_metadata=5)
  assert 'its metadata is damaged' in _problem(tmp_path / 'whole')
  shutil.rmtree(tmp_path / 'whole' / 'params')
  assert 'does not fit specsample.json' in _problem(tmp_path / 'whole')
  (tmp_path / 'whole' / 'specsample.json').write_text('{}')
  assert 'does not describe a model' in _problem(tmp_path / 'whole')


# For each layout: its tensors, its configuration, the resulting class, and a
# target.
_PUBLISHED = {
  'Medusa': (test_heads.medusa_tensors, None, 'Medusa', test_heads.TARGET),
  'Hydra': (test_heads.hydra_tensors, None, 'Hydra', test_heads.TARGET),
  'EAGLE': (
    *(test_eagle.eagle_tensors, test_eagle.CONFIG),
    *('Eagle', test_eagle.TARGET),
  ),
  'EAGLE-3': (
    *(test_eagle.eagle3_tensors, test_eagle.CONFIG),
    *('Eagle3', test_eagle.TARGET),
  ),
  'P-EAGLE': (
    *(test_p_eagle.p_eagle_tensors, test_p_eagle.CONFIG),
    *('PEagle', test_eagle.TARGET),
  ),
  'DFlash': (
    test_dflash.dflash_tensors,
    {
      key: value
      for key, value in test_dflash.DSPARK.items()
      if 'markov' not in key and 'confidence' not in key
    },
    *('DFlash', test_dflash.TARGET),
  ),
  'DFlash 2': (
    *(test_dflash2.tensors, test_dflash2.config()),
    *('DFlash2', test_dflash.TARGET),
  ),
  'DSpark': (
    lambda: test_dflash.dflash_tensors(rank=test_dflash.RANK, has_head=True),
    *(test_dflash.DSPARK, 'DSpark', test_dflash.TARGET),
  ),
}


def _publish(folder, layout):
  """Writes a small drafter in a layout."""
  make, config, *_ = _PUBLISHED[layout]
  folder.mkdir()
  if config is None:
    return test_heads.save(folder, f'{layout.lower()}_lm_head.pt', make())
  return folders.save(folder, make(), config)


@pytest.mark.slow
@pytest.mark.parametrize('layout', _PUBLISHED)
def test_published_drafters_are_told(tmp_path, layout):
  folder = _publish(tmp_path / 'drafter', layout)
  *_, kind, target = _PUBLISHED[layout]
  checkpoint.save(tmp_path / 'target', target.model, target.params)
  with pytest.raises(ValueError, match=r'is a drafter, .* --target=MODEL'):
    inspection.inspect(str(folder))
  report = inspection.inspect(str(folder), str(tmp_path / 'target'))
  assert report.problem is None
  facts = dict(report.facts)
  assert facts['drafter'] == kind
  loaded = specsample.load_drafter(folder, target)
  assert facts['drafts'] == f'{loaded.drafter.num_draft_tokens} tokens'

  wide = testing.tiny_llama(dim=24, num_layers=6)
  params = wide.init(jax.random.key(0))
  checkpoint.save(tmp_path / 'wide', wide, params)
  text = _problem(folder, tmp_path / 'wide')
  assert '16' in text
  assert '24' in text


def test_drafters_of_the_library_are_told(tmp_path):
  model = testing.tiny_llama()
  params = model.init(jax.random.key(0))
  target = specsample.Loaded(model, params, None)
  checkpoint.save(tmp_path / 'target', model, params)
  drafter = specsample.drafters.Medusa(model=model, num_draft_tokens=2)
  folder = tmp_path / 'drafter'
  specsample.save_drafter(
    folder,
    drafter,
    drafter.init_params(jax.random.key(1)),
    target=target,
    card={'target': str(tmp_path / 'target')},
  )
  report = inspection.inspect(str(folder))
  assert report.problem is None
  assert dict(report.facts)['drafter'] == 'Medusa'
  assert report.what == f'a drafter for {tmp_path / "target"}'
  os.truncate(folder / 'drafter.safetensors', 500)
  text = _problem(folder, tmp_path / 'target')
  assert 'is not a complete safetensors file' in text
  (folder / 'card.json').write_text('{"format": 1}')
  assert 'kind is None, expected str' in _problem(folder, tmp_path / 'target')
  (folder / 'card.json').unlink()
  with pytest.raises(ValueError, match='does not say for which model'):
    inspection.inspect(str(folder / 'drafter.safetensors'))


def _config(**changes):
  return lambda folder: _change(folder / 'config.json', **changes)


def _as_pickle(folder):
  for path in folder.glob('model*'):
    path.unlink()
  weights = random_models.reference('llama').state_dict()
  torch.save(weights, folder / 'pytorch_model.bin')


@pytest.mark.parametrize(
  ('damage', 'words'),
  [
    (
      lambda x: os.truncate(sorted(x.glob('model-*'))[1], 300),
      r'model-00002-of-\d+.safetensors is not a complete safetensors file',
    ),
    (lambda x: sorted(x.glob('model-*'))[0].unlink(), 'lacks model-00001-of-'),
    (
      _config(model_type='mamba'),
      "model_type is 'mamba', but the supported types",
    ),
    (_config(hidden_act='gelu'), "hidden_act is 'gelu', but only 'silu' is"),
    (
      _config(quantization_config={'quant_method': 'gptq'}),
      "quant_method of quantization_config is 'gptq', but only 'fp8' or",
    ),
    (_as_pickle, 'pytorch_model.bin may be a pickle'),
    (lambda x: [path.unlink() for path in x.glob('model*')], 'safetensors'),
    (
      lambda x: (x / 'tokenizer.json').write_text('{"version": "1.0"'),
      'tokenizer.json',
    ),
  ],
)
def test_what_cannot_be_loaded_is_told(tmp_path, damage, words):
  _save(tmp_path, max_shard_size='20KB')
  damage(tmp_path)
  assert re.search(words, _problem(tmp_path))


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
  write_gguf(path, sizes, {'token_embd.weight': np.zeros((32, 16))})
  assert 'lacks 10 tensors' in _problem(path)
  os.truncate(path, path.stat().st_size - 1000)
  assert 'is not a complete GGUF file (tensor ' in _problem(path)
  path.unlink()
  write_gguf(path, {'general.architecture': 'mamba'})
  message = "is 'mamba', but the supported architectures are llama, gemma3,"
  assert message in _problem(path)


def test_modules_for_more_tokens_need_their_target(tmp_path):
  _save(tmp_path, 'deepseek_v3')
  _change(tmp_path / 'config.json', num_nextn_predict_layers=1)
  assert inspection.inspect(str(tmp_path)).problem is None
  text = _problem(tmp_path, tmp_path)
  assert 'tensors (model.layers.3.' in text


def test_the_command_ends_as_the_checkpoint_is(tmp_path, commands):
  _save(tmp_path / 'whole')
  shutil.copytree(tmp_path / 'whole', tmp_path / 'broken')
  _change(tmp_path / 'broken' / 'config.json', num_hidden_layers=4)
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
  whole, broken, empty, notes, *others = commands.run_all(calls)
  assert whole.code == 0, whole.err
  assert whole.out.endswith('it can be loaded\n')
  assert '\n  num_layers' in whole.out
  assert broken.code == empty.code == notes.code == 1
  assert '/broken lacks 9 tensors (model.layers.3.' in broken.out
  assert 'empty holds neither config.json nor' in empty.out
  assert 'notes.txt is not a GGUF file' in notes.out
  expected = (
    "nowhere' is neither a file nor a folder: check the path",
    "'organisation/name' is not a path, and was not downloaded from the hub",
    '0 arguments: give one PATH',
    '2 arguments: give one PATH',
    'empty holds neither config.json nor',
  )
  for outcome, words in zip(others, expected, strict=True):
    outcome.check_refused(words)


@pytest.mark.slow
def test_what_was_downloaded_from_the_hub_is_inspected(tmp_path, monkeypatch):
  monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
  monkeypatch.setenv('HF_HOME', str(tmp_path))
  cached = tmp_path / 'models--organisation--model'
  commit = '0' * 40
  _save(cached / 'snapshots' / commit)
  (cached / 'refs').mkdir()
  (cached / 'refs' / 'main').write_text(commit)
  report = inspection.inspect('organisation/model')
  assert (report.problem, report.what) == (None, 'a model')
  assert report.path.endswith(commit)
  with pytest.raises(ValueError, match=f'from the hub to {tmp_path}'):
    inspection.inspect('organisation/absent')
