"""State dicts saved by torch, read without torch and without running code."""

import collections
import io
import os
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch

from specsample import files
from specsample.models import torch_file


def _read(path):
  return {
    name: tensor[(slice(None),) * len(tensor.shape)]
    for name, tensor in torch_file.read_header(files.at(path)).items()
  }


def test_tensors_are_what_torch_saved(tmp_path):
  torch.manual_seed(0)
  whole = torch.randn(6, 5)
  tensors = {
    'float': whole,
    'part': whole[2:4],  # in the same storage
    'one row': torch.randn(3, 7)[:1].t()[:1],
    'double': torch.randn(2, 3, 4).double(),
    'half': torch.randn(4).half(),
    'bfloat16': torch.randn(3, 2).bfloat16(),
    'd2t': torch.tensor([3, -1, 2**40]),
    'int': torch.tensor([7, -7], dtype=torch.int32),
    't2d': torch.tensor([True, False]),
    'empty': torch.zeros(0, 3),
  }
  path = tmp_path / 'model.pt'
  torch.save(tensors, path)
  found = _read(path)
  assert found.keys() == tensors.keys()
  for name, tensor in tensors.items():
    if name == 'bfloat16':
      assert found[name].dtype == ml_dtypes.bfloat16
      expected = tensor.float().numpy().astype(ml_dtypes.bfloat16)
    else:
      expected = tensor.numpy()
    assert found[name].dtype == expected.dtype
    np.testing.assert_array_equal(found[name], expected)


def test_a_modules_state_is_read_in_parts(tmp_path):
  """A state dict is an OrderedDict with attributes of its own."""
  module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
  path = tmp_path / 'model.pt'
  torch.save(module.state_dict(), path)
  found = torch_file.read_header(files.at(path))
  assert list(found) == ['0.weight', '0.bias', '1.weight', '1.bias']
  part = found['0.weight'][slice(1, 4), slice(2, 3)]
  np.testing.assert_array_equal(part, module[0].weight.detach()[1:4, 2:3])


class _Call:
  """An object that calls a function when it is unpickled."""

  def __init__(self, function, *arguments):
    self.call = function, arguments

  def __reduce__(self):
    return self.call


def _archive(path, pickled):
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('archive/data.pkl', pickled)


@pytest.mark.parametrize(
  ('function', 'name'),
  [
    (os.mkdir, r'(posix|nt)\.mkdir'),
    (eval, r'(builtins|__builtin__)\.eval'),
    (torch.nn.Linear, r'torch\.nn\.modules\.linear\.Linear'),
    (collections.Counter, r'collections\.Counter'),
  ],
)
@pytest.mark.parametrize('protocol', [0, 2, 5])
def test_a_pickle_runs_no_code(tmp_path, function, name, protocol):
  made = tmp_path / 'made'
  call = _Call(function, str(made))
  _archive(tmp_path / 'model.pt', pickle.dumps({'weight': call}, protocol))
  message = (
    rf'model\.pt does not hold named tensors .*asks for {name}, which is '
    'refused because it could run'
  )
  with pytest.raises(ValueError, match=message):
    _read(tmp_path / 'model.pt')
  assert not made.exists()
  # The pickle is not harmless; it is the reader that is careful.
  if function is os.mkdir:
    pickle.loads(pickle.dumps(call, protocol))
    assert made.is_dir()


# A function's defaults, a class's attribute and a storage type: if they were
# the reader's own, a pickle could change them for the next file.
_PATCHES = [
  (b'ctorch._utils\n_rebuild_tensor_v2\n', b'__defaults__'),
  (b'ccollections\nOrderedDict\n', b'__init__'),
  (b'ctorch\nFloatStorage\n', b'__doc__'),
]


@pytest.mark.parametrize(('target', 'attribute'), _PATCHES)
def test_a_pickle_changes_nothing_of_the_reader(tmp_path, target, attribute):
  patch = b"(N(dS'" + attribute + b"'\nI1\nstb."
  _archive(tmp_path / 'model.pt', target + patch)
  with pytest.raises(ValueError, match='does not hold named tensors'):
    _read(tmp_path / 'model.pt')
  torch.save({'weight': torch.ones(2)}, tmp_path / 'next.pt')
  np.testing.assert_array_equal(_read(tmp_path / 'next.pt')['weight'], [1, 1])


def _saved(content, **options):
  stream = io.BytesIO()
  torch.save(content, stream, **options)
  return stream.getvalue()


_WHOLE = _saved({'weight': torch.ones(64, 64)})


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'', 'not a zip file'),
    (_WHOLE[:-100], 'not a zip file'),
    (_WHOLE[: len(_WHOLE) // 2], 'not a zip file'),
    (
      _saved({'weight': torch.ones(2)}, _use_new_zipfile_serialization=False),
      'not a zip file',
    ),
    (_saved([torch.ones(2)]), 'its content is of type list, not a state dict'),
    (
      _saved({'state_dict': {}}),
      "'state_dict' is of type dict, not a named tensor",
    ),
    (_saved({'epoch': 3}), "'epoch' is of type int, not a named tensor"),
    (
      _saved({'weight': torch.ones(2, 3).t()}),
      r'weight of shape \(3, 2\) has strides \(1, 3\): save it with',
    ),
    (
      _saved({'weight': torch.nn.Parameter(torch.ones(2))}),
      r'asks for torch\._utils\._rebuild_parameter, which .* could run code',
    ),
    (
      _saved({'weight': torch.ones(2, dtype=torch.int8)}),
      r'asks for torch\.CharStorage, which .* could run code',
    ),
  ],
)
def test_what_holds_no_tensors_is_refused(tmp_path, content, message):
  path = tmp_path / 'model.pt'
  path.write_bytes(content)
  with pytest.raises(ValueError, match=message) as caught:
    _read(path)
  assert '\n' not in str(caught.value)


def test_a_storage_that_is_too_short_is_refused(tmp_path):
  path, short = tmp_path / 'model.pt', tmp_path / 'short.pt'
  path.write_bytes(_WHOLE)
  with zipfile.ZipFile(path) as whole, zipfile.ZipFile(short, 'w') as archive:
    for info in whole.infolist():
      data = whole.read(info)
      is_weights = info.filename.endswith('data/0')
      archive.writestr(info.filename, data[:100] if is_weights else data)
  with pytest.raises(ValueError, match='tensor weight has only 100 bytes'):
    _read(short)
