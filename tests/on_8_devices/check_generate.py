"""Sharded models give the unsharded tokens, for each drafter and chain rule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import policies
from specsample import sharding
from specsample import testing
from specsample import verify
from specsample.drafters import vocabulary
from specsample.memory import store
from specsample.models import replicated
from specsample.testing import trained
from tests.on_8_devices import small

# More than 256 tokens, so that they are drawn in two steps. Fewer key-value
# heads than 4 or 8 devices; the draft model has as many as query heads.
TARGET = small.target(320)
DRAFT = small.draft(320)
WHOLE = replicated.Replicated(DRAFT)
# Another vocabulary: it shares every second target token; the others are pairs.
OTHER = dataclasses.replace(DRAFT, vocab_size=200)
OTHER_PIECES = np.stack(
  [np.arange(320) // 2, np.where(np.arange(320) % 2, 199, -1)], axis=1
)
DRAFTERS = {
  'none': drafters.NoDraft(),
  'ngram': drafters.Ngram(num_draft_tokens=3, min_ngram=1),
  'skip': drafters.Skip(model=TARGET, layers=(0,), num_draft_tokens=3),
  'chain': drafters.Chain(model=DRAFT, num_draft_tokens=3),
  'chain of a replicated model': drafters.Chain(
    model=WHOLE, num_draft_tokens=3
  ),
  'pard': drafters.PARD(model=DRAFT, num_draft_tokens=3, mask_token_id=300),
  'tli': drafters.TLI(model=OTHER, vocab_size=320, num_draft_tokens=3),
  'adaptive': drafters.Adaptive(
    drafter=drafters.Chain(model=DRAFT, num_draft_tokens=3),
    policies=(
      policies.SVIP(2.35),
      policies.Fastest(costs=(1.0, 1.1, 1.3, 1.5), patience=2, strength=0.5),
    ),
    widths=(0, 1),
  ),
  'recording': drafters.Recording(
    drafter=drafters.Chain(model=DRAFT, num_draft_tokens=3),
    model=TARGET,
  ),
}
SUFFIX = drafters.Suffix(num_draft_tokens=3, min_kept=0.1)
DRAFTERS['suffix'] = SUFFIX
DRAFTERS['either'] = drafters.Either(
  remembered=SUFFIX, trained=DRAFTERS['chain']
)
# Texts of tokens that LIKELY makes likely, and of the prompts' tokens.
STORE = store.build(
  [[1, 2, 3, 7, 14, 21, 28, 35, 0, 7] * 3, [5, 0, 7, 14, 21]], vocab_size=320
)
TRAINED = {
  kind.name.lower(): kind.make(TARGET, 3, 40) for kind in trained.CASES
}
DRAFTERS |= TRAINED
RULES = {
  'chain': verify.chain,
  'block': verify.block,
  'coupled': verify.coupled,
  'synthetic': verify.Synthetic(rate=0.6),
}
BIAS = np.zeros(TARGET.vocab_size, np.float32)
BIAS[::7] = 2
# Some of these likely tokens are drafted and accepted, even if the drafter has
# random weights and few tokens.
LIKELY = np.zeros(TARGET.vocab_size, np.float32)
LIKELY[:56:7] = 5


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
  """An automaton that looks its states up in an array."""

  following: np.ndarray  # [states, V] int32, -1 forbids

  def start(self):
    return 0

  def advance(self, state, token):
    return jnp.asarray(self.following)[state, token]

  def allowed(self, state):
    return jnp.asarray(self.following)[state] >= 0


# Each state forbids a third of the tokens.
_IDS = np.arange(TARGET.vocab_size)
TABLE = (np.arange(3)[:, None] + _IDS) % 3
TABLE = np.where(np.arange(3)[:, None] == _IDS % 3, -1, TABLE).astype(np.int32)
SAMPLINGS = {
  'filters': specsample.Sampling(
    temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logit_bias=LIKELY
  ),
  'greedy': specsample.Sampling(logit_bias=LIKELY),
  'constraint': specsample.Sampling(
    temperature=1.0,
    logit_bias=LIKELY,
    constraint=specsample.Constraint(
      automaton=Table(TABLE), start=np.asarray([0, 1, 2])
    ),
  ),
  'penalties': specsample.Sampling(
    temperature=0.7,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=BIAS,
  ),
}
# Three rows don't divide evenly into two, four or eight parts.
PROMPTS, LENGTHS = specsample.pad_prompts([[1, 2, 3, 1, 2, 3], [5], [7, 8, 7]])


@functools.cache
def host_params(drafter):
  target = TARGET.init(jax.random.key(0))
  if drafter in TRAINED:
    size = DRAFTERS[drafter].draft_vocab_size
    d2t = None if size is None else 7 * np.arange(size)
    own = DRAFTERS[drafter].init_params(jax.random.key(1), target, d2t)
    own = testing.with_noise(own, jax.random.key(2))
  elif drafter == 'tli':
    own = {
      'model': OTHER.init(jax.random.key(1)),
      'draft_ids': np.where(np.arange(320) % 2, -1, np.arange(320) // 2),
      'pieces': OTHER_PIECES,
      'prefix': np.asarray([7]),
    }
  elif drafter == 'suffix':
    own = {'store': STORE}
  else:
    own = DRAFT.init(jax.random.key(1))
  if drafter == 'either':
    own = {'remembered': {'store': STORE}, 'trained': own}
  return jax.device_get({'target': target, 'drafter': own})


def param_axes(drafter):
  """Returns the axes of the tree that `host_params` returns."""
  if drafter == 'tli':
    whole = {'draft_ids': (None,), 'pieces': (None, None), 'prefix': (None,)}
    own_axes = whole | {'model': OTHER.param_axes()}
    return {'target': TARGET.param_axes(), 'drafter': own_axes}
  own = DRAFTERS[drafter] if drafter in TRAINED else DRAFT
  own_axes = (WHOLE if 'replicated' in drafter else own).param_axes()
  stores = {'store': jax.tree.map(lambda x: (None,) * x.ndim, STORE)}
  if drafter == 'suffix':
    own_axes = stores
  elif drafter == 'either':
    own_axes = {'remembered': stores, 'trained': own_axes}
  return {'target': TARGET.param_axes(), 'drafter': own_axes}


def decode(params, drafter, rule, sampling):
  return specsample.generate(
    params,
    PROMPTS,
    LENGTHS,
    jax.random.key(0),
    model=TARGET,
    drafter=DRAFTERS[drafter],
    verify=RULES[rule],
    sampling=SAMPLINGS[sampling],
    max_new_tokens=12,
  )


def generate(params, *case):
  return jax.device_get(decode(params, *case))


@functools.cache
def unsharded(*case):
  return generate(host_params(case[0]), *case)


def sharded(mesh, drafter, rule, sampling):
  params = host_params(drafter)
  with jax.set_mesh(mesh):
    params = sharding.place(params, param_axes(drafter))
    return generate(params, drafter, rule, sampling)


def check(mesh, *case):
  found, expected = sharded(mesh, *case), unsharded(*case)
  for name in ('tokens', 'lengths', 'origin', 'accepted', 'stop_reason'):
    np.testing.assert_array_equal(
      getattr(found, name), getattr(expected, name), name
    )
  np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)
  # Otherwise nothing would show how drafts are judged.
  assert expected.accepted[:, 1:].any() == (case[0] != 'none')


# With `coupled`, a drafter draws with the noise of a position, with other rules
# from a stream of its own. This covers each `propose` that draws.
@pytest.mark.slow
@pytest.mark.nightly(but=('chain', 'dspark', 'eagle-3'))
@pytest.mark.parametrize('drafter', DRAFTERS)
def test_noise_of_a_position_is_that_of_one_device(drafter):
  check(sharding.make_mesh(2, 4), drafter, 'coupled', 'filters')


@pytest.mark.slow
@pytest.mark.nightly(
  but=('medusa-block', 'none-chain', 'chain of a replicated model-synthetic')
)
@pytest.mark.parametrize(
  ('drafter', 'rule'),
  [
    *((drafter, 'block') for drafter in ('ngram', 'tli', 'medusa', 'hydra')),
    *((drafter, 'block') for drafter in ('draftmodel', 'p-eagle', 'dflash 2')),
    ('assistant', 'block'),
    *((drafter, 'block') for drafter in ('eagle-3', 'mtp', 'dspark', 'either')),
    *((drafter, 'chain') for drafter in ('none', 'chain', 'adaptive', 'pard')),
    ('chain of a replicated model', 'synthetic'),
  ],
)
def test_a_mesh_may_divide_the_model_alone(drafter, rule):
  mesh = sharding.make_mesh(1, 8, explicit=False)
  check(mesh, drafter, rule, 'filters')


@pytest.mark.nightly(but=('1x8-auto-ngram-block', '2x4-explicit-ngram-block'))
@pytest.mark.parametrize(
  ('drafter', 'rule'), [('ngram', 'block'), ('chain', 'coupled')]
)
def test_tokens_are_those_of_one_device_on(mesh, drafter, rule):
  check(mesh, drafter, rule, 'filters')


@pytest.mark.nightly
@pytest.mark.parametrize(
  ('shape', 'explicit', 'case'),
  [
    ((1, 8), False, ('chain', 'chain', 'greedy')),
    ((1, 8), False, ('chain', 'chain', 'penalties')),
    ((1, 8), False, ('ngram', 'block', 'constraint')),
    ((2, 4), True, ('chain', 'chain', 'constraint')),
    ((2, 4), True, ('hydra', 'coupled', 'penalties')),
    ((2, 4), True, ('eagle-3', 'coupled', 'penalties')),
  ],
)
def test_tokens_are_those_of_one_device_with(shape, explicit, case):
  check(sharding.make_mesh(*shape, explicit=explicit), *case)


@pytest.mark.slow
def test_tokens_are_those_of_one_device_inside_jit():
  case = 'ngram', 'block', 'filters'
  with jax.set_mesh(sharding.make_mesh(2, 4)):
    params = sharding.place(host_params('ngram'), param_axes('ngram'))
    found = jax.jit(lambda params: decode(params, *case))(params)
  np.testing.assert_array_equal(found.tokens, unsharded(*case).tokens)


@pytest.mark.slow
def test_a_draft_model_is_copied_out_of_a_divided_target(mesh):
  drafter = DRAFTERS['draftmodel']
  with jax.set_mesh(mesh):
    target = host_params('draftmodel')['target']
    target = sharding.place(target, TARGET.param_axes())
    own = drafter.init_params(jax.random.key(0), target, 7 * np.arange(40))
    axes = drafter.param_axes()['layers'][0]
    found = jax.tree.map(lambda x: x.sharding, own['layers'][0])
    assert found == sharding.of_tree(axes)


@pytest.mark.slow
def test_a_draft_vocabulary_is_cut_out_of_a_divided_target(mesh):
  d2t = 7 * np.arange(40)
  with jax.set_mesh(mesh):
    params = host_params('hydra')
    target = sharding.place(params['target'], TARGET.param_axes())
    cut = vocabulary.of_target(TARGET, target, d2t)
    axes = DRAFTERS['hydra'].param_axes()['vocabulary']
    assert cut['unembedding'].sharding == sharding.from_axes(
      *axes['unembedding']
    )
  np.testing.assert_allclose(
    cut['unembedding'], params['target']['unembedding'][:, d2t], rtol=1e-6
  )
