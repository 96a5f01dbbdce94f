"""Data of make_data: their content, how they grow, and what is made of them."""

import dataclasses
import json
import os
import re
import resource
import shutil

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
from specsample.memory import store

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


def _shards(folder):
  return {path.name: path.read_bytes() for path in folder.glob('shard-*.npz')}


@pytest.fixture(scope='module')
def make(commands, flags):
  """A function that makes data in a folder and returns the outcome."""
  return lambda out, tokens=_TOKENS: commands.complete(
    *('make_data', *flags, f'--out={out}', f'--tokens={tokens}')
  )


@pytest.fixture(scope='module')
def made(make, tmp_path_factory):
  """The data of one undisturbed run."""
  folder = tmp_path_factory.mktemp('made') / 'data'
  return Made(folder, make(folder))


@pytest.fixture(scope='module')
def data(made, target):
  return data_folder.load(made.folder, target)


@pytest.fixture(scope='module')
def all_dialogues(data):
  return [dialogue for shard in data.shards for dialogue in shard]


def _answer(dialogue):
  (span,) = dialogue.answers
  return dialogue.tokens[slice(*span)].tolist()


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
  assert set(_shards(made.folder)) == {
    f'shard-{i:05}.npz' for i in range(len(data.shards))
  }


def test_few_tokens_take_few_conversations(make, tmp_path):
  make(tmp_path, _SETTINGS['max_answer_tokens'] + 1)
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


@pytest.mark.slow
def test_a_greedy_answer_is_the_models_own(all_dialogues, target, greedy):
  answers = [d for d in all_dialogues if d.temperature == 0][:4]
  for dialogue in answers:
    answer, turn = _answer(dialogue), _turn(target, dialogue)
    tokens, _ = greedy(turn, _SETTINGS['max_answer_tokens'], chat=True)
    assert answer == tokens[: len(answer)]
    chat = target.tokenizer.encode_chat([{'role': 'user', 'content': turn}])
    assert dialogue.tokens[: dialogue.answers[0][0]].tolist() == chat


@pytest.mark.slow
def test_vectors_of_the_target_are_computed_once(
  made, data, target, all_dialogues
):
  layers = (-1, 0)
  found, num_found = features.read(data, target, layers)
  assert num_found == sum(d.tokens.size for d in all_dialogues)
  again, num_found = features.read(data, target, layers)
  assert not num_found
  tokens = all_dialogues[0].tokens[None]
  empty = target.model.init_cache(*tokens.shape)
  output, _ = target.model.apply(target.params, tokens, empty, layers)
  expected = {
    'hidden': output.hidden[0],
    'features': np.concatenate(output.features, axis=-1)[0],
  }
  for name, values in expected.items():
    vectors = found[0][0][name]
    np.testing.assert_array_equal(again[0][0][name], vectors)
    np.testing.assert_allclose(
      vectors.astype(np.float32), values, rtol=0.02, atol=0.02
    )
  path = features.path(made.folder, 0)
  path.write_bytes(path.read_bytes()[:-10])
  with pytest.raises(ValueError, match=r'hidden\.npy is damaged'):
    features.read(data, target)
  for path in made.folder.glob('*.npy'):
    path.unlink()


def test_shares_are_as_set(all_dialogues):
  # One of 4 temperatures is greedy, and half of the jobs have it.
  temperatures = np.asarray([d.temperature for d in all_dialogues])
  found, counts = np.unique(temperatures.round(3), return_counts=True)
  np.testing.assert_allclose(found, [0, 0.4, 0.7, 1.0], atol=1e-6)
  assert 0.35 < counts[0] / counts.sum() < 0.65
  sources = {d.source for d in all_dialogues}
  assert sources == {Source.SAMPLED, Source.OPENED, Source.PROMPT}


def test_turns_of_the_file_and_of_openings_are_answered_once(
  all_dialogues, data, target
):
  turns = lambda source: [
    _turn(target, d) for d in all_dialogues if d.source == source
  ]
  assert turns(Source.PROMPT) == ['Is 7 odd?', 'Is 8 odd?', 'And 9?']
  # The first shard takes four of the questions, and drops two of them.
  assert sum(d.source == Source.PROMPT for d in data.shards[0]) == 2
  assert {turn[:3] for turn in turns(Source.OPENED)} == {'Wha', 'Why'}


def test_no_turn_is_there_twice(all_dialogues, target):
  turns = [_turn(target, d) for d in all_dialogues]
  assert len({' '.join(filters.words(turn)) for turn in turns}) == len(turns)
  assert [d.turn for d in all_dialogues] == [filters.digest(t) for t in turns]
  assert not any(filters.loops(target.tokenizer.encode(t)) for t in turns)
  assert all(turn.strip() for turn in turns)


def test_an_answer_ends_soon_after_it_begins_to_loop(all_dialogues):
  answers = map(_answer, all_dialogues)
  looping = [answer for answer in answers if filters.loops(answer)]
  assert looping, 'a random model loops'
  for answer in looping:
    assert filters.loop(answer) == len(answer)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_files(
  commands, flags, make, made, tmp_path
):
  call = ('make_data', *flags, f'--out={tmp_path}', f'--tokens={_TOKENS}')
  commands.kill_once((tmp_path / 'shard-00001.npz').exists, *call)
  assert 2 <= len(_shards(tmp_path)) < len(_shards(made.folder))
  ended = make(tmp_path)
  assert _shards(tmp_path) == _shards(made.folder)
  assert ended.out.partition(':')[0] == made.ended.out.partition(':')[0]


def test_more_tokens_take_one_command(make, made, tmp_path):
  fewer = shutil.copytree(made.folder, tmp_path / 'data')
  names = sorted(_shards(made.folder))
  # As if killed before the manifest listed a shard, and while writing another.
  manifest = json.loads((fewer / 'manifest.json').read_text())
  kept = manifest | {'shards': manifest['shards'][:1]}
  (fewer / 'manifest.json').write_text(json.dumps(kept))
  for name in names[2:]:
    (fewer / name).unlink()
  (fewer / f'.{names[2]}.partial').write_bytes(b'cut off')
  make(fewer)
  assert _shards(fewer) == _shards(made.folder)
  again = json.loads((fewer / 'manifest.json').read_text())
  assert again['answer_tokens'] == manifest['answer_tokens']


def _flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 255
  path.write_bytes(content)


def test_what_does_not_belong_is_refused(
  commands, flags, files, made, tmp_path
):
  refused = {
    '--gin_bindings=Synthesis.seed = 1': (
      'belongs to data that differs in seed: give another --out'
    ),
    f'--prompts={files / "exclude.txt"}': (
      'shard 0 was made from other conversations than'
    ),
    "--gin_bindings=target/specsample.load.dtype = 'bfloat16'": (
      'belongs to data that differs in dtype'
    ),
    "--gin_bindings=target/specsample.load.weights = 'int8'": (
      'belongs to data that differs in weights'
    ),
    '--tokens=9999': 'shard-00001.npz is damaged',
  }
  whole = shutil.copytree(made.folder, tmp_path / 'whole')
  damaged = shutil.copytree(made.folder, tmp_path / 'damaged')
  _flip(damaged / 'shard-00001.npz')
  read = lambda: {
    path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()
  }
  before = read()
  out = lambda words: damaged if 'damaged' in words else whole
  calls = [
    ('make_data', *flags, '--tokens=9999', flag, f'--out={out(words)}')
    for flag, words in refused.items()
  ]
  ended = commands.run_all(calls)
  for outcome, words in zip(ended, refused.values(), strict=True):
    assert (outcome.code, outcome.out) == (2, '')
    assert words in outcome.err.splitlines()[-1]
  assert read() == before


@pytest.mark.slow
def test_a_full_disk_leaves_what_was_there(commands, flags, made, tmp_path):
  """A file size limit that a shard exceeds stands in for a full disk."""
  for name in ('manifest.json', 'shard-00000.npz'):
    shutil.copy(made.folder / name, tmp_path)
  manifest = json.loads((tmp_path / 'manifest.json').read_text())
  few = manifest | {'shards': manifest['shards'][:1]}
  (tmp_path / 'manifest.json').write_text(json.dumps(few))
  before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
  limit = len(_shards(made.folder)['shard-00001.npz']) - 1
  call = ('make_data', *flags, f'--out={tmp_path}', f'--tokens={_TOKENS}')
  process = commands.start(*call)
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


def _in_manifest(**changes):
  def change(folder):
    path = folder / 'manifest.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

  return change


def _in_settings(**changes):
  def change(folder):
    settings = json.loads((folder / 'manifest.json').read_text())['settings']
    _in_manifest(settings=settings | changes)(folder)

  return change


_ONE, _TWO = 'shard-00000.npz', 'shard-00001.npz'


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (lambda x: os.truncate(x / _TWO, 500), f'{_TWO} is damaged'),
    (lambda x: _flip(x / _TWO), f'{_TWO} is damaged'),
    (
      lambda x: shutil.copy(x / _ONE, x / _TWO),
      f'{_TWO} is damaged, or not the shard that',
    ),
    (lambda x: (x / _TWO).unlink(), f'{_TWO} is missing'),
    (
      lambda x: (x / 'manifest.json').write_text('{"format": '),
      'manifest.json cannot be read',
    ),
    (
      lambda x: (x / 'manifest.json').unlink(),
      'manifest.json does not exist: make_data --out writes it',
    ),
    (_in_manifest(format=1), 'has format 1, .* make the data again'),
    (
      _in_manifest(target='0' * 16),
      'was written by target 0000000000000000, .* make data for this target',
    ),
    (
      _in_settings(template={'before': [1], 'after': [2]}),
      'was written with another tokenizer or chat',
    ),
    (_in_settings(weights='int8'), "'int8', but this .* = None: load it"),
  ],
)
def test_data_that_do_not_fit_the_target_are_refused(
  made, target, tmp_path, change, words
):
  folder = shutil.copytree(made.folder, tmp_path / 'data')
  change(folder)
  with pytest.raises(ValueError, match=words):
    data_folder.load(folder, target)


def test_data_of_other_weights_are_refused(made, target):
  """Rounded weights are refused though their exact fingerprint is the same."""
  of_int8 = dataclasses.replace(target, exact_fingerprint=target.fingerprint)
  with pytest.raises(ValueError, match=r"None, but this .* = 'int8': load it"):
    data_folder.load(made.folder, of_int8)


def test_shards_without_their_manifest_are_not_continued(
  made, target, tmp_path
):
  shutil.copy(made.folder / _ONE, tmp_path)
  with (
    pytest.raises(ValueError, match='is missing, but its shards exist'),
    data_folder.opened(files_lib.at(tmp_path), target, {}),
  ):
    pass


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


def test_prompts_are_about_answers_that_training_does_not_hold_out(
  commands, tiny, made, data, target, tmp_path
):
  out = tmp_path / 'new' / 'prompts.jsonl'
  templates = ('Sum up: {text}', '{text} So, {question}')
  ended = commands.complete(
    *('make_prompts', *tiny, f'--data={made.folder}', f'--out={out}'),
    f'--gin_bindings=Prompts.templates = {templates!r}',
    '--gin_bindings=Prompts.max_question_tokens = 100',
    '--gin_bindings=Prompts.held_out_every = 2',
    '--count=200',
  )
  assert ended.out == f'200 prompts: {out}\n'
  texts = lambda numbers: {
    target.tokenizer.decode(_answer(dialogue)).strip()
    for number in numbers
    for dialogue in data.shards[number]
  }
  train, held_out = map(texts, data.numbers(2))
  assert held_out - train  # which another choice would have asked about
  read = prompts.read(str(out))
  assert [x.category for x in read[:3]] == [f'template {i}' for i in (0, 1, 0)]
  of_two = {f'{first}\n\n{second}' for first in train for second in train}
  asked = {x.text.removeprefix('Sum up: ') for x in read[::2]}
  assert asked <= train | of_two
  assert all(x.text.endswith('?') for x in read[1::2])


def test_a_store_holds_the_answers_or_the_last_of_them(
  commands, tiny, made, data, target, tmp_path
):
  answers = [_answer(dialogue) for shard in data.shards for dialogue in shard]
  call = ('make_store', *tiny, f'--data={made.folder}')
  ended = commands.complete(*call, f'--out={tmp_path / "whole"}')
  kept = store.texts_of(specsample.load_store(tmp_path / 'whole', target))
  assert [x.tolist() for x in kept] == answers
  num_tokens = sum(map(len, answers))
  assert f'{num_tokens:,} tokens in {len(answers)} answers' in ended.out
  card = json.loads((tmp_path / 'whole' / 'store.json').read_text())
  assert card['data'] == [data.digest()]

  ended = commands.complete(*call, f'--out={tmp_path / "few"}', '--tokens=100')
  assert 'answers before them are left out: raise --tokens' in ended.out
  kept = store.texts_of(specsample.load_store(tmp_path / 'few', target))
  assert 0 < len(kept) < len(answers)
  assert [x.tolist() for x in kept] == answers[-len(kept) :]
  assert sum(x.size + 1 for x in kept) <= 100


def test_no_store_is_made_without_data(commands, tiny, tmp_path):
  flags = (f'--data={tmp_path}', f'--out={tmp_path / "store"}')
  ended = commands.run('make_store', *tiny, *flags)
  ended.check_refused('make_data --out writes it')
  assert not (tmp_path / 'store').exists()


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


@pytest.mark.slow
def test_two_processes_write_the_same_data(
  commands, flags, made, cpu_devices, tmp_path
):
  folder = tmp_path / 'data'
  # The fewest tokens for which a shard is not made smaller.
  wanted = _TURNS * _SETTINGS['max_answer_tokens']
  call = (
    *('make_data', *flags, f'--out={folder}', f'--tokens={wanted}'),
    *('--gin_bindings=Mesh.data = 2', '--gin_bindings=Mesh.model = 2'),
  )
  first, second = commands.run_on_two_hosts(*call, variables=cpu_devices(2))
  assert (first.code, second.code) == (0, 0), (first.err, second.err)
  assert second.out == ''
  found = _shards(folder)
  assert found.items() <= _shards(made.folder).items()
  assert found
