"""What every drafter must do, whatever it drafts by."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.training import dflash
from specsample.training import draft
from specsample.training import eagle
from specsample.training import heads
from specsample.training import step
from tests.contract import drafters as subjects

_LENGTHS = np.asarray([6, 2, 5, 1])
_MIXED = Sampling(temperature=np.asarray([1.0, 0.0, 0.5, 1.5]), top_k=6)
# Which objective trains a kind; P-EAGLE and Assistant have none.
_OBJECTIVES = {
  drafters.Medusa: heads.HeadsObjective,
  drafters.Hydra: heads.HeadsObjective,
  drafters.DraftModel: draft.DraftObjective,
  drafters.DFlash: dflash.DFlashObjective,
  drafters.DSpark: dflash.DSparkObjective,
  drafters.DFlash2: dflash.DFlash2Objective,
  drafters.Eagle: eagle.FeatureObjective,
  drafters.Eagle3: eagle.FeatureObjective,
  drafters.MTP: eagle.FeatureObjective,
}
_each = pytest.mark.parametrize('name', subjects.NAMES)
_each_kind = pytest.mark.parametrize('name', subjects.KINDS)


def _names(holds):
  """Returns the kinds whose drafter fulfils a condition."""
  make = lambda kind: kind.make(
    subjects.target(), subjects.K, subjects.D2T.size
  )
  return [name for name, kind in subjects.KINDS.items() if holds(make(kind))]


def _prompts(model):
  return np.arange(4 * 6).reshape(4, 6) % model.vocab_size


@_each
def test_draft_is_of_its_kind(name):
  one = subjects.subject(name)
  prompts = _prompts(one.model)
  testing.assert_draft(
    one.params,
    prompts,
    _LENGTHS,
    jax.random.key(2),
    sampling=Sampling(temperature=1.0),
    **one.parts,
  )


@pytest.mark.slow
@pytest.mark.nightly(
  only=('Tree of *', 'MTP', 'EAGLE', 'P-EAGLE', 'Hydra', 'DSpark*', 'Assistant')
)
@_each
def test_greedy_tokens_are_the_targets_own(name):
  one = subjects.subject(name)
  testing.assert_greedy_equal(
    one.params, _prompts(one.model), _LENGTHS, max_new_tokens=16, **one.parts
  )


@pytest.mark.slow(
  but=(
    'EAGLE-3',
    'Ngram',
  )
)
@pytest.mark.nightly(
  but=(
    'Chain',
    'Ngram',
    'Suffix',
    'Hydra++',
    'EAGLE-3',
    'DFlash',
    'DynamicTree*',
  )
)
@_each
def test_row_has_the_same_tokens_in_any_batch(name):
  one = subjects.subject(name)
  testing.assert_batch_invariant(
    one.params,
    _prompts(one.model),
    _LENGTHS,
    jax.random.key(2),
    sampling=_MIXED,
    max_new_tokens=12,
    **one.parts,
  )


# What these draft depends on what became of earlier drafts.
_LEARNING = ('Suffix', 'Either', 'Adaptive')
_PAUSING = (*subjects.KINDS, 'Chain', 'Skip', 'PARD', 'Tree')
_BESIDE = (
  *('Chain', 'Skip', 'TLI with room', 'Hydra++', 'DraftModel', 'DSpark'),
  *('EAGLE-3', 'MTP of 2', 'Tree', 'Tree of Medusa', 'Tree of EAGLE-3'),
  *('DynamicTree of EAGLE-3', 'LatticeTree of DSpark'),
)


@pytest.mark.slow
@pytest.mark.nightly(
  but=(
    *('always-Chain', 'always-Hydra++', 'always-MTP of 2', 'always-DFlash'),
    *('always-Tree of EAGLE-3', 'always-TLI with room', 'always-PARD'),
    *('seldom-Tree', 'seldom-PARD', 'beside-Chain', 'beside-MTP of 2'),
  )
)
@pytest.mark.parametrize(
  ('way', 'name'),
  [
    *(('always', name) for name in subjects.NAMES if name not in _LEARNING),
    *(('seldom', name) for name in _PAUSING),
    *(('beside', name) for name in _BESIDE),
  ],
)
def test_next_draft_is_that_of_drafter_given_whole_text_at_once(way, name):
  found, expected, kept = subjects.next_drafts(subjects.subject(name), way)
  # Some drafts were kept, but not all of a draft in each round.
  assert kept[1:].any() and kept[:-1].any()
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  np.testing.assert_array_equal(found.parents, expected.parents)
  if found.probs is not None:
    np.testing.assert_allclose(found.probs, expected.probs, atol=2e-4)
  if found.signals is not None:
    np.testing.assert_allclose(
      found.signals.log_prob, expected.signals.log_prob, atol=1e-3
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _KeepsGuesses(drafters.Eagle):
  """A faulty drafter that caches accepted drafts from its own outputs."""

  def propose(self, params, draw, warp, tokens, length, state):
    (cache,), (held,) = state.caches, state.features
    features = held[:, : self.num_draft_tokens + 1]
    index = cache.length[:, None] + 1 + jnp.arange(features.shape[1])
    new = jnp.take_along_axis(tokens, index, axis=1)
    outputs, _ = self._run(params, 0, new, features, cache)
    later = held[:, features.shape[1] :]
    guesses = [features[:, :1], outputs[:, :-1], later]
    guesses = jnp.concatenate(guesses, axis=1)
    state = dataclasses.replace(state, features=(guesses,))
    return super().propose(params, draw, warp, tokens, length, state)


@pytest.mark.slow
def test_cache_of_guesses_is_noticed():
  one = subjects.of_kind('EAGLE')
  faulty = _KeepsGuesses(
    model=one.model,
    num_draft_tokens=subjects.K,
    draft_vocab_size=subjects.D2T.size,
  )
  one = dataclasses.replace(one, drafter=faulty)
  found, expected, _ = subjects.next_drafts(one)
  assert np.abs(found.probs - expected.probs).max() > 0.01


@pytest.mark.nightly(but=('MTP', 'DSpark', 'Hydra++'))
@_each_kind
def test_greedy_tokens_are_the_targets_own_in_bfloat16(name):
  one = subjects.of_kind(name, 'bfloat16')
  prompts, new = _prompts(one.model), 16
  output = specsample.generate(
    one.params,
    prompts,
    np.full(len(prompts), prompts.shape[1]),
    jax.random.key(0),
    sampling=Sampling(temperature=0.0),
    max_new_tokens=new,
    **one.parts,
  )
  tokens = np.concatenate([prompts, output.tokens], axis=1)
  empty = one.model.init_cache(len(tokens), 0)
  logits = one.model.apply(one.params['target'], tokens, empty)[0].logits
  logits = np.asarray(logits[:, -new - 1 : -1], np.float32)
  chosen = np.take_along_axis(logits, output.tokens[..., None], axis=-1)[..., 0]
  # A pass over one token rounds differently from one over many.
  np.testing.assert_allclose(chosen, logits.max(axis=-1), atol=0.1)


@pytest.mark.nightly(but=('Hydra-rule0', 'EAGLE-rule1', 'DFlash-rule2'))
@pytest.mark.parametrize('rule', [verify.chain, verify.block, verify.coupled])
@pytest.mark.parametrize(
  'name', _names(lambda x: x.draft_vocab_size is not None)
)
def test_target_goes_on_alone_where_no_draft_is_allowed(name, rule):
  one = subjects.of_kind(name)
  bias = np.zeros(subjects.V, np.float32)
  bias[subjects.D2T] = -np.inf
  prompts = _prompts(one.model)
  generate = lambda drafter: specsample.generate(
    one.params,
    prompts,
    _LENGTHS,
    jax.random.key(3),
    model=one.model,
    drafter=drafter,
    verify=rule,
    sampling=Sampling(temperature=1.0, logit_bias=bias),
    max_new_tokens=12,
  )
  output = generate(one.drafter)
  assert np.asarray(output.lengths).tolist() == [12] * len(prompts)
  assert not np.isin(output.tokens, subjects.D2T).any()
  assert np.asarray(output.rounds).tolist() == [12] * len(prompts)
  if rule is verify.coupled:
    plain = generate(drafters.NoDraft())
    np.testing.assert_array_equal(output.tokens, plain.tokens)


@pytest.mark.nightly(but=('MTP', 'DSpark', 'Hydra'))
@pytest.mark.parametrize('name', _names(lambda x: type(x) in _OBJECTIVES))
def test_training_in_bfloat16_lowers_the_loss(name):
  one = subjects.of_kind(name, 'bfloat16')
  prompts = _prompts(one.model)
  is_trained = {
    'target': jax.tree.map(lambda _: False, one.params['target']),
    'drafter': one.drafter.is_trained(),
  }
  optimizer = optax.adam(0.01)
  state, frozen = step.init(one.params, is_trained, optimizer, 'bfloat16')
  objective = _OBJECTIVES[type(one.drafter)](drafter=one.drafter)
  losses = []
  for _ in range(8):
    state, report = step.train_step(
      state,
      frozen,
      {'tokens': prompts, 'mask': np.ones(prompts.shape, bool)},
      objective=objective,
      optimizer=optimizer,
      dtype='bfloat16',
    )
    losses.append(float(report['loss']))
  assert losses[-1] < losses[0]
  found = {x.dtype.name for x in jax.tree.leaves(state.trained)}
  assert found == {'float32'}


@_each_kind
def test_parameters_have_the_shapes_that_it_states(name):
  one = subjects.of_kind(name)
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(one.drafter.abstract_params()) == shapes(one.params['drafter'])


@_each_kind
def test_all_but_the_targets_vocabulary_is_trained(name):
  trained = subjects.of_kind(name).drafter.is_trained()
  of_target = trained.pop('vocabulary', {})
  assert jax.tree.leaves(trained) and all(jax.tree.leaves(trained))
  assert not any(jax.tree.leaves(of_target))


@_each_kind
def test_equal_settings_make_equal_drafters(name):
  make = lambda: subjects.KINDS[name].make(
    subjects.target(), subjects.K, subjects.D2T.size
  )
  assert make() == make() and hash(make()) == hash(make())


_REFUSED = {
  'no draft tokens': (
    lambda drafter: dataclasses.replace(drafter, num_draft_tokens=0),
    'num_draft_tokens is 0: give at least 1',
  ),
  'an empty draft vocabulary': (
    lambda drafter: dataclasses.replace(drafter, draft_vocab_size=0),
    'draft_vocab_size is 0: give',
  ),
  'a draft vocabulary of five and a half tokens': (
    lambda drafter: dataclasses.replace(drafter, draft_vocab_size=5.5),
    'draft_vocab_size is 5.5: give',
  ),
  'a draft vocabulary above the vocabulary': (
    lambda drafter: dataclasses.replace(
      drafter, draft_vocab_size=subjects.V + 1
    ),
    f'draft_vocab_size is {subjects.V + 1}',
  ),
  'no ids of the draft vocabulary': (
    lambda drafter: dataclasses.replace(
      drafter, draft_vocab_size=subjects.D2T.size
    ).init_params(jax.random.key(0), subjects.subject('Skip').params['target']),
    f'd2t is None, but draft_vocab_size is {subjects.D2T.size}',
  ),
  'ids without a draft vocabulary': (
    lambda drafter: dataclasses.replace(
      drafter, draft_vocab_size=None
    ).init_params(jax.random.key(0), d2t=subjects.D2T),
    f'd2t names {subjects.D2T.size} tokens, but draft_vocab_size is None',
  ),
  'no parameters': (
    lambda drafter: drafter.init({'target': {}}, 1, 8),
    re.escape("['target'], but") + r' \w+ reads',
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize('case', _REFUSED)
@_each_kind
def test_bad_settings_and_parameters_are_refused(name, case):
  act, message = _REFUSED[case]
  # An assistant has no vocabulary of its own.
  if name == 'Assistant' and case == 'no ids of the draft vocabulary':
    message = 'draft_vocab_size is 7: give None'
  with pytest.raises(ValueError, match=message):
    act(subjects.of_kind(name, draft_vocab_size=None).drafter)


@_each_kind
def test_parameters_of_another_dtype_than_the_targets_are_refused(name):
  half = subjects.of_kind(name, 'bfloat16')
  params = half.params | {'drafter': subjects.of_kind(name).params['drafter']}
  with pytest.raises(ValueError, match=r'bfloat16, but .* float32: load both'):
    specsample.prefill(
      Decoder(half.model, half.drafter, half.verify),
      params,
      _prompts(half.model),
      _LENGTHS,
      jax.random.key(0),
      sampling=Sampling(),
      max_new_tokens=4,
    )
