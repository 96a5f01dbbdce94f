"""Data that the command makes: their content, and how they grow."""

import dataclasses
import json
import os
import re
import resource
import shutil
import time

import numpy as np
import pytest

from experiments.decoding import prompts
from experiments.training_data import data_folder
from experiments.training_data import features
from experiments.training_data import filters
from experiments.training_data import synthesis
from experiments.training_data import text_prompts
from experiments.training_data.data_folder import Source
import specsample
from specsample import files as files_lib

_TURNS = 24
_SETTINGS = {
  'user_turns': _TURNS,
  'prompts_per_shard': 4,
  'openings': ('What', 'Why'),
  'opened_share': 0.25,
  'max_prompt_tokens': 128,
  'max_answer_tokens': 48,
  'batch_size': 8,
}
_QUESTIONS = [
  'Is 7 odd?',
  'Is 8 odd?',
  'IS 7, odd',  # a duplicate
  'Who excluded this?',
  'And 9?',
  'x' * 200,  # too long
]
_TOKENS = 4000


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  """A folder with the prompts and with an excluded one."""
  folder = tmp_path_factory.mktemp('files')
  (folder / 'prompts.txt').write_text('\n'.join(_QUESTIONS))
  (folder / 'exclude.txt').write_text('Who excluded this?\n')
  return folder


@pytest.fixture(scope='module')
def flags(tiny, files):
  """The flags of all calls, except for --out and --tokens."""
  return (
    *tiny,
    *(
      f'--gin_bindings=Synthesis.{name} = {value!r}'
      for name, value in _SETTINGS.items()
    ),
    "--gin_bindings=target/specsample.load.dtype = 'float32'",
    f'--prompts={files / "prompts.txt"}',
    f'--exclude={files / "exclude.txt"}',
  )


@dataclasses.dataclass(frozen=True)
class Made:
  """A folder of data, and the outcome of the command that made it."""

  folder: object
  ended: object

  def files(self):
    """Returns the shards' contents by file name."""
    return {
      path.name: path.read_bytes() for path in self.folder.glob('shard-*.npz')
    }


@pytest.fixture(scope='module')
def made(commands, flags, tmp_path_factory):
  """The data of one undisturbed run."""
  folder = tmp_path_factory.mktemp('made') / 'data'
  ended = commands.run(
    'make_data', *flags, f'--out={folder}', f'--tokens={_TOKENS}'
  )
  assert ended.code == 0, ended.err
  return Made(folder, ended)


@pytest.fixture(scope='module')
def target(checkpoint):
  return specsample.load(checkpoint)


@pytest.fixture(scope='module')
def data(made, target):
  return data_folder.load(made.folder, target)


@pytest.fixture(scope='module')
def all_dialogues(data):
  return [dialogue for shard in data.shards for dialogue in shard]


def _turn(target, dialogue):
  """Returns the user's words in a dialogue."""
  prompt = target.tokenizer.decode(dialogue.tokens[: dialogue.answers[0][0]])
  assert prompt.startswith('user: ')
  assert prompt.endswith('\nassistant: ')
  return prompt[len('user: ') : -len('\nassistant: ')]


def test_there_are_as_many_tokens_as_asked_for(made, all_dialogues, data):
  answers = data_folder.num_answer_tokens(all_dialogues)
  assert answers >= _TOKENS
  last = data_folder.num_answer_tokens(data.shards[-1])
  assert answers - last < _TOKENS
  total, rates = made.ended.out.splitlines()
  assert total == (
    f'{answers:,} tokens of answers in {len(data.shards)} shards: {made.folder}'
  )
  assert re.fullmatch(
    r'[\d,]+ answer tokens per second; [\d,]+ rows per second including the '
    r'prompts',
    rates,
  )
  summary, first, *_ = made.ended.err.splitlines()
  assert summary.endswith(
    'prompts.txt: 6 conversations, 6 user turns; all of them are used'
  )
  assert re.fullmatch(
    r'[\d,]+/4,000 tokens.*, shard 0: \d+ of \d+ questions written', first
  )
  manifest = json.loads((made.folder / 'manifest.json').read_text())
  assert manifest['answer_tokens'] == answers
  for shard, notes in zip(data.shards, manifest['shards'], strict=True):
    ends = notes['ends']
    assert notes['dialogues'] == len(shard)
    assert sum(n for end, n in ends.items() if 'kept' in end) == len(shard)
    assert sum(ends.values()) == _TURNS
    assert notes['rows'] >= sum(d.tokens.size for d in shard)
  assert set(made.files()) == {
    f'shard-{i:05}.npz' for i in range(len(data.shards))
  }


def test_few_tokens_take_few_conversations(commands, flags, tmp_path):
  most = _SETTINGS['max_answer_tokens']
  ended = commands.run(
    'make_data', *flags, f'--out={tmp_path}', f'--tokens={most + 1}'
  )
  assert ended.code == 0, ended.err
  manifest = json.loads((tmp_path / 'manifest.json').read_text())
  for notes in manifest['shards']:
    assert sum(notes['ends'].values()) == 2
  # The folder is one that a larger --tokens continues.
  assert manifest['settings']['user_turns'] == _TURNS


@pytest.mark.parametrize(
  ('wanted', 'tried', 'of_file'),
  [(1, 1, 1), (480, 10, 2), (3_000, 63, 10), (9_999, 96, 16)],
)
def test_a_shard_is_no_larger_than_what_is_wanted(wanted, tried, of_file):
  whole = synthesis.Synthesis(
    target=None, user_turns=96, prompts_per_shard=16, max_answer_tokens=48
  )
  found = whole.for_tokens(wanted)
  assert (found.user_turns, found.prompts_per_shard) == (tried, of_file)
  only_a_file = dataclasses.replace(whole, prompts_per_shard=96)
  found = only_a_file.for_tokens(wanted)
  assert found.user_turns == found.prompts_per_shard == tried


def test_a_greedy_answer_is_the_models_own(all_dialogues, target, greedy):
  answers = [d for d in all_dialogues if d.temperature == 0][:4]
  for dialogue in answers:
    answer = dialogue.tokens[slice(*dialogue.answers[0])]
    turn = _turn(target, dialogue)
    tokens, _ = greedy(turn, _SETTINGS['max_answer_tokens'], chat=True)
    assert answer.tolist() == tokens[: answer.size]
    chat = target.tokenizer.encode_chat([{'role': 'user', 'content': turn}])
    assert dialogue.tokens[: dialogue.answers[0][0]].tolist() == chat


def test_the_targets_vectors_are_computed_once(made, data, target):
  dialogues = [d for shard in data.shards for d in shard]
  found, num_found = features.read(data, target)
  assert num_found == sum(d.tokens.size for d in dialogues)
  again, num_found = features.read(data, target)
  assert not num_found
  vectors, expected = (x[0][0]['hidden'] for x in (again, found))
  np.testing.assert_array_equal(vectors, expected)
  empty = target.model.init_cache(1, 0)
  tokens = dialogues[0].tokens[None]
  output, _ = target.model.apply(target.params, tokens, empty)
  np.testing.assert_allclose(
    vectors.astype(np.float32), output.hidden[0], rtol=0.02, atol=0.02
  )
  path = features.path(made.folder, 0)
  path.write_bytes(path.read_bytes()[:-10])
  with pytest.raises(ValueError, match=r'hidden\.npy is damaged'):
    features.read(data, target)
  path.unlink()


def test_outputs_of_layers_are_found_once(made, data, target):
  layers = (-1, 0)
  _, num_found = features.read(data, target, layers)
  assert num_found
  found, num_found = features.read(data, target, layers)
  assert not num_found
  dialogue, vectors = data.shards[0][0], found[0][0]
  tokens = dialogue.tokens[None]
  empty = target.model.init_cache(*tokens.shape)
  output, _ = target.model.apply(target.params, tokens, empty, layers)
  np.testing.assert_allclose(
    vectors['features'].astype(np.float32),
    np.concatenate(output.features, axis=-1)[0],
    rtol=0.01,
    atol=0.01,
  )
  assert vectors['hidden'].shape == output.hidden[0].shape
  for path in made.folder.glob('*-layers-*.npy'):
    path.unlink()


def test_shares_are_as_set(all_dialogues, made):
  # One of 4 temperatures is greedy, and half of the jobs have it.
  temperatures = np.asarray([d.temperature for d in all_dialogues])
  found, counts = np.unique(temperatures.round(3), return_counts=True)
  np.testing.assert_allclose(found, [0, 0.4, 0.7, 1.0], atol=1e-6)
  assert 0.35 < counts[0] / counts.sum() < 0.65
  sources = {d.source for d in all_dialogues}
  assert sources == {Source.SAMPLED, Source.OPENED, Source.PROMPT}


def test_turns_of_the_file_are_answered_once(all_dialogues, data, target):
  of_file = [d for d in all_dialogues if d.source == Source.PROMPT]
  assert [_turn(target, d) for d in of_file] == [
    'Is 7 odd?',
    'Is 8 odd?',
    'And 9?',
  ]
  # The first shard takes four of the questions, and drops two of them.
  assert sum(d.source == Source.PROMPT for d in data.shards[0]) == 2


def test_opened_turns_begin_with_the_opening(all_dialogues, target):
  opened = [d for d in all_dialogues if d.source == Source.OPENED]
  first = {_turn(target, d)[:3] for d in opened}
  assert first == {'Wha', 'Why'}


def test_no_turn_is_there_twice(all_dialogues, target):
  turns = [_turn(target, d) for d in all_dialogues]
  assert len({' '.join(filters.words(turn)) for turn in turns}) == len(turns)
  assert [d.turn for d in all_dialogues] == [filters.digest(t) for t in turns]
  assert not any(filters.loops(target.tokenizer.encode(t)) for t in turns)
  assert all(turn.strip() for turn in turns)


def test_an_answer_ends_soon_after_it_begins_to_loop(all_dialogues):
  answers = [d.tokens[slice(*d.answers[0])].tolist() for d in all_dialogues]
  looping = [answer for answer in answers if filters.loops(answer)]
  assert looping, 'a random model loops'
  for answer in looping:
    assert filters.loop(answer) == len(answer)


def test_a_killed_run_goes_on_to_the_same_files(
  commands, flags, made, tmp_path
):
  call = ['make_data', *flags, f'--out={tmp_path}', f'--tokens={_TOKENS}']
  process = commands.start(*call)
  deadline = time.monotonic() + 300
  while not (tmp_path / 'shard-00001.npz').exists():
    assert process.poll() is None, process.stderr.read().decode()
    assert time.monotonic() < deadline
    time.sleep(0.001)
  process.kill()
  process.communicate()
  killed = Made(tmp_path, None).files()
  assert 2 <= len(killed) < len(made.files())
  ended = commands.run(*call)
  assert ended.code == 0, ended.err
  assert Made(tmp_path, ended).files() == made.files()
  assert ended.out.partition(':')[0] == made.ended.out.partition(':')[0]


def test_more_tokens_take_one_command(commands, flags, made, tmp_path):
  fewer = tmp_path / 'data'
  shutil.copytree(made.folder, fewer)
  names = sorted(made.files())
  # As if killed before the manifest listed a shard, and while writing another.
  manifest = json.loads((fewer / 'manifest.json').read_text())
  kept = manifest | {'shards': manifest['shards'][:1]}
  (fewer / 'manifest.json').write_text(json.dumps(kept))
  for name in names[2:]:
    (fewer / name).unlink()
  (fewer / f'.{names[2]}.partial').write_bytes(b'cut off')
  ended = commands.run(
    'make_data', *flags, f'--out={fewer}', f'--tokens={_TOKENS}'
  )
  assert ended.code == 0, ended.err
  assert Made(fewer, ended).files() == made.files()
  again = json.loads((fewer / 'manifest.json').read_text())
  assert again['answer_tokens'] == manifest['answer_tokens']


@pytest.fixture(scope='module')
def refusals(commands, flags, files, made, tmp_path_factory):
  """Outcomes of the command on copies of the data, and whether they changed."""
  parent = tmp_path_factory.mktemp('refused')
  names = sorted(made.files())
  calls = {}

  def case(name, *more):
    folder = parent / name
    shutil.copytree(made.folder, folder)
    out = f'--out={folder}'
    calls[name] = ['make_data', *flags, *more, out, '--tokens=9999']
    return folder

  case('seed', '--gin_bindings=Synthesis.seed = 1')
  case('prompts', f'--prompts={files / "exclude.txt"}')
  case('answers', '--prompts=', f'--answers={files / "answers.jsonl"}')
  case('bfloat16', "--gin_bindings=target/specsample.load.dtype = 'bfloat16'")
  case('int8', "--gin_bindings=target/specsample.load.weights = 'int8'")
  folder = case('truncated')
  whole = (folder / names[1]).read_bytes()
  (folder / names[1]).write_bytes(whole[: len(whole) // 2])
  folder = case('flipped')
  middle = len(whole) // 2
  flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
  (folder / names[1]).write_bytes(flipped)
  folder = case('moved')
  shutil.copy(folder / names[0], folder / names[1])
  folder = case('manifest')
  (folder / 'manifest.json').write_text('{"format": ')
  folder = case('unlisted')
  (folder / 'manifest.json').unlink()
  read = lambda: {
    path: path.read_bytes() for path in parent.rglob('*') if path.is_file()
  }
  before = read()
  ended = commands.run_all(list(calls.values()))
  assert read() == before
  return dict(zip(calls, ended, strict=True))


@pytest.mark.parametrize(
  ('case', 'expected'),
  [
    ('seed', 'belongs to data that differs in seed: give another --out'),
    ('prompts', 'shard 0 was made from other conversations than'),
    ('answers', '--prompts and --answers are both given'),
    ('bfloat16', 'belongs to data that differs in dtype'),
    ('int8', 'belongs to data that differs in weights'),
    ('truncated', 'shard-00001.npz is damaged'),
    ('flipped', 'shard-00001.npz is damaged'),
    ('moved', 'shard-00001.npz is damaged, or not the shard that'),
    ('manifest', 'manifest.json cannot be read'),
    ('unlisted', 'manifest.json is missing, but its shards exist'),
  ],
)
def test_what_does_not_belong_is_refused(refusals, case, expected):
  outcome = refusals[case]
  assert outcome.code == 2
  assert outcome.out == ''
  *_, line = outcome.err.splitlines()
  assert expected in line


def test_a_full_disk_leaves_what_was_there(commands, flags, made, tmp_path):
  """A file size limit that a shard exceeds stands in for a full disk."""
  for name in ('manifest.json', 'shard-00000.npz'):
    shutil.copy(made.folder / name, tmp_path)
  manifest = json.loads((tmp_path / 'manifest.json').read_text())
  few = manifest | {'shards': manifest['shards'][:1]}
  (tmp_path / 'manifest.json').write_text(json.dumps(few))
  before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
  limit = len(made.files()['shard-00001.npz']) - 1
  process = commands.start(
    *('make_data', *flags, f'--out={tmp_path}', f'--tokens={_TOKENS}')
  )
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
  ended = commands.finish(process)
  assert ended.code == 2
  *_, line = ended.err.splitlines()
  assert 'shard-00001.npz cannot be written (File too large)' in line
  assert 'run the same command again to continue' in line
  after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
  assert after == before


def test_two_runs_do_not_share_a_folder(target, tmp_path):
  opened = lambda: data_folder.opened(files_lib.at(tmp_path), target, {})
  with (
    opened(),
    pytest.raises(ValueError, match='in use by another run'),
    opened(),
  ):
    pass
  with opened() as manifest:
    assert manifest['shards'] == []


def test_data_of_another_target_are_refused(made, target, tmp_path):
  other = dataclasses.replace(target, exact_fingerprint='another')
  with pytest.raises(ValueError, match=r'was written by target .* make data'):
    data_folder.load(made.folder, other)
  with pytest.raises(ValueError, match=r'manifest\.json does not exist'):
    data_folder.load(tmp_path, target)


def test_data_of_other_weights_are_refused(made, target, tmp_path):
  """Rounded weights are refused though their exact fingerprint is the same."""
  of_int8 = dataclasses.replace(target, exact_fingerprint=target.fingerprint)
  with pytest.raises(ValueError, match=r"None, but this .* = 'int8': load it"):
    data_folder.load(made.folder, of_int8)
  manifest = json.loads((made.folder / 'manifest.json').read_text())
  manifest['settings']['weights'] = 'int8'
  (tmp_path / 'manifest.json').write_text(json.dumps(manifest))
  with pytest.raises(ValueError, match=r"'int8', but this .* = None: load it"):
    data_folder.load(tmp_path, target)


def test_a_missing_shard_is_named(made, target, tmp_path):
  folder = shutil.copytree(made.folder, tmp_path / 'data')
  os.unlink(folder / 'shard-00001.npz')
  with pytest.raises(ValueError, match=r'shard-00001\.npz is missing'):
    data_folder.load(folder, target)


def test_each_nth_shard_is_held_out(data):
  train, held_out = data.numbers(3)
  assert held_out == [*range(0, len(data.shards), 3)]
  assert sorted(train + held_out) == [*range(len(data.shards))]
  for every in (1, 0, -3):
    with pytest.raises(ValueError, match=f'is {every}: give at least 2'):
      data.numbers(every)
  alone = dataclasses.replace(data, shards=data.shards[:1])
  with pytest.raises(ValueError, match=r'run make_data again with more'):
    alone.numbers(2)


def test_prompts_are_about_the_targets_own_texts(
  commands, tiny, made, all_dialogues, target, tmp_path
):
  out = tmp_path / 'new' / 'prompts.jsonl'
  templates = ('Sum up: {text}', '{text} So, {question}')
  call = (
    *('make_prompts', *tiny, f'--data={made.folder}', f'--out={out}'),
    f'--gin_bindings=Prompts.templates = {templates!r}',
    '--gin_bindings=Prompts.max_question_tokens = 100',
    '--count=9',
  )
  ended = commands.run(*call)
  if not any(_turn(target, d).endswith('?') for d in all_dialogues):
    pytest.fail('the data hold no question to ask')
  assert ended.code == 0, ended.err
  assert ended.out == f'9 prompts: {out}\n'
  answers = {
    target.tokenizer.decode(d.tokens[slice(*d.answers[0])].tolist()).strip()
    for d in all_dialogues
  }
  read = prompts.read(str(out))
  assert [x.category for x in read[:3]] == [f'template {i}' for i in (0, 1, 0)]
  for prompt in read[::2]:
    text = prompt.text.removeprefix('Sum up: ')
    assert all(part in answers for part in text.split('\n\n'))
  assert all(x.text.endswith('?') for x in read[1::2])


def test_prompts_are_not_about_what_training_holds_out(
  commands, tiny, made, data, target, tmp_path
):
  out = tmp_path / 'prompts.jsonl'
  call = (
    *('make_prompts', *tiny, f'--data={made.folder}', f'--out={out}'),
    "--gin_bindings=Prompts.templates = ('{text}',)",
    '--gin_bindings=Prompts.max_answers = 1',
    '--gin_bindings=Prompts.held_out_every = 2',
    '--count=200',
  )
  ended = commands.run(*call)
  assert ended.code == 0, ended.err
  texts = lambda numbers: {
    target.tokenizer.decode(d.tokens[slice(*d.answers[0])].tolist()).strip()
    for n in numbers
    for d in data.shards[n]
  }
  train, held_out = map(texts, data.numbers(2))
  asked = {x.text for x in prompts.read(str(out))}
  assert asked <= train
  assert held_out - train  # which another choice would have asked about


@pytest.mark.parametrize(
  ('templates', 'message'),
  [
    ((), 'Prompts.templates is empty'),
    (('What?',), r"has 'What\?': add {text}"),
    (('{text} {answer}',), r"\('answer'\): use braces only in {text} and"),
  ],
)
def test_templates_without_a_place_for_a_text_are_refused(templates, message):
  with pytest.raises(ValueError, match=message):
    text_prompts.Prompts(target=None, templates=templates)


def test_two_processes_write_the_same_data(
  commands, flags, made, cpu_devices, tmp_path
):
  folder = tmp_path / 'data'
  # The fewest tokens for which a shard is not made smaller.
  wanted = _TURNS * _SETTINGS['max_answer_tokens']
  call = (
    *('make_data', *flags, f'--out={folder}', f'--tokens={wanted}'),
    *('--gin_bindings=Mesh.data = 4', '--gin_bindings=Mesh.model = 2'),
  )
  first, second = commands.run_on_two_hosts(*call, variables=cpu_devices(4))
  assert (first.code, second.code) == (0, 0), (first.err, second.err)
  assert second.out == ''
  found = Made(folder, first).files()
  assert found.items() <= made.files().items()
  assert found
