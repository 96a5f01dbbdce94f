"""`generate`: what a row's tokens depend on, how often it compiles, and jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import verify
from specsample.loop import decode
from tests.loop import scene
from tests.loop.scene import CHAIN
from tests.loop.scene import generate
from tests.loop.scene import PARAMS
from tests.loop.scene import rows
from tests.loop.scene import TARGET
from tests.loop.scene import VOCAB

_DRAFTERS = {
  'none': drafters.NoDraft(),
  'chain': CHAIN,
  'ngram': scene.NGRAM,
  'skip': drafters.Skip(model=TARGET, layers=(0, 1, 2), num_draft_tokens=2),
}


@pytest.mark.slow
@pytest.mark.parametrize('drafter', _DRAFTERS)
def test_coupled_equals_plain_sampling(drafter):
  run = functools.partial(
    generate,
    verify=verify.coupled,
    sampling=specsample.Sampling(temperature=0.9, top_p=0.95),
  )
  for seed in range(10):
    plain = run(seed=seed, drafter=drafters.NoDraft())
    output = run(seed=seed, drafter=_DRAFTERS[drafter])
    assert rows(output) == rows(plain)


def test_speculation_accepts_what_a_perfect_drafter_drafts():
  perfect = drafters.Chain(model=TARGET, num_draft_tokens=3)
  output = generate(drafter=perfect)
  assert specsample.stats.summarize(output).acceptance_by_position == (1, 1, 1)
  assert list(output.rounds) == [3, 3, 3, 3]  # 12 tokens, 4 per round


def test_rows_with_equal_prompts_differ():
  output = rows(generate([[1, 2, 3]] * 4))
  assert len({tuple(row) for row in output}) == 4


def test_parts_equal_the_whole():
  decoder, state = scene.prefill()
  num_parts = 0
  while not np.all(state.done):
    state = specsample.advance(decoder, PARAMS, state, max_rounds=1)
    num_parts += 1
  assert num_parts > 2
  output = specsample.finish(state, max_new_tokens=12)
  scene.assert_same(output, generate())


@pytest.mark.slow
def test_row_of_a_running_batch_can_be_refilled():
  long = list(range(VOCAB)) * 9  # needs a larger bucket
  sizes = {'max_new_tokens': 8, 'max_length': 200}
  decoder, state = scene.prefill([[1, 2], [3, 4]], **sizes)
  step = lambda state, rounds: specsample.advance(
    decoder, PARAMS, state, stop=specsample.Stop(), max_rounds=rounds
  )
  state = step(state, 2)
  ids = np.asarray([7], np.int32)
  _, fresh = scene.prefill([long], request_ids=ids, **sizes)
  state = jax.tree.map(lambda leaf, row: leaf.at[0].set(row[0]), state, fresh)
  output = specsample.finish(step(state, 100), max_new_tokens=8)
  expected = generate(
    [long, [3, 4]], request_ids=np.asarray([7, 1], np.int32), max_new_tokens=8
  )
  assert rows(output) == rows(expected)


def _num_executables():
  parts = (decode._prefill, decode._advance, decode._emitted)
  return [part._cache_size() for part in parts]


def test_one_executable_a_bucket_and_no_transfer():
  padded, lengths = specsample.pad_prompts([[1, 2, 3]])
  ids = jax.device_put(np.arange(1, dtype=np.int32))
  padded, lengths, other = jax.device_put((padded, lengths, np.asarray([17])))
  call = lambda lengths, key: generate(
    padded,
    lengths=lengths,
    key=key,
    request_ids=ids,
    verify=verify.block,
    max_new_tokens=9,
  )
  call(lengths, jax.random.key(0))
  before = _num_executables()
  key = jax.random.key(1)
  other = other.astype(jnp.int32)
  with jax.transfer_guard('disallow'):
    call(other, key).tokens.block_until_ready()
  assert _num_executables() == before


def _until(row, eos_ids=(), sequences=()):
  """Returns a row up to its first stop."""
  ends = [
    n
    for n in range(1, len(row) + 1)
    for sequence in (*([i] for i in eos_ids), *sequences)
    if row[max(0, n - len(sequence)) : n] == list(sequence)
  ]
  return row[: min(ends, default=len(row))]


@pytest.mark.slow
def test_lengths_and_stops_share_executables():
  # With shared noise, a row's tokens do not depend on what the limit cuts off.
  settings = {'verify': verify.coupled, 'max_length': 80}
  whole = rows(generate(max_new_tokens=16, **settings))
  before = _num_executables()
  for most in range(1, 17):
    output = generate(max_new_tokens=most, **settings)
    assert output.tokens.shape[1] == most
    assert rows(output) == [row[:most] for row in whole]
  assert _num_executables() == before
  first = whole[0]
  stops = [{'eos_ids': first[i : 2 * i + 1]} for i in range(4)]
  stops += [{'sequences': [first[5 - i : 7], first[9:]]} for i in range(3)]
  stops += [{'sequences': [first[i:][:2] for i in range(8)], 'eos_ids': [3]}]
  for given in stops:
    stop = specsample.Stop(**given)
    output = generate(max_new_tokens=16, stop=stop, **settings)
    assert rows(output) == [_until(row, **given) for row in whole]
  # One without room for sequences, which was there before, and one with it.
  grown = [a - b for a, b in zip(_num_executables(), before, strict=True)]
  assert grown == [0, 1, 0]


def _tokens(key, temperature=1.0, **changes):
  sampling = specsample.Sampling(temperature=temperature)
  return generate(
    **({'key': key, 'sampling': sampling, 'max_new_tokens': 5} | changes)
  ).tokens


@pytest.fixture(scope='module')
def keys():
  """Two keys."""
  return jax.random.split(jax.random.key(0), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
  'transformed',
  [
    jax.vmap(_tokens),
    lambda keys: jax.lax.scan(lambda _, x: (None, _tokens(x)), None, keys)[1],
    jax.jit(lambda keys: jnp.stack([_tokens(key) for key in keys])),
  ],
  ids=['vmap', 'scan', 'jit'],
)
def test_transformed_it_gives_the_tokens_of_plain_calls(transformed, keys):
  expected = np.stack([_tokens(key) for key in keys])
  np.testing.assert_array_equal(transformed(keys), expected)


@pytest.mark.slow
def test_a_function_that_calls_it_has_a_gradient(keys):
  def loss(temperature):
    # As in a policy gradient: the tokens are data.
    return temperature * jnp.sum(_tokens(keys[0], temperature))

  assert jax.grad(loss)(1.0) == _tokens(keys[0]).sum()


_PADDED, _LENGTHS = specsample.pad_prompts([[1, 2, 3], [5]])


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'prompts': _PADDED.astype(np.float32)}, 'prompts is of dtype float32'),
    ({'lengths': _LENGTHS[:1]}, r'lengths \(1,\): expected'),
    ({'request_ids': np.arange(3)}, r'request_ids is .* per prompt \[2\]'),
    ({'max_new_tokens': np.int32(5)}, 'max_new_tokens is .* not traced'),
  ],
)
def test_shapes_and_dtypes_are_checked_while_tracing(change, message, keys):
  given = {'prompts': _PADDED, 'lengths': _LENGTHS}
  traced = jax.jit(lambda change: _tokens(keys[0], **(given | change)))
  with pytest.raises(ValueError, match=message):
    traced(change)


def test_many_prompts_are_decoded_outside_of_jit(keys):
  def tokens(key):
    outputs = specsample.generate_all(
      PARAMS,
      [[1]],
      key,
      model=TARGET,
      drafter=CHAIN,
      verify=verify.chain,
      sampling=specsample.Sampling(),
      max_new_tokens=1,
    )
    return next(outputs).tokens

  with pytest.raises(ValueError, match='call generate there'):
    jax.jit(tokens)(keys[0])
