"""Fixtures and hooks that several test files share."""

import gc
import pathlib

import gguf
import jax
import numpy as np
import pytest

import specsample
from specsample.loop import decode
from specsample.loop import refill
from specsample.models import rotary
from specsample.models import transformer
from tests import tiers


def pytest_addoption(parser):
  """See tiers.py."""
  parser.addoption(
    '--nightly', action='store_true', help='run what is left for the night'
  )


def pytest_collection_modifyitems(config, items):
  """Deselects the tests of the other tier, and sorts the rest."""
  nightly = config.getoption('--nightly')
  names = [str(item.nodeid).removeprefix('tests/') for item in items]
  is_whole = not any('::' in str(argument) for argument in config.args)
  unused = tiers.that_fit_nothing(names) if is_whole else []
  if unused:
    raise pytest.UsageError(f'tests/tiers.py: no test is {unused}')
  keep = [tiers.is_of(nightly, name) for name in names]
  left_out = [item for item, kept in zip(items, keep, strict=True) if not kept]
  config.hook.pytest_deselected(items=left_out)
  items[:] = [item for item, kept in zip(items, keep, strict=True) if kept]
  folder = pathlib.Path(__file__).parent
  items.sort(key=lambda item: tiers.turn(str(item.path.relative_to(folder))))
  # These objects live until the end, so the garbage collector can skip them.
  gc.collect()
  gc.freeze()


@pytest.fixture(scope='module', autouse=True)
def _drop_executables():
  """Drops each file's executables: Linux allows only 65530 mappings."""
  yield
  jax.clear_caches()


@pytest.fixture(scope='session')
def num_compiled():
  """A function that counts the executables of continuous batching by part."""
  parts = (
    decode._advance,
    decode._emitted,
    decode._prefill,
    refill._empty,
    refill._replace,
  )
  return lambda: [part._cache_size() for part in parts]


@pytest.fixture(scope='session')
def smollm2():
  """SmolLM2-135M-Instruct in float32, read once per session."""
  return specsample.load('smollm2-135m-instruct')


@pytest.fixture(scope='session')
def tiny_llama():
  """A Llama model of two layers and its random parameters."""
  model = transformer.Transformer(
    vocab_size=96,
    num_layers=2,
    dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=96,
    max_length=128,
    rope_scaling=rotary.LinearRope(factor=2.0),
    # Rounded to float32, because that is how GGUF stores it.
    norm_eps=float(np.float32(1e-5)),
  )

  @jax.jit
  def init(key):
    # Noise, because norms of ones would hide that they are not applied.
    params = model.init(key)
    keys = iter(jax.random.split(key, len(jax.tree.leaves(params))))
    noise = lambda leaf: 0.1 * jax.random.normal(next(keys), leaf.shape)
    return jax.tree.map(lambda leaf: leaf + noise(leaf), params)

  return model, init(jax.random.key(0))


@pytest.fixture(scope='session')
def write_gguf():
  """The function `_write_gguf`."""
  return _write_gguf


def _write_gguf(path, metadata=(), tensors=(), kinds=()):
  """Writes metadata and tensors [out, in], some of them quantised."""
  metadata = dict(metadata)
  writer = gguf.GGUFWriter(path, metadata.pop('general.architecture', 'llama'))
  for key, value in metadata.items():
    writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
  for name, values in dict(tensors).items():
    kind = dict(kinds).get(name, gguf.GGMLQuantizationType.F32)
    stored = gguf.quantize(np.asarray(values, np.float32), kind)
    writer.add_tensor(name, stored, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
