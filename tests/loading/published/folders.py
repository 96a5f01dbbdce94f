"""Folders of published drafters: written, damaged, and saved again."""

import json

import jax
import numpy as np
import safetensors.numpy
import torch

import specsample
from specsample import testing


def save(folder, tensors, config, name='model.safetensors'):
  """Writes a folder, with safetensors or as torch does."""
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config))
  if name.endswith('.safetensors'):
    safetensors.numpy.save_file(tensors, folder / name)
  else:
    saved = {key: torch.from_numpy(x) for key, x in tensors.items()}
    torch.save(saved, folder / name)
  return folder


def load(folder, tensors, config, target):
  """Writes a folder and loads its drafter."""
  return specsample.load_drafter(save(folder, tensors, config), target)


def changed(tensors, **changes):
  """Returns the tensors with changes; those that become None are left out."""
  found = tensors | changes
  return {key: x for key, x in found.items() if x is not None}


def saved_again(path, loaded, target):
  """Returns what is loaded of a published drafter that the library saved."""
  specsample.save_drafter(
    path, loaded.drafter, loaded.params, target=target, card={}
  )
  again = specsample.load_drafter(path, target)
  assert again.drafter == loaded.drafter
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=0.01),
    again.params,
    loaded.params,
  )
  return again


def assert_greedy_equal(loaded, target, verify=None, drafter=None):
  """Compares the text with the target's; the drafter may be wrapped."""
  testing.assert_greedy_equal(
    {'target': target.params, 'drafter': loaded.params},
    np.asarray([[3, 1, 4, 9, 2], [8, 5, 0, 0, 0]]),
    np.asarray([5, 2]),
    model=target.model,
    drafter=drafter or loaded.drafter,
    verify=verify or specsample.verify.chain,
    max_new_tokens=6,
  )
