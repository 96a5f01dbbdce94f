"""Prompts that take turns in a batch get the tokens that each gets alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import policies
from specsample import testing
from specsample import verify
from specsample.loop import refill
from specsample.loop.decoder import Decoder
from specsample.types import StopReason
from tests.loop import scene
from tests.loop.scene import CHAIN
from tests.loop.scene import NGRAM
from tests.loop.scene import PARAMS
from tests.loop.scene import TARGET
from tests.loop.scene import VOCAB

_RNG = np.random.default_rng(0)
# One prompt is far longer than the others, and longer than a chunk.
PROMPTS = [
  _RNG.integers(VOCAB, size=size).tolist()
  for size in (3, 40, 1, 140, 7, 2, 33, 9, 5, 6)
]
MOST = np.asarray([5, 20, 1, 12, 20, 3, 9, 20, 2, 14])
TEMPERATURES = np.asarray([0, 1, 0.5, 1, 0, 1.5, 1, 0, 1, 1], np.float32)
# The fields [B, M] of an output.
TABLES = ('tokens', 'log_probs', 'warped_log_probs', 'origin', 'emit_round')
STOP = specsample.Stop(eos_ids=(7,), sequences=((1, 2),))
SETTINGS = {
  'model': TARGET,
  'drafter': CHAIN,
  'verify': verify.chain,
  'sampling': specsample.Sampling(temperature=TEMPERATURES),
  'max_new_tokens': MOST,
  'stop': STOP,
}


def generate_all(prompts=PROMPTS, *, params=PARAMS, **kwargs):
  sizes = {'batch_size': 3}
  return specsample.generate_all(
    params, prompts, jax.random.key(5), **(SETTINGS | sizes | kwargs)
  )


def static(prompts=PROMPTS, **kwargs):
  """Decodes all prompts in one batch."""
  output = scene.generate(prompts, seed=5, **(SETTINGS | kwargs))
  return jax.device_get(output)


def assert_rows_equal(found, expected):
  """Compares outputs of one row each with one output of all rows."""
  assert len(found) == len(expected.lengths)
  for i, output in enumerate(found):
    width = output.tokens.shape[1]
    for field in dataclasses.fields(output):
      value = getattr(expected, field.name)
      if value is None:  # `scored` and `ties` of other rules
        continue
      value = value[i : i + 1]
      is_table = field.name in TABLES
      value = value[:, :width] if is_table else value
      np.testing.assert_array_equal(
        getattr(output, field.name), value, err_msg=f'{i}, {field.name}'
      )


@pytest.mark.slow
def test_more_tokens_than_there_is_room_for_are_as_many_as_fit():
  outputs = generate_all(
    [[1, 2, 3], [5]],
    model=dataclasses.replace(TARGET, max_length=48),
    max_new_tokens=2**31 - 1,
    sampling=specsample.Sampling(),
    stop=specsample.Stop(),
  )
  assert [int(output.lengths[0]) for output in outputs] == [45, 47]


@pytest.mark.slow
@pytest.mark.nightly(but=('drafter0-rule0-1', 'drafter3-rule3-5'))
@pytest.mark.parametrize(
  'drafter, rule, group_size',
  [
    (drafters.NoDraft(), verify.chain, 1),
    (CHAIN, verify.chain, 1),
    (CHAIN, verify.block, 2),
    (NGRAM, verify.coupled, 5),  # more than there are rows
  ],
)
def test_every_output_is_that_of_a_static_batch(drafter, rule, group_size):
  kwargs = {'drafter': drafter, 'verify': rule}
  found = list(generate_all(**kwargs, group_size=group_size))
  assert_rows_equal(found, static(**kwargs))
  assert [output.tokens.shape[1] for output in found] == MOST.tolist()
  reasons = {StopReason(int(output.stop_reason[0])) for output in found}
  assert reasons >= {StopReason.EOS, StopReason.MAX_NEW_TOKENS}


@pytest.mark.slow
def test_a_policys_state_is_that_of_the_row_alone():
  learned = drafters.Adaptive(
    drafter=CHAIN, policies=(policies.AdaEDL(threshold=0.4),)
  )
  found = list(generate_all(drafter=learned, group_size=2))
  expected = static(drafter=learned)
  assert_rows_equal(found, expected)
  # The state matters; otherwise the rounds would be those without the policy.
  assert expected.rounds.tolist() != static().rounds.tolist()


@pytest.mark.slow
def test_penalties_count_the_prompt_of_the_row_alone():
  bias = np.zeros((len(PROMPTS), VOCAB), np.float32)
  bias[np.arange(len(PROMPTS)), np.arange(len(PROMPTS))] = 3.0
  sampling = specsample.Sampling(
    temperature=TEMPERATURES,
    repetition_penalty=1.5,
    frequency_penalty=np.linspace(0, 1, len(PROMPTS)),
    logit_bias=bias,
  )
  found = list(generate_all(sampling=sampling))
  assert_rows_equal(found, static(sampling=sampling))
  plain = list(generate_all())
  assert any(
    a.tokens.tolist() != b.tokens.tolist()
    for a, b in zip(found, plain, strict=True)
  )


WINDOWED = dataclasses.replace(
  testing.tiny_llama(vocab_size=VOCAB, dim=8, max_length=512),
  sliding_window=6,
  sliding_layers=(0,),
)


@functools.cache
def _windowed():
  return {'target': WINDOWED.init(jax.random.key(0))}


@pytest.mark.slow
def test_caches_of_a_window_take_any_prompts_row():
  # Chunks are smaller for short prompts, but the rings must not be.
  kwargs = {'model': WINDOWED, 'drafter': NGRAM, 'params': _windowed()}
  found = list(generate_all(**kwargs))
  expected = static(**kwargs)
  for i, output in enumerate(found):
    tokens = expected.tokens[i : i + 1, : MOST[i]]
    np.testing.assert_array_equal(output.tokens, tokens)


def _job(index, prompt, temperature, max_new_tokens):
  return refill.Job(
    index=index,
    prompt=prompt,
    request_id=index,
    sampling=specsample.Sampling(temperature=np.float32(temperature)),
    max_new_tokens=int(max_new_tokens),
  )


def _run_batch(parts, **sizes):
  """Returns each prompt's tokens, and the states' (rows, slots) on the way."""
  model, drafter, params = parts
  batch = refill.Batch(
    decoder=Decoder(model, drafter, verify.chain),
    stop=STOP,
    batch_size=8,
    max_length=192,
    max_new_tokens=20,
    group_size=2,
    **sizes,
  )
  waiting = iter(
    _job(i, prompt, TEMPERATURES[i], MOST[i])
    for i, prompt in sorted(enumerate(PROMPTS), key=lambda x: len(x[1]))
  )
  found, shapes = {}, []
  for done in batch.run(params, jax.random.key(5), waiting):
    length = int(done.output.lengths[0])
    found[done.job.index] = done.output.tokens[0, :length].tolist()
    shapes.append(done.state.tokens.shape)
  return found, shapes


@pytest.mark.slow
@pytest.mark.nightly(but=('hashes',))
@pytest.mark.parametrize('of_window', [False, True], ids=['hashes', 'window'])
def test_the_batch_shrinks_with_its_rows(of_window):
  parts = TARGET, CHAIN, PARAMS
  if of_window:
    parts = WINDOWED, NGRAM, _windowed()
  plain, shapes = _run_batch(parts)
  assert len(set(shapes)) == 1
  found, shapes = _run_batch(parts, fewest_rows=2)
  assert found == plain
  rows, slots = zip(*shapes, strict=True)
  assert len(set(slots)) == 1
  assert set(rows) == {8, 4, 2}


def test_fewer_prompts_than_rows():
  found = list(generate_all(PROMPTS[:2], batch_size=64, **_first(2)))
  assert_rows_equal(found, static(PROMPTS[:2], **_first(2)))


def test_without_prompts_there_is_nothing_to_do():
  assert list(generate_all([], **_first(0))) == []


@pytest.mark.slow
def test_a_full_cache_stops_its_row():
  kwargs = {'max_new_tokens': 20, 'stop': specsample.Stop(), 'max_length': 145}
  found = list(generate_all(**kwargs))
  assert_rows_equal(found, static(**kwargs))
  assert found[3].stop_reason == StopReason.CACHE_FULL
  assert found[3].lengths == 5


def test_rows_are_refilled_as_soon_as_they_are_done():
  # The second row keeps going while the first takes all the other jobs.
  most = [3, 40, 1, 1, 2, 1]
  waiting = iter([_job(i, [1], 1, count) for i, count in enumerate(most)])
  batch = refill.Batch(
    decoder=Decoder(TARGET, drafters.NoDraft(), verify.chain),
    batch_size=2,
    max_length=64,
    max_new_tokens=40,
  )
  order, rounds = [], []
  for done in batch.run({'target': {}}, jax.random.key(5), waiting):
    order.append(done.job.index)
    rounds.append(int(done.state.round[1]))  # of the second row so far
    assert done.output.lengths == most[done.job.index]
  assert order == [0, 2, 3, 4, 5, 1]
  assert rounds == [3, 4, 5, 7, 8, 40]


def test_one_that_is_left_off_leaves_nothing_behind():
  expected = static()
  outputs = generate_all()
  next(outputs)
  outputs.close()
  assert_rows_equal(list(generate_all()), expected)


def test_few_executables_whatever_the_prompts(num_compiled):
  kwargs = {'max_length': 300, 'max_new_tokens': 11, 'batch_size': 4}
  before = num_compiled()
  list(generate_all(**kwargs))
  made = [
    after - first for after, first in zip(num_compiled(), before, strict=True)
  ]
  # The three are for chunks of 32, 64 and 128 tokens.
  assert made == [1, 1, 3, 1, 1]
  other = [[1] * size for size in (31, 50, 200, 128, 8)]
  list(generate_all(other, **(_first(5) | kwargs)))
  assert [a - b for a, b in zip(num_compiled(), before, strict=True)] == made


def test_advance_returns_when_enough_rows_are_done():
  decoder, state = scene.prefill(
    [[1]] * 4,
    drafter=drafters.NoDraft(),
    max_new_tokens=np.asarray([2, 9, 5, 5]),
  )
  rounds, done = [], []
  for max_finished in (1, 1, 5):
    state = specsample.advance(
      decoder,
      {'target': {}},
      state,
      max_rounds=100,
      max_finished=np.int32(max_finished),
    )
    rounds.append(int(state.round.max()))
    done.append(np.asarray(state.done).tolist())
  assert rounds == [2, 5, 9]
  assert done[:2] == [[True, False, False, False], [True, False, True, True]]
  assert all(done[2])


@pytest.mark.parametrize(
  'kwargs, message',
  [
    ({'prompts': [[1], [], [2]]}, 'prompt 1: .*at least one'),
    ({'prompts': [[1], [2], [VOCAB]]}, 'prompt 2: .*id 16'),
    ({'prompts': [[1], [2], [0.5]]}, 'prompt 2: .*0.5'),
    ({'prompts': [[1], [1] * 9, [1]], 'max_length': 9}, 'prompt 1: .*of 9'),
    ({'max_new_tokens': [1, 0, 1]}, r'max_new_tokens is \[1, 0, 1\]'),
    ({'max_new_tokens': [1, 1]}, r'one per prompt \[3\]'),
    ({'max_new_tokens': 0}, 'max_new_tokens is 0'),
    ({'request_ids': [1, 2]}, 'request_ids'),
    ({'prompts': None}, 'prompts is None: give a list of token ids'),
    (
      {'prompts': np.zeros((2, 3), int)},
      r'prompts is an array of shape \(2, 3\), in which padding',
    ),
    ({'prompts': [[1, [2]]]}, r'prompts is \[\[1, \[2\]\]\]: give a list'),
    ({'batch_size': 0}, 'batch_size is 0'),
    ({'batch_size': None}, 'batch_size is None'),
    ({'max_length': '9'}, "max_length is '9'"),
    ({'history': []}, 'history is of type list: give History'),
    ({'group_size': 0}, 'group_size is 0'),
    ({'stop': specsample.Stop(eos_ids=(99,))}, 'id 99'),
    ({'params': {}}, 'target'),
    (
      {'verify': verify.greedy_draft},
      'drafts of Chain: GreedyDraft is not exact for drafts of kind',
    ),
    ({'sampling': specsample.Sampling(temperature=[1.0, 2.0])}, 'temperature'),
  ],
)
def test_refuses_before_anything_is_asked_for(kwargs, message):
  defaults = {
    'prompts': [[1], [2], [3]],
    'sampling': specsample.Sampling(),
    'max_new_tokens': 4,
  }
  with pytest.raises(ValueError, match=message):
    generate_all(**(defaults | kwargs))


def test_a_number_of_rows_below_1_is_refused():
  with pytest.raises(ValueError, match='fewest_rows is 0: give an integer of'):
    refill.Batch(
      decoder=Decoder(TARGET, drafters.NoDraft(), verify.chain),
      batch_size=1,
      max_length=8,
      max_new_tokens=4,
      fewest_rows=0,
    )


def _first(count):
  return {
    'sampling': specsample.Sampling(temperature=TEMPERATURES[:count]),
    'max_new_tokens': MOST[:count],
  }
