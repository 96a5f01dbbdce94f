"""Drafters by their names on the Hugging Face hub."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import torch

import specsample
from specsample import testing

_MODEL = testing.tiny_llama(num_layers=1)
_TARGET = specsample.Loaded(_MODEL, _MODEL.init(jax.random.key(0)), None)

_LOAD = """
import jax
import specsample
from specsample import testing
model = testing.tiny_llama(num_layers=1)
target = specsample.Loaded(model, model.init(jax.random.key(0)), None)
for name in ('organisation/medusa', 'organisation/own'):
  loaded = specsample.load_drafter(name, target)
  print(type(loaded.drafter).__name__, loaded.drafter.num_draft_tokens)
try:
  specsample.load_drafter('organisation/absent', target)
except ValueError as error:
  print(error)
"""


def _cache(home: pathlib.Path, folder: pathlib.Path) -> None:
  """Copies a folder to where the hub's package keeps downloads."""
  cached = home / 'hub' / f'models--organisation--{folder.name}'
  commit = '0' * 40
  shutil.copytree(folder, cached / 'snapshots' / commit)
  (cached / 'refs').mkdir()
  (cached / 'refs' / 'main').write_text(commit)


def test_published_and_own_drafters_are_loaded_from_the_cache(tmp_path):
  """Runs in its own process, as the hub's package reads its settings once."""
  medusa, own = tmp_path / 'medusa', tmp_path / 'own'
  medusa.mkdir()
  rng = np.random.default_rng(0)
  shapes = {'0.linear.weight': (16, 16), '0.linear.bias': (16,)}
  shapes |= {'1.weight': (32, 16)}
  tensors = {
    f'{i}.{name}': torch.from_numpy(rng.normal(size=shape).astype(np.float32))
    for i in range(2)
    for name, shape in shapes.items()
  }
  torch.save(tensors, medusa / 'medusa_lm_head.pt')
  eagle = specsample.drafters.Eagle(model=_MODEL, num_draft_tokens=3)
  params = eagle.init_params(jax.random.key(1))
  specsample.save_drafter(own, eagle, params, target=_TARGET, card={})
  _cache(tmp_path, medusa)
  _cache(tmp_path, own)
  lines = subprocess.run(
    [sys.executable, '-c', _LOAD],
    env=os.environ | {'HF_HOME': str(tmp_path), 'HF_HUB_OFFLINE': '1'},
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  ).stdout.splitlines()
  assert lines[:2] == ['Medusa 2', 'Eagle 3']
  assert len(lines) == 3
  assert "'organisation/absent' is neither a folder nor a drafter" in lines[2]
  assert 'could not be downloaded from the hub' in lines[2]
  assert 'smollm2-135m-instruct/medusa' in lines[2]
