"""Paths in buckets (gs://), and models that are read from there."""

import importlib
import itertools
import json
import shutil

import jax
import numpy as np
import pytest
import transformers

import specsample
from specsample import files
from specsample import testing
from specsample.models import checkpoint
from specsample.text import tokenizer_files
from tests import bucket


@pytest.fixture
def served(tmp_path):
  """The list of what is read from the bucket gs://bucket."""
  (tmp_path / 'bucket').mkdir()
  return bucket.make(tmp_path).served


def test_any_part_of_a_file_is_read(served, tmp_path, monkeypatch):
  monkeypatch.setattr(files, '_PART_BYTES', 7)
  monkeypatch.setattr(files, '_NUM_PARTS', 3)
  content = np.random.default_rng(0).bytes(200)
  local = tmp_path / 'bucket' / 'file'
  local.write_bytes(content)
  for path in (files.at(local), files.at('gs://bucket/file')):
    assert files.size(path) == 200
    for start, stop in ((0, 200), (13, 13), (13, 14), (0, 42), (41, 187)):
      buffer = bytearray(stop - start)
      files.read_into(path, start, memoryview(buffer))
      assert bytes(buffer) == content[start:stop]
    with pytest.raises(ValueError, match='file ends at byte 200 of 201'):
      files.read_into(path, 100, memoryview(bytearray(101)))
  assert max(stop - start for _, start, stop in served) == 7


@pytest.fixture(scope='module')
def folder(tmp_path_factory, smollm2):
  """A tiny model of transformers in several files, with a tokenizer."""
  folder = tmp_path_factory.mktemp('model')
  config = transformers.LlamaConfig(
    vocab_size=smollm2.tokenizer.vocab_size,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
  )
  tokenizer_files.save(smollm2.tokenizer, folder)
  model = transformers.LlamaForCausalLM(config)
  model.save_pretrained(folder, max_shard_size='1MB')
  return folder


@pytest.mark.slow
def test_a_folder_in_a_bucket_is_loaded(folder, served, tmp_path):
  shutil.copytree(folder, tmp_path / 'bucket' / 'model')
  expected = specsample.load(folder)
  loaded = specsample.load('gs://bucket/model')
  assert loaded.model == expected.model
  jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)
  assert loaded.tokenizer.encode('Hello') == expected.tokenizer.encode('Hello')
  # Every byte of the weights is read, and none twice.
  weights = sorted(folder.glob('*.safetensors'))
  assert len(weights) > 2
  for path in weights:
    parts = sorted(part[1:] for part in served if part[0] == path.name)
    assert parts[0][0] == 0 and parts[-1][1] == path.stat().st_size
    for (_, stop), (start, _) in itertools.pairwise(parts):
      assert start == stop


def _without_a_file(folder, bucket_folder):
  shutil.copytree(folder, bucket_folder / 'model')
  sorted((bucket_folder / 'model').glob('*.safetensors'))[1].unlink()


def _partly_saved(_, bucket_folder):
  params = bucket_folder / 'model' / 'params'
  params.mkdir(parents=True)
  (params / 'manifest.ocdbt').write_bytes(b'')


@pytest.mark.parametrize(
  ('make', 'path', 'words'),
  [
    (_without_a_file, 'gs://bucket/model', r'lacks model-00002-of-\d+\.safe'),
    (lambda *_: None, 'gs://bucket/model', 'gs://bucket/model does not exist'),
    (
      lambda _, bucket: (bucket / 'model.gguf').write_bytes(b'GGUF'),
      'gs://bucket/model.gguf',
      'copy it to one, or load a folder',
    ),
    (_partly_saved, 'gs://bucket/model', 'completely saved model'),
    (lambda *_: None, 's3://bucket/model', 'only gs:// is supported'),
    (lambda *_: None, 'http://host/model', 'only gs:// is supported'),
  ],
)
def test_what_cannot_be_loaded_is_refused_before_it_is_read(
  folder, served, tmp_path, make, path, words
):
  make(folder, tmp_path / 'bucket')
  with pytest.raises(ValueError, match=words):
    specsample.load(path)
  assert not served


def test_a_folder_of_a_bucket_is_not_overwritten(served, tmp_path):
  (tmp_path / 'bucket' / 'model').mkdir()
  model = testing.tiny_llama()
  params = model.init(jax.random.key(0))
  with pytest.raises(ValueError, match='gs://bucket/model exists'):
    checkpoint.save('gs://bucket/model', model, params)
  assert not list((tmp_path / 'bucket' / 'model').iterdir())
  assert not served


def test_json_is_kept_in_a_bucket(served, tmp_path):
  content = {'text': 'Grüße 🤗', 'numbers': [1, 2.5]}
  files.write_json(files.at('gs://bucket/folder/file.json'), content)
  stored = tmp_path / 'bucket' / 'folder' / 'file.json'
  assert json.loads(stored.read_text('utf-8')) == content
  assert files.read_json(files.at('gs://bucket/folder/file.json')) == content
  with pytest.raises(ValueError, match=r'gs://bucket/none\.json cannot be'):
    files.read_json(files.at('gs://bucket/none.json'))
  assert not served  # The file is opened, not read in parts.


def test_a_bucket_that_cannot_be_reached_is_named(tmp_path):
  bucket.make(tmp_path).error = RuntimeError('Anonymous caller\n has no access')
  with pytest.raises(ValueError) as caught:
    specsample.load('gs://bucket/model')
  for word in ('gs://bucket/model', 'caller has no access', 'credentials'):
    assert word in str(caught.value)


def test_the_package_that_is_missing_is_named(monkeypatch):
  # By name, because the package's attribute is a table of the same name.
  registry = importlib.import_module('fsspec.registry')
  missing = {'class': 'no_such_package.FileSystem', 'err': 'Install it'}
  monkeypatch.setitem(registry.known_implementations, 'gs', missing)
  monkeypatch.delitem(registry._registry, 'gs', raising=False)
  with pytest.raises(ValueError, match=r"pip install 'specsample\[gcs\]'"):
    specsample.load('gs://bucket/model')
