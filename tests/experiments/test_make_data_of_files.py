"""Data made from files: several turns, foreign answers, growing files."""

import json

import numpy as np
import pytest

from experiments.training import begin as begin_lib
from experiments.training import training as training_lib
from experiments.training_data import data_folder
from experiments.training_data.data_folder import Source
from specsample.testing import trained
from specsample.training import heads

_SETTINGS = {
  'user_turns': 3,
  'prompts_per_shard': 3,
  'max_prompt_tokens': 200,
  'max_answer_tokens': 40,
  'greedy_share': 1.0,
  'max_turns': 3,
  'batch_size': 4,
}
_COUNT = 8


def _conversation(i, temperature):
  """Returns a user's turns with somebody's answers."""
  messages = [
    {'role': 'user', 'content': f'Is {i} odd?'},
    {'role': 'assistant', 'content': f'I say that {i} is.'},
    {'role': 'user', 'content': 'Why?'},
    {'role': 'assistant', 'content': 'Because I count.'},
  ]
  return {'messages': messages, 'temperature': temperature, 'source': 'own'}


def _array(folder, *records):
  """Writes a file that ends with a conversation that begins with a tool's."""
  path = folder / 'array.json'
  last = {'messages': [{'role': 'tool', 'content': 'x'}]}
  path.write_text(json.dumps([*records, last]))
  return path


@pytest.fixture(scope='module')
def flags(tiny):
  """The flags of all calls, except for the files and --out."""
  settings = [f'Synthesis.{name} = {x!r}' for name, x in _SETTINGS.items()]
  settings.append("target/specsample.load.dtype = 'float32'")
  return (*tiny, *(f'--gin_bindings={setting}' for setting in settings))


@pytest.fixture(scope='module')
def make(commands, flags):
  """A function that makes data in a folder and returns the outcome."""
  call = ('make_data', *flags)
  return lambda out, *more: commands.complete(*call, f'--out={out}', *more)


def _shards(folder):
  return {x.name: x.read_bytes() for x in sorted(folder.glob('shard-*.npz'))}


@pytest.fixture(scope='module')
def asked(make, tmp_path_factory):
  """The target's answers to an array's turns, and the command's outcome."""
  folder = tmp_path_factory.mktemp('asked')
  path = _array(folder, *(_conversation(i, 0) for i in range(4)))
  exclude = folder / 'exclude.json'
  # A later turn of the test set counts too.
  exclude.write_text(json.dumps([{'turns': ['Hm', 'Is 2 odd?']}]))
  data = folder / 'data'
  return data, make(data, f'--prompts={path}', f'--exclude={exclude}')


@pytest.mark.slow
def test_the_target_answers_each_turn_after_its_own_answers(
  asked, target, greedy
):
  folder, _ = asked
  data = data_folder.load(folder, target)
  found = [dialogue for shard in data.shards for dialogue in shard]
  decode = lambda ids: target.tokenizer.decode(ids, skip_special=False)
  firsts = [decode(x.tokens[: x.answers[0][0]]) for x in found]
  assert firsts == [f'user: Is {i} odd?\nassistant: ' for i in (0, 1, 3)]
  for dialogue in found:
    assert dialogue.source == Source.PROMPT
    (_, end), (start, size) = dialogue.answers
    assert decode(dialogue.tokens[end:start]) == '\nuser: Why?\nassistant: '
    assert size == dialogue.tokens.size
    for begin, end in dialogue.answers:
      tokens, _ = greedy(decode(dialogue.tokens[:begin]), end - begin)
      assert dialogue.tokens[begin:end].tolist() == tokens
  assert data.what == 'answers of the target, sampled by make_data'


def test_one_line_says_what_cannot_be_used(asked):
  folder, ended = asked
  summary, *_ = ended.err.splitlines()
  skipped = 'skipped (no turn of a user)'
  assert f'4 conversations, 8 user turns; 1 {skipped}' in summary
  *_, counts = ended.err.splitlines()
  assert '1 dropped, turn excluded' in counts
  _, left, rates = ended.out.splitlines()
  assert left == (
    'the file is used up: append conversations to it for more tokens'
  )
  assert 'rows per second' in rates
  manifest = json.loads((folder / 'manifest.json').read_text())
  assert manifest['file'] == {
    'name': 'array.json',
    'conversations': 4,
    'user_turns': 8,
    'left_out': {skipped: 1},
  }
  first, second = manifest['shards']
  assert first['origin']['count'] == 3
  assert second['origin']['first'] == 3
  assert first['categories'] == {'own': 3}


@pytest.fixture(scope='module')
def written(make, tmp_path_factory):
  """A file of answers, the data made from it, and the command's outcome."""
  folder = tmp_path_factory.mktemp('written')
  path = folder / 'answers.jsonl'
  lines = [json.dumps(_conversation(i, 0.7 * (i % 2))) for i in range(_COUNT)]
  path.write_text('\n'.join(lines))
  data = folder / 'data'
  return path, data, make(data, f'--answers={path}')


def test_answers_written_elsewhere_are_kept_as_they_are(written, target):
  _, folder, ended = written
  data = data_folder.load(folder, target)
  assert [len(shard) for shard in data.shards] == [6, 6, 4]
  found = [dialogue for shard in data.shards for dialogue in shard]
  # The template renders no end, so each answer ends a dialogue of its own.
  assert {len(x.answers) for x in found} == {1}
  texts = [target.tokenizer.decode(x.tokens) for x in found]
  assert texts[3] == (
    'user: Is 1 odd?\nassistant: I say that 1 is.\n'
    'user: Why?\nassistant: Because I count.<|end|>'
  )
  np.testing.assert_allclose(
    [x.temperature for x in found[:4]], [0, 0, 0.7, 0.7], rtol=1e-6
  )
  assert {x.source for x in found} == {Source.ENGINE}
  assert data.what == 'answers of the target, written by another engine'
  assert ended.out.endswith('append conversations to it for more tokens\n')


def test_a_file_may_grow_between_two_calls(make, written, tmp_path):
  path, whole, _ = written
  lines = path.read_text().splitlines()
  growing, out = tmp_path / 'growing.jsonl', tmp_path / 'data'
  answers = f'--answers={growing}'
  growing.write_text('\n'.join(lines[:4]))
  make(out, answers)
  before = _shards(out)
  assert len(before) == 2
  growing.write_text('\n'.join(lines))
  make(out, answers)
  after = _shards(out)
  assert {name: after[name] for name in before} == before
  manifest, expected = (
    json.loads((folder / 'manifest.json').read_text())
    for folder in (out, whole)
  )
  assert [x['origin']['count'] for x in manifest['shards']] == [3, 1, 3, 1]
  assert manifest['answer_tokens'] == expected['answer_tokens']
  # The same call again changes nothing.
  make(out, answers)
  assert _shards(out) == after


def test_a_call_goes_on_to_the_files_of_an_undisturbed_one(
  make, written, tmp_path
):
  path, whole, _ = written
  ended = make(tmp_path, f'--answers={path}', '--tokens=1')
  assert len(_shards(tmp_path)) == 1
  assert ended.out.splitlines()[1] == '5 conversations are left: raise --tokens'
  make(tmp_path, f'--answers={path}')
  assert _shards(tmp_path) == _shards(whole)


# What is given, and words of the line that refuses it.
_REFUSED = {
  'other file': 'shard 0 was made from other conversations than',
  'no file': 'belongs to data that differs in answers, dtype',
  'both': '--prompts and --answers are both given: make the data in two',
  'limit': 'belongs to data that differs in max_answer_tokens',
  'unanswered': 'no conversation in the file passed the filters',
  'exclude': 'exclude.jsonl, line 2: ',
  'other exclusion': 'belongs to data that differs in exclude',
}


@pytest.fixture(scope='module')
def refusals(commands, flags, written, asked, tmp_path_factory):
  """Outcomes of commands that don't fit the data in their folder."""
  path, folder, _ = written
  parent = tmp_path_factory.mktemp('refused')
  other = parent / 'other.jsonl'
  other.write_text(path.read_text().replace('odd', 'even'))
  unanswered = parent / 'unanswered.txt'
  unanswered.write_text('One?\nTwo?\n')
  exclude = parent / 'exclude.jsonl'
  exclude.write_text('{"prompt": "a"}\n{"prompt": ')
  answers, prompts = f'--answers={path}', f'--prompts={path}'
  fewer = '--gin_bindings=Synthesis.max_answer_tokens = 39'
  calls = {
    'other file': (folder, f'--answers={other}'),
    'no file': (folder,),
    'both': (folder, prompts, answers),
    'limit': (folder, answers, fewer),
    'unanswered': (parent / 'new', f'--answers={unanswered}'),
    'exclude': (parent / 'x', prompts, f'--exclude={exclude}'),
    'other exclusion': (asked[0], f'--prompts={other}'),
  }
  ended = commands.run_all(
    [
      ('make_data', *flags, f'--out={out}', *more)
      for out, *more in calls.values()
    ]
  )
  return dict(zip(calls, ended, strict=True))


@pytest.mark.parametrize('case', _REFUSED)
def test_what_does_not_fit_is_refused(refusals, case):
  outcome = refusals[case]
  assert (outcome.code, outcome.out) == (2, '')
  assert _REFUSED[case] in outcome.err.splitlines()[-1]


def test_texts_of_others_need_greedy_answers_beside_them(
  make, written, target, tmp_path
):
  path, folder, _ = written
  make(tmp_path, f'--answers={path}', '--answers_by=others')
  others = data_folder.load(tmp_path, target)
  assert others.what == 'conversations whose answers the target did not write'
  own = data_folder.load(folder, target)
  case = next(iter(trained.scenes(5)))
  training = training_lib.Training(
    target=target,
    objective=heads.HeadsObjective(drafter=case.drafter),
    held_out_every=2,
  )

  found = begin_lib.split(training, [others, own], None)
  assert len(found.held_out) == 4 + 2
  assert len(found.train) == 6 + 6
  with pytest.raises(ValueError, match=r'no held-out answer in .* is greedy'):
    begin_lib.split(training, [others], None)
