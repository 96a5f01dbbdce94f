"""`generate`: invariance of a row's tokens, and compilation."""

import dataclasses

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import verify
from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.testing import hash_model

VOCAB = 16
TARGET = hash_model.HashModel(vocab_size=VOCAB, seed=3)
CHAIN = drafters.Chain(
  model=dataclasses.replace(TARGET, noise=0.3), num_draft_tokens=3
)
NGRAM = drafters.Ngram(num_draft_tokens=4, min_ngram=1)
SKIP = drafters.Skip(model=TARGET, layers=(0, 1, 2), num_draft_tokens=2)
DRAFTERS = {
  'none': drafters.NoDraft(),
  'chain': CHAIN,
  'ngram': NGRAM,
  'skip': SKIP,
}
VERIFIERS = {
  'chain': verify.chain,
  'block': verify.block,
  'coupled': verify.coupled,
}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], list(range(12)), [9, 9, 9]]
PARAMS = {'target': {}, 'drafter': {}}


def generate(prompts=PROMPTS, seed=0, **kwargs):
  padded, lengths = specsample.pad_prompts(prompts)
  settings = {
    'model': TARGET,
    'drafter': CHAIN,
    'verify': verify.chain,
    'sampling': specsample.Sampling(temperature=1.0),
    'max_new_tokens': 12,
  } | kwargs
  key = jax.random.key(seed)
  return specsample.generate(PARAMS, padded, lengths, key, **settings)


def rows(output):
  return [
    row[:length].tolist()
    for row, length in zip(
      np.asarray(output.tokens), np.asarray(output.lengths), strict=True
    )
  ]


@pytest.mark.nightly(
  but=('none-chain', 'chain-chain', 'ngram-block', 'skip-coupled')
)
@pytest.mark.parametrize('rule', VERIFIERS)
@pytest.mark.parametrize('drafter', DRAFTERS)
def test_greedy_equals_autoregressive(drafter, rule):
  greedy = specsample.Sampling(temperature=0.0)
  plain = generate(drafter=drafters.NoDraft(), sampling=greedy)
  output = generate(
    drafter=DRAFTERS[drafter], verify=VERIFIERS[rule], sampling=greedy
  )
  assert rows(output) == rows(plain)
  np.testing.assert_array_equal(output.log_probs, plain.log_probs)


@pytest.mark.parametrize('drafter', DRAFTERS)
def test_coupled_equals_plain_sampling(drafter):
  sampling = specsample.Sampling(temperature=0.9, top_p=0.95)
  for seed in range(20):
    plain = generate(
      seed=seed,
      drafter=drafters.NoDraft(),
      verify=verify.coupled,
      sampling=sampling,
    )
    output = generate(
      seed=seed,
      drafter=DRAFTERS[drafter],
      verify=verify.coupled,
      sampling=sampling,
    )
    assert rows(output) == rows(plain)


def test_speculation_accepts_what_a_perfect_drafter_drafts():
  perfect = drafters.Chain(model=TARGET, num_draft_tokens=3)
  output = generate(drafter=perfect)
  assert specsample.stats.summarize(output).acceptance_by_position == (1, 1, 1)
  assert list(output.rounds) == [3, 3, 3, 3]  # 12 tokens, 4 per round


def test_row_is_the_same_alone_padded_and_permuted():
  together = rows(generate())
  for i, prompt in enumerate(PROMPTS):
    alone = generate([prompt], request_ids=np.asarray([i], np.int32))
    assert rows(alone) == [together[i]]
  longer = generate([*PROMPTS, list(range(VOCAB)) * 9])
  assert rows(longer)[: len(PROMPTS)] == together
  order = [2, 0, 3, 1]
  permuted = generate(
    [PROMPTS[i] for i in order], request_ids=np.asarray(order, np.int32)
  )
  assert rows(permuted) == [together[i] for i in order]


def test_rows_with_equal_prompts_differ():
  output = rows(generate([[1, 2, 3]] * 4))
  assert len({tuple(row) for row in output}) == 4


def test_parts_equal_the_whole():
  padded, lengths = specsample.pad_prompts(PROMPTS)
  decoder = Decoder(TARGET, CHAIN, verify.chain)
  state = specsample.prefill(
    decoder,
    PARAMS,
    padded,
    lengths,
    jax.random.key(0),
    sampling=specsample.Sampling(temperature=1.0),
    max_new_tokens=12,
  )
  seen = []
  while not np.all(state.done):
    seen.append(np.asarray(state.length))
    state = specsample.advance(decoder, PARAMS, state, max_rounds=1)
  assert len(seen) > 2
  output = specsample.finish(state, max_new_tokens=12)
  whole = generate()
  for field in dataclasses.fields(whole):
    np.testing.assert_array_equal(
      getattr(output, field.name), getattr(whole, field.name), field.name
    )


def test_row_of_a_running_batch_can_be_refilled():
  padded, lengths = specsample.pad_prompts([[1, 2], [3, 4]])
  long = list(range(VOCAB)) * 9  # needs a larger bucket
  long_padded, long_lengths = specsample.pad_prompts([long])
  decoder = Decoder(TARGET, CHAIN, verify.chain)
  static = {
    'sampling': specsample.Sampling(temperature=1.0),
    'max_new_tokens': 8,
    'max_length': 200,
  }
  key = jax.random.key(0)
  step = lambda state, rounds: specsample.advance(
    decoder, PARAMS, state, stop=specsample.Stop(), max_rounds=rounds
  )
  state = specsample.prefill(decoder, PARAMS, padded, lengths, key, **static)
  state = step(state, 2)
  fresh = specsample.prefill(
    decoder,
    PARAMS,
    long_padded,
    long_lengths,
    key,
    request_ids=np.asarray([7], np.int32),
    **static,
  )
  state = jax.tree.map(lambda leaf, row: leaf.at[0].set(row[0]), state, fresh)
  output = specsample.finish(step(state, 100), max_new_tokens=8)
  expected = generate(
    [long, [3, 4]],
    request_ids=np.asarray([7, 1], np.int32),
    max_new_tokens=8,
  )
  assert rows(output) == rows(expected)


def _num_executables():
  parts = (decode._prefill, decode._advance, decode._emitted)
  return [part._cache_size() for part in parts]


def test_one_executable_a_bucket_and_no_transfer():
  padded, lengths = specsample.pad_prompts([[1, 2, 3]])
  arguments = [
    jax.device_put(x) for x in (padded, lengths, np.arange(1, dtype=np.int32))
  ]
  call = lambda tokens, lengths, ids, key: specsample.generate(
    PARAMS,
    tokens,
    lengths,
    key,
    request_ids=ids,
    model=TARGET,
    drafter=CHAIN,
    verify=verify.block,
    sampling=specsample.Sampling(temperature=0.77),
    max_new_tokens=9,
  )
  call(*arguments, jax.random.key(0))
  before = _num_executables()
  key = jax.random.key(1)
  other = jax.device_put(np.asarray([17], np.int32))
  with jax.transfer_guard('disallow'):
    call(arguments[0], other, arguments[2], key).tokens.block_until_ready()
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


def test_can_be_traced_by_the_caller():
  padded, lengths = specsample.pad_prompts(PROMPTS)

  @jax.jit
  def outer(prompts, lengths, temperature):
    return specsample.generate(
      PARAMS,
      prompts,
      lengths,
      jax.random.key(0),
      model=TARGET,
      drafter=CHAIN,
      verify=verify.chain,
      sampling=specsample.Sampling(temperature=temperature),
      max_new_tokens=12,
    )

  assert rows(outer(padded, lengths, 1.0)) == rows(generate())
