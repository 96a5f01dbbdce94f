"""Hydra's draft, computed in NumPy."""

import jax
import numpy as np

from specsample import drafters
from specsample import testing
from specsample.drafters.heads import HeadsState
from specsample.types import DraftKind

_V, _K, _D = 12, 3, 16
_TARGET = testing.tiny_llama(vocab_size=_V, dim=_D)
_HYDRA = drafters.Hydra(model=_TARGET, num_draft_tokens=_K, num_layers=2)
_TOKENS = np.asarray([[3, 1, 4, 9, 0, 0], [2, 7, 0, 0, 0, 0]])
_LENGTHS = np.asarray([4, 2])


def _silu(x):
  return x / (1 + np.exp(-x))


def _by_hand(params, head, hidden, tokens):
  """Returns one row's logits after the pending token and the drafted ones."""
  embeddings = params['target']['embedding'][:, tokens].T
  x = np.concatenate([hidden, *embeddings])
  x = hidden + _silu(x @ head['read']['kernel'] + head['read']['bias'])
  block = head['blocks'][0]['linear']
  x = x + _silu(x @ block['kernel'] + block['bias'])
  x = x @ head['project']['linear']['kernel']
  return x @ params['target']['unembedding']


def test_a_head_reads_the_pending_token_and_those_drafted_before():
  target = _TARGET.init(jax.random.key(0))
  own = _HYDRA.init_params(jax.random.key(1))
  own = testing.with_noise(own, jax.random.key(2))
  params = jax.device_get({'target': target, 'drafter': own})
  hidden = np.random.default_rng(0).normal(size=(2, _D)).astype(np.float32)
  draft, _ = _HYDRA.propose(
    params,
    # Draws the third most likely token, so that an argmax would be noticed.
    lambda probs, position: probs.argsort(axis=-1)[:, -3].astype(np.int32),
    lambda logits, drafted: jax.nn.softmax(logits),
    _TOKENS,
    _LENGTHS,
    HeadsState(hidden=hidden, length=_LENGTHS - 1),
  )
  assert draft.kind is DraftKind.SAMPLED
  for row, pending in enumerate((9, 7)):
    tokens = [pending]
    for i in range(_K):
      head = params['drafter']['heads'][i]
      logits = _by_hand(params, head, hidden[row], tokens)
      weights = np.exp(logits)
      np.testing.assert_allclose(
        draft.probs[row, i], weights / weights.sum(), atol=1e-5
      )
      tokens.append(int(logits.argsort()[-3]))
    assert draft.tokens[row].tolist() == tokens[1:]
