"""The command that makes a store of the answers in folders of data."""

import json

import pytest

from experiments.training_data import data_folder
import specsample
from specsample.memory import store

_SETTINGS = {
  'user_turns': 12,
  'prompts_per_shard': 4,
  'max_prompt_tokens': 128,
  'max_answer_tokens': 32,
  'batch_size': 8,
}


@pytest.fixture(scope='module')
def data(commands, tiny, tmp_path_factory):
  """A folder of data of the tiny model."""
  folder = tmp_path_factory.mktemp('made') / 'data'
  ended = commands.run(
    'make_data',
    *tiny,
    *(
      f'--gin_bindings=Synthesis.{name} = {value!r}'
      for name, value in _SETTINGS.items()
    ),
    f'--out={folder}',
    '--tokens=500',
  )
  assert ended.code == 0, ended.err
  return folder


def _answers(found):
  return [
    dialogue.tokens[start:end].tolist()
    for shard in found.shards
    for dialogue in shard
    for start, end in dialogue.answers
  ]


def _make(commands, tiny, *flags):
  return commands.run('make_store', *tiny, *flags)


def test_the_store_holds_the_answers(
  commands, tiny, data, checkpoint, tmp_path
):
  out = tmp_path / 'store'
  ended = _make(commands, tiny, f'--data={data}', f'--out={out}')
  assert ended.code == 0, ended.err
  target = specsample.load(checkpoint)
  found = data_folder.load(data, target)
  expected = _answers(found)
  loaded = specsample.load_store(out, target)
  assert [x.tolist() for x in store.texts_of(loaded)] == expected
  num_tokens = sum(map(len, expected))
  assert f'{num_tokens:,} tokens in {len(expected)} answers' in ended.out
  card = json.loads((out / 'store.json').read_text())
  assert card['data'] == [found.digest()]


def test_of_too_many_tokens_the_last_answers_are_kept(
  commands, tiny, data, checkpoint, tmp_path
):
  out = tmp_path / 'store'
  flags = (f'--data={data}', f'--out={out}', '--tokens=100')
  ended = _make(commands, tiny, *flags)
  assert ended.code == 0, ended.err
  assert 'answers before them are left out: raise --tokens' in ended.out
  target = specsample.load(checkpoint)
  kept = store.texts_of(specsample.load_store(out, target))
  texts = _answers(data_folder.load(data, target))
  assert 0 < len(kept) < len(texts)
  assert [x.tolist() for x in kept] == texts[-len(kept) :]
  assert sum(len(text) + 1 for text in texts[-len(kept) :]) <= 100


def test_a_folder_without_data_is_refused(commands, tiny, tmp_path):
  flags = (f'--data={tmp_path}', f'--out={tmp_path / "store"}')
  ended = _make(commands, tiny, *flags)
  assert ended.code == 2
  assert 'make_data --out writes it' in ended.err
  assert not (tmp_path / 'store').exists()
