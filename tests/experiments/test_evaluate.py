"""The output and files of `python -m experiments.evaluate`."""

import csv
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import re
import shlex
import struct
import subprocess

import pytest

from experiments.evaluation import generations as generations_lib
from tests.experiments import reports

_NEW_TOKENS = 96  # as in other files, so that they share compiled programs
_NEW_TOKENS_FLAG = f'--gin_bindings=Evaluation.max_new_tokens = {_NEW_TOKENS}'
_QUESTIONS = (
  ('writing', 'Write a line.'),
  ('[qa]', 'Why is the sky blue?'),  # rich would read it as markup
  ('writing', 'And another one.'),
  ('[qa]', 'What is 2 + 2?'),
)
_METHODS = ('autoregressive', 'ngram', 'skip')


@dataclasses.dataclass(frozen=True)
class Run:
  """An evaluation: its arguments, its outcome and its folder."""

  arguments: list
  outcome: object
  folder: object

  @property
  def result(self):
    return json.loads((self.folder / 'result.json').read_text())

  def rows(self, category):
    return {
      row['method']: row
      for row in self.result['rows']
      if row['category'] == category
    }

  def generations(self, method):
    """Returns a method's generations by prompt, from the journal."""
    lines = (self.folder / 'journal.jsonl').read_text().splitlines()
    records = [json.loads(line) for line in lines[1:]]
    of_method = [r for r in records if r['key'][:2] == ['generation', method]]
    return [
      generation
      for record in of_method
      for generation in record['value']['generations']
    ]

  def tokens(self, method):
    return [one['tokens'] for one in self.generations(method)]


@pytest.fixture(scope='module')
def run(tiny_evaluate, commands, tmp_path_factory):
  """The methods of evaluate.gin over a file in Spec-Bench's format."""
  folder = tmp_path_factory.mktemp('evaluate')
  with (folder / 'spec_bench.jsonl').open('w') as file:
    for i, (category, text) in enumerate(_QUESTIONS, 81):
      turns = {'category': category, 'turns': [text, 'And then?']}
      file.write(json.dumps({'question_id': i} | turns) + '\n')
  arguments = [
    *tiny_evaluate,
    _NEW_TOKENS_FLAG,
    '--gin_bindings=Evaluation.max_turns = 1',
    f'--prompts={folder / "spec_bench.jsonl"}',
    f'--out={folder / "out"}',
  ]
  outcome = commands.complete('evaluate', *arguments)
  return Run(arguments, outcome, folder / 'out')


@pytest.fixture(scope='module')
def others(tiny_evaluate, commands, tmp_path_factory):
  """Runs on plain text, too little to time parts, and on sampled JSON lines."""
  folder = tmp_path_factory.mktemp('others')
  (folder / 'plain.txt').write_text('One.\n\nTwo.\nThree.\n')
  (folder / 'prompts.jsonl').write_text('{"prompt": "One", "category": "a"}\n')
  common = ['evaluate', *tiny_evaluate, _NEW_TOKENS_FLAG]
  calls = [
    [
      *common,
      f'--prompts={folder / "plain.txt"}',
      '--limit=2',
      '--gin_bindings=Evaluation.repeats = None',
    ],
    [
      *common,
      f'--prompts={folder / "prompts.jsonl"}',
      '--gin_bindings=Sampling.temperature = 1.0',
      "--gin_bindings=Evaluation.methods = {'skip': @skip/Method()}",
      f'--profile_dir={folder / "profile"}',
    ],
  ]
  calls = [[*call, f'--out={folder}/{i}'] for i, call in enumerate(calls)]
  outcomes = commands.run_all(calls)
  assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
  return [Run(calls[i], outcomes[i], folder / str(i)) for i in range(2)]


def test_result_says_where_and_how(run, checkpoint):
  result = run.result
  assert result.keys() == {
    *('schema', 'hardware', 'versions', 'compiler_flags', 'git_commit'),
    *('command', 'gin_config', 'data', 'divergences', 'rows'),
  }
  assert result['hardware']['platform'] == 'cpu'
  assert result['hardware']['memory_bytes'] > 1 << 28
  for package in ('jax', 'flax', 'numpy'):
    version = importlib.metadata.version(package)
    assert result['versions'][package] == version
  git = ['git', '-C', pathlib.Path(__file__).parent, 'rev-parse', 'HEAD']
  head = subprocess.run(git, capture_output=True, text=True, check=False)
  commit = (result['git_commit'] or '').removesuffix('-dirty')
  assert commit == head.stdout.strip()  # empty outside a repository
  expected = ['python', '-m', 'experiments.evaluate', *run.arguments]
  assert shlex.split(result['command']) == expected
  assert f"specsample.load.name_or_path = '{checkpoint}'" in re.sub(
    r' = \\\n\s+', ' = ', result['gin_config']
  )
  assert f'max_new_tokens = {_NEW_TOKENS}' in result['gin_config']


def test_rows_are_methods_by_categories(run):
  rows = run.result['rows']
  fields = reports.row('ngram', 'overall', 4).keys()
  assert all(row.keys() == fields for row in rows)
  assert [(row['method'], row['category']) for row in rows] == [
    (method, category)
    for category in ('overall', 'writing', '[qa]')
    for method in _METHODS
  ]
  for method, row in run.rows('overall').items():
    parts = [run.rows(category)[method] for category in ('writing', '[qa]')]
    for count in ('prompts', 'tokens', 'rounds'):
      assert row[count] == sum(part[count] for part in parts)
    assert row['prompts'] == len(_QUESTIONS)
    assert row['tokens'] == len(_QUESTIONS) * _NEW_TOKENS
    assert row['tokens_per_round'] == row['tokens'] / row['rounds']
    assert len(row['acceptance_by_position']) == row['num_draft_tokens']
    assert (row['benchmark'], row['batch_size']) == ('spec_bench', 1)
    assert (row['temperature'], row['lossless']) == (0, True)
    assert row['verifier'] == 'chain'
    # These are timed over one prompt, not by category.
    times = ('prefill_ms', 'draft_ms', 'verify_ms')
    assert all(isinstance(row[name], float) for name in times)
    # It is None if other work on the machine hid the time of a round.
    predicted = row['predicted_speedup']
    assert predicted is None or predicted > 0
    times = (*times, 'predicted_speedup')
    assert all(part[name] is None for part in parts for name in times)


def test_methods_are_those_of_the_configuration(run):
  rows = run.rows('overall')
  assert {
    method: (row['drafter'], row['num_draft_tokens'])
    for method, row in rows.items()
  } == {
    'autoregressive': ('none', 0),
    'ngram': ('ngram', 4),
    'skip': ('skip', 2),
  }
  assert rows['ngram']['law'] == 'point_mass'
  assert rows['autoregressive']['tokens_per_round'] == 1
  assert rows['skip']['tokens_per_round'] > 1


def test_rounds_without_a_draft_are_plain_passes(run):
  rows = run.rows('overall')
  row = rows['ngram']
  counts = [one['stats']['proposed'] for one in run.generations('ngram')]
  plain = sum(count[0] for count in counts) / row['rounds']
  assert row['plain_rounds'] == plain > 0
  # No text ends early, but the last round of each may draft nothing.
  assert rows['skip']['plain_rounds'] <= len(_QUESTIONS) / row['rounds']
  assert rows['autoregressive']['plain_rounds'] is None
  passes = row['verify_ms_by_width']
  assert passes.keys() == {'0', '4'}
  mean = plain * passes['0'] + (1 - plain) * passes['4']
  assert row['verify_ms'] == pytest.approx(mean)
  assert rows['skip']['verify_ms_by_width'] is None
  assert run.rows('writing')['ngram']['verify_ms_by_width'] is None
  assert re.search(
    rf'^ *ngram +4 +\d\.\d\d .* {plain:.0%} ', run.outcome.out, re.MULTILINE
  )
  assert re.search(
    r'^ *autoregressive +0 +1\.00 .* - ', run.outcome.out, re.MULTILINE
  )


def test_speedups_are_over_the_autoregressive_row(run):
  for category in ('overall', 'writing', '[qa]'):
    rows = run.rows(category)
    baseline = rows['autoregressive']
    assert baseline['speedup'] == 1
    has_interval = baseline['prompts'] > 2
    assert baseline['speedup_ci95'] == ([1, 1] if has_interval else None)
    for row in rows.values():
      ratio = baseline['ms_per_token'] / row['ms_per_token']
      assert row['speedup'] == pytest.approx(ratio)
      low, high = row['speedup_ci95'] or [row['speedup']] * 2
      assert 0 <= low <= row['speedup'] <= high
      assert row['percent_of_roofline'] > 0


def test_greedy_tokens_are_those_of_the_library(run, greedy):
  expected = [greedy(text, _NEW_TOKENS, chat=True)[0] for _, text in _QUESTIONS]
  found = {method: run.tokens(method) for method in _METHODS}
  assert found == dict.fromkeys(_METHODS, expected)


def test_terminal_gets_the_table_and_the_comparison(run, others):
  out = run.outcome.out
  assert 'Speedup by category, then tokens per round' in out
  assert '\x1b' not in out
  assert 'spec_bench: 4 prompts, 384 tokens, batch 1, temperature 0' in out
  for method in _METHODS:
    assert re.search(rf'^ *{method} +\d+ +\d+\.\d\d', out, re.MULTILINE)
  for category in ('overall', 'writing', r'\[qa\]'):
    assert re.search(rf'^ *{category} +\d +\d+\.\d\dx', out, re.MULTILINE)
  for method in _METHODS[1:]:
    assert f'\n{method}: every output equals autoregressive\n' in out
  assert out.endswith(f'results.png are in {run.folder}\n')
  # On its first run matplotlib reports that it builds a font cache.
  lines = run.outcome.err.splitlines()
  steps = [line for line in lines if 'font cache' not in line]
  # A warm-up per method; then two copies and, for each method and question, an
  # answer and the parts of its rounds. Up to ten lines show them.
  counts = (len(_METHODS), 2 + 2 * len(_METHODS) * len(_QUESTIONS))
  shown = lambda n: range(0, n, math.ceil(n / 10))
  expected = [f'{i}/{n},' for n in counts for i in shown(n)]
  assert [step.split()[0] for step in steps] == expected
  for other in others:  # no category, or one
    assert 'roofline' in other.outcome.out
    assert 'by category' not in other.outcome.out


def test_generations_say_who_wrote_what(run, greedy):
  found = generations_lib.read(run.folder / 'generations.jsonl', 9)
  assert [(one['category'], one['text']) for one in found] == list(_QUESTIONS)
  rounds = dict.fromkeys(_METHODS, 0)
  for one in found:
    _, text = greedy(one['text'], _NEW_TOKENS, chat=True)
    for method, wrote in one['methods'].items():
      assert ''.join(wrote['pieces']) == text
      assert len(wrote['origins']) == len(wrote['rounds']) == _NEW_TOKENS
      rounds[method] += wrote['rounds'][-1] + 1
      # Each round ends with a token of the target's own, unless it was cut.
      own = [i for i, x in enumerate(wrote['origins']) if x != 'accepted']
      last = {number: i for i, number in enumerate(wrote['rounds'])}
      assert own == sorted(last.values())[: len(own)]
    assert set(one['methods']['autoregressive']['origins']) == {'plain'}
  assert rounds == {
    method: row['rounds'] for method, row in run.rows('overall').items()
  }


def test_csv_holds_the_rows(run, others):
  for one in (run, others[1]):
    with (one.folder / 'results.csv').open(newline='') as file:
      lines = list(csv.DictReader(file))
    first = one.result['rows'][0]
    texts = {name for name in first if isinstance(first[name], str)}
    assert [
      {
        name: cell if name in texts else json.loads(cell or 'null')
        for name, cell in line.items()
      }
      for line in lines
    ] == one.result['rows']


def test_figure_is_a_png(run, others):
  for one in (run, *others):
    data = (one.folder / 'results.png').read_bytes()
    assert data[:16] == b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR'
    width, height = struct.unpack('>II', data[16:24])
    assert 900 < width < 4000 and 300 < height < 2000
    assert data.endswith(b'IEND\xaeB`\x82')
    assert len(data) > 10_000


def test_parts_of_few_prompts_are_not_timed_and_have_no_columns(others):
  plain, _ = others
  rows = plain.rows('overall')
  assert {name: row['law'] for name, row in rows.items()} == {
    'autoregressive': 'point_mass',
    'ngram': 'point_mass',
    'skip': 'sampled',
  }
  for row in rows.values():
    assert (row['prompts'], row['benchmark']) == (2, 'plain')
    assert row['speedup'] > 0
    for name in ('predicted_speedup', 'draft_ms', 'verify_ms', 'prefill_ms'):
      assert row[name] is None
  assert len(plain.rows('none')) == len(_METHODS)
  assert 'speedup' in plain.outcome.out
  assert 'predicted' not in plain.outcome.out
  said = 'for fewer than 4 prompts; here are 2: to time them, bind'
  assert said in plain.outcome.err


def test_without_a_baseline_there_is_no_speedup(others):
  _, drawn = others
  (row,) = drawn.rows('overall').values()
  assert (row['method'], row['law']) == ('skip', 'sampled')
  assert (row['temperature'], row['prompts']) == (1, 1)
  assert 0 < row['tokens'] <= _NEW_TOKENS  # a text may end early
  assert (row['speedup'], row['speedup_ci95']) == (None, None)
  assert drawn.rows('a').keys() == {'skip'}
  assert 'equals autoregressive' not in drawn.outcome.out


def test_a_profile_is_of_one_generation(others):
  _, drawn = others
  folder = drawn.folder.parent / 'profile' / 'skip' / 'plugins' / 'profile'
  (of_run,) = folder.iterdir()
  (profile,) = of_run.glob('*.xplane.pb')
  content = profile.read_bytes()
  # It holds what ran, and nothing that was compiled meanwhile. (The names of a
  # round's parts may be from a program that an older version left in a cache.)
  assert b'jit__advance' in content and b'jit(_advance)/while/body/' in content
  assert b'backend_compile' not in content
  assert list(of_run.glob('*.trace.json.gz'))
  assert 'profile, skip' in drawn.outcome.err
