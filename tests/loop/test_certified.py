"""`verify.Certified` chooses what all logits would."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import tree
from specsample import verify
from specsample.loop.decoder import Decoder
from specsample.models import int8
from specsample.models.transformer import Transformer
from specsample.testing import choices
from specsample.testing.grammar import OneForbidden
from specsample.testing.hash_model import HashModel
from specsample.types import StopReason
from tests.loop import scene

SCENES = {one.name: one for one in choices.scenes()}
VOCAB = 256
MODEL = Transformer(
  vocab_size=VOCAB,
  num_layers=2,
  dim=32,
  num_heads=2,
  num_kv_heads=2,
  head_dim=16,
  mlp_dim=64,
  max_length=128,
  logit_softcap=30.0,
  num_tokens=250,
)
PROMPTS = [[3, 1, 4, 1, 5, 3, 1], [2, 7, 1, 8, 2, 7], [9, 9]]
CHAIN = drafters.Ngram(num_draft_tokens=3)
GREEDY = specsample.Sampling(temperature=0.0)


class ReadsLogits(drafters.Ngram):
  """A drafter that needs all logits, or says so."""

  reads_logits = True


def own(target=None):
  target = MODEL.init(jax.random.key(0)) if target is None else target
  # Larger logits, so that the cap matters and rounds differ.
  target = jax.tree.map(lambda x: 2 * x, target)
  return {'target': target, 'shadow': MODEL.shadow(target)}


def generate(rule, params=None, drafter=CHAIN, sampling=GREEDY, **kwargs):
  settings = {'model': MODEL, 'max_new_tokens': 24, **kwargs}
  settings.setdefault('log_probs', not isinstance(rule, verify.Certified))
  return scene.generate(
    PROMPTS,
    own() if params is None else params,
    seed=1,
    drafter=drafter,
    verify=rule,
    sampling=sampling,
    **settings,
  )


def assert_same(found, expected):
  fields = ('tokens', 'lengths', 'origin', 'rounds', 'stop_reason')
  scene.assert_same(found, expected, *fields)


@pytest.mark.parametrize('name', SCENES)
def test_no_logit_is_above_its_bound(name):
  one = SCENES[name]
  assert choices.missed_bounds(one, one.model()) == 0


@pytest.mark.slow(but=('normal, float32-greedy',))
@pytest.mark.parametrize('setting', choices.SETTINGS)
@pytest.mark.parametrize('name', SCENES)
def test_the_choice_is_the_best_token(name, setting):
  one = SCENES[name]
  is_coupled = bool(choices.SETTINGS[setting].temperature > 0)
  rule = verify.Certified(coupled=is_coupled)
  assert choices.found(one, one.model(), setting, rule).wrong == 0


def test_more_tokens_are_scored_where_few_are_not_enough():
  numbers = lambda name: (
    choices.found(
      SCENES[name], SCENES[name].model(), 'greedy', verify.certified
    ).scored
  )
  assert numbers('normal, float32') == {8: 32}
  assert numbers('groups of 20, float32') == {64: 32}
  assert numbers('groups of 320, float32') == {640: 32}


SKIP = drafters.Skip(model=MODEL, layers=(0,), num_draft_tokens=3)
# Two children of the root, each with one.
TREE = drafters.Tree(
  drafter=dataclasses.replace(SKIP, num_draft_tokens=2),
  topology=tree.k_ary((2, 1)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
  'drafter, rule',
  [
    (drafters.NoDraft(), verify.chain),
    (CHAIN, verify.chain),
    (SKIP, verify.chain),
    (TREE, verify.tree),
  ],
  ids=['none', 'n-grams', 'layers', 'tree'],
)
def test_greedy_tokens_and_rounds_are_those_of_all_logits(drafter, rule):
  found = generate(verify.certified, drafter=drafter)
  assert_same(found, generate(rule, drafter=drafter))
  emitted = np.arange(24) < np.asarray(found.lengths)[:, None]
  assert (np.asarray(found.choices.scored)[emitted] >= 8).all()
  assert found.log_probs is None


@pytest.mark.slow
@pytest.mark.parametrize('drafter', [CHAIN, SKIP], ids=['n-grams', 'layers'])
@pytest.mark.parametrize('temperature', [0.8, [0.0, 1.0, 0.5]])
def test_coupled_tokens_are_those_of_all_logits(drafter, temperature):
  sampling = specsample.Sampling(temperature=temperature)
  rule = verify.Certified(coupled=True)
  found = generate(rule, drafter=drafter, sampling=sampling)
  expected = generate(verify.coupled, drafter=drafter, sampling=sampling)
  assert_same(found, expected)
  assert np.unique(found.tokens).size > 10


@pytest.mark.slow
def test_penalties_bias_and_constraint_change_the_bounds_too():
  constraint = specsample.Constraint(automaton=OneForbidden(VOCAB))
  bias = np.zeros(VOCAB, np.float32)
  bias[::3] = -np.inf
  sampling = dataclasses.replace(
    GREEDY,
    repetition_penalty=1.3,
    frequency_penalty=0.7,
    logit_bias=bias,
    constraint=constraint,
  )
  found = generate(verify.certified, sampling=sampling)
  assert_same(found, generate(verify.chain, sampling=sampling))
  assert (np.asarray(found.tokens) % 3 > 0).all()


def test_rows_without_a_distribution_stop_as_with_all_logits():
  params = own()
  kernel = params['target']['unembedding']
  params['target']['unembedding'] = kernel.at[:, 7].set(jnp.nan)
  params['shadow'] = MODEL.shadow(params['target'])
  found = generate(verify.certified, params)
  assert (np.asarray(found.stop_reason) == StopReason.INVALID_LOGITS).all()
  assert_same(found, generate(verify.chain, params))


def generate_all(rule, **settings):
  defaults = {'sampling': GREEDY, 'max_new_tokens': 12, 'log_probs': False}
  return specsample.generate_all(
    own(),
    PROMPTS,
    jax.random.key(1),
    model=MODEL,
    drafter=CHAIN,
    verify=rule,
    **(defaults | settings),
  )


@pytest.mark.slow
def test_refilled_rows_are_those_of_all_logits():
  for found, expected in zip(
    generate_all(verify.certified, batch_size=2),
    generate_all(verify.chain, batch_size=2, log_probs=True),
    strict=True,
  ):
    assert_same(found, expected)
    assert found.choices.scored.shape == found.tokens.shape


def test_without_log_probs_the_other_rules_give_the_same():
  found = generate(verify.chain, log_probs=False)
  assert found.log_probs is None
  assert_same(found, generate(verify.chain))


def _shadow_of_others():
  params = own()
  target = params['target'] | {'unembedding': -params['target']['unembedding']}
  return params | {'target': target}


def _with(**settings):
  return {'sampling': dataclasses.replace(GREEDY, **settings)}


@pytest.mark.parametrize(
  'rule, params, more, message',
  [
    (verify.certified, own, {'log_probs': True}, 'give log_probs=False'),
    (verify.certified, _shadow_of_others, {}, 'is of other weights'),
    (verify.certified, lambda: {'target': own()['target']}, {}, "no 'shadow'"),
    (verify.certified, own, _with(temperature=0.5), 'temperature is 0.5'),
    (
      verify.Certified(coupled=True),
      *(own, _with(temperature=0.5, top_p=0.9)),
      'top_p is set, but it needs the normaliser',
    ),
    (verify.Certified(coupled=True), own, {'drafter': TREE}, 'is for chains'),
    (
      verify.certified,
      *(own, {'drafter': ReadsLogits(num_draft_tokens=3)}),
      "ReadsLogits reads the target's logits",
    ),
    (
      verify.certified,
      lambda: own() | {'target': {}},
      {'model': HashModel(vocab_size=VOCAB)},
      'needs a types.Certifiable',
    ),
  ],
)
def test_refuses(rule, params, more, message):
  with pytest.raises(ValueError, match=message):
    generate(rule, params(), **more)


def test_a_state_that_was_not_checked_is_refused():
  _, state = scene.prefill(PROMPTS, own(), model=MODEL, drafter=CHAIN)
  with pytest.raises(ValueError, match='prefill with the same verify'):
    specsample.advance(
      Decoder(MODEL, CHAIN, verify.certified), own(), state, max_rounds=2
    )


def test_a_shadow_of_int8_weights_is_refused():
  target = int8.weights(own()['target'])
  with pytest.raises(ValueError, match='load the target with weights=None'):
    MODEL.shadow(target)


def test_a_prompt_that_is_drawn_is_named_before_anything_is_asked_for():
  sampling = specsample.Sampling(temperature=np.asarray([0.0, 1.0, 0.0]))
  with pytest.raises(ValueError, match='prompt 1: temperature is 1'):
    generate_all(verify.certified, sampling=sampling)
