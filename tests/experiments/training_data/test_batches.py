"""Batches of examples: their content and their order."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training_data import batches
from experiments.training_data import data_folder


def _dialogue(size, *starts_and_ends):
  """Returns a dialogue whose last answer, given by its start, ends it."""
  bounds = [*starts_and_ends, size]
  answers = tuple(zip(bounds[::2], bounds[1::2], strict=True))
  tokens = np.arange(size, dtype=np.int32) + 100 * size
  return data_folder.Dialogue(
    tokens, answers, 0.0, data_folder.Source.SAMPLED, 0
  )


_DIALOGUES = [
  _dialogue(size, answer)
  for size, answer in zip(range(20, 64, 2), range(3, 25), strict=True)
]
_EXAMPLES = [batches.example(d, {}, whole=True) for d in _DIALOGUES]


def test_epoch_has_every_example_once():
  loader = batches.Batches(
    examples=_EXAMPLES, batch_size=5, max_length=48, width_multiple=16
  )
  rows = lambda found: sorted(
    row[row > 0].tolist()
    for batch in found
    for row in batch['tokens']
    if row.any()
  )
  expected = sorted(x.tokens[:48].tolist() for x in _EXAMPLES)
  steps = loader.per_epoch
  assert steps == -(-len(_EXAMPLES) // 5)
  assert rows(loader[i] for i in range(steps)) == expected
  assert rows(loader[i] for i in range(steps, 2 * steps)) == expected
  assert rows(loader.once()) == expected


def test_step_depends_on_the_seed_and_its_number_alone():
  loader = batches.Batches(examples=_EXAMPLES, batch_size=4, sorted_batches=2)
  first = lambda step, found=loader: found[step]['tokens'][:, 0].tolist()
  in_order = [first(step) for step in range(20)]
  # The order of each epoch differs.
  size = loader.per_epoch
  assert in_order[:size] != in_order[size : 2 * size]
  again = dataclasses.replace(loader)
  backwards = [first(step, again) for step in reversed(range(20))]
  assert backwards == in_order[::-1]
  other = dataclasses.replace(loader, seed=1)
  assert [first(step, other) for step in range(20)] != in_order


def test_batch_holds_examples_of_similar_length():
  rng = np.random.default_rng(0)
  sizes = rng.integers(5, 50, size=1000)
  examples = [
    batches.example(_dialogue(size, 1), {}, whole=True) for size in sizes
  ]
  loader = batches.Batches(examples=examples, batch_size=4)
  spread = [
    np.ptp(loader[step]['mask'].sum(axis=1)) for step in range(loader.per_epoch)
  ]
  assert np.mean(spread) < 3


def test_batch_marks_the_answers():
  (batch,) = batches.Batches(
    examples=_EXAMPLES[:3], batch_size=4, width_multiple=32
  ).once()
  assert batch.keys() == {'tokens', 'mask'}
  assert batch['tokens'].shape == (4, 32)
  for i, example in enumerate(_EXAMPLES[:3]):
    row, mask = batch['tokens'][i], batch['mask'][i]
    np.testing.assert_array_equal(row[mask], example.learned)
    assert mask.argmax() == example.answers[0][0]
  assert not batch['mask'][3].any()


def test_vectors_stay_with_their_tokens():
  hidden = np.arange(40, dtype=jnp.bfloat16).reshape(20, 2)
  dialogue = _dialogue(20, 9)
  example = batches.example(dialogue, {'hidden': hidden}, whole=False)
  # The token before the answer is pending; the one before that has been read.
  assert example.tokens.tolist() == dialogue.tokens[7:].tolist()
  assert example.answers == ((2, 13),)
  (batch,) = batches.Batches(
    examples=[example], batch_size=1, width_multiple=16
  ).once()
  assert batch['hidden'].dtype == jnp.bfloat16
  np.testing.assert_array_equal(batch['hidden'][0, :13], hidden[7:])
  assert not batch['hidden'][0, 13:].any()
  whole = batches.example(dialogue, {'hidden': hidden}, whole=True)
  np.testing.assert_array_equal(whole.tokens, dialogue.tokens)
  np.testing.assert_array_equal(whole.vectors['hidden'], hidden)


def test_step_names_the_places_of_the_answers():
  examples = [
    batches.example(_dialogue(size, answer), {}, whole=True)
    for size, answer in [(40, 30), (60, 1), (64, 60), (58, 40)]
  ]
  of = lambda few, **settings: batches.Batches(
    examples=few, batch_size=len(few), width_multiple=8, **settings
  )
  few = of([examples[0], *examples[2:]])[0]
  assert few['tokens'].shape == (3, 64)
  assert few['places'].shape == (3, 24)
  for row, mask in zip(few['places'], few['mask'], strict=True):
    np.testing.assert_array_equal(np.diff(row), 1)
    assert row[0] == mask.argmax() - 2
    assert set(np.flatnonzero(mask)) <= set(row)
  # Nothing is saved if one of the answers is as long as the batch is wide.
  assert 'places' not in of(examples)[0]
  # Places that were cut off are not read.
  cut = of([examples[3]], max_length=48)[0]
  assert cut['places'].tolist() == [[*range(38, 54)]]


def test_dialogue_of_several_answers_has_several_runs():
  dialogue = _dialogue(40, 10, 14, 20, 23, 30)
  example = batches.example(dialogue, {}, whole=False)
  assert example.answers == ((2, 6), (12, 15), (22, 32))
  learned = [*range(10, 14), *range(20, 23), *range(30, 40)]
  assert example.learned.tolist() == dialogue.tokens[learned].tolist()
  whole = batches.example(dialogue, {}, whole=True)
  of = lambda **settings: batches.Batches(
    examples=[whole], batch_size=2, width_multiple=8, **settings
  )
  batch = of()[0]
  assert np.flatnonzero(batch['mask'][0]).tolist() == learned
  # The places go from the first answer to the last one.
  assert batch['places'][0].tolist() == [*range(8, 40)]
  # An answer may be cut, and those after it are left out.
  cut = of(max_length=22)[0]
  assert np.flatnonzero(cut['mask'][0]).tolist() == [10, 11, 12, 13, 20, 21]
  assert not cut['mask'][1].any()


def test_answer_at_the_beginning_is_not_cut():
  example = batches.example(_dialogue(20, 1), {}, whole=False)
  assert (example.tokens.size, example.answers) == (20, ((1, 20),))


def test_what_makes_no_batch_is_refused():
  of = lambda **settings: batches.Batches(
    examples=_EXAMPLES, **{'batch_size': 2} | settings
  )
  with pytest.raises(ValueError, match=r'no answer in 22 .* begins within'):
    of(max_length=3)
  # Examples whose answer is cut off are left out.
  assert of(max_length=5).per_epoch == 1
  with pytest.raises(ValueError, match='batch_size is 0'):
    of(batch_size=0)


def test_packed_rows_hold_the_dialogues_of_the_step():
  examples = [
    batches.example(d, {'hidden': _hidden(d)}, whole=True) for d in _DIALOGUES
  ]
  plain = batches.Batches(
    examples=examples, batch_size=5, max_length=48, sorted_batches=1
  )
  packed = dataclasses.replace(plain, packed_length=100, width_multiple=8)
  for step in range(plain.per_epoch + 1):
    expected, found = plain[step], packed[step]
    num_tokens = np.minimum(expected['tokens'] > 0, 1).sum()
    assert found['tokens'].shape[1] == 100
    assert len(found['tokens']) < -(-num_tokens // 100) + 2
    assert sorted(_read(expected)) == sorted(_read(found))
    # Each dialogue's places begin two tokens before its answer.
    places = [x for row in found['places'] for x in row if x < 100]
    assert len(places) < found['mask'].size
    for mask, row in zip(found['mask'], found['places'], strict=True):
      assert {*np.flatnonzero(mask)} <= {*row}
  # Evaluations read one dialogue per row.
  assert not any('starts' in batch for batch in packed.once())


def _hidden(dialogue):
  return dialogue.tokens[:, None].astype(jnp.bfloat16)


def _read(batch):
  """Returns each dialogue's tokens, learned tokens and vectors."""
  starts = batch.get('starts', np.zeros((len(batch['tokens']), 1), int))
  size = batch['tokens'].shape[1]
  found = []
  for row, begins in enumerate(starts):
    ends = [*begins[1:], size]
    for begin, end in zip(begins, ends, strict=True):
      tokens = batch['tokens'][row, begin:end]
      count = int((tokens > 0).sum())
      assert (tokens[:count] > 0).all()
      learned = np.flatnonzero(batch['mask'][row, begin:end])
      hidden = batch['hidden'][row, begin : begin + count, 0].astype(float)
      if count:
        found.append((tokens[:count].tolist(), learned.tolist(), [*hidden]))
  return found


def test_dialogues_are_packed_first_fit():
  sizes = [3, 9, 2, 5, 4, 7]
  assert batches.first_fit(sizes, 10) == [
    *[(1, 7), (0, 0), (3, 0), (2, 0), (2, 5), (1, 0)],
  ]
  assert batches.first_fit([], 10) == []
  with pytest.raises(
    ValueError, match='has 9 tokens, but a row has room for 8'
  ):
    batches.first_fit(sizes, 8)
