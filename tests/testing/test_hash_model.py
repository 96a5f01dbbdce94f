"""The hash model: every bit of a prefix counts, and nothing else does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import testing
from specsample.testing import HashModel

_MODEL = HashModel(vocab_size=11)


@functools.partial(jax.jit, static_argnames='model')
def _logits(tokens, model=_MODEL):
  """Returns the logits [B, T, V] of whole prefixes [B, T], in one pass."""
  output, _ = model.apply({}, tokens, model.init_cache(*tokens.shape))
  return output.logits


_apply = jax.jit(_MODEL.apply)


def _tokens(batch, length, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(_MODEL.vocab_size, size=(batch, length), dtype=np.int32)


def test_logits_depend_on_the_whole_prefix():
  tokens = _tokens(1, 12)
  logits = _logits(tokens)[0]
  for position in range(12):
    changed = tokens.copy()
    changed[0, position] = (changed[0, position] + 1) % _MODEL.vocab_size
    differs = (_logits(changed)[0] != logits).any(axis=-1)
    np.testing.assert_array_equal(differs, np.arange(12) >= position)


def test_order_counts():
  first, second = _logits(np.asarray([[3, 5, 7], [5, 3, 7]]))[:, -1]
  assert (first != second).sum() >= 10


def test_bits_are_the_same_in_any_batch_and_any_chunks():
  tokens = _tokens(5, 24)
  together = np.asarray(_logits(tokens))
  for row in range(5):
    alone = _logits(tokens[row : row + 1])[0]
    np.testing.assert_array_equal(alone, together[row])
  for chunks in ([1] * 24, [5, 1, 18]):
    cache, pieces, start = _MODEL.init_cache(5, 24), [], 0
    for size in chunks:
      chunk = tokens[:, start : start + size]
      output, cache = _apply({}, chunk, cache)
      pieces.append(output.logits)
      start += size
    np.testing.assert_array_equal(jnp.concatenate(pieces, axis=1), together)


@pytest.mark.slow
def test_it_is_a_model_bit_for_bit():
  testing.assert_model(_MODEL, {}, tolerance=0)


def test_logits_are_spread_over_the_scale():
  logits = np.asarray(_logits(_tokens(64, 64))).ravel()
  counts, _ = np.histogram(logits, bins=20, range=(0, _MODEL.scale))
  assert counts.sum() == logits.size
  np.testing.assert_allclose(counts / logits.size, 1 / 20, rtol=0.06)


def test_unembedding_the_hidden_vectors_gives_the_logits():
  tokens = _tokens(2, 3)
  output, _ = _MODEL.apply({}, tokens, _MODEL.init_cache(2, 3), features=(0, 2))
  logits = _MODEL.unembed({}, output.hidden)
  np.testing.assert_array_equal(logits, output.logits)
  assert [feature.shape for feature in output.features] == [(2, 3, 2)] * 2
  assert _MODEL.embed({}, tokens).shape == output.hidden.shape


def test_noise_moves_a_drafter_away():
  tokens = _tokens(64, 32)

  def distance(model):
    probs = jax.nn.softmax(_logits(tokens, model))
    own = jax.nn.softmax(_logits(tokens))
    return float(jnp.abs(probs - own).sum(axis=-1).mean() / 2)

  by_noise = [
    distance(dataclasses.replace(_MODEL, noise=noise))
    for noise in (0, 0.1, 0.3, 0.6, 1)
  ]
  assert by_noise[0] == 0
  assert by_noise == sorted(by_noise)
  other = distance(dataclasses.replace(_MODEL, seed=9))
  np.testing.assert_allclose(by_noise[-1], other, rtol=0.1)
  assert distance(dataclasses.replace(_MODEL, noise=0.5, noise_seed=4)) > 0.05
  half = distance(_MODEL.keep_layers((1, 3)))
  assert half == distance(dataclasses.replace(_MODEL, noise=0.5))
  assert _MODEL.keep_layers((0, 1, 2, 3)) == _MODEL


def test_negative_scale_turns_the_order_around():
  contrary = dataclasses.replace(_MODEL, scale=-_MODEL.scale)
  tokens = _tokens(4, 4)
  np.testing.assert_array_equal(_logits(tokens, contrary), -_logits(tokens))


def test_padding_is_no_token():
  padded = dataclasses.replace(_MODEL, padding=3)
  tokens = _tokens(4, 4)
  found = _logits(tokens, padded)
  assert (found[..., 8:] == -jnp.inf).all()
  np.testing.assert_array_equal(found[..., :8], _logits(tokens)[..., :8])


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'noise': 1.5}, 'noise is 1.5'),
    ({'padding': 11}, 'padding is 11: .* among 11 ids'),
  ],
)
def test_refuses(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_MODEL, **changes)
