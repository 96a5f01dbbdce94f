"""A store that grows with the generated text, and what it changes."""

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import verify
from specsample.memory import store
from specsample.testing import hash_model

_V = 16
_TARGET = hash_model.HashModel(vocab_size=_V, seed=3)
_SUFFIX = drafters.Suffix(num_draft_tokens=4, min_kept=0.3)
_RNG = np.random.default_rng(0)
_PROMPTS = [_RNG.integers(_V, size=size).tolist() for size in (3, 9, 5, 7)] * 3


def _history(**kwargs):
  settings = {'vocab_size': _V, 'capacity': 256, 'every': 8}
  return specsample.History(**(settings | kwargs))


def _generate(history=None, *, temperature=0.0, drafter=_SUFFIX, **kwargs):
  outputs = specsample.generate_all(
    {'target': {}},
    _PROMPTS,
    jax.random.key(5),
    model=_TARGET,
    drafter=drafter,
    verify=kwargs.get('verify', verify.chain),
    sampling=specsample.Sampling(temperature=temperature),
    max_new_tokens=12,
    batch_size=2,
    history=history,
  )
  return [
    (output.tokens[0, : output.lengths[0]].tolist(), int(output.rounds[0]))
    for output in outputs
  ]


def test_the_latest_texts_are_kept_and_the_oldest_dropped():
  history = _history(capacity=10, every=1)
  for text in ([1, 2, 3], [4, 5], [6, 7, 8, 9]):
    assert history.add(text)
  kept = [text.tolist() for text in store.texts_of(history.store)]
  assert kept == [[4, 5], [6, 7, 8, 9]]
  assert history.num_dropped == 1


def test_of_a_text_longer_than_the_capacity_its_end_is_kept():
  history = _history(capacity=4, every=1)
  assert history.add(range(10))
  assert store.texts_of(history.store)[0].tolist() == [7, 8, 9]


def test_it_is_sorted_again_after_so_many_tokens():
  history = _history(every=5)
  before = history.store
  assert not history.add([1, 2, 3, 4])
  assert history.store is before
  assert not history.add([])
  assert history.add([5])
  assert len(store.texts_of(history.store)) == 2


def test_greedy_tokens_are_the_same_and_take_fewer_rounds():
  without, within = _generate(), _generate(_history())
  assert [tokens for tokens, _ in within] == [tokens for tokens, _ in without]
  rounds = lambda outputs: sum(count for _, count in outputs[4:])
  assert rounds(within) < rounds(without)


def test_coupled_tokens_are_the_same_whatever_others_wrote():
  settings = {'temperature': 1.0, 'verify': verify.coupled}
  without = _generate(**settings)
  within = _generate(_history(), **settings)
  assert [tokens for tokens, _ in within] == [tokens for tokens, _ in without]


def test_a_history_goes_on_in_the_next_call():
  history = _history()
  first, second = _generate(history), _generate(history)
  assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]
  total = lambda outputs: sum(count for _, count in outputs)
  assert total(second) < total(first)


def test_new_texts_compile_nothing(num_compiled):
  _generate(_history())
  before = num_compiled()
  _generate(_history())
  assert num_compiled() == before


def test_the_bits_that_wrote_a_text_are_not_used_again():
  history = _history()
  _generate(history, temperature=1.0)
  message = 'request 0 would be drawn twice with the same key'
  with pytest.raises(ValueError, match=message):
    _generate(history, temperature=1.0)
  # Neither of these depends on what is drafted.
  _generate(history)
  _generate(history, temperature=1.0, verify=verify.coupled)


def test_a_key_is_known_by_its_value_and_an_id_by_its_key():
  history = _history()
  history.claim(jax.random.key(1), [0, 2])
  history.claim(jax.random.key(1), [1, 3])
  history.claim(jax.random.key(2), [0])
  for key, ids, known in (
    (jax.random.key(1), [4, 3], 3),
    (jax.random.PRNGKey(2), [0], 0),
    (jax.random.key(3), [7, 7], 7),
  ):
    with pytest.raises(ValueError, match=f'^request {known} would be drawn'):
      history.claim(key, ids)
  history.claim(jax.random.key(1), [4])  # the refused call noted nothing


# A text takes one more than its tokens.
@pytest.mark.parametrize(('name', 'value'), [('capacity', 1), ('every', 0)])
def test_no_room_is_refused(name, value):
  message = f'{name} is {value}: give an integer of at least {value + 1}'
  with pytest.raises(ValueError, match=message):
    _history(**{name: value})


def test_a_drafter_that_looks_nothing_up_is_refused():
  with pytest.raises(ValueError, match='Ngram does not use one'):
    _generate(_history(), drafter=drafters.Ngram(num_draft_tokens=4))


def test_a_history_of_another_vocabulary_is_refused():
  with pytest.raises(
    ValueError, match='is for 8 tokens, but the target has 16'
  ):
    _generate(_history(vocab_size=8))


def test_a_text_of_another_vocabulary_is_not_kept():
  history = _history(every=1)
  with pytest.raises(ValueError, match=f'has the token {_V}'):
    history.add([1, _V])
  assert history.add([1, 2])
