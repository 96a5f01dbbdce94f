"""The files in checkpoints/ are small, and their cards say how they arose."""

import json
import pathlib
import re

import numpy as np
import pytest

import specsample
from specsample.memory import store

_ROOT = pathlib.Path(__file__).parents[2] / 'checkpoints'
_TARGET = 'smollm2-135m-instruct'
_NAMES = sorted(
  path.parent.name for path in _ROOT.glob(f'{_TARGET}/*/card.json')
)
_LARGEST = 60e6  # bytes of all drafters
_LARGEST_STORE = 4e6  # bytes of its texts
_ABSOLUTE_PATH = re.compile(r'(^|[\s=])/\w')
_each = pytest.mark.parametrize('name', _NAMES)


def _card(name):
  return json.loads((_ROOT / _TARGET / name / 'card.json').read_text())


def _texts(value):
  """Returns all strings in some JSON."""
  if isinstance(value, dict):
    value = [*value, *value.values()]
  if isinstance(value, list):
    return [text for item in value for text in _texts(item)]
  return [value] if isinstance(value, str) else []


def test_all_kinds_ship_and_are_small():
  assert _NAMES == ['draft', 'dspark', 'eagle3', 'hydra', 'medusa', 'mtp']
  paths = _ROOT.rglob('drafter.safetensors')
  assert sum(path.stat().st_size for path in paths) <= _LARGEST


def test_a_store_ships_and_is_small(smollm2):
  folder = _ROOT / _TARGET / 'store'
  assert (folder / 'tokens.npz').stat().st_size <= _LARGEST_STORE
  card = json.loads((folder / 'store.json').read_text())
  texts = store.texts_of(specsample.load_store(f'{_TARGET}/store', smollm2))
  assert len(texts) == card['texts']
  assert sum(text.size for text in texts) == card['tokens'] > 900_000
  assert card['license'] and 'Spec-Bench' in card['about']


@_each
def test_the_card_says_what_it_is_made_of(name):
  card = _card(name)
  held_out = card['held_out']
  assert held_out['tokens_per_round'] > 1.2
  num_drafts = card['settings']['num_draft_tokens']
  assert len(held_out['acceptance_by_position']) == num_drafts
  assert len(held_out['by_answer_tokens_seen']) >= 4
  assert card['training']['answer_tokens_per_second'] > 0
  assert card['training']['hours'] > 0
  for folder in card['data']['folders']:
    assert folder['answer_tokens'] > 10_000
    assert folder['answer_tokens_per_second'] > 0
    # The questions of the tables are excluded.
    assert folder['settings']['exclude']


@pytest.mark.parametrize('name', ['eagle3', 'hydra', 'medusa', 'mtp'])
def test_the_card_says_which_ranks_are_kept(name):
  measured = _card(name)['on_questions']
  by_rank = np.asarray(measured['acceptance_by_rank'])
  assert len(by_rank) == len(measured['acceptance_by_position'])
  assert by_rank.min() >= 0 and by_rank.sum(axis=1).max() <= 1
  assert (by_rank.argmax(axis=1) == 0).all()
  # Counted on other questions than the chain's, and where a tree went.
  chain = measured['acceptance_by_position'][0]
  assert abs(by_rank[0, 0] - chain) < 0.03


def test_the_card_says_what_the_trees_of_the_lattice_emit():
  measured = _card('dspark')['on_questions']
  by_nodes = {int(n): x for n, x in measured['tokens_by_nodes'].items()}
  assert list(by_nodes) == [1, 3, 7, 15]
  assert list(by_nodes.values()) == sorted(by_nodes.values())
  assert by_nodes[7] > measured['tokens_per_round']  # a chain of 7


@_each
def test_the_card_names_no_folder_of_a_machine(name):
  found = [text for text in _texts(_card(name)) if _ABSOLUTE_PATH.search(text)]
  assert not found
