"""`compile_tpu` without TPU's compiler, up to where it needs it."""

import os
import pathlib
import re

import pytest

from experiments.tpu import libtpu

# Flags, and the parts of the expected line, in that order.
_BAD = {
  '--topology=v9:2x2': "'v9:2x2' ... v4:2x2x4, v5e:4x4, v5p:2x2x4, v6e:4x4",
  '--topology=h100:8': "'h100:8' is not a TPU ... give one of v4:2x2x4",
  '--topology=v5e:4x4 --topology=v4:4x4': "'v4:4x4' ... 3 axes ... v4:2x2x4",
  '--topology=v5e': "'v5e' ... 2 axes ... v5e:4x4",
  '--topology=v5e:4xb': "'v5e:4xb' ... 2 axes ... v5e:4x4",
  '--gin_bindings=CompileTpu.topologies = ()': (
    'no topology ... --topology ... v4:2x2x4'
  ),
  '--gin_bindings=CompileTpu.batch_size = 0': (
    'CompileTpu.batch_size is 0 ... at least 1'
  ),
  '--gin_bindings=CompileTpu.data = 0': 'CompileTpu.data is 0 ... at least 1',
  "--gin_bindings=CompileTpu.rules = (('heads', ('model',)),)": (
    "CompileTpu.rules has 'heads' ... batch, tokens, kv_heads"
  ),
  '--gin_bindings=CompileTpu.chips = 4': "'chips' ... configs/",
  '--topologies=v5e:4x4': "'topologies' ... --help",
  '': 'libtpu, ... is not installed ... -m pip install ... libtpu== ... again',
}


@pytest.fixture(scope='module')
def outcomes(commands, tmp_path_factory):
  """The outcome of each case, and --out."""
  folder = tmp_path_factory.mktemp('out') / 'results'
  calls = [
    ['compile_tpu', f'--out={folder}', *re.split(' (?=--)', flags)]
    for flags in _BAD
  ]
  calls[-1].pop()
  ended = commands.run_all(calls)
  return dict(zip(_BAD, ended, strict=True)), folder


@pytest.mark.parametrize('flags', _BAD)
def test_one_line_says_what_to_do(outcomes, flags):
  outcome = outcomes[0][flags]
  assert outcome.code == 2, outcome.err
  assert outcome.out == ''
  pattern = '.*'.join(map(re.escape, _BAD[flags].split(' ... ')))
  assert re.fullmatch(f'.*{pattern}.*\n', outcome.err), outcome.err


def test_nothing_is_left(outcomes):
  assert not outcomes[1].exists()


def test_libtpu_is_found_where_the_command_installs_it(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setenv('TPU_LIBRARY_PATH', '')  # so that it is put back
  with pytest.raises(ValueError, match='is not installed') as error:
    libtpu.find_libtpu()
  (folder,) = re.findall('--target=([^ ]+)', str(error.value))
  library = pathlib.Path(folder) / 'libtpu' / 'libtpu.so'
  library.parent.mkdir(parents=True)
  library.touch()
  libtpu.find_libtpu()
  assert os.environ['TPU_LIBRARY_PATH'] == str(library)
  # Another version of JAX has another folder: libtpu is of its version.
  assert re.fullmatch(r'libtpu-[0-9.]*[0-9]', pathlib.Path(folder).name)
