"""How many drafts are made and read if policies cut them."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import policies
from specsample import tree
from specsample import verify
from specsample.loop import step
from specsample.loop.decoder import Decoder
from specsample.models import replicated
from specsample.sampling import Sampling
from tests.drafters import rounds

_TARGET, _K = rounds.TARGET, rounds.K
_CHAIN = drafters.Chain(model=_TARGET, num_draft_tokens=_K)
_TREE = drafters.Tree(
  drafter=_CHAIN, topology=tree.Topology((0, 0, 1, 2, 3, 4))
)
_PROMPTS, _LENGTHS = rounds.PROMPTS[:3], np.asarray([6, 1, 4], np.int32)
_COSTS = (1.0, 1.1, 1.2, 1.3)


@functools.cache
def _params():
  other = jax.tree.map(lambda x: 1.02 * x, rounds.target_params())
  return {'target': rounds.target_params(), 'drafter': other}


def _adaptive(*of_policies, drafter=_CHAIN, widths=None):
  return drafters.Adaptive(drafter=drafter, policies=of_policies, widths=widths)


def _start(drafter, params=None, rule=verify.chain):
  return specsample.prefill(
    Decoder(_TARGET, drafter, rule),
    _params() if params is None else params,
    _PROMPTS,
    _LENGTHS,
    jax.random.key(0),
    sampling=Sampling(temperature=0.0),
    max_new_tokens=60,
    max_length=80,
  )


@pytest.mark.slow
def test_the_target_reads_no_more_than_what_was_drafted():
  """A tree pruned to two nodes is three inputs, as counted at run time."""
  pruned = functools.partial(_adaptive, policies.TopNodes(2), drafter=_TREE)
  seen = []

  @dataclasses.dataclass(frozen=True)
  class Counting(type(_TARGET)):
    def read(self, params, tokens, cache, features=(), parents=None):
      if parents is not None:
        jax.debug.callback(lambda: seen.append(tokens.shape[1]))
      return super().read(params, tokens, cache, features, parents)

  fields = dataclasses.fields(_TARGET)
  model = Counting(**{x.name: getattr(_TARGET, x.name) for x in fields})
  for widths, inputs in (((), 7), ((2,), 3)):
    seen.clear()
    drafter = pruned(widths=widths)
    state = specsample.advance(
      Decoder(model, drafter, verify.tree),
      _params(),
      _start(drafter, rule=verify.tree),
      max_rounds=4,
    )
    jax.effects_barrier()
    assert set(seen) == {inputs}
    proposed = np.asarray(state.proposed)
    assert proposed[:, 1:].any() and not proposed[:, 3:].any()


@pytest.mark.parametrize(
  ('drafter', 'policy', 'expected'),
  [
    (_CHAIN, policies.Fixed(1), (0, 3)),
    # Width 2 is only 4% cheaper than width 3; width 1 is 14% cheaper.
    (_CHAIN, policies.Fastest(costs=(1.0, 1.2, 1.34, 1.4)), (0, 1, 3)),
    (_CHAIN, policies.Fastest(costs=(1.0, 1.2, 1.3, 1.4)), (0, 1, 2, 3)),
    (_TREE, policies.Fastest(costs=_COSTS), (0, 6)),
    (
      _TREE,
      policies.Budget(ladder=(0, 3, 6), costs=(1.0, 1.2, 1.5)),
      (0, 3, 6),
    ),
  ],
)
def test_narrower_pass_is_compiled_where_it_pays(drafter, policy, expected):
  assert _adaptive(policy, drafter=drafter).widths == expected


@pytest.mark.slow
def test_rows_begin_with_what_policies_learned():
  fastest = policies.Fastest(costs=_COSTS, strength=0.5, prior=0.1)
  drafter = _adaptive(fastest)

  def after(params, rounds):
    decoder = Decoder(_TARGET, drafter, verify.chain)
    state = _start(drafter, params)
    return specsample.advance(decoder, params, state, max_rounds=rounds)

  first = after(_params(), 12)
  (learned,) = drafter.learned(first.draft)
  (rows,) = first.draft.policies
  np.testing.assert_allclose(learned.kept, np.mean(rows.kept, axis=0))
  assert learned.wait.rounds.dtype == jnp.int32
  again = after(_params() | {'policies': (learned,)}, 0)
  (begun,) = again.draft.policies
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x, np.broadcast_to(y, x.shape)),
    begun,
    learned,
  )
  untaught = after(_params() | {'policies': drafter.untaught()}, 12)
  np.testing.assert_array_equal(untaught.tokens, first.tokens)
  np.testing.assert_array_equal(untaught.proposed, first.proposed)
  with pytest.raises(ValueError, match=r'the policies \(Fastest\): give what'):
    after(_params() | {'policies': ()}, 0)


@pytest.mark.slow
def test_more_than_k_is_clamped_and_said_once(caplog):
  with caplog.at_level(logging.WARNING):
    drafter = _adaptive(policies.Fixed(77))
    _adaptive(policies.Fixed(77))
  assert (
    caplog.text.count('Fixed asks for up to 77 draft tokens per round') == 1
  )
  decoder = Decoder(_TARGET, drafter, verify.chain)
  draft, _ = step.propose(decoder, _params(), _start(drafter))
  assert draft.tokens.shape == (3, _K) and np.all(draft.tokens >= 0)


@pytest.mark.slow
def test_target_of_one_width_decodes_the_same_tokens():
  # One token is drafted in some rounds, and none in others.
  sometimes = policies.AdaEDL(threshold=0.5, scale=0.3)
  drafter = _adaptive(sometimes, policies.Fixed(1), widths=(0, 1))
  whole, several = (
    specsample.generate(
      _params(),
      _PROMPTS,
      _LENGTHS,
      jax.random.key(0),
      model=model,
      drafter=drafter,
      verify=verify.chain,
      sampling=Sampling(temperature=0.0),
      max_new_tokens=24,
    )
    for model in (replicated.Replicated(_TARGET), _TARGET)
  )
  np.testing.assert_array_equal(whole.tokens, several.tokens)
  np.testing.assert_array_equal(whole.proposed, several.proposed)
  # There were passes over one token and over two.
  assert np.all(several.proposed[:, :2] > 0)
  np.testing.assert_allclose(whole.log_probs, several.log_probs, atol=1e-4)


@pytest.mark.slow
def test_row_that_is_done_asks_for_no_drafts():
  drafter = _adaptive(policies.TokenProbability(0.0))
  state = _start(drafter)
  limit = state.limit.at[:2].set(state.length[:2] + 1)
  state = dataclasses.replace(state, limit=limit)
  decoder = Decoder(_TARGET, drafter, verify.chain)
  # The first round ends two rows; in the second they emit nothing.
  state = specsample.advance(decoder, _params(), state, max_rounds=2)
  assert state.draft.over.tolist() == [True, True, False]
  draft, _ = step.propose(decoder, _params(), state)
  assert np.asarray(draft.tokens >= 0).sum(axis=1).tolist() == [0, 0, _K]
