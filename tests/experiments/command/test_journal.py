import pytest

from experiments.command import journal

HEADER = {'configuration': {'a': '1'}, 'shape': (1, 2)}


def _open(path, header=HEADER):
  return journal.Journal(path, header)


def test_what_was_added_is_there_again(tmp_path):
  first = _open(tmp_path)
  first.add(('generation', 'ngram', 0), {'seconds': 0.1})
  first.add(('copy',), {'bytes': 3})
  first.close()
  again = _open(tmp_path)
  assert len(again) == 2
  assert again['generation', 'ngram', 0] == {'seconds': 0.1}
  assert ('copy',) in again
  assert ('generation', 'ngram', 1) not in again
  with pytest.raises(ValueError, match='already'):
    again.add(('copy',), {'bytes': 4})


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


def test_another_configuration_is_refused(tmp_path):
  _open(tmp_path).close()
  before = (tmp_path / 'journal.jsonl').read_bytes()
  with pytest.raises(
    ValueError,
    match=r'differs in configuration \(a = 2 \(before: 1\)\): give another',
  ):
    _open(tmp_path, HEADER | {'configuration': {'a': '2'}})
  assert (tmp_path / 'journal.jsonl').read_bytes() == before
  _open(tmp_path).close()


def test_the_settings_that_differ_are_named(tmp_path):
  header = {
    'configuration': {'A.x': '1', 'A.y': '[2, 3]', 'B.z': '4'},
    'versions': {'jax': '1', 'numpy': '2'},
    'weights': 'abc',
  }
  _open(tmp_path, header).close()
  other = {
    'configuration': {'A.x': '1', 'A.y': '[2, 5]', 'B.w': '4'},
    'versions': {'jax': '3', 'numpy': '2'},
    'weights': 'def',
  }
  expected = (
    r'differs in configuration \(A\.y = \[2, 5\] \(before: \[2, 3\]\); '
    r'B\.w = 4 \(before: not set\); B\.z = not set \(before: 4\)\), '
    r'versions \(jax = 3 \(before: 1\)\), weights: give another --out'
  )
  with pytest.raises(ValueError, match=expected):
    _open(tmp_path, other)


def test_damage_before_the_end_is_refused(tmp_path):
  _open(tmp_path).close()
  with (tmp_path / 'journal.jsonl').open('a') as file:
    file.write('{"key": [\n')
  with pytest.raises(ValueError, match='line 2 is damaged: delete'):
    _open(tmp_path)


def test_what_is_removed_is_begun_anew(tmp_path):
  first = _open(tmp_path)
  first.add(('copy',), {'bytes': 3})
  first.remove()
  assert not list(tmp_path.iterdir())
  assert not len(_open(tmp_path, HEADER | {'configuration': {'a': '2'}}))


def test_two_runs_do_not_write_at_once(tmp_path):
  running = _open(tmp_path)
  with pytest.raises(ValueError, match='in use by another run'):
    _open(tmp_path)
  running.close()
  _open(tmp_path).close()


def test_a_journal_that_cannot_be_written_is_one_message(tmp_path):
  (tmp_path / 'journal.jsonl').mkdir()
  with pytest.raises(ValueError, match='give an --out that can be written'):
    journal.Journal(tmp_path, {})
