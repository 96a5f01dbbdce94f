"""An evaluation that is killed, runs out of disk and is interrupted."""

import dataclasses
import json
import re
import resource
import signal

import pytest

from experiments.command import environment

_PROMPTS = 10
_NEW_TOKENS = 96
_METHODS = ('autoregressive', 'ngram')
_KEYS = {
  *(('memory_bandwidth', i) for i in range(2)),
  *(('generation', name, i) for name in _METHODS for i in range(_PROMPTS)),
  *(('parts', name, i) for name in _METHODS for i in range(_PROMPTS)),
}
# A line of the progress: the number of steps, and the step that begins.
_STEP = re.compile(r'\d+/(\d+), (?:\S+ left, )?(.*)')


@dataclasses.dataclass(frozen=True)
class Story:
  """The outcomes of runs, and snapshots of the folder that they share."""

  ended: dict
  files: dict


@pytest.fixture(scope='module')
def story(commands, tiny_evaluate, tmp_path_factory):
  """One folder of results, and everything that happens to it."""
  folder = tmp_path_factory.mktemp('resume')
  out = folder / 'out'
  lines = [f'Is {i} an even number?\n' for i in range(_PROMPTS)]
  (folder / 'prompts.txt').write_text(''.join(lines))
  methods = ', '.join(f"'{name}': @{name}/Method()" for name in _METHODS)
  call = [
    'evaluate',
    *tiny_evaluate,
    f'--gin_bindings=Evaluation.methods = {{{methods}}}',
    f'--gin_bindings=Evaluation.max_new_tokens = {_NEW_TOKENS}',
    f'--gin_bindings=Evaluation.repeats = {_PROMPTS}',
    f'--prompts={folder / "prompts.txt"}',
    f'--out={out}',
  ]
  ended, files = {}, {}

  def look(moment):
    files[moment] = {path.name: path.read_bytes() for path in out.iterdir()}

  def units():
    journal = out / 'journal.jsonl'
    return journal.read_bytes().count(b'\n') - 1 if journal.exists() else 0

  commands.kill_once(lambda: units() >= 6, *call)
  look('killed')
  full = commands.start(*call)
  # Like a full disk: no file may become larger than the journal is.
  size = (out / 'journal.jsonl').stat().st_size
  resource.prlimit(full.pid, resource.RLIMIT_FSIZE, (size, size))
  ended['full'] = commands.finish(full)
  look('full')
  second = commands.start(*call)
  commands.wait(lambda: units() >= 12, second)
  second.send_signal(signal.SIGINT)
  ended['interrupted'] = commands.finish(second)
  look('interrupted')
  ended['finished'] = commands.run(*call)
  look('finished')
  return Story(ended, files)


def _records(files):
  """Returns the journal's complete lines; the first one describes the run."""
  return files['journal.jsonl'].split(b'\n')[:-1]


def _keys(files):
  return [tuple(json.loads(line)['key']) for line in _records(files)[1:]]


@pytest.mark.slow
def test_a_run_is_held_to_the_code_and_not_to_the_commit(story):
  header = json.loads(_records(story.files['killed'])[0])
  assert header['code'] == environment.source()
  # The commit also changes with other files, such as the results themselves.
  assert environment.git_commit() not in header.values()
  assert header['target weights']


def test_a_kill_leaves_what_was_done(story):
  assert set(story.files['killed']) == {'journal.jsonl'}
  assert 6 <= len(_keys(story.files['killed'])) < len(_KEYS)


def test_a_full_disk_ends_a_run_with_one_line(story):
  assert story.ended['full'].code == 2
  (line,) = [
    line
    for line in story.ended['full'].err.splitlines()
    if 'journal.jsonl cannot be written' in line
  ]
  assert 'run the same command again to continue' in line
  assert _keys(story.files['full']) == _keys(story.files['killed'])


def test_an_interruption_is_one_line(story):
  assert story.ended['interrupted'].code == 130
  lines = story.ended['interrupted'].err.splitlines()
  assert [line for line in lines if not _STEP.fullmatch(line)] == [
    'interrupted: run the same command again to continue'
  ]
  assert story.ended['interrupted'].out == ''
  assert set(story.files['interrupted']) == {'journal.jsonl'}
  assert 12 <= len(_keys(story.files['interrupted'])) < len(_KEYS)


def test_nothing_is_done_twice_and_nothing_is_lost(story):
  killed, interrupted, finished = (
    _records(story.files[moment])
    for moment in ('killed', 'interrupted', 'finished')
  )
  assert interrupted[: len(killed)] == killed
  assert finished[: len(interrupted)] == interrupted
  keys = _keys(story.files['finished'])
  assert len(keys) == len(set(keys))
  assert set(keys) == _KEYS
  # Apart from warm-ups, each step is a unit that was missing.
  for before, run in (('killed', 'interrupted'), ('interrupted', 'finished')):
    missing = _KEYS - set(_keys(story.files[before]))
    lines = story.ended[run].err.splitlines()
    steps = filter(None, map(_STEP.fullmatch, lines))
    totals = {
      int(step[1]) for step in steps if not step[2].startswith('warm-up')
    }
    assert totals == {len(missing)}


def test_the_result_is_of_all_prompts(story):
  assert story.ended['finished'].code == 0, story.ended['finished'].err
  assert set(story.files['finished']) == {
    *('journal.jsonl', 'result.json', 'results.csv', 'results.png'),
    'generations.jsonl',
  }
  rows = json.loads(story.files['finished']['result.json'])['rows']
  overall = [row for row in rows if row['category'] == 'overall']
  assert [row['method'] for row in overall] == list(_METHODS)
  for row in overall:
    assert row['prompts'] == _PROMPTS
    assert row['tokens'] == _PROMPTS * _NEW_TOKENS
  assert (
    'ngram: every output equals autoregressive' in story.ended['finished'].out
  )
