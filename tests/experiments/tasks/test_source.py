import dataclasses
import gzip
import hashlib
import json
import sys

import pytest

from experiments.tasks import source

_TEXT = '{"a": "one"}\n\n{"a": "two", "b": 3}\n'

_REMEDY = (
  """: get it there, and --gin_bindings='Test.path = "FILE"' names a file """
  'of JSON lines with "a"'
)


def _source(path, **kwargs):
  return source.Source(
    task='Test',
    fields=('a',),
    configurable='Test',
    origin='get it there',
    path=None if path is None else str(path),
    **kwargs,
  )


def _file(folder, data, name='data.jsonl'):
  path = folder / name
  path.write_bytes(data if isinstance(data, bytes) else data.encode())
  return path


@pytest.mark.parametrize('name', ['data.jsonl', 'data.jsonl.gz'])
@pytest.mark.parametrize('convert', [bytes, gzip.compress])
def test_records_have_their_lines(tmp_path, name, convert):
  data = convert(_TEXT.encode())
  read = _source(_file(tmp_path, data, name)).read()
  assert read == [
    source.Record(1, {'a': 'one'}),
    source.Record(3, {'a': 'two', 'b': 3}),
  ]


def test_a_file_is_compared_with_the_published_one(tmp_path):
  digest = hashlib.sha256(_TEXT.encode()).hexdigest()
  for data in (_TEXT, gzip.compress(_TEXT.encode())):
    path = _file(tmp_path, data)
    for known, published in ((digest, True), ('0' * 64, False), (None, None)):
      found = _source(path, sha256=known).provenance()
      assert found == source.Provenance(str(path), digest, published)


@pytest.mark.parametrize(
  ('data', 'message'),
  [
    ('', 'it has no records'),
    ('\n \n', 'it has no records'),
    ('{"a": "one"}\n{"a": "tw', 'line 2 is not JSON'),
    ('{"a": "one"}\n["a"]', 'line 2 is not a JSON object'),
    (
      '{"a": "one"}\n{"b": "two"}',
      'line 2: "a" is None, but it should be a text',
    ),
    ('{"a": 3}', 'line 1: "a" is 3, but it should be a text'),
    ('{"a": " "}', 'line 1: "a" is \' \', but it should be a text'),
    (
      json.dumps({'a': ['x' * 10**5]}),
      'line 1: "a" is .*, but it should be a text',
    ),
    ('{"a": ' + '[' * 10**5, 'line 1 is not JSON .it is nested too deeply'),
    ('{"a": "\\ud83d"}', 'line 1: "a" holds half of a surrogate pair'),
    (b'{"a": "one"}\n{"a": "\xff"}', 'line 2 is not UTF-8: convert'),
  ],
  ids=lambda text: str(text[:40]),
)
def test_what_is_no_data_set_is_refused(tmp_path, data, message):
  path = _file(tmp_path, data)
  with pytest.raises(ValueError, match=message) as error:
    _source(path).read()
  shown = str(error.value)
  assert shown.startswith(f'Test: {path}: ')
  reason = shown.removesuffix(_REMEDY)
  assert reason != shown
  assert len(reason) < len(str(path)) + 200


@pytest.mark.parametrize('length', [3, 30])
def test_half_of_a_compressed_file_is_refused(tmp_path, length):
  data = gzip.compress(_TEXT.encode())[:length]
  with pytest.raises(ValueError, match=r'it is damaged.*: get it there'):
    _source(_file(tmp_path, data, 'data.jsonl.gz')).read()


def test_an_absent_file_is_refused(tmp_path):
  path = tmp_path / 'nowhere.jsonl'
  for call in (_source(path).read, _source(path).provenance):
    with pytest.raises(ValueError, match=r'No such file.*: get it there'):
      call()
  with pytest.raises(ValueError, match='no file is given: get it there'):
    _source(None).read()


# The part of the hub's library that is called, serving a folder.
_LIBRARY = """
import json, pathlib

def load_dataset(path, name=None, *, split, revision=None):
  file = pathlib.Path(__file__).with_name(f'{split}.jsonl')
  assert (path, name, revision) == ('owner/set', 'main', 'v1')
  return [json.loads(line) for line in file.read_text().splitlines()]
"""


def test_the_hub_is_read_through_its_library(tmp_path, monkeypatch):
  _file(tmp_path, _LIBRARY, 'datasets.py')
  _file(tmp_path, '{"a": "one"}\n{"a": "two"}', 'test.jsonl')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'datasets', raising=False)
  subset = source.Subset('owner/set', 'main', 'test', 'v1')
  from_hub = _source(None, hub=subset)
  assert [record.values['a'] for record in from_hub.read()] == ['one', 'two']
  lines = ''.join(json.dumps({'a': x}) + '\n' for x in ('one', 'two'))
  from_whole = from_hub.provenance()
  assert from_whole == source.Provenance(
    'hub: owner/set, main, test, v1',
    hashlib.sha256(lines.encode()).hexdigest(),
    None,
  )
  # Records left out count as absent.
  _file(tmp_path, '{"a": "one"}\n{"a": ""}\n{"a": "two"}', 'test.jsonl')
  skipping = _source(None, hub=subset, skip_without='a')
  assert [record.line for record in skipping.read()] == [1, 3]
  assert skipping.provenance() == dataclasses.replace(from_whole, left_out=1)
  absent = _source(None, hub=source.Subset('owner/set', 'main', 'train', 'v1'))
  with pytest.raises(ValueError, match=r'FileNotFoundError.*: get it there'):
    absent.read()
  monkeypatch.delitem(sys.modules, 'datasets', raising=False)


def test_without_the_hub_library_a_file_is_asked_for(monkeypatch):
  # Python marks modules that cannot be imported this way.
  monkeypatch.setitem(sys.modules, 'datasets', None)
  subset = source.Subset('owner/set', None, 'test')
  with pytest.raises(ValueError, match=r'specsample\[data\].*: get it there'):
    _source(None, hub=subset).read()
