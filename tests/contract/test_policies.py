"""What every policy must do, whatever it decides by.

That output stays exact with each of them is in tests/test_exactness.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import drafts
from specsample import policies
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.loop.decoder import Decoder
from specsample.policies import decision
from specsample.sampling import Sampling
from specsample.testing import trained
from specsample.types import Draft, DraftKind, Signals

_B, _N, _V = 5, 4, 6
# Nodes 1 and 4 follow the pending token, 2 and 3 follow node 1.
_PARENTS = (0, 1, 1, 0)
_COSTS = (1.0, 1.1, 1.3, 1.7, 2.2)
_STEEP = (1.0, 1.1, 1.7, 2.2, 2.9)
_EACH = {
  'AdaEDL': policies.AdaEDL(scale=0.1, threshold=0.6),
  'Budget': policies.Budget(ladder=(0, 1, 2, 4), costs=(1.0, 1.1, 1.15, 1.6)),
  'Confidence': policies.Confidence(0.5),
  'ConfidenceProduct': policies.ConfidenceProduct(0.3),
  'EarlyStopping': policies.EarlyStopping(costs=_COSTS),
  'EarlyStopping of a batch': policies.EarlyStopping(
    costs=_COSTS, whole_batch=True
  ),
  'Fastest': policies.Fastest(costs=_STEEP, strength=0.5, patience=2),
  'Fastest of a batch': policies.Fastest(
    costs=_STEEP, strength=0.5, patience=2, whole_batch=True
  ),
  'Fixed': policies.Fixed(1),
  'LargestProbability': policies.LargestProbability(0.3),
  'PathProbability': policies.PathProbability(0.04),
  'SVIP': policies.SVIP(1.2),
  'TokenProbability': policies.TokenProbability(0.15),
  'TopK': policies.TopK(4),
  'TopNodes': policies.TopNodes(2),
}
# They rank the drafts themselves, which is exact for point masses alone.
_OF_POINT_MASSES = ('Budget', 'TopNodes')
_OF_BATCHES = ('Budget', 'EarlyStopping of a batch', 'Fastest of a batch')
_OF_CHAINS = ('EarlyStopping', 'EarlyStopping of a batch')
_each = pytest.mark.parametrize('name', _EACH)


def test_every_policy_is_tested():
  names = {type(policy).__name__ for policy in _EACH.values()}
  assert names == set(policies.__all__)


def _draft(name, rng):
  """Returns a random draft of each row: a tree where the policy takes one."""
  is_chain = name in _OF_CHAINS
  parents = tuple(range(_N)) if is_chain else _PARENTS
  logits = rng.normal(size=(_B, _N + 1, _V))
  probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
  probs = probs[:, list(parents)]  # siblings have the same
  tokens = rng.integers(_V, size=(_B, _N))
  own = np.take_along_axis(probs, tokens[..., None], axis=-1)
  tokens[1, 0] = -1
  draft = Draft(
    tokens=jnp.asarray(tokens, jnp.int32),
    probs=None,
    kind=DraftKind.SAMPLED,
    parents=None if is_chain else drafts.of_all_rows(parents, _B),
    signals=Signals(
      log_prob=jnp.log(own[..., 0]),
      max_log_prob=jnp.log(probs.max(axis=-1)),
      rank=jnp.asarray((probs > own).sum(axis=-1)),
      entropy=jnp.asarray(-(probs * np.log(probs)).sum(axis=-1)),
      confidence=jnp.asarray(rng.random((_B, _N + 1))[:, list(parents)]),
    ),
  )
  if name in _OF_POINT_MASSES:
    draft = dataclasses.replace(draft, kind=DraftKind.POINT_MASS)
  missing = ~drafts.all_on_the_way(draft, draft.tokens >= 0)
  return dataclasses.replace(draft, tokens=jnp.where(missing, -1, draft.tokens))


def _states(policy):
  return (jax.tree.map(lambda x: jnp.stack([x] * _B), policy.init(_N)),)


def _decide(policy, states, draft, over):
  """Returns how many drafts are asked for [B], and which stay and go on."""
  wanted = decision.wanted((policy,), states, over, _N)
  return wanted, *decision.decide((policy,), states, wanted, over, draft)


def _play(name, rounds=6):
  """Yields the states, draft and done rows of some rounds, and the decision.

  Rows keep up to as many drafts as were verified, at random; the last is done.
  """
  policy, rng = _EACH[name], np.random.default_rng(0)
  states, over = _states(policy), jnp.arange(_B) == _B - 1
  for _ in range(rounds):
    draft = _draft(name, rng)
    wanted, stay, goes_on = _decide(policy, states, draft, over)
    yield states, draft, over, (wanted, stay, goes_on)
    states = decision.note((policy,), states, drafts.cut(draft, stay))
    drafted = drafts.depth(drafts.cut(draft, stay))
    kept = jnp.minimum(drafted, rng.integers(3, size=_B))
    states = decision.update((policy,), states, drafted, kept, over)


@pytest.mark.slow
@_each
def test_drafts_stay_within_what_is_asked_for_and_with_their_parents(name):
  has_cut = False
  for _, draft, _, (wanted, stay, goes_on) in _play(name):
    most = min(_N, _EACH[name].most or _N)
    assert wanted.shape == (_B,) and stay.shape == goes_on.shape == (_B, _N)
    assert np.all((wanted >= 0) & (wanted <= most))
    assert not np.any(stay & (drafts.depths(draft) > wanted[:, None]))
    np.testing.assert_array_equal(drafts.all_on_the_way(draft, stay), stay)
    np.testing.assert_array_equal(goes_on & stay, goes_on)
    has_cut |= bool(np.any(~stay))
  assert has_cut


@pytest.mark.slow(but=('EarlyStopping of a batch',))
@_each
def test_state_has_rows_first_and_one_shape(name):
  shapes = lambda states: jax.tree.map(lambda x: (x.shape, x.dtype), states)
  played = [states for states, *_ in _play(name)]
  assert all(x.shape[0] == _B for x in jax.tree.leaves(played[0]))
  assert all(shapes(states) == shapes(played[0]) for states in played)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(played[-1]))


@pytest.mark.slow
@_each
def test_row_decides_alone_or_with_all_rows_that_are_not_done(name):
  if name in _OF_BATCHES:
    order = np.asarray([3, 0, 2, 4, 1])
  else:
    order = np.asarray([2])
  for states, draft, over, expected in _play(name):
    of_rows = jax.tree.map(lambda x: x[order], (states, draft, over))
    found = _decide(_EACH[name], *of_rows)
    jax.tree.map(
      lambda x, y: np.testing.assert_array_equal(x, y[order]), found, expected
    )
    # The last row is done: what it has counts for nothing.
    other = jax.tree.map(lambda x: x.at[-1].set(x[0]), (states, draft))
    found = _decide(_EACH[name], *other, over)
    jax.tree.map(
      lambda x, y: np.testing.assert_array_equal(x[:-1], y[:-1]),
      found,
      expected,
    )


def _anticipates(policy, draft, states, over):
  """Returns whether it hangs on a drawn token whether that token stays."""
  _, stay, _ = _decide(policy, states, draft, over)
  on_the_way = np.asarray(drafts.on_the_way(draft))[..., 1:, :]
  on_the_way = np.broadcast_to(on_the_way, (_B, _N, _N))
  rng = np.random.default_rng(1)
  for node in range(_N):
    # Another token at the node, and anything but on the way to it.
    known, is_before = on_the_way[:, node], on_the_way[:, node].copy()
    is_before[:, node] = False
    other = _draft('Fixed', rng).signals
    signals = dataclasses.replace(
      draft.signals,
      log_prob=jnp.where(is_before, draft.signals.log_prob, other.log_prob),
      rank=jnp.where(is_before, draft.signals.rank, other.rank),
      **{
        key: jnp.where(known, getattr(draft.signals, key), getattr(other, key))
        for key in ('max_log_prob', 'entropy', 'confidence')
      },
    )
    changed = dataclasses.replace(draft, signals=signals)
    _, found, _ = _decide(policy, states, changed, over)
    if not np.array_equal(found[:, node], stay[:, node]):
      return True
  return False


class _Careless(policies.TokenProbability):
  """A faulty policy that says it does not read the token."""

  reads_token = False


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', [name for name in _EACH if name not in _OF_POINT_MASSES]
)
def test_decision_anticipates_no_draw(name):
  for states, draft, over, _ in _play(name):
    assert not _anticipates(_EACH[name], draft, states, over)


def test_policy_that_anticipates_is_noticed():
  played = _play('TokenProbability')
  careless = _Careless(_EACH['TokenProbability'].threshold)
  assert any(_anticipates(careless, x, states, o) for states, x, o, _ in played)


_MODEL = testing.HashModel(vocab_size=_V)
_CHAIN = drafters.Chain(
  model=dataclasses.replace(_MODEL, noise=0.5), num_draft_tokens=3
)


@pytest.mark.slow
@pytest.mark.nightly(but=('Budget', 'SVIP', 'Confidence', 'Fastest'))
@_each
def test_greedy_tokens_are_the_targets_own(name):
  policy, rule = _EACH[name], verify.chain
  if name in _OF_POINT_MASSES:
    topology = tree.Topology((0, 1, 1, 2))
    scene = trained.untrained(
      _MODEL, drafters.Tree(drafter=_CHAIN, topology=topology)
    )
    rule = verify.tree
  elif name.startswith(('Confidence', 'EarlyStopping')):
    scene = trained.confident(vocab_size=_V)
  else:
    scene = trained.untrained(_MODEL, _CHAIN)
  testing.assert_greedy_equal(
    scene.params,
    np.arange(3 * 4).reshape(3, 4) % _V,
    np.asarray([4, 1, 3]),
    model=scene.model,
    drafter=drafters.Adaptive(drafter=scene.drafter, policies=(policy,)),
    verify=rule,
    max_new_tokens=16,
  )


@_each
def test_drafts_that_it_cannot_read_are_refused(name):
  policy, draft = _EACH[name], _draft(name, np.random.default_rng(0))
  row = jax.tree.map(lambda x: x[0], draft)
  states, kind = policy.init(_N), type(policy).__name__

  def refuses(message, **changes):
    with pytest.raises(ValueError, match=message):
      policy.passes(dataclasses.replace(row, **changes), states, False)

  if name in _OF_POINT_MASSES:
    for drawn in (DraftKind.SAMPLED, DraftKind.WITHOUT_REPLACEMENT):
      refuses(f'{kind} .*{drawn.value!r} were drawn.* point masses', kind=drawn)
  if name in _OF_CHAINS:
    refuses('draft is a tree: choose Budget', parents=jnp.asarray(_PARENTS))
  if kind in ('Fixed', 'Fastest'):
    return
  refuses(f'{kind} reads Draft.signals', signals=None)
  if 'Confidence' in kind or kind == 'EarlyStopping':
    headless = dataclasses.replace(row.signals, confidence=None)
    refuses(rf'{kind} reads .* draft with DSpark', signals=headless)


def test_drafter_without_signals_is_refused_when_it_is_traced():
  ngram = drafters.Ngram(num_draft_tokens=3)
  drafter = drafters.Adaptive(drafter=ngram, policies=(policies.SVIP(),))
  with pytest.raises(ValueError, match='SVIP reads'):
    specsample.prefill(
      Decoder(_MODEL, drafter, verify.chain),
      {'target': {}},
      np.asarray([[1, 2]]),
      np.asarray([2]),
      jax.random.key(0),
      sampling=Sampling(),
      max_new_tokens=4,
    )


_NAN = float('nan')


@pytest.mark.parametrize(
  ('policy', 'settings', 'message'),
  [
    (policies.TokenProbability, {'threshold': 1.5}, 'threshold is 1.5'),
    (policies.PathProbability, {'threshold': -0.1}, 'threshold is -0.1'),
    (policies.ConfidenceProduct, {'threshold': 2}, 'threshold is 2'),
    (policies.SVIP, {'threshold': -1.0}, 'threshold is -1.0'),
    (policies.SVIP, {'threshold': _NAN}, 'threshold is nan'),
    (policies.TopK, {'k': 0}, 'k is 0: give an integer of at least 1'),
    (policies.TopK, {'k': 1.5}, 'k is 1.5: give an integer'),
    (policies.TopNodes, {'num_nodes': 0}, 'num_nodes is 0'),
    (policies.AdaEDL, {'target_rate': 1.2}, 'target_rate is 1.2'),
    (policies.AdaEDL, {'scale': -1.0}, 'scale is -1.0'),
    (policies.Fixed, {'num_draft_tokens': -1}, 'num_draft_tokens is -1'),
    (policies.Fastest, {'costs': (1,)}, 'costs are'),
    (policies.Fastest, {'costs': (1, 0)}, 'each above 0'),
    (policies.Fastest, {'costs': (1, _NAN)}, 'each above 0'),
    (policies.Fastest, {'prior': 1.2}, 'prior is 1.2'),
    (policies.Fastest, {'strength': 0}, 'strength is 0'),
    (policies.Fastest, {'patience': 0}, 'patience is 0'),
    (policies.Budget, {'ladder': (1, 4)}, r'is \(1, 4\): .* begin with 0'),
    (policies.Budget, {'ladder': (0,)}, 'ladder is'),
    (policies.Budget, {'ladder': (0, 4, 2)}, 'ladder is'),
    (policies.Budget, {'costs': (1.0, 2.0)}, 'one above 0 for each of the 4'),
    (policies.Budget, {'costs': (1.0, 2.0, 3.0, 0.0)}, 'costs are'),
    (policies.Budget, {'drafting': -1}, 'drafting is -1'),
    (policies.Budget, {'strength': 0}, 'strength is 0'),
    (policies.Budget, {'patience': 0}, 'patience is 0'),
  ],
)
def test_setting_out_of_range_is_refused(policy, settings, message):
  (good,) = (x for name, x in _EACH.items() if name == policy.__name__)
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(good, **settings)


@pytest.mark.slow
def test_costs_and_ladder_that_do_not_fit_the_draft_are_refused():
  with pytest.raises(ValueError, match=r'costs has 5 numbers, .* give 6'):
    _EACH['Fastest'].init(5)
  draft = jax.tree.map(
    lambda x: x[:, :3], _draft('Budget', np.random.default_rng(0))
  )
  states = _states(_EACH['Budget'])
  with pytest.raises(ValueError, match=r'ladder ends with 4, but .* 3 nodes'):
    _decide(_EACH['Budget'], states, draft, jnp.zeros(_B, bool))
