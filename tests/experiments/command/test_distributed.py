"""Two processes of four devices that evaluate together."""

import dataclasses
import json
import pathlib
import re
import signal
import socket
import time

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_PROMPTS = [f'Is {i} an even number?' for i in range(10)]
_BATCH_SIZE = 4
_NEW_TOKENS = 24
_KEYS = [
  ['refilled', 'ngram', 0],
  ['memory_bandwidth', 0],
  *(['generation', 'ngram', i] for i in range(3)),
  ['parts', 'ngram', 2],
  ['memory_bandwidth', 1],
  ['refilled', 'ngram', 1],
]
_TIMEOUT = 300


@dataclasses.dataclass(frozen=True)
class Run:
  """The outcomes of both processes, and the files in each one's folder."""

  ended: list
  files: list

  @property
  def journal(self):
    return self.files[0]['journal.jsonl'].splitlines()


@pytest.fixture(scope='module')
def runs(commands, tiny_evaluate, cpu_devices, tmp_path_factory):
  """The same command twice: process 1 is killed, then both resume."""
  prompts = tmp_path_factory.mktemp('prompts') / 'prompts.txt'
  prompts.write_text('\n'.join(_PROMPTS))
  folders = [_folder(tmp_path_factory) for _ in range(2)]
  bindings = (
    'Mesh.data = 4',
    'Mesh.model = 2',
    f'Evaluation.batch_size = {_BATCH_SIZE}',
    f'Evaluation.max_new_tokens = {_NEW_TOKENS}',
    "Evaluation.methods = {'ngram': @ngram/Method()}",
    'Evaluation.repeats = 1',
    'Evaluation.refill = True',
  )
  call = (
    *('evaluate', *tiny_evaluate, f'--prompts={prompts}', '--out=out'),
    *(f'--gin_bindings={binding}' for binding in bindings),
  )
  options = {'folders': folders, 'variables': cpu_devices(4)}

  def files():
    return [
      {path.name: path.read_bytes() for path in (folder / 'out').glob('*')}
      for folder in folders
    ]

  soon = ('--heartbeat_timeout=6',)
  first = commands.start_on_two_hosts(*call, flags=(soon, soon), **options)
  try:
    _wait_for_units(folders[0] / 'out' / 'journal.jsonl', 2, first)
    first[1].send_signal(signal.SIGKILL)
    ended = [commands.finish(process) for process in first]
  finally:
    for process in first:
      process.kill()
  killed = Run(ended, files())
  second = commands.start_on_two_hosts(*call, **options)
  try:
    ended = [commands.finish(process) for process in second]
  finally:
    for process in second:
      process.kill()
  return killed, Run(ended, files())


def _folder(tmp_path_factory):
  """Makes a folder in which the commands can be started."""
  folder = tmp_path_factory.mktemp('host')
  for name in ('configs', 'experiments'):
    (folder / name).symlink_to(_ROOT / name)
  return folder


def _wait_for_units(journal, count, processes):
  deadline = time.monotonic() + _TIMEOUT
  while not journal.exists() or journal.read_bytes().count(b'\n') <= count:
    for process in processes:
      assert process.poll() is None, process.stderr.read().decode()
    assert time.monotonic() < deadline
    time.sleep(0.002)


def test_all_end_when_one_is_killed(runs):
  killed, _ = runs
  survivor, victim = killed.ended
  assert victim.code == -signal.SIGKILL
  assert survivor.code != 0
  assert re.search(
    r'process 0 of 2 ended early, .* start the same command again',
    survivor.err,
  )
  assert survivor.out == ''
  assert set(killed.files[0]) == {'journal.jsonl'}


def test_the_same_command_goes_on(runs):
  killed, finished = runs
  assert [outcome.code for outcome in finished.ended] == [0, 0], finished.ended
  assert 3 <= len(killed.journal) < len(finished.journal)
  assert finished.journal[: len(killed.journal)] == killed.journal
  records = [json.loads(line) for line in finished.journal[1:]]
  assert [record['key'] for record in records] == _KEYS


def test_tokens_are_those_of_one_device(runs, greedy):
  _, finished = runs
  records = [json.loads(line) for line in finished.journal[1:]]
  generations = [
    generation
    for record in records
    if record['key'][0] == 'generation'
    for generation in record['value']['generations']
  ]
  expected = [greedy(one, _NEW_TOKENS, chat=True)[0] for one in _PROMPTS]
  assert [generation['tokens'] for generation in generations] == expected
  for record in records:
    if record['key'][0] == 'refilled':
      assert record['value']['tokens'] == expected


def test_the_result_says_what_ran(runs):
  _, finished = runs
  result = json.loads(finished.files[0]['result.json'])
  assert result['hardware']['device_count'] == 8
  assert result['hardware']['process_count'] == 2
  (row,) = (row for row in result['rows'] if row['category'] == 'overall')
  assert (row['prompts'], row['batch_size']) == (len(_PROMPTS), _BATCH_SIZE)
  assert row['tokens'] == len(_PROMPTS) * _NEW_TOKENS
  assert row['percent_of_roofline'] > 0
  assert 'prompts: 10 prompts, 240 tokens, batch 4' in finished.ended[0].out


def test_only_process_0_writes(runs):
  for run in runs:
    outcome = run.ended[1]
    assert run.files[1] == {}
    assert outcome.out == ''
    # Gloo prints a greeting per peer; there must be no steps and no table.
    assert not re.search(r'prompt|of a round|memory', outcome.err), outcome.err
  assert 'Gloo' not in runs[1].ended[0].out


def test_processes_that_differ_are_refused(
  commands, tiny, cpu_devices, tmp_path_factory
):
  folders = [_folder(tmp_path_factory) for _ in range(2)]
  call = ('generate', *tiny, '--prompt=Hello', '--out=out')
  processes = commands.start_on_two_hosts(
    *call,
    flags=[(), ('--seed=1',)],
    folders=folders,
    variables=cpu_devices(4),
  )
  outcome, other = [commands.finish(process) for process in processes]
  assert outcome.code == 2
  # Gloo prints its greetings in between.
  assert re.search(
    'process 1 differs from process 0 in command line: start all processes '
    'with the same command',
    outcome.err,
  )
  assert outcome.out == other.out == ''
  assert other.code != 0
  assert not any((folder / 'out').exists() for folder in folders)


@pytest.fixture(scope='module')
def alone(commands, tiny):
  """Outcomes of the command by case, with flags that cannot work."""
  with socket.create_server(('localhost', 0)) as server:
    address = f'--coordinator_address=localhost:{server.getsockname()[1]}'
  cases = {
    'waits': (address, '--num_processes=2', '--process_id=0'),
    'calls': (address, '--num_processes=2', '--process_id=1'),
    'no cluster': ('--distributed',),
    'no port': ('--coordinator_address=localhost',),
    'third of two': (address, '--num_processes=2', '--process_id=2'),
  }
  call = ('generate', *tiny, '--prompt=Hello', '--initialization_timeout=2')
  calls = [(*call, *flags) for flags in cases.values()]
  return dict(zip(cases, commands.run_all(calls), strict=True))


@pytest.mark.parametrize(
  ('case', 'expected'),
  [
    (
      'waits',
      r'--coordinator_address=localhost:\d+, .* within 2 s: start each',
    ),
    ('calls', r'--process_id=1: .* within 2 s: .* process 0 can be reached'),
    ('no cluster', r'--distributed: .* give --coordinator_address, --num'),
    ('no port', r'--coordinator_address=localhost: give host:port .*--help'),
    ('third of two', r'--distributed: .*process_id=2, num_processes=2'),
  ],
)
def test_processes_that_do_not_meet_end_with_one_line(alone, case, expected):
  outcome = alone[case]
  assert outcome.code == 2
  assert outcome.out == ''
  assert re.search(expected, outcome.err), outcome.err
  assert len(outcome.err.splitlines()) == 1
