"""Every command, given input it cannot use, ends with one line that says so.

The line names the value and the remedy, the exit code is 2, nothing has been
compiled and nothing is left behind.
"""

import dataclasses
import importlib.util
import json
import re
import shutil

import pytest

# For each command: flags and, below them, the parts of the expected line, in
# that order. The words in capitals stand for the folder of `files`, a setting,
# and a prompt of 600 tokens (the tiny model takes 512).
_TABLES = {
  'evaluate': """
--prompts=FOLDER/nowhere.jsonl
  nowhere.jsonl: No such file ... give a readable file
--prompts=FOLDER/empty.jsonl
  empty.jsonl: there is no prompt ... the file is empty
--prompts=FOLDER/seven.jsonl
  seven.jsonl, line 7: Unterminated string ... correct it
--prompts=FOLDER/latin.txt
  latin.txt: line 2 is not UTF-8: convert the file
--prompts=FOLDER/long.txt
  long.txt, line 2: a prompt of 618 tokens ... 512 ... shorten it
--prompts=
  path '' names no file ... leave the setting out
--profile_dir=FOLDER/empty.jsonl/profile
  empty.jsonl/profile: Not a directory ... give a folder
--limit=0
  --limit=0 ... not a positive ... --help
--gin_bindings=Ngrm.num_draft_tokens = 3
  matching 'Ngrm' ... Did you mean Ngram? ... configs/
--gin_bindings=Ngram.num_drafts = 3
  'num_drafts' ... Did you mean num_draft_tokens? ... configs/
--gin_bindings=TARGT = 'nowhere'
  TARGT is set, but nothing reads it. Did you mean TARGET? ... configs/
--gin_bindings=Evaluation.target = %TARGT
  'TARGT/gin.macro' ... Did you mean TARGET? ... configs/
--gin_file=configs/runs/quikstart.gin
  configs/runs/. Did you mean configs/runs/quickstart.gin?
--gin_bindings=Evaluation.max_new_tokens = (3
  a bracket or a quote is not closed
--gin_file=FOLDER/malformed.gin
  malformed.gin, line 2 ... configs/
--gin_file=FOLDER/own.gin
  /own_drafter.py:7: KeyError: 'a key that is missing'
--gin_file=FOLDER/includes.gin
  Unable to open file: nothing.gin ... includes.gin", line 1 ... configs/
more.jsonl
  'more.jsonl' ... --help
--promts=a
  flag 'promts'. Did you mean: ... prompts ? (--help lists
--gin_bindings=Evaluation.methods = {}
  Evaluation.methods is empty ... name at least one
--gin_bindings=Evaluation.methods = {'a': @autoregresive/Method()}
  argument: 'drafter' ... in scope 'autoregresive': bind what it needs, or
--gin_bindings=Evaluation.max_new_tokens = 0
  max_new_tokens is 0 ... at least 1
--gin_bindings=Method.verify = @KSeq()
  KSeq is not exact for drafts of kind 'point_mass' ... choose a
--gin_bindings=Skip.layers = (0, 7)
  layers are (0, 7) ... layers 0 to 1: name at least one
--gin_bindings=TARGET = 'nowhere'
  'nowhere' is not a file ... check the path
--out=FOLDER/long.txt
  --out= ... long.txt: File exists ... give a folder
--out=s3://bucket/run
  s3://bucket/run ... only gs:// is supported
--gin_bindings=Evaluation.repeats = -1
  Evaluation.repeats is -1: give an integer of at least 0
--gin_bindings=Evaluation.seed = 4294967296
  Evaluation.seed is 4294967296: give an integer from 0 to 4294967295
--num_seeds=3 --gin_bindings=Evaluation.seed = 4294967294
  Evaluation.seed is 4294967294: give an integer from 0 to 4294967293
--gin_file=configs/tasks.gin --gin_bindings=Evaluation.task=@HumanEval() \
    --gin_bindings=Limits.seconds = 4.5
  Limits.seconds is 4.5: give an integer of at least 1
--gin_bindings=Mesh.data = 2
  a mesh of 2 x 1 needs 2 devices, but there
--gin_file=configs/runs/quickstart.gin \
    --gin_bindings=Evaluation.methods = {'medusa': @medusa/trained()} \
    --gin_bindings=medusa/trained.name = 'FOLDER/drafter'
  drafter was trained for another (0123), but this target is ... load the
  target of the drafter, or train
""",
  'generate': """
--prompt=
  --prompt= ... not empty
--prompt=€
  lengths [0] ... at least one
--prompt=a\udcff
  --prompt is not UTF-8 at character 2: convert it
--prompt=LONG
  a prompt of 600 tokens ... 512 ... shorten it
--num_draft_tokens=-1
  --num_draft_tokens=-1 ... not a non-negative ... --help
--drafter=none --num_draft_tokens=3
  --num_draft_tokens=3 ... --drafter=none ... choose another drafter
--drafter=skip --top_candidates=0
  --top_candidates=0 ... not a positive ... --help
--drafter=skip --top_candidates=9999
  --top_candidates=9999 ... there are only ... give fewer
--drafter=ngram --top_candidates=5
  --top_candidates=5: Ngram cannot continue ... choose a trained drafter
--drafter=unknown
  --drafter=unknown is unknown: choose one of auto, none, ngram
--gin_bindings=Method.verify = @KSeq()
  drafts of Ngram: KSeq is not exact for drafts of kind 'point_mass'
--temperature=nan
  temperature is nan ... finite and at least 0
--top_p=0
  top_p is 0.0: it must be in (0, 1]; 1 keeps every token
--top_k=-1
  top_k is -1: it must be an integer from 0 to 2**31 - 1
--min_p=2
  min_p is 2.0: it must be in [0, 1]; 0 keeps every token
--show --show_drafts
  give --show_drafts or --show, not both
--interactive
  a chat writes no file: give --out or --interactive
--seed=4294967296
  --seed=4294967296 ... range [0, 4294967295] ... --help
Hello
  'Hello' ... --help
--drafter=draft --gin_bindings=draft/trained.name = 'FOLDER/model.bin'
  model.bin may be a pickle ... give a folder that save_drafter wrote
""",
  'benchmark': """
--gin_bindings=Benchmark.max_new_tokens = 0
  max_new_tokens is 0 ... at least 1
--gin_bindings=Benchmark.max_new_tokens = 600
  max_new_tokens is 600 after a prompt of ... takes 512 ... fewer
--gin_bindings=Benchmark.prompt = 'LONG'
  a prompt of 618 tokens ... shorten it
--gin_bindings=TARGET = 'FOLDER/scaled'
  LinearRope(factor=2.0) ... rope_scaling ... Benchmark.loaded = None
""",
  'certify': """
all
  'all' ... --help
--gin_bindings=Nothing.at_all = 3
  'Nothing' ... configs/
--gin_bindings=Plan.num_rows = 5
  num_rows is 5 ... 4096
--gin_bindings=Plan.seed = 1099511627776
  Plan.seed is 1099511627776: give an integer from 0 to 4294967295
--out=FOLDER/certified
  certified/journal.jsonl belongs to a run that differs in code,
  compiler_flags, configuration, hardware, schema, versions: give another
""",
  'make_data': """
--exclude=FOLDER/latin.txt
  latin.txt: line 2 is not UTF-8: convert the file
--out=FOLDER/long.txt
  --out= ... long.txt: File exists ... give a folder
--gin_bindings=Synthesis.greedy_share = 1.5
  Synthesis.greedy_share is 1.5: give a number from 0 to 1
--gin_bindings=Synthesis.temperatures = (0.5, 0)
  Synthesis.temperatures is (0.5, 0): give at least one ... above 0
--gin_bindings=Synthesis.openings = ()
  Synthesis.openings is (): give at least one, or set opened_share = 0
--gin_bindings=Synthesis.max_prompt_tokens = 20
  max_prompt_tokens is 20: give more than ... chat template
--gin_bindings=Synthesis.max_answer_tokens = 500
  add up to 627, but the model takes 512: lower one of them
--gin_bindings=Synthesis.seed = -1
  Synthesis.seed is -1: give an integer from 0 to 4294967295
""",
  'report': """
--results=FOLDER/nowhere
  nowhere is not a folder: give the folder of --out
--results=FOLDER/drafter
  drafter has neither result.json nor ... evaluate first
--results=FOLDER/old
  old/result.json has schema None ... reads schema 5: make it again
--results=gs://bucket/results
  copy the folder here first
""",
  'compile_tpu': """
--topology=v9:2x2
  'v9:2x2' ... v4:2x2x4, v5e:4x4, v5p:2x2x4, v6e:4x4
--topology=h100:8
  'h100:8' is not a TPU ... give one of v4:2x2x4
--topology=v5e:4x4 --topology=v4:4x4
  'v4:4x4' ... 3 axes ... v4:2x2x4
--topology=v5e
  'v5e' ... 2 axes ... v5e:4x4
--topology=v5e:4xb
  'v5e:4xb' ... 2 axes ... v5e:4x4
--gin_bindings=CompileTpu.topologies = ()
  no topology ... --topology ... v4:2x2x4
--gin_bindings=CompileTpu.batch_size = 0
  CompileTpu.batch_size is 0 ... at least 1
--gin_bindings=CompileTpu.rules = (('heads', ('model',)),)
  CompileTpu.rules has 'heads' ... batch, tokens, kv_heads
--gin_bindings=CompileTpu.chips = 4
  'chips' ... configs/
--topologies=v5e:4x4
  'topologies' ... --help
--gin_bindings=
  libtpu, ... is not installed ... -m pip install ... libtpu== ... again
""",
}
_CASES = {
  (command, flags): ' '.join(words.split())
  for command, table in _TABLES.items()
  for flags, words in re.findall(r'^(\S.*)\n((?:  .*\n)+)', table, re.MULTILINE)
}
_LONG = 'x' * 600
_OWN_DRAFTER = """
from specsample import drafters

class Own(drafters.Ngram):

  def init(self, params, batch_size, max_length):
    return params['a key that is missing']
"""
_OWN_GIN = """
from __gin__ import dynamic_registration
from experiments import evaluation
from experiments import methods
import own_drafter
own/methods.Method.drafter = @own_drafter.Own()
own_drafter.Own.num_draft_tokens = 2
evaluation.Evaluation.methods = {'own': @own/methods.Method()}
"""


@pytest.fixture(scope='module')
def files(tmp_path_factory, checkpoint):
  """A folder of files that no command can use."""
  folder = tmp_path_factory.mktemp('files')
  prompt = '{"prompt": "a"}\n'
  config = json.loads((checkpoint / 'config.json').read_text())
  scaling = {'rope_type': 'linear', 'factor': 2.0}
  card = {'format': 1, 'kind': 'hydra', 'settings': {}, 'target': 'another'}
  texts = {
    'empty.jsonl': '\n',
    'seven.jsonl': 6 * prompt + '{"prompt": "cut off\n' + prompt,
    'long.txt': f'short\n{_LONG}\n',
    'malformed.gin': 'import gin\nEvaluation.max_new_tokens = = 3\n',
    'includes.gin': "include 'nothing.gin'\n",
    'own_drafter.py': _OWN_DRAFTER,
    'own.gin': _OWN_GIN,
    'drafter/card.json': json.dumps(
      card | {'fingerprint': '0123', 'sha256': ''}
    ),
    'old/result.json': '{"hardware": {}, "rows": []}',
    'certified/journal.jsonl': '{"configuration": {}}\n',
    'model.bin': 'cos\nabort\n(tR.',  # a pickle
    'scaled/config.json': json.dumps(config | {'rope_scaling': scaling}),
  }
  for name in ('certified', 'drafter', 'old'):
    (folder / name).mkdir()
  shutil.copytree(checkpoint, folder / 'scaled')
  for name, text in texts.items():
    (folder / name).write_text(text)
  (folder / 'latin.txt').write_bytes(b'short\ncaf\xe9\n')
  return folder


# Keep programs even if they compiled fast.
_KEEP_ALL = {'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}


@pytest.fixture(scope='module')
def commands_here(commands, tmp_path_factory):
  """The commands, with a compilation cache that is empty at first."""
  cache = tmp_path_factory.mktemp('cache')
  here = dataclasses.replace(commands, cache=str(cache))
  yield here
  here.close()


@pytest.fixture(scope='module')
def outcomes(files, commands_here, tiny, tiny_methods, tiny_evaluate):
  """The outcome of each case, the files left, and the programs compiled."""
  length = '--gin_bindings=Synthesis.max_prompt_tokens = 127'
  own = {
    'evaluate': [*tiny_evaluate, '--limit=2'],
    'generate': [*tiny_methods, '--drafter=ngram', '--prompt=Hello'],
    'benchmark': tiny,
    'make_data': [*tiny, length],
  }
  stands_for = {
    'FOLDER': str(files),
    'LONG': _LONG,
    'TARGET': 'target/specsample.load.name_or_path',
  }
  calls = []
  for i, (command, flags) in enumerate(_CASES):
    for word, meaning in stands_for.items():
      flags = flags.replace(word, meaning)
    out = f'--out={files / "results" / str(i)}'
    given = re.split(r'\s+(?=--)', flags)
    calls.append([command, *own.get(command, []), out, *given])
  before = set(files.rglob('*'))
  ended = commands_here.run_all(calls, variables=_KEEP_ALL)
  left = set(files.rglob('*')) - before
  return dict(zip(_CASES, ended, strict=True)), left, _programs(commands_here)


def _programs(commands):
  """Returns the decoding loop's programs in the compilation cache."""
  cached = {path.name.partition('-')[0] for path in commands.cached()}
  loop = {'_prefill', '_advance', 'drafted_rounds', 'target_rounds'}
  return {name for name in loop if f'jit_{name}' in cached}


@pytest.mark.parametrize('case', _CASES, ids=' '.join)
def test_one_line_says_what_to_do(outcomes, case):
  outcomes[0][case].check_refused(_CASES[case])


def test_nothing_is_left(outcomes):
  _, left, _ = outcomes
  assert left == set()


def test_nothing_is_compiled(outcomes, commands_here, tiny):
  _, _, programs = outcomes
  assert programs == set()
  # A run that does compile is noticed.
  flags = ['--drafter=ngram', '--prompt=Hello', '--max_new_tokens=2']
  call = ['generate', *tiny, *flags]
  (outcome,) = commands_here.run_all([call], variables=_KEEP_ALL)
  assert outcome.code == 0, outcome.err
  assert _programs(commands_here) == {'_prefill', '_advance'}


@pytest.mark.parametrize(
  ('platform', 'reason'),
  [
    # The reasons for which JAX raises errors of two kinds.
    ('nonesuch', "Backend 'nonesuch' is not in the list of known backends"),
    ('cuda', 'its plugin is not installed'),
  ],
)
def test_a_platform_that_is_not_here_is_named(commands, platform, reason):
  if platform == 'cuda' and importlib.util.find_spec('jax_plugins'):
    pytest.skip('the plugin is installed')
  calls = [
    ['generate', '--prompt=a'],
    ['make_prompts', '--data=nowhere', '--out=nowhere'],
  ]
  variables = {'JAX_PLATFORMS': platform}
  for outcome in commands.run_all(calls, variables=variables):
    outcome.check_refused(
      f'JAX_PLATFORMS={platform}: JAX finds no such ... {reason} ... or leave '
      'JAX_PLATFORMS out'
    )


def test_stray_words_are_named_before_the_prompt_is_missed(commands_here):
  (outcome,) = commands_here.run_all([['generate', 'hi', 'there']])
  assert outcome.code == 2
  assert outcome.remarks == ["unexpected argument 'hi': --help lists the flags"]


@pytest.mark.slow(but=('--helpfull',))
@pytest.mark.parametrize('flag', ['--help', '--helpfull'])
def test_help_is_no_failure(commands_here, flag):
  (outcome,) = commands_here.run_all([['generate', flag]])
  assert outcome.code == 0
  assert '--[no]interactive' in outcome.out
