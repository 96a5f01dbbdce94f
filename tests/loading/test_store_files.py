"""Saved stores: what is read back, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest

import specsample
from specsample.loading import store_files
from specsample.memory import store

_TEXTS = [[5, 6, 7, 5, 6], [8], [7, 5, 6, 9]]


@pytest.fixture
def target(smollm2):
  return smollm2


@pytest.fixture
def folder(target, tmp_path):
  """The folder of a saved store."""
  made = store.build(_TEXTS, vocab_size=target.model.vocab_size, capacity=40)
  path = tmp_path / 'store'
  specsample.save_store(path, made, target=target, card={'license': 'none'})
  return path


def _texts(loaded):
  return [text.tolist() for text in store.texts_of(loaded)]


def test_the_texts_come_back_in_their_order(folder, target):
  loaded = specsample.load_store(folder, target)
  assert _texts(loaded) == _TEXTS
  assert loaded.capacity == sum(len(text) + 1 for text in _TEXTS)
  larger = specsample.load_store(folder, target, capacity=99)
  assert _texts(larger) == _TEXTS and larger.capacity == 99


def test_a_token_takes_two_bytes_before_compression(folder):
  with np.load(folder / 'tokens.npz') as arrays:
    assert arrays['tokens'].dtype == np.uint16


def test_the_card_says_what_the_store_holds(folder):
  card = json.loads((folder / store_files.NAME).read_text())
  assert card['texts'] == 3 and card['tokens'] == 10
  assert card['license'] == 'none'


def test_a_folder_that_exists_is_not_written_over(folder, target):
  again = specsample.load_store(folder, target)
  with pytest.raises(ValueError, match='exists: remove it'):
    specsample.save_store(folder, again, target=target, card={})


def test_an_empty_store_leaves_no_folder(target, tmp_path):
  with pytest.raises(ValueError, match='the store has no text'):
    specsample.save_store(
      tmp_path / 'new', store.empty(8), target=target, card={}
    )
  assert not list(tmp_path.iterdir())


def test_a_card_that_is_no_json_leaves_no_folder(target, tmp_path):
  made = store.build(_TEXTS, vocab_size=target.model.vocab_size)
  with pytest.raises(ValueError, match='the card cannot be written as JSON'):
    specsample.save_store(
      tmp_path / 'new', made, target=target, card={'x': float('nan')}
    )
  assert not list(tmp_path.iterdir())


def test_a_store_of_another_vocabulary_is_refused(folder, target):
  card = json.loads((folder / store_files.NAME).read_text())
  card['vocabulary'] = 'another'
  (folder / store_files.NAME).write_text(json.dumps(card))
  with pytest.raises(ValueError, match=r"vocabulary is 'another'.*build the"):
    specsample.load_store(folder, target)


def test_damaged_tokens_are_refused(folder, target):
  path = folder / 'tokens.npz'
  path.write_bytes(path.read_bytes()[:-20])
  with pytest.raises(ValueError, match=r'tokens\.npz cannot be read'):
    specsample.load_store(folder, target)


def test_ids_that_the_target_lacks_are_refused(folder, target):
  smaller = dataclasses.replace(
    target, model=dataclasses.replace(target.model, vocab_size=8)
  )
  with pytest.raises(ValueError, match='the target has 8'):
    specsample.load_store(folder, smaller)


def test_a_name_that_is_nowhere_lists_what_ships(target):
  with pytest.raises(
    ValueError, match="'nowhere' is neither a folder with a st"
  ):
    specsample.load_store('nowhere', target)
