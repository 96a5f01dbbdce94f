"""Truncated drafts and skipped rounds change nothing else."""

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
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.loop import step
from specsample.loop.decoder import Decoder
from specsample.models import replicated
from specsample.policies import policy as policy_lib
from specsample.sampling import Sampling
from specsample.testing import trained

_V = 12
_TARGET = testing.tiny_llama(vocab_size=_V, num_layers=3)
_K = 3
_MAKE = {'model': _TARGET, 'num_draft_tokens': _K}
_CHAIN = drafters.Chain(**_MAKE)
_DRAFTERS = {
  'chain': _CHAIN,
  'skip': drafters.Skip(layers=(0, 2), **_MAKE),
  'tree': drafters.Tree(
    drafter=_CHAIN, topology=tree.Topology((0, 0, 1, 2, 3, 4))
  ),
  **{kind.name.lower(): kind.make(_TARGET, _K, None) for kind in trained.CASES},
}
_PROMPTS = np.arange(3 * 6).reshape(3, 6) % _V
_LENGTHS = np.asarray([6, 1, 4], np.int32)


@dataclasses.dataclass(frozen=True)
class _Seldom(policy_lib.Policy):
  """A policy that drafts in every fourth round."""

  def init(self, num_draft_tokens):
    del num_draft_tokens
    return jnp.int32(0)

  def length(self, state, over):
    del over
    return jnp.where(state % 4 == 3, 99, 0)

  def update(self, drafted, kept, state, over):
    del drafted, kept, over
    return state + 1


@functools.cache
def _params(name):
  drafter = _DRAFTERS[name]
  target = jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))
  if name in ('chain', 'tree'):
    other = jax.tree.map(lambda x: 1.02 * x, target)
    return {'target': target, 'drafter': other}
  if name == 'skip':
    return {'target': target}
  own = drafter.init_params(jax.random.key(1), target)
  return {
    'target': target,
    'drafter': testing.with_noise(own, jax.random.key(2)),
  }


def _start(drafter, params, prompts, lengths, rule=verify.chain):
  return specsample.prefill(
    Decoder(_TARGET, drafter, rule),
    params,
    prompts,
    lengths,
    jax.random.key(0),
    sampling=Sampling(temperature=0.0),
    max_new_tokens=60,
    max_length=80,
  )


def _check_next_draft(drafter, params, rule, state):
  """Checks the next draft against that of a drafter given all tokens anew."""
  lengths = np.asarray(state.length)
  fresh = _start(drafter, params, state.tokens, lengths, rule)
  fresh = dataclasses.replace(fresh, limit=state.limit)
  if isinstance(drafter, drafters.Adaptive):
    of_policies = state.draft.policies
    draft = dataclasses.replace(fresh.draft, policies=of_policies)
    fresh = dataclasses.replace(fresh, draft=draft)
  propose = jax.jit(
    lambda state: step.propose(Decoder(_TARGET, drafter, rule), params, state)[
      0
    ]
  )
  found, expected = propose(state), propose(fresh)
  assert np.all(np.asarray(found.tokens) >= 0)
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  np.testing.assert_allclose(
    found.signals.log_prob, expected.signals.log_prob, atol=2e-4
  )


def _rule(name):
  return verify.tree if name == 'tree' else verify.chain


def _advance(drafter, name, rounds):
  params = _params(name)
  state = specsample.advance(
    Decoder(_TARGET, drafter, _rule(name)),
    params,
    _start(drafter, params, _PROMPTS, _LENGTHS, _rule(name)),
    max_rounds=rounds,
  )
  assert not np.any(state.done)
  if name in ('chain', 'tree'):
    # Fully accepted drafts end with a token that was never fed to the drafter.
    # The other drafters have too few of them to require one.
    assert np.all(state.accepted[:, 3])
  return state


@pytest.mark.nightly(but=('tree',))
@pytest.mark.parametrize('name', _DRAFTERS)
def test_behind_rounds_that_were_left_out_it_drafts_as_ever(name):
  drafter = drafters.Adaptive(drafter=_DRAFTERS[name], policies=(_Seldom(),))
  state = _advance(drafter, name, rounds=27)
  assert np.all(np.asarray(state.proposed) == [21, 0, 0, 6])
  _check_next_draft(drafter, _params(name), _rule(name), state)


_COSTS = (1.0, 1.1, 1.2, 1.3)
_POLICIES = {
  'token': policies.TokenProbability(0.3),
  'entropy': policies.SVIP(1.1),
  'fastest': policies.Fastest(costs=_COSTS, patience=2, strength=0.5),
}


def _adaptive(name, policy):
  return drafters.Adaptive(
    drafter=_DRAFTERS[name], policies=(_POLICIES[policy],), widths=(0, 1)
  )


@pytest.mark.nightly(but=('tree-fastest',))
@pytest.mark.parametrize(
  ('name', 'policy'),
  [('chain', 'token'), ('eagle-3', 'entropy'), ('tree', 'fastest')],
)
def test_greedy_output_is_the_targets_own(name, policy):
  testing.assert_greedy_equal(
    _params(name),
    _PROMPTS,
    _LENGTHS,
    model=_TARGET,
    drafter=_adaptive(name, policy),
    verify=_rule(name),
    max_new_tokens=24,
  )


def test_the_target_reads_no_more_than_what_was_drafted():
  """A tree pruned to two nodes is three inputs, as counted at run time."""
  policy = policies.TopNodes(2)
  drafter = lambda widths: drafters.Adaptive(
    drafter=_DRAFTERS['tree'], policies=(policy,), widths=widths
  )
  seen = []

  @dataclasses.dataclass(frozen=True)
  class Counting(type(_TARGET)):
    def read(self, params, tokens, cache, features=(), parents=None):
      if parents is not None:
        jax.debug.callback(lambda: seen.append(tokens.shape[1]))
      return super().read(params, tokens, cache, features, parents)

  model = Counting(
    **{
      field.name: getattr(_TARGET, field.name)
      for field in dataclasses.fields(_TARGET)
    }
  )
  for widths, inputs in (((), 7), ((2,), 3)):
    seen.clear()
    state = _start(
      drafter(widths), _params('tree'), _PROMPTS, _LENGTHS, verify.tree
    )
    state = specsample.advance(
      Decoder(model, drafter(widths), verify.tree),
      _params('tree'),
      state,
      max_rounds=4,
    )
    jax.effects_barrier()
    assert set(seen) == {inputs}
    proposed = np.asarray(state.proposed)
    assert proposed[:, 1:].any() and not proposed[:, 3:].any()


@pytest.mark.parametrize(
  ('name', 'policy', 'expected'),
  [
    ('chain', policies.Fixed(1), (0, 3)),
    # Width 2 is only 4% cheaper than width 3; width 1 is 14% cheaper.
    ('chain', policies.Fastest(costs=(1.0, 1.2, 1.34, 1.4)), (0, 1, 3)),
    ('chain', policies.Fastest(costs=(1.0, 1.2, 1.3, 1.4)), (0, 1, 2, 3)),
    ('tree', policies.Fastest(costs=_COSTS), (0, 6)),
  ],
)
def test_a_narrower_pass_is_compiled_where_it_pays(name, policy, expected):
  drafter = drafters.Adaptive(drafter=_DRAFTERS[name], policies=(policy,))
  assert drafter.widths == expected


def test_rows_begin_with_what_policies_learned():
  fastest = policies.Fastest(costs=_COSTS, strength=0.5, prior=0.1)
  drafter = drafters.Adaptive(drafter=_CHAIN, policies=(fastest,))
  params = _params('chain')

  def after(params, rounds):
    state = _start(drafter, params, _PROMPTS, _LENGTHS)
    return specsample.advance(
      Decoder(_TARGET, drafter, verify.chain), params, state, max_rounds=rounds
    )

  first = after(params, 12)
  (learned,) = drafter.learned(first.draft)
  (rows,) = first.draft.policies
  np.testing.assert_allclose(learned.kept, np.mean(rows.kept, axis=0))
  assert learned.wait.rounds.dtype == jnp.int32
  again = after(params | {'policies': (learned,)}, 0)
  (begun,) = again.draft.policies
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x, np.broadcast_to(y, x.shape)),
    begun,
    learned,
  )
  untaught = after(params | {'policies': drafter.untaught()}, 12)
  np.testing.assert_array_equal(untaught.tokens, first.tokens)
  np.testing.assert_array_equal(untaught.proposed, first.proposed)
  with pytest.raises(ValueError, match=r'the policies \(Fastest\): give what'):
    after(params | {'policies': ()}, 0)


def test_more_than_k_is_clamped_and_said_once(caplog):
  make = lambda: drafters.Adaptive(
    drafter=_CHAIN, policies=(policies.Fixed(77),)
  )
  with caplog.at_level(logging.WARNING):
    drafter = make()
    make()
  assert (
    caplog.text.count('Fixed asks for up to 77 draft tokens per round') == 1
  )
  state = _start(drafter, _params('chain'), _PROMPTS, _LENGTHS)
  draft, _ = step.propose(
    Decoder(_TARGET, drafter, verify.chain), _params('chain'), state
  )
  assert draft.tokens.shape == (3, _K) and np.all(draft.tokens >= 0)


_FASTEST = policies.Fastest(costs=(1.0, 1.1, 1.3, 1.5))


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'policies': ()}, r'policies is \(\): give a tuple'),
    ({'widths': (2, 1)}, 'increasing numbers of draft tokens, from 0 to 3'),
    ({'widths': (0, 4)}, r'widths are \(0, 4\)'),
    ({'widths': (2,), 'policies': (_FASTEST,)}, 'plain pass: begin with 0'),
    ({'widths': (), 'policies': (_FASTEST,)}, 'plain pass: begin with 0'),
    (
      {'policies': (policies.Budget(ladder=(0, 9), costs=(1.0, 2.0)),)},
      r'the ladder is \(0, 9\): give .* from 0 to 3',
    ),
    ({'drafter': object()}, 'drafter is <object .*: give a drafter'),
    ({'drafter': drafters.Chain}, 'drafter is the class Chain: give an inst'),
    (
      {'drafter': drafters.Recording(drafter=_CHAIN, model=_TARGET)},
      'drafter is Recording, which cannot sit out a round',
    ),
    (
      {'drafter': drafters.Adaptive(drafter=_CHAIN, policies=(_Seldom(),))},
      'pass all policies to one Adaptive',
    ),
  ],
)
def test_settings_out_of_range_are_refused(settings, message):
  good = {'drafter': _CHAIN, 'policies': (policies.Fixed(1),)}
  with pytest.raises(ValueError, match=message):
    drafters.Adaptive(**(good | settings))


def test_what_a_filter_cannot_read_is_refused_when_it_is_traced():
  ngram = drafters.Ngram(num_draft_tokens=_K)
  drafter = drafters.Adaptive(drafter=ngram, policies=(policies.SVIP(),))
  with pytest.raises(ValueError, match='SVIP reads'):
    _start(drafter, _params('chain'), _PROMPTS, _LENGTHS)


def test_a_target_of_one_width_decodes_the_same_tokens():
  drafter = drafters.Adaptive(
    drafter=_CHAIN, policies=(_Seldom(), policies.Fixed(1)), widths=(0, 1)
  )
  generate = lambda model: specsample.generate(
    _params('chain'),
    _PROMPTS,
    _LENGTHS,
    jax.random.key(0),
    model=model,
    drafter=drafter,
    verify=verify.chain,
    sampling=Sampling(temperature=0.0),
    max_new_tokens=24,
  )
  whole, several = generate(replicated.Replicated(_TARGET)), generate(_TARGET)
  np.testing.assert_array_equal(whole.tokens, several.tokens)
  np.testing.assert_array_equal(whole.proposed, several.proposed)
  # There were passes over one token and over two.
  assert np.all(several.proposed[:, :2] > 0)
  np.testing.assert_allclose(whole.log_probs, several.log_probs, atol=1e-4)


def test_a_row_that_is_done_asks_for_no_drafts():
  drafter = drafters.Adaptive(
    drafter=_CHAIN, policies=(policies.TokenProbability(0.0),)
  )
  params = _params('chain')
  state = _start(drafter, params, _PROMPTS, _LENGTHS)
  limit = state.limit.at[:2].set(state.length[:2] + 1)
  state = dataclasses.replace(state, limit=limit)
  decoder = Decoder(_TARGET, drafter, verify.chain)
  # The first round ends two rows; in the second they emit nothing.
  state = specsample.advance(decoder, params, state, max_rounds=2)
  assert state.draft.over.tolist() == [True, True, False]
  draft, _ = step.propose(decoder, params, state)
  assert np.asarray(draft.tokens >= 0).sum(axis=1).tolist() == [0, 0, _K]
