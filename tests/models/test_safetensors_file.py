"""Parts of arrays in safetensors files, against the format's own package."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from specsample import files
from specsample.models import safetensors_file


@pytest.fixture
def arrays():
  rng = np.random.default_rng(0)
  return {
    'vector': rng.normal(size=7).astype(np.float16),
    'matrix': rng.normal(size=(11, 6)),
    'half': rng.normal(size=(5, 4)).astype(ml_dtypes.bfloat16),
    'empty': np.zeros((0, 3), np.float32),
    'ids': np.arange(3),
  }


@pytest.fixture
def path(tmp_path, arrays):
  path = tmp_path / 'model.safetensors'
  safetensors.numpy.save_file(arrays, path, metadata={'format': 'np'})
  return path


@pytest.mark.parametrize('block_bytes', [1, 100, 2**20])
def test_parts_are_those_of_the_array(path, arrays, block_bytes, monkeypatch):
  monkeypatch.setattr(safetensors_file, '_BLOCK_BYTES', block_bytes)
  found = safetensors_file.read_header(files.at(path))
  assert {name: entry.shape for name, entry in found.items()} == {
    name: array.shape for name, array in arrays.items()
  }
  slices = [slice(None), slice(0, 3), slice(2, 4), slice(3, None)]
  for name in ('vector', 'matrix', 'half', 'empty'):
    for rows in slices:
      for columns in slices:
        index = (rows, columns)[: arrays[name].ndim]
        part = found[name][index]
        assert part.dtype == arrays[name].dtype
        np.testing.assert_array_equal(part, arrays[name][index])
  assert found['ids'].kind == 'I64'


def test_what_is_written_is_what_the_package_reads(tmp_path, arrays):
  path = tmp_path / 'model.safetensors'
  ids = np.arange(3, dtype=np.int32)
  written = arrays | {'ids': ids, 'columns': arrays['matrix'].T[:, ::2]}
  safetensors_file.write(files.at(path), written)
  found = safetensors.numpy.load_file(path)
  assert found.keys() == written.keys()
  for name, array in written.items():
    assert found[name].dtype == array.dtype
    np.testing.assert_array_equal(found[name], array)
  tensor = safetensors_file.read_header(files.at(path))['ids']
  np.testing.assert_array_equal(tensor[slice(1, 3),], ids[1:])


def test_an_array_of_no_supported_dtype_is_not_written(tmp_path, arrays):
  path = tmp_path / 'model.safetensors'
  arrays['ids'] = arrays['ids'].astype(np.uint32)
  with pytest.raises(
    ValueError, match='tensor ids is uint32, but the dtypes that can be writ'
  ):
    safetensors_file.write(files.at(path), arrays)
  assert not path.exists()


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'data_offsets': [0, 10**9]}, 'ends at byte 1000000'),
    ({'data_offsets': [0, 16]}, 'has 16 bytes, expected 20'),
    ({'data_offsets': [-4, 16]}, 'at offset -4'),
    ({'data_offsets': 20}, 'int'),
    ({'shape': [5, 2]}, 'has 20 bytes, expected 40'),
    ({'shape': [-5]}, r'shape \(-5,\)'),
    ({'shape': None}, 'NoneType'),
  ],
)
def test_a_damaged_entry_is_found(tmp_path, change, words):
  entry = {'dtype': 'F32', 'shape': [5], 'data_offsets': [0, 20]}
  path = tmp_path / 'model.safetensors'

  def write(entry):
    header = json.dumps({'x': entry}).encode()
    start = len(header).to_bytes(8, 'little')
    path.write_bytes(start + header + np.arange(5, dtype='<f4').tobytes())

  write(entry)
  (tensor,) = safetensors_file.read_header(files.at(path)).values()
  np.testing.assert_array_equal(tensor[slice(1, 3),], [1, 2])
  write(entry | change)
  with pytest.raises(ValueError, match=words) as caught:
    safetensors_file.read_header(files.at(path))
  assert f'{path} is not a complete safetensors file' in str(caught.value)


@pytest.mark.parametrize(
  ('places', 'words'),
  [
    (((0, 8), (8, 20)), None),
    (((8, 20), (0, 8)), None),
    (((0, 8), (8, 8), (8, 20)), None),
    (((0, 12), (8, 20)), 'tensor a and tensor b overlap at byte 8'),
    (((0, 20), (0, 20)), 'tensor a and tensor b overlap at byte 0'),
    (((0, 8), (4, 4), (8, 20)), 'tensor a and tensor b overlap at byte 4'),
    (
      ((4, 8), (8, 20)),
      'bytes 0 to 4, between the header and tensor a',
    ),
    (((0, 8), (12, 20)), 'bytes 8 to 12, between tensor a and tensor b'),
    (((0, 8), (8, 16)), 'bytes 16 to 20 belong to no tensor'),
  ],
)
def test_each_byte_belongs_to_one_tensor(tmp_path, places, words):
  header = {
    name: {'dtype': 'U8', 'shape': [end - begin], 'data_offsets': (begin, end)}
    for name, (begin, end) in zip('abc', places, strict=False)
  }
  content = json.dumps(header).encode()
  content = len(content).to_bytes(8, 'little') + content + bytes(20)
  path = tmp_path / 'model.safetensors'
  path.write_bytes(content)
  read = lambda: safetensors_file.read_header(files.at(path))
  if words is None:
    assert set(read()) == {name for name, _ in safetensors.deserialize(content)}
    return
  with pytest.raises(safetensors.SafetensorError):
    safetensors.deserialize(content)
  with pytest.raises(ValueError, match=words):
    read()


@pytest.mark.parametrize(
  'content',
  [
    b'',
    b'\x02',
    b'\xff' * 100,
    b'\x08' + bytes(7) + b'no JSON.',
    b'\x02' + bytes(7) + b'[]',
    b'\x07' + bytes(7) + b'{"x":1}',
  ],
)
def test_a_damaged_header_is_found(tmp_path, content):
  path = tmp_path / 'model.safetensors'
  path.write_bytes(content)
  with pytest.raises(ValueError, match='not a complete safetensors file'):
    safetensors_file.read_header(files.at(path))
