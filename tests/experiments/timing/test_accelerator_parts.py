"""The parts of an accelerator's measurement: order, budget, kills, the page."""

import json
import os
import pathlib
import subprocess
import sys
import time

import gin
import pytest

from experiments.command import progress
from experiments.methods import random_weights
from experiments.timing import accelerator_page
from experiments.timing import accelerator_parts
from experiments.timing import benchmarking

_ROOT = pathlib.Path(__file__).resolve().parents[3]
# Adds a line to a file, then writes what a benchmark would have written.
_WRITES = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[1].removeprefix('--out='))
with open(out.parent / 'begun', 'a') as file:
  file.write(out.name + ' ')
out.mkdir(exist_ok=True)
(out / 'benchmark.json').write_text(json.dumps(json.loads({result!r})))
"""
_METHOD = {
  **{'num_draft_tokens': 2, 'tokens_per_round': 1.5, 'tokens_per_s': 90.0},
  **{'draft_ms': 1.0, 'verify_ms': 11.0, 'overhead_ms': 0.25},
  'synthetic': False,
}
_RESULT = {
  'hardware': {
    **{'platform': 'tpu', 'device': 'TPU v5e', 'device_count': 1, 'cpu': 'X'},
  },
  'versions': {'jax': '1', 'jaxlib': '1', 'specsample': '1'},
  'git_commit': 'abc',
  't_ms': {'1': 10.0, '2': 10.5, '17': 12.0},
  'ar_tokens_per_s': 60.0,
  'ar_ms_per_token': 10.0,
  'ar_round_ms': 10.125,
  'memory_gb_per_s': 700.0,
  'percent_of_roofline': 81.0,
  'weight_bytes': 5,
  'methods': {'mtp': _METHOD},
  'not kept': 1,
}
_SLEEPS = 'import time; time.sleep(60)'
_FAILS = 'print("no room"); raise SystemExit(3)'


def _part(name, code):
  return accelerator_parts.Part(name, f'what {name} is', ('-c', code))


def _writing(name):
  return _part(name, _WRITES.format(result=json.dumps(_RESULT)))


def _run(work, out, minutes=1.0):
  """Runs parts; returns the page's last reasons and the results by name."""
  journal = accelerator_parts.open_journal(out, {})
  seen = []
  accelerator_parts.run(
    work,
    out,
    journal,
    minutes=minutes,
    progress=progress.bar,
    after_each=lambda left_out: seen.append(dict(left_out)),
  )
  found = {x.name: journal.get(('part', x.name)) for x in work}
  journal.close()
  assert len(seen) == 1 + len(work) or not seen[-1]
  return seen[-1], {name: x for name, x in found.items() if x}


def _begun(out):
  return (out / 'begun').read_text().split()


def test_what_has_ended_is_not_run_again(tmp_path):
  work = [_writing('a'), _part('b', _FAILS), _writing('c')]
  left_out, found = _run(work, tmp_path)
  assert left_out.keys() == {'b'} and found.keys() == {'a', 'c'}
  assert 'it failed (no room): see b.log' in left_out['b']
  assert 'not kept' not in found['a'] and found['a']['seconds'] > 0
  left_out, found = _run([*work[:1], _writing('b'), *work[2:]], tmp_path)
  assert left_out == {} and found.keys() == {'a', 'b', 'c'}
  assert _begun(tmp_path) == ['a', 'c', 'b']


def test_a_part_that_hangs_leaves_half_of_the_time(tmp_path):
  work = [_part('a', _SLEEPS), _writing('b')]
  left_out, found = _run(work, tmp_path, minutes=0.1)
  assert 'stopped after 3 s' in left_out['a']
  assert found.keys() == {'b'}


def test_without_time_nothing_begins(tmp_path):
  left_out, found = _run([_writing('a')], tmp_path, minutes=0)
  assert left_out == {'a': 'no time was left'} and not found
  page = accelerator_page.text([_writing('a')], found, left_out)
  assert 'Nothing was measured.' in page
  assert '* `a` (what a is): no time was left' in page


def test_a_kill_loses_no_part_and_ends_the_one_that_runs(tmp_path):
  code = f"""
import functools, os, pathlib
from experiments.command import progress
from experiments.tasks import system_calls
from experiments.timing import accelerator_parts as parts
out = pathlib.Path({str(tmp_path)!r})
sleeps = 'import os; open("{tmp_path}/pid", "w").write(str(os.getpid()));'
work = [
  parts.Part('a', '', ('-c', {_writing('a').command[1]!r})),
  parts.Part('b', '', ('-c', sleeps + {_SLEEPS!r})),
]
parts.run(
  work, out, parts.open_journal(out, {{}}), minutes=9, progress=progress.bar,
  after_each=lambda _: None,
  in_child=functools.partial(system_calls.end_with, os.getpid()),
)
"""
  process = subprocess.Popen([sys.executable, '-c', code], cwd=_ROOT)
  pid = tmp_path / 'pid'
  deadline = time.monotonic() + 300
  while not pid.exists() or not pid.read_text():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.01)
  process.kill()
  process.wait()
  child = pathlib.Path('/proc') / pid.read_text()
  while child.exists() and ') Z ' not in (child / 'stat').read_text():
    assert time.monotonic() < deadline
    time.sleep(0.01)
  left_out, found = _run([_writing('a'), _writing('b')], tmp_path)
  assert left_out == {} and found.keys() == {'a', 'b'}
  assert _begun(tmp_path) == ['a', 'b']


def test_the_page_has_every_number(tmp_path):
  work = [_writing('a'), _writing('b'), _writing('c')]
  rows = [
    {
      **{'category': category, 'method': 'mtp', 'num_draft_tokens': 2},
      **{'tokens_per_round': 1.6, 'speedup': 1.25, 'speedup_ci95': [1.1, 1.4]},
      'percent_of_roofline': 70.0,
    }
    for category in ('overall', 'writing')
  ]
  timed = _RESULT | {'seconds': 30.0}
  of_rows = {x: timed[x] for x in ('hardware', 'versions', 'git_commit')}
  found = {'a': timed, 'b': of_rows | {'seconds': 60.0, 'rows': rows}}
  page = accelerator_page.text(work, found, {})
  assert '* device: 1 x TPU v5e (tpu); host: X' in page
  assert '* memory: 700 GB/s' in page
  assert '* 2 parts in 1.5 minutes' in page
  # The loop takes 10.125 - 10 ms.
  assert (
    '| what a is | 10.000 | 10.500 | 12.000 | 1.20x | 60.0 | 125 | 81% |'
    in page
  )
  assert (
    '| mtp | what a is | 2 | 1.50 | 90.0 | 1.50x | 1.000 | 11.000 | 250 |'
    in page
  )
  assert page.count('| mtp | 2 | 1.60 | 1.25x | 1.10-1.40 | 70% |') == 1
  assert '* `c` (what c is): it has not begun' in page
  assert 'flash attention or a Pallas kernel' in page


def test_parts_are_chosen_by_name_in_their_order():
  every = accelerator_parts.parts(8, [])
  names = [part.name for part in every]
  assert names[:4] == ['target', '8b_bfloat16', 'mtp', '8b_int8']
  few = accelerator_parts.chosen(every, ['8b_int8', 'target'])
  assert [part.name for part in few] == ['target', '8b_int8']
  assert accelerator_parts.chosen(every, []) == every
  with pytest.raises(ValueError, match='--parts=8b is unknown: choose from ta'):
    accelerator_parts.chosen(every, ['8b'])


def _settings(part, name):
  return [
    x.removeprefix(f'--{name}=')
    for x in part.command
    if x.startswith(f'--{name}=')
  ]


@pytest.mark.parametrize(
  'part', accelerator_parts.parts(8, []), ids=lambda part: part.name
)
def test_every_part_is_a_configuration_of_a_command(part):
  module = part.command[1].replace('.', os.sep)
  assert (_ROOT / f'{module}.py').exists()
  gin.clear_config()
  gin.add_config_file_search_path(str(_ROOT))
  try:
    gin.parse_config_files_and_bindings(
      _settings(part, 'gin_file'), _settings(part, 'gin_bindings')
    )
    if part.result == 'benchmark.json':
      bound = gin.get_bindings(benchmarking.Benchmark, resolve_references=False)
      assert bound['max_new_tokens'] == 8
      (name, _), *others = bound['methods'].items()
      assert not others
      assert name == part.name or part.name.startswith(('target', '8b'))
    weights = gin.get_bindings(random_weights.params).get('weights')
    assert weights == ('int8' if part.name == '8b_int8' else None)
  finally:
    gin.clear_config()


def test_other_flags_are_another_run(commands, tmp_path, cpu_devices):
  call = ['accelerator', '--parts=target', '--minutes=0', f'--out={tmp_path}']
  (first,) = commands.run_all([call], variables=cpu_devices(1))
  (other,) = commands.run_all([call], variables=cpu_devices(2))
  assert first.code == 0, first.err
  assert other.code == 2 and 'differs in compiler flags' in other.err
