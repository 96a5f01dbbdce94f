"""Two processes of four devices that evaluate together."""

import dataclasses
import json
import pathlib
import re
import signal
import socket

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
  journal = folders[0] / 'out' / 'journal.jsonl'
  is_begun = lambda: journal.exists() and journal.read_bytes().count(b'\n') >= 3
  try:
    commands.wait(is_begun, *first)
    first[1].send_signal(signal.SIGKILL)
    ended = [commands.finish(process) for process in first]
  finally:
    for process in first:
      process.kill()
  killed = Run(ended, files())
  ended = commands.run_on_two_hosts(*call, **options)
  return killed, Run(ended, files())


def _folder(tmp_path_factory):
  """Makes a folder in which the commands can be started."""
  folder = tmp_path_factory.mktemp('host')
  for name in ('configs', 'experiments'):
    (folder / name).symlink_to(_ROOT / name)
  return folder


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
  outcome, other = commands.run_on_two_hosts(
    *call,
    flags=[(), ('--seed=1',)],
    folders=folders,
    variables=cpu_devices(4),
  )
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


def test_processes_that_do_not_meet_end_with_one_line(commands, tiny):
  with socket.create_server(('localhost', 0)) as server:
    address = f'--coordinator_address=localhost:{server.getsockname()[1]}'
  both = (address, '--num_processes=2')
  # The flags, and words of the line.
  cases = [
    (
      (*both, '--process_id=0'),
      '--coordinator_address=localhost: ... within 2 s: start each',
    ),
    (
      (*both, '--process_id=1'),
      '--process_id=1: ... within 2 s: ... process 0 can be reached',
    ),
    (
      ('--distributed',),
      '--distributed: ... give --coordinator_address, --num',
    ),
    (
      ('--coordinator_address=localhost',),
      '--coordinator_address=localhost: give host:port ... --help',
    ),
    (
      (*both, '--process_id=2'),
      '--distributed: ... process_id=2, num_processes=2',
    ),
  ]
  call = ('generate', *tiny, '--prompt=Hello', '--initialization_timeout=2')
  ended = commands.run_all([(*call, *flags) for flags, _ in cases])
  for outcome, (_, words) in zip(ended, cases, strict=True):
    outcome.check_refused(words)
