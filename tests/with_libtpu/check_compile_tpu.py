"""`compile_tpu` from end to end, with TPU's compiler.

Not among the ordinary tests: the first run installs libtpu (0.2 GB), by the
command that `compile_tpu` prints.

  python -m pytest -o python_files='check_*.py' tests/with_libtpu
"""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_FIELDS = [
  *('model', 'weights', 'drafter', 'topology', 'devices', 'mesh'),
  *('batch_size', 'max_length', 'num_draft_tokens'),
  *('hbm_bytes_per_device', 'argument_bytes'),
  *('temp_bytes', 'peak_bytes', 'fits', 'collectives', 'host_transfers'),
  *('vocab_all_gathers', 'flops_per_round', 'bytes_per_round'),
  *('weight_copies_per_round', 'roofline_seconds_per_round'),
  'compile_seconds',
]
# The default configuration's pair with few layers.
_FEW_LAYERS = (
  '--gin_bindings=chinchilla_70b/transformer.Transformer.num_layers = 4',
  '--gin_bindings=chinchilla_4b/transformer.Transformer.num_layers = 1',
)
# The weights that a pass multiplies with, in bfloat16: layers and unembedding.
_TARGET_BYTES = 2 * 8192 * (4 * (4 * 8192 + 3 * 24576) + 32000)
_DRAFT_BYTES = 2 * 6144 * (4 * 6144 + 3 * 16384 + 32000)
_K = 4
_ON_CHIP_BYTES = 128 << 20  # a v4 or v5e may keep this much of them


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
    'v4:2x2x4: decoding loop',
    'v5e:4x4: prefill',
    'v5e:4x4: decoding loop',
  ]
  return out


@pytest.fixture(params=[0, 1], ids=['v4', 'v5e'])
def compiled(folder, request):
  """One topology's object in compile.json."""
  return json.loads((folder / 'compile.json').read_text())[request.param]


def test_the_fields_are_those_that_are_promised(compiled):
  assert list(compiled) == _FIELDS
  assert compiled['devices'] == 16
  for one in compiled['collectives']:
    assert list(one) == ['op', 'bytes', 'per_round']


def test_it_fits_and_moves_no_more_than_it_has_to(compiled):
  assert compiled['fits']
  assert compiled['peak_bytes'] < compiled['hbm_bytes_per_device']
  assert compiled['temp_bytes'] < compiled['argument_bytes'] / 10
  assert compiled['host_transfers'] == 0
  assert compiled['vocab_all_gathers'] == 0
  assert compiled['weight_copies_per_round'] == 0


def test_bytes_and_operations_are_those_of_weights_and_products(compiled):
  least = (_TARGET_BYTES + _DRAFT_BYTES) / 16 - _ON_CHIP_BYTES
  most = (_TARGET_BYTES + _K * _DRAFT_BYTES) / 16
  assert least < compiled['bytes_per_round'] < most
  operations = (_K + 1) * (_TARGET_BYTES + _DRAFT_BYTES) / 16
  assert 1 <= compiled['flops_per_round'] / operations < 1.1


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
  (compiled,) = json.loads((tmp_path / 'compile.json').read_text())
  assert compiled['fits']
  assert compiled['host_transfers'] == 0
  assert compiled['vocab_all_gathers'] == 0
  assert compiled['weight_copies_per_round'] == 0


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
  (compiled,) = json.loads((tmp_path / 'compile.json').read_text())
  assert compiled['fits']
  assert compiled['host_transfers'] == 0
  assert compiled['vocab_all_gathers'] == 0
  assert compiled['weight_copies_per_round'] == 0


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
  assert 'counted once' not in done.stderr
  (compiled,) = json.loads((tmp_path / 'compile.json').read_text())
  assert compiled['fits']
  assert compiled['host_transfers'] == 0
  assert compiled['vocab_all_gathers'] == 0
  assert compiled['weight_copies_per_round'] == 0
  # Going node by node, the rule would copy all 64 distributions 64 times.
  assert compiled['bytes_per_round'] < 1.3 * compiled['argument_bytes']
  # Two per layer, and fewer than two per node for everything else.
  collectives = sum(one['per_round'] for one in compiled['collectives'])
  assert collectives < 2 * 4 + 2 * 64


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
  assert 'v5e:2x2: DOES NOT FIT' in done.stdout
  (compiled,) = json.loads((tmp_path / 'compile.json').read_text())
  assert list(compiled) == _FIELDS
  assert not compiled['fits']
  needs = compiled['peak_bytes'] or compiled['argument_bytes']
  assert needs > compiled['hbm_bytes_per_device'] == 16 << 30


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
  (compiled,) = json.loads((tmp_path / 'compile.json').read_text())
  assert compiled['devices'] == 2 * 8
  assert compiled['vocab_all_gathers'] == 0
