"""The effect of float32 on the rules' laws, over a realistic vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import tree
from specsample import verify
from specsample.testing import precision
from specsample.types import Draft, DraftKind

_VOCAB_SIZE = 49_152
_CHAIN = tree.chain(3)
_TREE = tree.Topology((0, 0, 1, 1, 2))
_RULES = {
  'chain': (verify.chain, _CHAIN, DraftKind.SAMPLED),
  'block': (verify.block, _CHAIN, DraftKind.SAMPLED),
  'k_seq': (verify.k_seq, _TREE, DraftKind.SAMPLED),
  'multi_path_block': (verify.multi_path_block, _TREE, DraftKind.SAMPLED),
  'tree, with replacement': (verify.tree, _TREE, DraftKind.SAMPLED),
  'tree, without': (verify.tree, _TREE, DraftKind.WITHOUT_REPLACEMENT),
  'traversal': (verify.traversal, _TREE, DraftKind.WITHOUT_REPLACEMENT),
  'greedy_draft': (verify.greedy_draft, _TREE, DraftKind.TOP_AND_SAMPLED),
}


def _softmax(logits):
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  return probs / probs.sum(-1, keepdims=True)


def _drafted(rng, topology, kind, own):
  """Draws tokens [N] and returns their laws [N, V] too, from own [N + 1, V]."""
  tokens = np.zeros(topology.num_nodes, np.int32)
  probs = np.zeros((topology.num_nodes, _VOCAB_SIZE))
  for node in range(topology.num_nodes + 1):
    left, children = own[node], topology.children(node)
    for child in children:
      is_best = kind is DraftKind.TOP_AND_SAMPLED and child != children[-1]
      token = left.argmax() if is_best else rng.choice(_VOCAB_SIZE, p=left)
      one_hot = np.zeros(_VOCAB_SIZE)
      one_hot[token] = 1
      tokens[child - 1] = token
      probs[child - 1] = one_hot if is_best else left
      if kind is not DraftKind.SAMPLED:
        left = np.where(one_hot, 0, left)
        left = left / left.sum()
  return tokens, probs


def _emitted(rule, topology, kind, tokens, probs, target):
  """Returns the probability [N + 1, V] to stop at each node with each token."""
  shape = {}
  if topology is not _CHAIN:
    shape = {
      'parents': jnp.asarray(topology.parents, jnp.int32),
      'depth': topology.depth,
      'num_children': topology.num_children,
    }
  draft = Draft(
    tokens=jnp.asarray(tokens), probs=jnp.asarray(probs), kind=kind, **shape
  )
  found = jax.jit(rule.law)(draft, jnp.asarray(target))
  assert found.next.dtype == target.dtype
  return np.asarray(found.stop, float)[:, None] * np.asarray(found.next, float)


@pytest.mark.parametrize('noise', [3.0, 0.0])
@pytest.mark.parametrize('name', _RULES)
def test_a_law_is_that_of_float64(name, noise):
  rule, topology, kind = _RULES[name]
  rng = np.random.default_rng(0)
  # A few likely tokens and a long tail: text has an entropy of a few bits.
  logits = rng.normal(scale=4, size=(topology.num_nodes + 1, _VOCAB_SIZE))
  target = _softmax(logits).astype(np.float32)
  # Without noise the drafter equals the target up to rounding, so that only
  # rounding errors are left of the residual.
  own = _softmax(logits + noise * rng.normal(size=logits.shape))
  tokens, probs = _drafted(rng, topology, kind, own)
  probs = probs.astype(np.float32)
  found = _emitted(rule, topology, kind, tokens, probs, target)
  with precision.float64():
    expected = _emitted(
      *(rule, topology, kind, tokens),
      probs.astype(np.float64),
      target.astype(np.float64),
    )
  # K-SEQ is exact at any rate from the best one on, and bisection in float32
  # ends at another one.
  tolerance = 1e-4 if rule is verify.k_seq else 1e-6
  assert abs(found - expected).sum() < tolerance
  assert expected.sum() == pytest.approx(1, abs=1e-6)
