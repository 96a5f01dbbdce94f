"""Journals in a folder, here and in a bucket (gs://)."""

import pytest

from experiments.command import journal
from specsample import files
from tests import bucket

_HEADER = {'configuration': {'a': '1'}, 'shape': (1, 2)}


@pytest.fixture(params=['here', 'in a bucket'])
def folder(request, tmp_path):
  if request.param == 'here':
    return tmp_path
  bucket.make(tmp_path)
  return files.at('gs://bucket/run')


def _open(path, header=_HEADER):
  return journal.Journal(path, header)


def test_what_was_added_is_there_again(folder):
  first = _open(folder)
  first.add(('generation', 'n/a, b', 0), {'seconds': 0.1})
  first.add(('generation', 'n', 'a, b/0'), {'seconds': 0.2})
  first.add(('copy',), {'bytes': 3})
  first.close()
  again = _open(folder)
  assert len(again) == 3
  assert again['generation', 'n/a, b', 0] == {'seconds': 0.1}
  assert again['generation', 'n', 'a, b/0'] == {'seconds': 0.2}
  assert ('copy',) in again
  assert ('generation', 'n', 1) not in again
  with pytest.raises(ValueError, match='already'):
    again.add(('copy',), {'bytes': 4})


def test_what_is_removed_is_begun_anew(folder):
  first = _open(folder)
  first.add(('copy',), {'bytes': 3})
  first.remove()
  assert not list(folder.iterdir())
  assert not len(_open(folder, _HEADER | {'configuration': {'a': '2'}}))


def test_settings_that_differ_are_named_and_nothing_changes(folder):
  header = {
    'configuration': {'A.x': '1', 'A.y': '[2, 3]', 'B.z': '4'},
    'versions': {'jax': '1', 'numpy': '2'},
    'weights': 'abc',
  }
  _open(folder, header).close()
  other = {
    'configuration': {'A.x': '1', 'A.y': '[2, 5]', 'B.w': '4'},
    'versions': {'jax': '3', 'numpy': '2'},
    'weights': 'def',
  }
  expected = (
    r'belongs to a run that differs in configuration \(A\.y = \[2, 5\] '
    r'\(before: \[2, 3\]\); B\.w = 4 \(before: not set\); B\.z = not set '
    r'\(before: 4\)\), versions \(jax = 3 \(before: 1\)\), weights: give '
    'another --out'
  )
  with pytest.raises(ValueError, match=expected):
    _open(folder, other)
  _open(folder, header).close()


def test_a_kill_at_any_byte_loses_the_last_unit_at_most(tmp_path):
  whole = _open(tmp_path)
  for i in range(3):
    whole.add(('unit', i), {'value': i})
  whole.close()
  data = (tmp_path / 'journal.jsonl').read_bytes()
  for size in range(len(data) + 1):
    (tmp_path / 'journal.jsonl').write_bytes(data[:size])
    resumed = _open(tmp_path)
    complete = max(data[:size].count(b'\n') - 1, 0)  # the header is a line too
    assert len(resumed) == complete
    for i in range(complete, 3):
      resumed.add(('unit', i), {'value': i})
    resumed.close()
    assert (tmp_path / 'journal.jsonl').read_bytes() == data


def test_two_runs_do_not_write_at_once(tmp_path):
  running = _open(tmp_path)
  with pytest.raises(ValueError, match='in use by another run'):
    _open(tmp_path)
  running.close()
  _open(tmp_path).close()


def test_damage_before_the_end_is_refused(tmp_path):
  _open(tmp_path).close()
  with (tmp_path / 'journal.jsonl').open('a') as file:
    file.write('{"key": [\n')
  with pytest.raises(ValueError, match='line 2 is damaged: delete'):
    _open(tmp_path)


def test_a_journal_that_cannot_be_written_is_one_message(tmp_path):
  (tmp_path / 'journal.jsonl').mkdir()
  with pytest.raises(ValueError, match='give an --out that can be written'):
    journal.Journal(tmp_path, {})


@pytest.fixture
def objects(tmp_path):
  """A folder in a bucket, and the folder here that has its journal."""
  bucket.make(tmp_path)
  remote = files.at('gs://bucket/run')
  whole = _open(remote)
  whole.add(('copy',), {'bytes': 3})
  whole.add(('generation', 'n/a, b', 0), {'seconds': 0.1})
  return remote, tmp_path / 'bucket' / 'run' / 'journal'


def test_each_unit_of_a_bucket_is_an_object(objects):
  names = {path.name for path in objects[1].iterdir()}
  assert len(names) == 3
  assert {'header.json', 'copy.json'} < names


@pytest.mark.parametrize(
  ('damage', 'words'),
  [
    (lambda x: (x / 'header.json').unlink(), 'has no header.json: give'),
    (
      lambda x: (x / 'copy.json').write_text('{"key": ['),
      r'copy\.json is damaged: delete the file',
    ),
  ],
)
def test_damage_in_a_bucket_is_refused(objects, damage, words):
  remote, local = objects
  damage(local)
  with pytest.raises(ValueError, match=words):
    _open(remote)
