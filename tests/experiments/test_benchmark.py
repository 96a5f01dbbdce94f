"""The output and files of `python -m experiments.benchmark`."""

import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import gin
import jax
import numpy as np
import pytest

from experiments import methods
from experiments.methods import random_weights
from experiments.timing import benchmarking
from experiments.timing import transformers_peer
import specsample
from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.models import int8
from specsample.models import packed
from tests.experiments import reports

_ROOT = pathlib.Path(__file__).parents[2]
_ROWS = ('1', '2', '3', '5', '9', '17')
_NEW_TOKENS = 96
_FEW = (
  f'--gin_bindings=Benchmark.max_new_tokens = {_NEW_TOKENS}',
  '--gin_bindings=Benchmark.repeats = 1',
)
_SMALLER_CACHE = (
  "--gin_bindings=Benchmark.others = {'int8': @int8/benchmarking.Other()}",
  '--gin_bindings=int8/benchmarking.Other.model = @int8/methods.model()',
  '--gin_bindings=int8/benchmarking.Other.params = @target/methods.params()',
  '--gin_bindings=int8/methods.model.loaded = %TARGET',
  '--gin_bindings=int8/methods.model.has_int8_cache = True',
)
# Differences of two times, which may be negative for a model as small as this
# one beside other work.
_DIFFERENCES = ('ar_ms_per_token', 'ar_round_ms', 'percent_of_roofline')
_OF_METHOD = (
  *('draft_ms', 'verify_ms', 'overhead_ms', 'overhead_percent'),
  'cost_ratio',
)


@pytest.fixture(scope='module')
def real(tiny, commands, tmp_path_factory):
  """A checkpoint with a tokenizer, compared with transformers."""
  out = tmp_path_factory.mktemp('real')
  prompt = "--gin_bindings=Benchmark.prompt = 'Why is the sky blue?'"
  return _run(commands, out, *tiny, *_FEW, prompt, *_SMALLER_CACHE)


@pytest.fixture(scope='module')
def synthetic(target, commands, tmp_path_factory):
  """The shipped hardware study, with the tiny model's sizes."""
  out = tmp_path_factory.mktemp('synthetic')
  fields = dataclasses.fields(target.model)
  model = {field.name: getattr(target.model, field.name) for field in fields}
  sizes = {'llama_8b': model, 'llama_1b': model | {'num_layers': 1}}
  bindings = [
    f'--gin_bindings={scope}/Transformer.{name} = {value!r}'
    for scope, values in sizes.items()
    for name, value in values.items()
  ]
  return _run(commands, out, '--recipe=llama_8b', *bindings, *_FEW)


def _run(commands, out, *flags):
  outcome = commands.complete('benchmark', *flags, f'--out={out}')
  assert [path.name for path in out.iterdir()] == ['benchmark.json']
  return outcome, json.loads((out / 'benchmark.json').read_text())


@pytest.mark.nightly(but=('real',))
@pytest.mark.parametrize('name', ['real', 'synthetic'])
def test_json_holds_every_measurement(name, request):
  _, measured = request.getfixturevalue(name)
  assert tuple(measured['t_ms']) == _ROWS
  assert all(math.isfinite(ms) for ms in measured['t_ms'].values())
  assert measured['ar_tokens_per_s'] > 0 and measured['memory_gb_per_s'] > 0
  assert all(math.isfinite(measured[name]) for name in _DIFFERENCES)
  (found,) = measured['methods']
  assert found['tokens_per_s'] > 0
  assert all(math.isfinite(found[name]) for name in _OF_METHOD)
  assert measured['t_ratio']['17'] == (
    measured['t_ms']['17'] / measured['t_ms']['1']
  )
  assert measured['loop_overhead_ms'] == (
    measured['ar_round_ms'] - measured['t_ms']['1']
  )
  assert found['speedup'] == pytest.approx(
    found['tokens_per_s'] / measured['ar_tokens_per_s']
  )
  round_ms = sum(
    found[f'{part}_ms'] for part in ('draft', 'verify', 'overhead')
  )
  share = found['overhead_ms'] / round_ms
  assert found['overhead_percent'] == pytest.approx(100 * share)
  token_ms = found['draft_ms'] / found['num_draft_tokens']
  ratio = token_ms / measured['ar_round_ms']
  assert found['cost_ratio'] == pytest.approx(ratio)
  assert measured['weight_bytes'] < measured['peak_rss_bytes']
  assert 1 <= found['tokens_per_round'] <= found['num_draft_tokens'] + 1
  plain, passes = found['plain_rounds'], found['verify_ms_by_width']
  # A chain drafts in every round, except perhaps the last.
  assert 0 < plain < 1 if found['drafter'] == 'ngram' else plain < 0.05
  assert passes.keys() == ({'0', '4'} if found['drafter'] == 'ngram' else {'4'})
  mean = (1 - plain) * passes['4'] + plain * passes.get('0', passes['4'])
  assert found['verify_ms'] == pytest.approx(mean)
  described = {'hardware', 'versions', 'git_commit', 'command', 'gin_config'}
  assert described < measured.keys()
  assert f'Benchmark.max_new_tokens = {_NEW_TOKENS}' in measured['gin_config']


def test_bytes_are_those_of_the_model(real, synthetic, checkpoint, target):
  model = target.model
  # A pass reads everything but the embedding, from which it takes single rows.
  file = (checkpoint / 'model.safetensors').read_bytes()
  header = 8 + int.from_bytes(file[:8], 'little')
  weights = len(file) - header - 4 * model.vocab_size * model.dim
  # Of packed matrices it also reads the zeros that fill the last panels; random
  # matrices are not packed.
  with_zeros = weights + 4 * sum(
    leaf.values.size - math.prod(leaf.shape)
    for leaf in jax.tree.leaves(target.params, is_leaf=packed.is_packed)
    if packed.is_packed(leaf)
  )
  # Keys and values for the prompt's bucket and the new tokens, and a length.
  token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
  cache = 4 * (token * (64 + _NEW_TOKENS) + 1)
  for (_, measured), read in ((real, with_zeros), (synthetic, weights)):
    assert measured['weight_bytes'] == read
    assert measured['cache_bytes'] == cache
  # A byte for each number, and a scale for the key and the value of each head.
  smaller = real[1]['others']['int8']
  scales = 4 * token // model.head_dim
  assert smaller['weight_bytes'] == with_zeros
  assert smaller['cache_bytes'] == (token + scales) * (64 + _NEW_TOKENS) + 4


def test_passes_of_others_are_timed_too(real):
  outcome, measured = real
  passes = measured['others']['int8']['t_ms']
  assert tuple(passes) == _ROWS
  assert all(ms > 0 for ms in passes.values())
  # Long times divide the table into parts, each with a row.
  row = ' '.join(re.findall(r'^ *int8( .*)$', outcome.out, re.M))
  assert re.search(r'^ +\d+\.\d \(1\.00x\) .* \d+ +\d+ *$', row)


def test_the_same_weights_run_in_transformers(real, synthetic):
  outcome, measured = real
  assert measured['transformers_tokens_per_s'] > 0
  assert re.search(r'^transformers: \d+\.\d tokens/s;', outcome.out, re.M)
  assert synthetic[1]['transformers_tokens_per_s'] is None
  assert 'transformers' not in synthetic[0].out


def test_without_torch_transformers_is_left_out(monkeypatch, capsys):
  # As if the package were not installed.
  monkeypatch.setitem(sys.modules, 'torch', None)
  loaded = specsample.Loaded(None, {}, None)
  assert transformers_peer.generator(loaded, [1], 8) is None
  line = 'transformers is left out: it or torch is not installed\n'
  assert capsys.readouterr().err == line


@pytest.mark.parametrize(
  ('dtype', 'weights', 'backend', 'why'),
  [
    ('bfloat16', None, 'cpu', 'this model computes in bfloat16'),
    ('float32', 'int8', 'cpu', 'those of this model are int8'),
    ('float32', None, 'gpu', 'this model runs on gpu'),
  ],
)
def test_transformers_is_compared_on_equal_terms_only(
  dtype, weights, backend, why, monkeypatch, capsys
):
  # transformers' Llama has no sliding window, so building one would be refused.
  model = testing.tiny_llama(vocab_size=8)
  model = dataclasses.replace(model, sliding_window=4, dtype=dtype)
  params = random_weights.params(model, weights=weights)
  loaded = specsample.Loaded(model, params, None)
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  transformers_peer.check(loaded)
  assert transformers_peer.generator(loaded, [1], 8) is None
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('transformers is left out: ') and line.endswith(why)


def test_acceptance_is_called_synthetic_only_where_it_is_stated(
  real, synthetic
):
  outcome, measured = real
  (found,) = measured['methods']
  assert (found['drafter'], found['verifier']) == ('ngram', 'chain')
  assert (found['lossless'], found['synthetic']) == (True, False)
  assert 'synthetic' not in outcome.out.lower()
  outcome, measured = synthetic
  (found,) = measured['methods']
  assert (found['drafter'], found['verifier']) == ('chain', 'synthetic')
  assert (found['lossless'], found['synthetic']) == (False, True)
  assert found['num_draft_tokens'] == 4
  assert re.search(r'^ *chain +4 +synthetic ', outcome.out, re.M)
  assert 'SYNTHETIC acceptance: no text was decoded' in outcome.out


def test_terminal_gets_the_summary(real):
  outcome, measured = real
  assert '\x1b' not in outcome.out
  assert re.findall(r't\((\d+)\)', outcome.out) == list(_ROWS)
  assert re.search(
    r'^autoregressive: .*% of the roofline \(memory: .* GB/s\)$',
    outcome.out,
    re.M,
  )
  (found,) = measured['methods']
  assert f' {found["tokens_per_round"]:.2f} ' in outcome.out
  assert f' {found["plain_rounds"]:.0%} ' in outcome.out
  assert f'{found["cost_ratio"]:.3f}' in outcome.out
  assert re.search(r'^benchmark.json is in .*\n\Z', outcome.out, re.M)
  steps = outcome.err.splitlines()
  assert [step[:4] for step in steps] == [f'{i}/7,' for i in range(7)]


def test_a_target_of_random_int8_weights(target):
  quantised = random_weights.params(target.model, weights='int8')
  expected = int8.weights(random_weights.params(target.model))
  assert int8.names(quantised) == int8.names(expected) != []
  jax.tree.map(np.testing.assert_array_equal, quantised, expected)
  with pytest.raises(ValueError, match="weights is 'int4': give 'int8'"):
    random_weights.params(target.model, weights='int4')


def test_a_table_of_bounds_is_made_once():
  model = testing.tiny_llama(vocab_size=37)
  certified = methods.Method(drafters.NoDraft(), verify=verify.certified)
  benchmark = benchmarking.Benchmark(
    model=model,
    params=model.init(jax.random.key(0)),
    methods={'certified': certified},
  )
  first, again = (benchmark.setup(certified).params for _ in range(2))
  assert first['shadow'] is again['shadow']


def _measure(out, *arguments, python=sys.executable, minutes=3):
  """Runs the script for accelerators with another Python."""
  return subprocess.run(
    [_ROOT / 'docs' / 'accelerator.sh', out, str(minutes), *arguments],
    env={'PYTHONPATH': str(_ROOT), **os.environ, 'PYTHON': str(python)},
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.nightly
def test_one_command_measures_an_accelerator(tiny, tmp_path):
  arguments = [
    *('target', '96', tiny[0].split('=', 1)[1]),
    "target/specsample.load.dtype = 'float32'",
    'Benchmark.repeats = 1',
    "Benchmark.prompt = 'Why is the sky blue?'",
  ]
  done = _measure(tmp_path, *arguments, minutes=9)
  assert done.returncode == 0, done.stderr
  assert re.search(r'^target, at most \d+ s$', done.stdout, re.M)
  page = reports.Page((tmp_path / 'report.html').read_text())
  values, methods = page.tables
  shown = dict(values[1:])
  assert re.match(r'1 1, 2 \d.*, 17 \d', shown['t ratio'])
  assert {'t ms', 'loop overhead ms', 'percent of roofline'} < shown.keys()
  assert {'speedup', 'draft ms', 'synthetic'} < {*methods[0]}
  # It is not measured again, and another setting is not mixed in.
  before = (tmp_path / 'target.log').read_bytes()
  assert _measure(tmp_path, *arguments).returncode == 0
  assert (tmp_path / 'target.log').read_bytes() == before
  other = _measure(tmp_path, 'target', '8')
  assert other.returncode == 2
  assert 'results of other code or settings' in other.stderr


# Writes down how it was called, and an empty result unless it is to fail.
_RECORDER = """#!{python}
import json, os, pathlib, sys
if sys.argv[2] == 'experiments.report':
  sys.exit()
out = pathlib.Path(sys.argv[-1].removeprefix('--out='))
above = pathlib.Path('/proc', str(os.getppid()), 'cmdline').read_text()
call = [out.name, above.split('\\0')[3], sys.argv[2:]]
with open(out.parent / 'calls', 'a') as file:
  file.write(json.dumps(call) + '\\n')
if (out.parent / 'fails').exists() and out.name == 'mtp':
  sys.exit(3)
out.mkdir()
(out / 'benchmark.json').write_text('')
"""


@pytest.fixture
def record(tmp_path):
  """A function that runs the script for parts: its outcome and its calls."""
  python, calls = tmp_path / 'python', tmp_path / 'calls'
  python.write_text(_RECORDER.format(python=sys.executable))
  python.chmod(0o755)
  calls.touch()

  def run(*arguments, minutes=3):
    done = _measure(tmp_path, *arguments, python=python, minutes=minutes)
    return done, list(map(json.loads, calls.read_text().splitlines()))

  return run


def test_parts_without_a_result_run_the_most_important_first(record, tmp_path):
  (tmp_path / 'fails').touch()
  done, called = record('target|mtp|8b_int8')
  assert 'mtp ended with code 3' in done.stderr
  assert [name for name, *_ in called] == ['target', 'mtp', '8b_int8']
  # All but the last have half of the three minutes at most.
  first, second, last = (int(seconds) for _, seconds, _ in called)
  assert max(first, second) <= 90 < last <= 180
  (tmp_path / 'fails').unlink()
  _, called = record('target|mtp|8b_int8')
  assert [name for name, *_ in called[3:]] == ['mtp']


def test_without_time_nothing_begins(record):
  done, called = record('mtp|draft', minutes=0)
  assert done.stdout.splitlines() == [
    'mtp: no time was left',
    'draft: no time was left',
  ]
  assert not called


def test_every_part_is_a_configuration_of_a_command(record):
  _, called = record('.', '8', 'Ngram.num_draft_tokens = 2')
  assert len(called) == 10
  for part, _, (module, *arguments) in called:
    assert (_ROOT / f'{module.replace(".", "/")}.py').exists()
    flag, *bindings, _ = (x.partition('=')[2] for x in arguments)
    is_file = flag.endswith('.gin')
    file = flag if is_file else 'configs/runs/benchmark.gin'
    gin.clear_config()
    gin.add_config_file_search_path(str(_ROOT))
    try:
      gin.parse_config_files_and_bindings([file], bindings)
      assert gin.query_parameter('Ngram.num_draft_tokens') == 2
      if part == 'prompts':
        assert gin.query_parameter('Evaluation.max_new_tokens') == 8
        continue
      with gin.config_scope(None if is_file else flag or None):
        bound = gin.get_bindings(
          benchmarking.Benchmark, resolve_references=False
        )
      assert bound['max_new_tokens'] == 8
      (name,) = bound['methods']
      assert name == part or part.startswith(('target', '8b'))
      weights = gin.get_bindings(random_weights.params).get('weights')
      assert weights == ('int8' if part == '8b_int8' else None)
    finally:
      gin.clear_config()
