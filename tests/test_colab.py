"""The notebooks, run from top to bottom in a kernel as a reader runs them.

Not by `exec`: what a cell displays, and that a plot is inline, is seen only
through a kernel. It takes two seconds to start.
"""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import nbclient
import nbformat
import pytest

import specsample
from specsample.choosing import pass_times

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_FOLDER = _ROOT / 'colab'
_NAMES = [
  *('add_a_drafter', 'audit', 'quickstart', 'reproduce_a_table', 'rollouts')
]
# Seconds for a cell: far more than it takes, as tests may share a machine.
_TIMEOUT = 1800


def _read(name):
  return nbformat.read(_FOLDER / f'{name}.ipynb', as_version=4)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """The function that runs a notebook: the outputs of its cells, by id."""
  ipython = str(tmp_path_factory.mktemp('ipython'))

  def outputs(name):
    notebook = _read(name)
    client = nbclient.NotebookClient(
      notebook,
      timeout=_TIMEOUT,
      kernel_name='python3',
      resources={'metadata': {'path': str(_FOLDER)}},
    )
    environment = os.environ | {'IPYTHONDIR': ipython}
    client.execute(env=environment)  # raises what a cell raises
    cells = [cell for cell in notebook.cells if 'outputs' in cell]
    return {cell.id: cell.outputs for cell in cells}

  return outputs


def _text(outputs):
  return ''.join(output.text for output in outputs if 'text' in output)


def _displayed(outputs, kind):
  return [
    output.data[kind] for output in outputs if kind in output.get('data', {})
  ]


@pytest.mark.slow
def test_quickstart(run, smollm2, tmp_path, monkeypatch):
  # As if `auto` had been here before, on a machine where nothing pays: timing
  # takes most of a minute, and decoding of another kind is compiled anew.
  monkeypatch.setenv('SPECSAMPLE_CACHE', str(tmp_path))
  seconds = lambda _, __, sizes, **___: {n: [1.0 * n] * 2 for n in sizes}
  monkeypatch.setattr(pass_times, 'passes', seconds)
  monkeypatch.setattr(pass_times, 'drafting', lambda *_, **__: [0.2, 0.2])
  specsample.auto(smollm2)
  cells = run('quickstart')
  assert cells['install'] == []  # nothing is installed, nothing said
  textbook = _text(cells['textbook'])
  kept = re.findall(r'kept with probability (\S+)', textbook)
  assert kept == ['0.889', '0.375', '1.000']
  assert 'in its place: mat 0.00, sofa 0.80, moon 0.20\n' in textbook
  passes = re.findall(r'tokens in (\d+) passes', _text(cells['equal']))
  plain, drafted = map(int, passes)
  assert plain == 48 > drafted
  assert re.match(r'decodes plainly.*\n$', _text(cells['auto']))
  assert _text(cells['stream']).count('|') == drafted  # a part for each round
  for name in ('origin', 'sampled'):
    (view,) = _displayed(cells[name], 'text/html')
    assert view.count('class="o accepted') > 3
  assert _displayed(cells['histogram'], 'image/png')
  assert len(_text(cells['another-key'])) > 100
  (view,) = _displayed(cells['rounds'], 'text/html')
  assert '<del>' in view and '>round 2<' in view


@pytest.mark.nightly
def test_reproduce_a_table(run):
  cells = run('reproduce_a_table')
  rows = [line.split() for line in _text(cells['table']).splitlines()[2:]]
  assert [row[0] for row in rows] == ['0', '1', '2', '3', '4']
  for row in rows[1:]:
    kept, predicted, measured = map(float, row[1:4])
    assert 0 < kept < 1
    # The formula assumes independent drafts, which these are not.
    assert measured == pytest.approx(predicted, rel=0.25)
  assert _displayed(cells['plot'], 'image/png')


@pytest.mark.nightly
def test_add_a_drafter(run):
  cells = run('add_a_drafter')
  (view,) = _displayed(cells['run'], 'text/html')
  assert view.count('class="o accepted') > 3
  caught = _text(cells['caught'])
  assert 'certify: Chain() is not exact' in caught
  assert 'does not follow the target: chi-square' in caught
  assert _displayed(cells['see'], 'image/png')


@pytest.mark.nightly
def test_rollouts(run):
  cells = run('rollouts')
  lines = _text(cells['train']).splitlines()
  assert len(lines) == 3
  rounds = [float(re.search(r'(\S+) tokens per', line)[1]) for line in lines]
  assert rounds[-1] > rounds[0] >= 1
  losses = [re.findall(r'-?\d\.\d{4}', line) for line in lines]
  assert any(float(second) < -1e-3 for _, second in losses)
  assert _displayed(cells['plot'], 'image/png')


@pytest.mark.nightly
def test_audit(run, monkeypatch, tmp_path):
  # No clone is there.
  for name in ('TPU_INFERENCE', 'SGLANG_JAX'):
    monkeypatch.setenv(name, str(tmp_path / name))
  cells = run('audit')
  assert 'DIFFERS' in _text(cells['yours'])
  assert 'DIFFERS' in _text(cells['sampled'])
  assert _text(cells['transformers']).count(': follows the target, ') == 6
  assert 'DIFFERS' not in _text(cells['transformers'])
  for name in ('tpu-inference', 'sglang-jax'):
    assert _text(cells[name]).endswith(' is not there: skipped\n')


# A runtime without the library, where installing clones the repository and
# lets Python find nothing by itself until it starts anew.
_FRESH = """
import os, runpy, subprocess, sys
sys.meta_path = [x for x in sys.meta_path if 'editable' not in str(x)]
sys.path = [x for x in sys.path if os.path.realpath(x) != {root!r}]
commands = []

def run(command, check):
  commands.append(command)
  if command[0] == 'git':
    assert command[-1] == os.path.join(os.getcwd(), 'specsample_repository')
    os.symlink({root!r}, command[-1])

subprocess.run = run
runpy.run_path('install.py')
import experiments, specsample
assert 'specsample_repository' in specsample.__file__, specsample.__file__
assert [command[0] for command in commands][:2] == ['git', sys.executable]
# The accelerator found: nvidia-smi on the path looks like a GPU.
assert commands[-1][-1] in ('jax[tpu]>=0.10.2', 'jax[cuda12]>=0.10.2'), commands
"""


def _install(name):
  (cell,) = (cell for cell in _read(name).cells if cell.id == 'install')
  return cell.source


@pytest.mark.slow
def test_fresh_runtime_finds_what_it_installed(tmp_path):
  (tmp_path / 'install.py').write_text(_install('quickstart'), 'utf-8')
  programs = tmp_path / 'bin'
  programs.mkdir()
  (programs / 'nvidia-smi').touch(mode=0o755)
  path = f'{programs}{os.pathsep}{os.environ["PATH"]}'
  done = subprocess.run(
    # -P: the folder of the repository is not on its path.
    [sys.executable, '-P', '-c', _FRESH.format(root=str(_ROOT))],
    env={k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    | {'PATH': path},
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr


def test_all_notebooks_are_run_and_install_the_same():
  assert {path.stem for path in _FOLDER.glob('*.ipynb')} == set(_NAMES)
  assert len(set(map(_install, _NAMES))) == 1


@pytest.mark.parametrize('name', _NAMES)
def test_notebook_is_valid_and_without_outputs(name):
  notebook = _read(name)
  nbformat.validate(notebook)
  for cell in notebook.cells:
    if cell.cell_type == 'code':
      assert cell.outputs == []
      assert cell.execution_count is None
  project = tomllib.loads((_ROOT / 'pyproject.toml').read_text('utf-8'))
  repository = project['project']['urls']['Repository']
  path = f'{repository.removeprefix("https://github.com/")}/blob/main/colab'
  badge = f'https://colab.research.google.com/github/{path}/{name}.ipynb'
  assert f'href="{badge}"' in notebook.cells[0].source
  assert f"REPOSITORY = '{repository}'\n" in _install(name)
