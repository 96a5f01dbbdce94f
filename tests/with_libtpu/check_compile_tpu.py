"""`compile_tpu` from end to end, with TPU's compiler.

Not among the ordinary tests: the first run installs libtpu (0.2 GB), by the
command that `compile_tpu` prints.

  python -m pytest -o python_files='check_*.py' tests/with_libtpu
"""

import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# The default configuration's pair with few layers.
_FEW_LAYERS = (
  '--gin_bindings=chinchilla_70b/transformer.Transformer.num_layers = 4',
  '--gin_bindings=chinchilla_4b/transformer.Transformer.num_layers = 1',
)
# The default number of drafts, of which all but one are made in a loop; XLA
# counts the operations of one of its turns.
_K = 4
# The weights that a pass multiplies with, in bfloat16: layers and unembedding.
_TARGET_BYTES = 2 * 8192 * (4 * (4 * 8192 + 3 * 24576) + 32000)
_DRAFT_BYTES = 2 * 6144 * (4 * 6144 + 3 * 16384 + 32000)


def _run(*flags):
  command = [sys.executable, '-m', 'experiments.compile_tpu', *flags]
  return subprocess.run(
    command,
    cwd=_ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    check=False,
  )


def _programs(folder):
  return json.loads((folder / 'compile.json').read_text())['programs']


def _check(folder):
  """Returns a folder's only program, which is as it should be."""
  (compiled,) = _programs(folder)
  assert compiled['fits']
  assert compiled['host_transfers'] == 0
  assert compiled['vocab_gathers'] == 0
  assert compiled['weight_copies'] == 0
  return compiled


@pytest.fixture(scope='module', autouse=True)
def libtpu():
  """Runs the command that the message has if libtpu is missing."""
  message = _run('--topology=v5e:3x3').stderr
  for command in re.findall('run `([^`]* -m pip [^`]*)`', message):
    subprocess.run(shlex.split(command), check=True)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The files that the command writes for two topologies."""
  out = tmp_path_factory.mktemp('out')
  topologies = ('--topology=v4:2x2x4', '--topology=v5e:4x4')
  done = _run(*_FEW_LAYERS, *topologies, f'--out={out}', f'--dump_hlo={out}')
  assert done.returncode == 0, done.stderr
  steps = done.stderr.splitlines()
  assert [step.partition(' ')[2] for step in steps] == [
    'v4:2x2x4: prefill',
    'v4:2x2x4: round',
    'v5e:4x4: prefill',
    'v5e:4x4: round',
  ]
  return out


@pytest.fixture(params=[0, 1], ids=['v4', 'v5e'])
def compiled(folder, request):
  """One topology's record in compile.json."""
  return _programs(folder)[request.param]


def test_it_fits_and_moves_no_more_than_it_has_to(compiled):
  assert compiled['fits']
  assert compiled['peak_gib'] < compiled['hbm_gib']
  assert compiled['temporary_gib'] < compiled['argument_gib'] / 10
  assert compiled['host_transfers'] == 0
  assert compiled['vocab_gathers'] == 0
  assert compiled['weight_copies'] == 0


def test_bytes_and_operations_are_those_of_weights_and_products(compiled):
  least = (_TARGET_BYTES + _DRAFT_BYTES) / 16
  most = 1.1 * (_TARGET_BYTES + _K * _DRAFT_BYTES) / 16
  assert least < 1e9 * compiled['gb_moved'] < most
  operations = ((_K + 1) * _TARGET_BYTES + 3 * _DRAFT_BYTES) / 16
  assert 1 <= 1e9 * compiled['gflops'] / operations < 1.1


def test_the_hlo_is_left(folder):
  names = {path.name for path in folder.glob('*.hlo')}
  assert names == {'v4_2x2x4.hlo', 'v5e_4x4.hlo'}


@pytest.mark.parametrize(
  'kind',
  [
    *('DraftModel', 'Medusa', 'Hydra', 'Eagle', 'Eagle3', 'MTP'),
    *('DFlash', 'DSpark'),
  ],
)
def test_every_trained_drafter_compiles_for_a_tpu(tmp_path, kind):
  done = _run(
    '--recipe=llama_8b',
    '--topology=v5e:2x4',
    f'--gin_bindings=CompileTpu.drafter = @{kind}()',
    f'--out={tmp_path}',
  )
  assert done.returncode == 0, done.stderr
  _check(tmp_path)


# Drafters whose parameters are another drafter's, or more than a model's.
_OTHERS = {
  'recording': """
    compilation.CompileTpu.drafter = @drafters.Recording()
    drafters.Recording.drafter = @drafters.Medusa()
    drafters.Recording.model = %LLAMA_8B
  """,
  'an adaptive tree': """
    compilation.CompileTpu.drafter = @drafters.Adaptive()
    compilation.CompileTpu.verify = @rule.Tree()
    drafters.Adaptive.drafter = @drafters.Tree()
    drafters.Adaptive.policies = (@policies.TopNodes(),)
    policies.TopNodes.num_nodes = 8
    drafters.Tree.drafter = @drafters.Medusa()
    drafters.Tree.topology = @tree.mc_sim_7b_63()
  """,
  'tli': """
    include 'configs/shapes.gin'
    llama_1b/transformer.Transformer.num_layers = 1
    llama_1b/transformer.Transformer.vocab_size = 32000
    compilation.CompileTpu.drafter = @drafters.TLI()
    drafters.TLI.model = %LLAMA_1B
    drafters.TLI.vocab_size = 128256
    drafters.TLI.num_draft_tokens = 4
  """,
}


@pytest.mark.parametrize('name', _OTHERS)
def test_every_other_drafter_compiles_for_a_tpu(tmp_path, name):
  imports = (
    *('__gin__ import dynamic_registration', 'experiments import compilation'),
    *('specsample import drafters', 'specsample import policies'),
    *('specsample import tree', 'specsample.models import transformer'),
    'specsample.verify import tree as rule',
  )
  lines = (
    *(f'from {one}' for one in imports),
    'llama_8b/transformer.Transformer.num_layers = 4',
    textwrap.dedent(_OTHERS[name]),
  )
  file = tmp_path / 'run.gin'
  file.write_text('\n'.join(lines))
  flags = ('--topology=v5e:2x4', f'--out={tmp_path}')
  files = '--gin_file=configs/runs/pods.gin', f'--gin_file={file}'
  done = _run(*files, '--recipe=llama_8b', *flags)
  assert done.returncode == 0, done.stderr
  _check(tmp_path)


def test_a_tree_moves_little_more_than_the_weights(tmp_path):
  done = _run(
    '--recipe=llama_8b/trees',
    '--gin_bindings=llama_8b/transformer.Transformer.num_layers = 4',
    '--gin_bindings=Eagle3.feature_layers = (0, 1, 2)',
    '--gin_bindings=tree.best.num_nodes = 64',
    f'--out={tmp_path}',
  )
  assert done.returncode == 0, done.stderr
  # Every loop has a known number of turns.
  assert 'counts once' not in done.stderr
  compiled = _check(tmp_path)
  # Going node by node, the rule would copy all 64 distributions 64 times.
  arguments = compiled['argument_gib'] * 2**30
  assert 1e9 * compiled['gb_moved'] < 1.3 * arguments
  # Two per layer, and fewer than two per node for everything else.
  assert compiled['collectives'] < 2 * 4 + 2 * 64


@pytest.mark.parametrize(
  'binding',
  [
    # More weights than memory, which is known before anything is compiled.
    'chinchilla_70b/transformer.Transformer.num_layers = 80',
    # Caches that the compiler refuses.
    'CompileTpu.batch_size = 2600',
  ],
)
def test_what_does_not_fit_ends_with_exit_code_1(tmp_path, binding):
  topology = '--topology=v5e:2x2'
  flags = (*_FEW_LAYERS, f'--gin_bindings={binding}', f'--out={tmp_path}')
  done = _run(*flags, topology)
  assert done.returncode == 1, done.stderr
  assert 'DOES NOT FIT: v5e:2x2' in done.stdout
  (compiled,) = _programs(tmp_path)
  assert not compiled['fits']
  needs = compiled['peak_gib'] or compiled['argument_gib']
  assert needs > compiled['hbm_gib'] == 16


def test_a_topology_that_the_compiler_refuses_is_one_line(tmp_path):
  done = _run('--topology=v5e:3x3', f'--out={tmp_path / "out"}')
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert "'v5e:3x3'" in line
  assert 'such as v5e:4x4' in line
  assert not (tmp_path / 'out').exists()


def test_slices_divide_the_batch(tmp_path):
  slices = [
    f'--gin_bindings=CompileTpu.{name} = 2'
    for name in ('num_slices', 'data', 'batch_size')
  ]
  out = f'--out={tmp_path}'
  done = _run(*_FEW_LAYERS, *slices, '--topology=v4:2x2x2', out)
  assert done.returncode == 0, done.stderr
  _check(tmp_path)
  assert math.prod(_programs(tmp_path)[0]['mesh'].values()) == 2 * 8
