"""`evaluate --record` and `replay`, as a user starts them."""

import dataclasses
import json
import os

import pytest

from experiments.traces import trace_file

_METHODS = ('ngram', 'skip')
_FILES = {f'{name}/0000{i}.npz' for name in _METHODS for i in range(2)}


@dataclasses.dataclass(frozen=True)
class Story:
  """An evaluation that is recorded later, cut short, and replayed."""

  out: object
  ended: dict
  journals: dict
  written: dict  # modification times by file


@pytest.fixture(scope='module')
def story(commands, tiny_evaluate, cpu_devices, tmp_path_factory):
  folder = tmp_path_factory.mktemp('replay')
  (folder / 'prompts.txt').write_text('Is 7 a number?\nAnd 8?\n')
  out = folder / 'out'
  methods = "{'ngram': @judged(), 'skip': @skip/Method()}"
  evaluate = [
    'evaluate',
    *tiny_evaluate,
    f'--gin_bindings=Evaluation.methods = {methods}',
    '--gin_bindings=judged.method = @ngram/Method()',
    '--gin_bindings=judged.verify = @Block()',
    '--gin_bindings=Evaluation.max_new_tokens = 96',
    '--gin_bindings=Evaluation.repeats = 1',
    '--gin_bindings=Sampling.temperature = 1.0',
    f'--prompts={folder / "prompts.txt"}',
    f'--out={out}',
  ]
  record = [*evaluate, '--record']
  replay = ['replay', f'--out={folder / "replayed"}']
  journals, written = {}, {}

  def run(calls):
    done = commands.run_all(list(calls.values()), variables=cpu_devices(1))
    return dict(zip(calls, done, strict=True))

  def look(moment):
    journals[moment] = (out / 'journal.jsonl').read_text().splitlines()
    written[moment] = {
      f'{path.parent.name}/{path.name}': path.stat().st_mtime_ns
      for path in (out / 'traces').glob('*/*.npz')
    }

  ended = run({'evaluate': evaluate, 'record': record})
  look('recorded')
  # As if killed while the last trace was being written.
  lines = journals['recorded'][:-1]
  (out / 'journal.jsonl').write_text('\n'.join(lines) + '\n')
  os.truncate(out / 'traces' / 'skip' / '00001.npz', 99)
  at = lambda name: f'--trace={out / "traces" / name}'
  ended |= run({'torn': [*replay, at('skip')]})
  # Deleting a file and running again must also work if the journal has it.
  (out / 'traces' / 'ngram' / '00000.npz').unlink()
  ended |= run(
    {
      'resumed': record,
      'skip': [*replay, at('skip')],
      'ngram': [*replay, at('ngram')],
      'all': [*replay, at('')],
      'nothing': replay,
    }
  )
  look('resumed')
  return Story(out, ended, journals, written)


def test_a_finished_run_only_adds_its_traces(story):
  for name in ('evaluate', 'record', 'resumed'):
    assert story.ended[name].code == 0, story.ended[name].err
  keys = [json.loads(line).get('key') for line in story.journals['recorded']]
  assert [key[0] for key in keys[1:]] == (
    ['memory_bandwidth']
    + 4 * ['generation']
    + 2 * ['parts']
    + ['memory_bandwidth']
    + 4 * ['trace']
  )
  assert set(story.written['recorded']) == _FILES
  assert not any('warm-up' in x for x in story.ended['record'].err.split('\n'))


def test_what_a_kill_left_is_written_again(story):
  assert story.ended['torn'].code == 2
  assert 'skip/00001.npz is not a trace, or was cut short' in (
    story.ended['torn'].err
  )
  assert 'delete the file and run the same' in story.ended['torn'].err
  assert story.journals['resumed'] == story.journals['recorded']
  again = {
    name
    for name, when in story.written['resumed'].items()
    if when != story.written['recorded'][name]
  }
  assert again == {'skip/00001.npz', 'ngram/00000.npz'}


@pytest.mark.parametrize('method', _METHODS)
def test_a_trace_has_the_tokens_of_the_evaluation(story, method):
  records = [json.loads(line) for line in story.journals['resumed'][1:]]
  tokens = [
    generation['tokens']
    for record in records
    if record['key'][:2] == ['generation', method]
    for generation in record['value']['generations']
  ]
  trace = trace_file.read(story.out / 'traces' / method)
  rows = trace.arrays['output'].tolist()
  assert [[x for x in row if x >= 0] for row in rows] == tokens
  assert trace.header['hardware']['platform'] == 'cpu'
  assert trace.header['versions'].keys() >= {'jax', 'numpy', 'specsample'}


def test_a_replay_prints_and_leaves_the_variants(story):
  outcome = story.ended['skip']
  assert outcome.code == 0, outcome.err
  assert 'skip: 2 prompts, ' in outcome.out
  assert 'without a column of its own, at most: 0' in outcome.out
  replay = story.out.parent / 'replayed' / 'replay.json'
  rows = {row['variant']: row for row in json.loads(replay.read_text())['rows']}
  for name in ('recorded', 'chain', 'block', 'chain, svip', 'chain, fastest'):
    assert f'\n {name} ' in outcome.out
    assert rows[name]['speed'] > 0
  result = json.loads((story.out / 'result.json').read_text())
  live = {
    row['method']: row for row in result['rows'] if row['category'] == 'overall'
  }
  assert live['ngram']['verifier'] == 'block'
  found = rows['recorded']['tokens']
  assert found == pytest.approx(live['skip']['tokens_per_round'])
  assert abs(rows['chain']['tokens'] - found) < 3 * rows['chain']['tokens_sd']


@pytest.mark.parametrize(
  ('case', 'message'),
  [
    ('ngram', "variant 'chain, token probability': TokenProbability reads"),
    ('all', 'has no .npz file: give the folder of one method, such as'),
    ('nothing', '--trace is empty: name OUT/traces/<method>'),
  ],
)
def test_one_line_says_what_to_do(story, case, message):
  outcome = story.ended[case]
  assert (outcome.code, outcome.out) == (2, '')
  assert outcome.err.count('\n') == 1
  assert message in outcome.err
