"""`warp` against transformers' processors, and its edges."""

import math

import jax
from jax.extend import random
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
import transformers

from specsample import sampling
from specsample import types

VOCAB = 1000
NOTHING = np.zeros(0, np.int32)


def warp(logits, drafted=NOTHING, counts=None, **settings):
  rows = sampling.per_row(sampling.Sampling(**settings), 1, logits.size)
  row = jax.tree.map(lambda leaf: leaf[0], rows)
  return np.asarray(sampling.warp(row, counts, jnp.asarray(logits), drafted))


def counts(prompt, generated, vocab=VOCAB):
  bincount = lambda tokens: jnp.asarray(np.bincount(tokens, minlength=vocab))
  return types.TokenCounts(
    prompt=bincount(np.asarray(prompt, int)),
    generated=bincount(np.asarray(generated, int)),
  )


def random_logits(seed=0):
  return 3 * np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)


def hugging_face(logits, processors, tokens=(0,)):
  scores = torch.tensor(logits)[None]
  for processor in processors:
    scores = processor(torch.tensor([list(tokens)]), scores)
  return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize(
  'temperature, top_k, top_p, min_p',
  [
    (0.7, None, None, None),
    (1.3, 40, None, None),
    (1.0, None, 0.9, None),
    (0.8, None, None, 0.05),
    (0.6, 20, 0.8, 0.1),
    (1.0, 1, None, None),
    (1.0, VOCAB, 1.0, 0.0),
  ],
)
def test_matches_transformers(seed, temperature, top_k, top_p, min_p):
  processors = [transformers.TemperatureLogitsWarper(temperature)]
  if top_k:
    processors.append(transformers.TopKLogitsWarper(top_k))
  if top_p:
    processors.append(transformers.TopPLogitsWarper(top_p))
  if min_p:
    processors.append(transformers.MinPLogitsWarper(min_p))
  logits = random_logits(seed)
  ours = warp(
    logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
  )
  theirs = hugging_face(logits, processors)
  np.testing.assert_array_equal(ours > 0, theirs > 0)
  np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_repetition_penalty_matches_transformers():
  logits = random_logits()
  tokens = [3, 5, 3, 7]
  theirs = hugging_face(
    logits, [transformers.RepetitionPenaltyLogitsProcessor(1.7)], tokens
  )
  ours = warp(
    logits,
    counts=counts(tokens[:2], tokens[2:]),
    temperature=1.0,
    repetition_penalty=1.7,
  )
  np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_presence_and_frequency_count_emitted_tokens_only():
  logits = np.zeros(4, np.float32)
  probs = warp(
    logits,
    counts=counts([0, 0], [1, 2, 2], vocab=4),
    temperature=1.0,
    presence_penalty=0.5,
    frequency_penalty=0.25,
  )
  expected = np.exp([0, -0.75, -1.0, 0])
  np.testing.assert_allclose(probs, expected / expected.sum(), rtol=1e-6)


def test_drafted_tokens_count_as_emitted():
  logits = random_logits()
  settings = dict(
    temperature=1.0, frequency_penalty=0.3, repetition_penalty=1.2
  )
  drafted = np.asarray([4, 9, 4, -1], np.int32)
  np.testing.assert_array_equal(
    warp(logits, drafted, counts([1], [2]), **settings),
    warp(logits, NOTHING, counts([1], [2, 4, 9, 4]), **settings),
  )


def test_top_k_keeps_ties():
  probs = warp(np.asarray([2.0, 1.0, 1.0, 0.0]), temperature=1.0, top_k=2)
  assert list(probs > 0) == [True, True, True, False]


def test_top_p_keeps_the_token_that_crosses():
  logits = np.log(np.asarray([0.5, 0.3, 0.2], np.float32))
  assert list(warp(logits, temperature=1.0, top_p=0.4) > 0) == [
    True,
    False,
    False,
  ]
  assert list(warp(logits, temperature=1.0, top_p=0.6) > 0) == [
    True,
    True,
    False,
  ]


def test_temperature_zero_is_one_hot_and_the_limit():
  logits = random_logits()
  greedy = warp(logits, temperature=0.0, top_k=5, top_p=0.3, min_p=0.5)
  assert greedy[logits.argmax()] == 1
  assert greedy.sum() == 1
  np.testing.assert_allclose(warp(logits, temperature=1e-6), greedy, atol=1e-6)


def test_bias_is_added_before_the_repetition_penalty():
  logits, tokens = random_logits(), [3, 5]
  bias = np.zeros(VOCAB, np.float32)
  # Token 3 changes its sign, and with it what the penalty does.
  bias[3], bias[5] = -2 * logits[3], 0.5
  ours = warp(
    logits,
    counts=counts(tokens, []),
    temperature=1.0,
    repetition_penalty=1.5,
    logit_bias=bias,
  )
  # In the order of transformers' `_get_logits_processor`.
  biases = {(token,): float(bias[token]) for token in tokens}
  theirs = hugging_face(
    logits,
    [
      transformers.SequenceBiasLogitsProcessor(biases),
      transformers.RepetitionPenaltyLogitsProcessor(1.5),
    ],
    tokens,
  )
  np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_bias_forbids_and_forces():
  bias = np.zeros(VOCAB, np.float32)
  bias[7], bias[8] = 1e4, -np.inf
  probs = warp(random_logits(), temperature=1.0, logit_bias=bias)
  assert probs[7] == pytest.approx(1)
  assert probs[8] == 0


def test_half_precision_logits_are_warped_in_float32():
  logits = jnp.asarray(random_logits(), jnp.bfloat16)
  probs = warp(logits, temperature=1.0)
  assert probs.dtype == np.float32
  np.testing.assert_allclose(probs.sum(), 1, rtol=1e-6)


def test_rows_keep_their_own_settings():
  settings = sampling.Sampling(temperature=[0.0, 1.0], top_k=[0, 2])
  rows = sampling.per_row(settings, 2, VOCAB)
  logits = jnp.asarray(np.stack([random_logits(), random_logits()]))
  none = jnp.zeros((2, 0), jnp.int32)
  probs = jax.vmap(sampling.warp, (0, None, 0, 0))(rows, None, logits, none)
  assert list((np.asarray(probs) > 0).sum(axis=1)) == [1, 2]


@pytest.mark.parametrize(
  'settings, value',
  [
    ({'temperature': -0.5}, '-0.5'),
    ({'temperature': float('nan')}, 'nan'),
    ({'temperature': 'hot'}, 'hot'),
    ({'top_p': 0.0}, '0.0'),
    ({'top_p': 1.5}, '1.5'),
    ({'top_k': -1}, '-1'),
    ({'min_p': 1.1}, '1.1'),
    ({'repetition_penalty': 0.0}, '0.0'),
    # float32 numbers that a device reads as 0, or turns into infinities.
    ({'top_p': 1.1e-38}, '1.1e-38'),
    ({'repetition_penalty': 2e-38}, '2e-38.*from 1e-30'),
    ({'frequency_penalty': -3e38}, '-3e[+]38.*up to 1e[+]30'),
    ({'presence_penalty': float('inf')}, 'inf'),
    ({'temperature': [1.0, 0.5, 0.2]}, r'\(3,\)'),
    ({'logit_bias': np.zeros(3)}, r'\(3,\)'),
    ({'logit_bias': np.full(VOCAB, np.nan)}, 'NaN'),
  ],
)
def test_refuses(settings, value):
  with pytest.raises(ValueError, match=value):
    sampling.per_row(sampling.Sampling(**settings), 2, VOCAB)


# Drawn in one step; in two, with blocks that are padded, padded in each half,
# and whole.
@pytest.mark.slow
@pytest.mark.parametrize('vocab', [4, 1000, 514, 1536])
@pytest.mark.parametrize('draw', [sampling.draw, sampling.draw_coupled])
def test_draw_follows_the_distribution(draw, vocab):
  probs = np.random.default_rng(1).dirichlet(np.full(vocab, 0.3))
  probs[vocab // 2 :: 3] = 0
  probs = jnp.asarray(probs / probs.sum(), jnp.float32)
  keys = jax.random.split(jax.random.key(0), 20_000)
  drawn = jax.jit(jax.vmap(draw, (0, None)))(keys, probs)
  observed = np.bincount(drawn, minlength=vocab)
  assert observed.size == vocab
  assert not observed[np.asarray(probs) == 0].any()
  expected = 20_000 * np.asarray(probs, float)
  # Cells have an expected count of at least five; the rest form one cell.
  rare = expected < 5
  observed = np.append(observed[~rare], observed[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  kept = expected > 0
  statistic = np.sum((observed - expected)[kept] ** 2 / expected[kept])
  assert statistic < scipy.stats.chi2.isf(1e-6, kept.sum() - 1)


def _from_words(key, bit_width, shape):
  """Gives index 0 the two words that are the key, and others a half and 0."""
  del bit_width
  words = jnp.asarray([[0, 1 << 31], [0, 0]], jnp.uint32).at[:, 0].set(key)
  return words.ravel()[: math.prod(shape)].reshape(shape)


# Every value that either word of the noise can take.
@pytest.mark.slow
@pytest.mark.parametrize(
  'word, share', [('high', 0.5), ('high', 1e-2), ('low', 1e-9), ('low', 1e-11)]
)
def test_each_token_has_its_share_of_the_noise(word, share):
  """A token against one whose noise is its median wins as often as it should.

  The noise is -log of an exponential variable, whose median is log 2.
  """
  words = random.define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: seed,
    split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
    random_bits=_from_words,
    fold_in=lambda key, data: key,
    name='words',
  )
  weight = np.float32(share / (1 - share))
  weights = jnp.asarray([weight, 1], jnp.float32)

  @jax.jit
  def wins(bits):
    other = jnp.zeros_like(bits)
    pair = (bits, other) if word == 'high' else (other, bits)
    keys = jax.random.wrap_key_data(jnp.stack(pair, -1), impl=words)
    drawn = jax.vmap(sampling.draw, (0, None))(keys, weights)
    return jnp.sum(drawn == 0)

  # The nine lowest bits are not used.
  steps = np.arange(0, 1 << 32, 1 << 9, dtype=np.uint32).reshape(64, -1)
  won = sum(int(wins(jnp.asarray(part))) for part in steps)
  every = 1 << 23 if word == 'high' else 1 << 46
  expected = -math.expm1(-math.log(2) * float(weight))
  # To one value of the noise, and the rounding of the logarithms.
  assert won / every == pytest.approx(expected, rel=2e-6, abs=2 / every)


# SmolLM2, in 256 blocks; GPT-2, in padded ones; a fine-tuned Llama 2, in padded
# ones of each half; Gemma.
@pytest.mark.slow
@pytest.mark.parametrize('vocab', [49_152, 50_257, 32_002, 262_144])
def test_blocks_lose_and_move_no_token(vocab):
  # The ends of the vocabulary and of its halves, and places between.
  ends = np.add.outer([0, vocab // 2, vocab], np.arange(-70, 70)).ravel()
  between = np.random.default_rng(2).integers(vocab, size=300)
  tokens = np.unique(np.concatenate([ends % vocab, between]))
  draw = lambda token: sampling.draw(
    jax.random.key(token), jax.nn.one_hot(token, vocab)
  )
  drawn = jax.lax.map(draw, jnp.asarray(tokens), batch_size=64)
  np.testing.assert_array_equal(drawn, tokens)


@pytest.mark.slow
@pytest.mark.parametrize('vocab', [3, 300])
def test_draw_of_one_hot_is_certain(vocab):
  probs = jax.nn.one_hot(vocab - 2, vocab)
  keys = jax.random.split(jax.random.key(0), 1000)
  for draw in (sampling.draw, sampling.draw_coupled):
    assert (jax.vmap(draw, (0, None))(keys, probs) == vocab - 2).all()
