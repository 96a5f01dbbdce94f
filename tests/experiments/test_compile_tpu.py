"""`compile_tpu` without TPU's compiler, up to where it needs it."""

import dataclasses
import os
import pathlib
import re

import gin
import pytest

from experiments.tpu import environment

# Flags, and the parts of the expected line, in that order.
_BAD = {
  '--topology=v9:2x2': "'v9:2x2' ... v4:2x2x4, v5e:4x4, v5p:2x2x4, v6e:4x4",
  '--topology=h100:8': "'h100:8' is not a TPU ... v4:2x2x4 ... h100",
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
    "CompileTpu.rules has 'heads' ... batch, kv_heads"
  ),
  '--gin_bindings=CompileTpu.chips = 4': "'chips' ... configs/",
  '--topologies=v5e:4x4': "'topologies' ... --help",
  '': 'installing libtpu ... failed: ... libtpu ... pip ... run this again',
}


@pytest.fixture(scope='module')
def outcomes(commands, tmp_path_factory):
  """The outcome of each case if pip has nothing to install, and --out."""
  folder = tmp_path_factory.mktemp('out') / 'results'
  calls = [
    ['compile_tpu', f'--out={folder}', *re.split(' (?=--)', flags)]
    for flags in _BAD
  ]
  calls[-1].pop()
  nothing_to_install = {
    'PIP_NO_INDEX': '1',
    'PIP_FIND_LINKS': '',
    'PIP_CONFIG_FILE': os.devnull,
  }
  ended = commands.run_all(calls, variables=nothing_to_install)
  return dict(zip(_BAD, ended, strict=True)), folder


@pytest.mark.parametrize('flags', _BAD)
def test_one_line_says_what_to_do(outcomes, flags):
  outcome = outcomes[0][flags]
  assert outcome.code == 2, outcome.err
  assert outcome.out == ''
  pattern = '.*'.join(map(re.escape, _BAD[flags].split(' ... ')))
  assert re.fullmatch(f'.*{pattern}.*\n', outcome.err), outcome.err


def test_nothing_is_left(outcomes, commands):
  assert not outcomes[1].exists()
  assert not (pathlib.Path(commands.cache) / 'specsample/libtpu').exists()


@pytest.fixture
def commands_here(commands, tmp_path):
  """The commands with a cache folder of their own, and without packages."""
  here = dataclasses.replace(
    commands, cache=str(tmp_path), variables={'PIP_NO_INDEX': '1'}
  )
  yield here
  here.close()


@pytest.fixture
def installed(tmp_path):
  """A finished environment; its interpreter prints how it was started."""
  folder = tmp_path / 'specsample' / 'libtpu'
  library = folder / 'lib/python3/site-packages/libtpu/libtpu.so'
  python = folder / 'bin' / 'python'
  for path in (library, python):
    path.parent.mkdir(parents=True)
  library.touch()
  python.write_text('#!/bin/sh\necho "$@"\nenv\n')
  python.chmod(0o755)
  (folder / 'installed').write_text(environment._wanted())
  return folder


_FLAG = '--gin_bindings=CompileTpu.batch_size = 2'


def test_an_environment_is_made_once(commands_here, installed):
  outcome = commands_here.run('compile_tpu', _FLAG)
  assert outcome.code == 0, outcome.err
  command, *variables = outcome.out.splitlines()
  assert command == f'-m experiments.compile_tpu {_FLAG}'
  assert {'ALLOW_MULTIPLE_LIBTPU_LOAD=1', 'JAX_PLATFORMS=cpu'} <= set(variables)
  # Packages installed where the command was started are visible there too.
  (path,) = (x for x in variables if x.startswith('PYTHONPATH='))
  assert os.path.dirname(os.path.dirname(gin.__file__)) in path.split(':')


@pytest.mark.parametrize('mark', [None, 'libtpu==0.0.1\n'])
def test_an_interrupted_or_old_environment_is_made_again(
  commands_here, installed, mark
):
  (installed / 'installed').unlink()
  if mark is not None:
    (installed / 'installed').write_text(mark)
  outcome = commands_here.run('compile_tpu', _FLAG)
  assert outcome.code == 2
  assert 'failed' in outcome.err
  assert not installed.exists()
