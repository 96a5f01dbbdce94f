"""Rounds of drafters without the decoding loop, and a target for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsample import testing
from specsample.types import Verdict

V, K = 12, 3
TARGET = testing.tiny_llama(vocab_size=V, num_layers=3)
# The tokens that can be drafted by drafters with a vocabulary of their own.
D2T = np.asarray([6, 1, 11, 4, 3, 0, 9])
PROMPTS = np.arange(4 * 6).reshape(4, 6) % V
LENGTHS = np.asarray([6, 2, 5, 1])
TEXTS = [row[:n].tolist() for row, n in zip(PROMPTS, LENGTHS, strict=True)]
_WIDTH = 24  # of the buffers


@functools.cache
def target_params():
  # Larger than at initialisation, where a layer or a token hardly matters.
  return jax.tree.map(lambda x: 1.6 * x, TARGET.init(jax.random.key(0)))


@functools.cache
def params(drafter, noise=0.1):
  """Returns parameters of a drafter for `TARGET`; noise stands for training."""
  target = target_params()
  d2t = None if drafter.draft_vocab_size is None else D2T
  own = drafter.init_params(jax.random.key(1), target, d2t)
  own = testing.with_noise(own, jax.random.key(2), noise)
  return {'target': target, 'drafter': own}


def best(probs, position):
  """Draws the most likely token."""
  del position
  return jnp.argmax(probs, axis=-1).astype(jnp.int32)


def second(probs, position):
  """Draws the second most likely token, so that an argmax would be noticed."""
  del position
  return jnp.argsort(probs, axis=-1)[:, -2].astype(jnp.int32)


def softmax(logits, drafted):
  """Warps logits at temperature 1."""
  del drafted
  return jax.nn.softmax(logits)


def rows(texts):
  """Returns texts as an array of tokens, padded with 0, and their lengths."""
  tokens = np.zeros((len(texts), _WIDTH), np.int32)
  for row, text in zip(tokens, texts, strict=True):
    row[: len(text)] = text
  return jnp.asarray(tokens), jnp.asarray([len(text) for text in texts])


@functools.partial(jax.jit, static_argnames='layers')
def read(params, tokens, layers=()):
  """Returns the output of `TARGET` for whole sequences, from scratch."""
  empty = TARGET.init_cache(len(tokens), 0)
  return TARGET.apply(params['target'], tokens, empty, features=layers)[0]


@functools.partial(jax.jit, static_argnames='drafter')
def _begin(params, tokens, lengths, *, drafter):
  output = None
  if params.get('target'):
    output = read(params, tokens, drafter.feature_layers)
  state = drafter.init(params, *tokens.shape)
  return drafter.observe(params, tokens, lengths - 1, output, None, state)


def begin(drafter, params, texts):
  """Returns the state after a prefill of all tokens but the pending ones.

  A drafter that reads nothing of the target does without its parameters.
  """
  return _begin(params, *rows(texts), drafter=drafter)


@functools.partial(jax.jit, static_argnames=('drafter', 'draw'))
def _propose(params, tokens, lengths, state, *, drafter, draw):
  return drafter.propose(params, draw, softmax, tokens, lengths, state)


def propose(drafter, params, texts, state=None, draw=second):
  """Returns the draft after each text, and the state; a prefill by default."""
  state = begin(drafter, params, texts) if state is None else state
  return _propose(params, *rows(texts), state, drafter=drafter, draw=draw)


def after(drafter, params, before, texts, state):
  """Returns the state after a round that made `texts` of the texts before.

  The target's output is missing, for a drafter that does not read it.
  """
  new = [y[len(x) - 1 :] for x, y in zip(before, texts, strict=True)]
  tokens, lengths = rows(new)
  verdict = Verdict(num_accepted=lengths - 2, next_token=None)
  return drafter.observe(params, tokens, lengths - 1, None, verdict, state)
