"""Weights that are read and saved by the devices that hold them."""

import contextlib
import dataclasses
import os
import pathlib
import socket
import subprocess
import sys

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy
import transformers

import specsample
from specsample import sharding
from specsample.models import checkpoint
from specsample.models import packed
from tests import bucket
from tests.models import fp8_by_hand
from tests.models import mxfp4_by_hand

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Two key-value heads, so that groups of devices hold the same part.
_SIZES = {
  'vocab_size': 64,
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 48,
  'max_position_embeddings': 64,
}
_MATRICES = {
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}


def _write(folder, **changes):
  """Writes a random Llama as safetensors, in several files if it is small."""
  config = transformers.LlamaConfig(**_SIZES | changes)
  model = transformers.LlamaForCausalLM(config)
  model.save_pretrained(folder, max_shard_size='5GB' if changes else '40KB')
  (folder / 'generation_config.json').unlink()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A tiny model in several safetensors files, also found at gs://bucket."""
  root = tmp_path_factory.mktemp('root')
  (root / 'bucket').mkdir()
  _write(root / 'bucket' / 'model')
  assert len(list(root.glob('bucket/model/*.safetensors'))) > 1
  return root / 'bucket' / 'model'


@pytest.fixture(scope='module')
def whole(folder):
  """The same model on one device."""
  return _on_one_device(folder)


def _on_one_device(path):
  loaded = specsample.load(path)
  return dataclasses.replace(loaded, params=packed.plain(loaded.params))


def _mesh(data, model, explicit=True):
  return jax.set_mesh(sharding.make_mesh(data, model, explicit=explicit))


def _assert_placed(loaded, whole):
  """Checks the values and, on the mesh that is set, where each of them is."""
  assert loaded.model == whole.model
  params = loaded.params
  if jax.sharding.get_mesh().empty:
    params = packed.plain(params)
  jax.tree.map(np.testing.assert_array_equal, params, whole.params)
  places = sharding.of_tree(loaded.model.param_axes())
  found = jax.tree.map(lambda leaf: leaf.sharding, params)
  assert found == places


@pytest.mark.parametrize(
  'mesh', [(2, 4), (1, 8), (2, 4, False)], ids=['2x4', '1x8', '2x4-auto']
)
def test_a_mesh_holds_the_parameters_of_one_device(folder, whole, mesh):
  with _mesh(*mesh):
    loaded = specsample.load(folder)
    _assert_placed(loaded, whole)
  down = loaded.params['layers'][1]['mlp']['down']['kernel']
  assert down.addressable_shards[0].data.shape == (48 // mesh[1], 32)
  key = loaded.params['layers'][0]['attention']['key']['kernel']
  assert key.addressable_shards[0].data.shape == (32, 8)


def _write_fp8(folder, stored, plain):
  fp8_by_hand.write(folder, stored, (7, 5), plain=plain)


def _write_mxfp4(folder, stored, plain):
  sizes = _SIZES | {'intermediate_size': 64}
  config = transformers.GptOssConfig(**sizes, head_dim=8, num_local_experts=4)
  wide = stored.with_name('wide')
  transformers.GptOssForCausalLM(config).save_pretrained(wide)
  mxfp4_by_hand.write(wide, stored, plain=plain)


@pytest.mark.parametrize('write', [_write_fp8, _write_mxfp4])
def test_matrices_of_few_bits_are_divided_too(folder, tmp_path, write):
  stored, plain = tmp_path / 'stored', tmp_path / 'plain'
  write(folder, stored, plain)
  expected = _on_one_device(plain)
  with _mesh(2, 4):
    _assert_placed(specsample.load(stored), expected)


def test_weights_of_a_gguf_file_are_divided_too(folder, tmp_path, write_gguf):
  loaded = {}
  for path in folder.glob('*.safetensors'):
    loaded |= safetensors.numpy.load_file(path)
  values = {
    'token_embd.weight': loaded['model.embed_tokens.weight'],
    'output.weight': loaded['lm_head.weight'],
    'output_norm.weight': loaded['model.norm.weight'],
  }
  names = _MATRICES | {
    'attn_norm': 'input_layernorm',
    'ffn_norm': 'post_attention_layernorm',
  }
  for i in range(_SIZES['num_hidden_layers']):
    for name, source in names.items():
      tensor = loaded[f'model.layers.{i}.{source}.weight']
      values[f'blk.{i}.{name}.weight'] = tensor
  metadata = {
    'llama.vocab_size': _SIZES['vocab_size'],
    'llama.block_count': _SIZES['num_hidden_layers'],
    'llama.context_length': _SIZES['max_position_embeddings'],
    'llama.embedding_length': _SIZES['hidden_size'],
    'llama.feed_forward_length': _SIZES['intermediate_size'],
    'llama.attention.head_count': _SIZES['num_attention_heads'],
    'llama.attention.head_count_kv': _SIZES['num_key_value_heads'],
  }
  path = tmp_path / 'model.gguf'
  matrices = [name for name in values if 'norm' not in name]
  half = gguf.GGMLQuantizationType.F16
  write_gguf(path, metadata, values, dict.fromkeys(matrices, half))
  expected = _on_one_device(path)
  with _mesh(2, 4):
    _assert_placed(specsample.load(path), expected)


@pytest.mark.parametrize('mesh', [(2, 4), (8, 1)], ids=['2x4', '8x1'])
def test_every_byte_is_read_once(folder, whole, mesh):
  served = bucket.make(folder.parents[1]).served
  with _mesh(*mesh):
    _assert_placed(specsample.load('gs://bucket/model'), whole)
  files = sorted(folder.glob('*.safetensors'))
  assert sum(stop - start for _, start, stop in served) == sum(
    path.stat().st_size for path in files
  )
  assert {name for name, *_ in served} == {path.name for path in files}


def test_what_is_saved_fits_any_mesh(folder, whole, tmp_path):
  with _mesh(2, 4):
    loaded = specsample.load(folder)
    checkpoint.save(tmp_path / 'saved', loaded.model, loaded.params)
  assert os.listdir(tmp_path) == ['saved']
  for mesh in ((4, 2), (1, 8), (2, 4, False), None):
    with _mesh(*mesh) if mesh else contextlib.nullcontext():
      _assert_placed(specsample.load(tmp_path / 'saved'), whole)


@pytest.mark.parametrize('mesh', [(2, 4), (1, 8), (2, 4, False)])
def test_a_mesh_holds_a_drafter_of_one_device(whole, tmp_path, mesh):
  hydra = specsample.drafters.Hydra(
    model=whole.model,
    num_draft_tokens=2,
    draft_vocab_size=24,
    prefix_attention=True,
  )
  # One device rounds the target's unembedding to this, a mesh does not.
  params = jax.tree.map(
    lambda x: x.astype('bfloat16').astype(x.dtype), packed.plain(whole.params)
  )
  whole = dataclasses.replace(whole, params=params)
  own = hydra.init_params(jax.random.key(0), params, 2 * np.arange(24))
  save = lambda folder, params, target: specsample.save_drafter(
    folder, hydra, params, target=target, card={}
  )
  save(tmp_path / 'one', own, whole)
  expected = specsample.load_drafter(tmp_path / 'one', whole).params
  with _mesh(*mesh):
    placed = sharding.place(whole.params, whole.model.param_axes())
    target = dataclasses.replace(whole, params=placed)
    loaded = specsample.load_drafter(tmp_path / 'one', target)
    found = jax.tree.map(lambda leaf: leaf.sharding, loaded.params)
    assert found == sharding.of_tree(hydra.param_axes())
    save(tmp_path / 'mesh', loaded.params, target)
  expected = packed.plain(expected)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)
  one, other = (
    (tmp_path / name / 'drafter.safetensors').read_bytes()
    for name in ('one', 'mesh')
  )
  assert one == other


_PEAK = """
import resource
import sys
import jax
import specsample
from specsample import sharding
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with jax.set_mesh(sharding.make_mesh(1, 8)):
  sharding.zeros((8,), 'float32', sharding.Axis('vocab', 8)).block_until_ready()
  before = peak()
  params = specsample.load(sys.argv[1]).params
leaves = jax.tree.leaves(params)
held = sum(x.data.nbytes for leaf in leaves for x in leaf.addressable_shards)
print(peak() - before, held, max(leaf.nbytes for leaf in leaves))
"""


def test_loading_takes_three_tensors_more_memory_than_the_shards(tmp_path):
  _write(
    tmp_path / 'model',
    vocab_size=4096,
    hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=12288,
  )
  # A process starts with its parent's peak memory, so the parent has to be a
  # shell, not this process.
  command = ['sh', '-c', '"$@"; exit', 'sh', sys.executable, '-c', _PEAK]
  output = subprocess.run(
    [*command, tmp_path / 'model'],
    stdout=subprocess.PIPE,
    cwd=_ROOT,
    check=True,
  ).stdout
  growth, held, largest = map(int, output.split())
  growth *= 1 if sys.platform == 'darwin' else 1024
  assert largest == 12288 * 1024 * 4 and held > 6 * largest
  assert 0.9 * held < growth < held + 3 * largest


def test_two_processes_share_the_work(folder, whole, tmp_path):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  flags = os.environ['XLA_FLAGS'].replace('device_count=8', 'device_count=4')
  processes = [
    subprocess.Popen(
      [
        *(sys.executable, '-m', 'tests.on_8_devices.loading_process'),
        *(address, str(i), folder, tmp_path / 'saved'),
      ],
      env=os.environ | {'XLA_FLAGS': flags},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      cwd=_ROOT,
    )
    for i in range(2)
  ]
  outputs = [process.communicate()[0] for process in processes]
  for process, output in zip(processes, outputs, strict=True):
    assert process.returncode == 0, '\n'.join(outputs)
    # Half of the weights, the norms, and the files' metadata.
    size = sum(path.stat().st_size for path in folder.glob('*.safetensors'))
    assert int(output.split()[-1]) < 0.55 * size
  # Failed saves have left nothing behind.
  assert sorted(os.listdir(tmp_path)) == ['drafter', 'saved']
  _assert_placed(specsample.load(tmp_path / 'saved'), whole)
