"""Which draft tokens pass each filter, worked out by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specsample import policies
from specsample.drafters import signals as signals_lib
from specsample.types import Draft, DraftKind, Signals

_LOG = np.log
_SIGNALS = Signals(
  log_prob=jnp.asarray(_LOG([0.5, 0.1, 0.6])),
  max_log_prob=jnp.asarray(_LOG([0.5, 0.7, 0.6])),
  rank=jnp.asarray([0, 2, 0]),
  entropy=jnp.asarray([0.81, 0.25, 1.21]),
  confidence=jnp.asarray([0.9, 0.5, 0.8]),
)
_CHAIN = Draft(
  tokens=jnp.asarray([4, 2, 7]),
  probs=None,
  kind=DraftKind.SAMPLED,
  signals=_SIGNALS,
)
# No threshold below is equal to a probability: e to the log of .6 may be less.
# Nodes 1 and 2 are siblings, and 3 is a child of 1.
_TREE = dataclasses.replace(
  _CHAIN, kind=DraftKind.POINT_MASS, parents=jnp.asarray([0, 0, 1])
)


@pytest.mark.parametrize(
  ('policy', 'reads_token', 'passes'),
  [
    (policies.TokenProbability(0.5), True, [1, 0, 1]),
    (policies.PathProbability(0.04), True, [1, 1, 0]),
    (policies.TopK(2), True, [1, 0, 1]),
    (policies.LargestProbability(0.59), False, [0, 1, 1]),
    (policies.Confidence(0.8), False, [1, 0, 1]),
    (policies.ConfidenceProduct(0.4), False, [1, 1, 0]),
    (policies.SVIP(1.0), False, [1, 1, 0]),
    (policies.AdaEDL(scale=1.0, threshold=0.1), False, [1, 1, 0]),
  ],
)
def test_what_passes_of_a_chain(policy, reads_token, passes):
  found = policy.passes(_CHAIN, policy.init(3))
  assert found.tolist() == [bool(x) for x in passes]
  # A filter that reads the token itself may only decide on those after it.
  assert policy.reads_token == reads_token


def test_what_passes_of_a_tree():
  of_path = policies.PathProbability(0.29).passes(_TREE, ())
  assert of_path.tolist() == [True, False, True]  # .5, .1, .5 * .6


@pytest.mark.parametrize(
  ('num_nodes', 'kept'), [(1, [1, 0, 0]), (2, [1, 0, 1]), (3, [1, 1, 1])]
)
def test_the_likeliest_paths_of_a_tree_are_kept(num_nodes, kept):
  found = policies.TopNodes(num_nodes).passes(_TREE, ())
  assert found.tolist() == [bool(x) for x in kept]


def test_of_equals_the_first_is_kept_and_of_what_is_not_there_nothing():
  equal = dataclasses.replace(
    _TREE,
    tokens=jnp.asarray([-1, 3, -1]),
    signals=dataclasses.replace(_SIGNALS, log_prob=jnp.zeros(3)),
  )
  assert policies.TopNodes(1).passes(equal, ()).tolist() == [0, 1, 0]
  there = dataclasses.replace(equal, tokens=jnp.asarray([1, 3, 5]))
  assert policies.TopNodes(2).passes(there, ()).tolist() == [1, 1, 0]


@pytest.mark.parametrize(
  'kind', [kind for kind in DraftKind if kind is not DraftKind.POINT_MASS]
)
def test_drawn_siblings_are_not_pruned(kind):
  drawn = dataclasses.replace(_TREE, kind=kind)
  with pytest.raises(ValueError, match='draft point masses'):
    policies.TopNodes(2).passes(drawn, ())


def test_early_stopping_is_for_chains():
  policy = policies.EarlyStopping(costs=(1, 1, 1, 1))
  with pytest.raises(ValueError, match='the draft is a tree: choose Budget'):
    policy.passes(_TREE, policy.init(3))


def test_what_a_drafter_does_not_say_is_named():
  silent = dataclasses.replace(_CHAIN, signals=None)
  with pytest.raises(ValueError, match='SVIP reads Draft'):
    policies.SVIP().passes(silent, ())
  headless = dataclasses.replace(
    _CHAIN, signals=dataclasses.replace(_SIGNALS, confidence=None)
  )
  with pytest.raises(
    ValueError, match=r'Confidence reads .* draft with DSpark'
  ):
    policies.Confidence(0.5).passes(headless, ())


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: policies.TokenProbability(1.5), 'threshold is 1.5'),
    (lambda: policies.PathProbability(-0.1), 'threshold is -0.1'),
    (lambda: policies.ConfidenceProduct(2), 'threshold is 2'),
    (lambda: policies.SVIP(-1.0), 'threshold is -1.0'),
    (lambda: policies.TopK(0), 'k is 0: give an integer of at least 1'),
    (lambda: policies.TopK(1.5), 'k is 1.5: give an integer'),
    (lambda: policies.SVIP(float('nan')), 'threshold is nan'),
    (lambda: policies.TopNodes(0), 'num_nodes is 0'),
    (lambda: policies.AdaEDL(target_rate=1.2), 'target_rate is 1.2'),
    (lambda: policies.AdaEDL(scale=-1.0), 'scale is -1.0'),
    (lambda: policies.Fixed(-1), 'num_draft_tokens is -1'),
  ],
)
def test_settings_out_of_range_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_signals_are_those_of_the_softmax():
  logits = np.asarray([[0.0, 1.0, 2.0, -np.inf], [5.0, 5.0, 5.0, 5.0]])
  probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  found = signals_lib.of_tokens(jnp.asarray(logits), jnp.asarray([1, 2]), None)
  np.testing.assert_allclose(np.exp(found.log_prob), [probs[0, 1], 0.25])
  np.testing.assert_allclose(np.exp(found.max_log_prob), [probs[0, 2], 0.25])
  assert found.rank.tolist() == [1, 0]
  own = probs[0, :3]
  entropy = [-(own * np.log(own)).sum(), np.log(4)]
  np.testing.assert_allclose(found.entropy, entropy, rtol=1e-6)
