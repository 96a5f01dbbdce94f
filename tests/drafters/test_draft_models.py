"""Draft models: another model, layers of the target's, and one fed masks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.drafters import draft_model
from specsample.sampling import Sampling
from specsample.testing import conditional as conditional_lib
from specsample.types import DraftKind
from tests.drafters import rounds

_K, _D2T = rounds.K, rounds.D2T
_HASHES = testing.HashModel(vocab_size=16)
_CHAIN = drafters.Chain(model=_HASHES, num_draft_tokens=_K)
_WHOLE = drafters.DraftModel(
  model=rounds.TARGET, num_draft_tokens=_K, layers=(0, 2)
)
_CUT = dataclasses.replace(_WHOLE, draft_vocab_size=_D2T.size)
_PARD = drafters.PARD(model=_HASHES, num_draft_tokens=_K, mask_token_id=9)
_PROMPTS = [[1, 2, 3, 4], [5], [9, 9, 9, 9, 9, 9, 9]]


def test_drafts_are_the_models_own_continuation():
  draft, _ = rounds.propose(_CHAIN, {'drafter': {}}, _PROMPTS, draw=rounds.best)
  assert draft.kind is DraftKind.SAMPLED
  for text, tokens, probs in zip(
    _PROMPTS, np.asarray(draft.tokens), draft.probs, strict=True
  ):
    for token, of_token in zip(tokens, probs, strict=True):
      table = conditional_lib.from_model(_HASHES, {}, tuple(text))
      np.testing.assert_allclose(of_token, table(0, 0)[0], atol=1e-6)
      assert token == of_token.argmax()
      text = [*text, int(token)]


@pytest.mark.parametrize('num_right', [0, 2, 3])
def test_cache_keeps_what_another_drafter_drafted_alike(num_right):
  params = {'drafter': {}}
  draft, state = rounds.propose(_CHAIN, params, _PROMPTS)
  # The first `num_right` tokens are as drafted, the others are not; the rule
  # accepted all of them.
  texts = [
    [
      *row,
      *drafted[:num_right].tolist(),
      *(drafted[num_right:] ^ 1).tolist(),
      7,
    ]
    for row, drafted in zip(_PROMPTS, np.asarray(draft.tokens), strict=True)
  ]
  state = rounds.after(_CHAIN, params, _PROMPTS, texts, state)
  # The last draft token was never fed.
  known = np.asarray([len(row) for row in _PROMPTS]) + min(num_right, _K - 1)
  np.testing.assert_array_equal(state.length, known)


def _of_two_layers(layers, more):
  """Returns a Llama of two layers that shares the target's embedding."""
  two = dataclasses.replace(rounds.TARGET, num_layers=2)
  chain = drafters.Chain(model=two, num_draft_tokens=_K)
  own = rounds.target_params() | {'layers': dict(enumerate(layers))} | more
  return chain, {'drafter': own}


@pytest.mark.slow
@pytest.mark.parametrize('drafter', ['Skip', 'DraftModel'])
def test_drafts_are_those_of_a_model_of_the_kept_layers(drafter):
  layers = rounds.target_params()['layers']
  if drafter == 'Skip':
    found = drafters.Skip(
      model=rounds.TARGET, layers=(0, 2), num_draft_tokens=_K
    )
    params = {'target': rounds.target_params()}
    chain, own = _of_two_layers([layers[0], layers[2]], {})
  else:
    found, params = _WHOLE, rounds.params(_WHOLE)
    layers = params['drafter']['layers'].values()
    more = {'norm': params['drafter']['norm']}
    chain, own = _of_two_layers(layers, more)
  draft, _ = rounds.propose(found, params, rounds.TEXTS)
  expected, _ = rounds.propose(chain, own, rounds.TEXTS)
  np.testing.assert_array_equal(draft.tokens, expected.tokens)
  np.testing.assert_allclose(draft.probs, expected.probs, atol=1e-5)


@pytest.mark.slow
def test_draft_vocabulary_has_all_of_the_probability():
  params = rounds.params(_CUT)
  draft, _ = rounds.propose(_CUT, params, rounds.TEXTS)
  own, shape = params['drafter'], rounds.target_params()['unembedding'].shape
  columns = own['vocabulary']['unembedding']
  more = {
    'norm': own['norm'],
    'unembedding': jnp.zeros(shape).at[:, _D2T].set(columns),
  }
  chain, of_chain = _of_two_layers(own['layers'].values(), more)
  # Draws the same tokens.
  draw = lambda probs, position: rounds.second(
    jnp.zeros_like(probs).at[:, _D2T].set(probs[:, _D2T]), position
  )
  expected, _ = rounds.propose(chain, of_chain, rounds.TEXTS, draw=draw)
  np.testing.assert_array_equal(draft.tokens, expected.tokens)
  weights = np.zeros(draft.probs.shape)
  weights[..., _D2T] = expected.probs[..., _D2T]
  weights /= weights.sum(axis=-1, keepdims=True)
  np.testing.assert_allclose(draft.probs, weights, atol=1e-5)


@pytest.mark.slow
def test_training_sees_what_drafting_sees():
  params, text = (
    rounds.params(_CUT),
    jnp.asarray([3, 1, 4, 1, 5, 9, 2, 6, 5, 3]),
  )
  vectors = jax.jit(_CUT.vectors)(params, text[None])
  trained = jax.nn.softmax(_CUT.target_logits(params, vectors))[0]
  forced = lambda probs, position: text[position]
  prompts = [text[:n].tolist() for n in (1, 7)]
  draft, _ = rounds.propose(_CUT, params, prompts, draw=forced)
  for prompt, probs in zip(prompts, draft.probs, strict=True):
    # The pending token's logits give the first draft token.
    expected = trained[len(prompt) - 1 :][:_K]
    np.testing.assert_allclose(probs, expected, atol=1e-5)


def test_draft_model_is_a_model_by_itself():
  params = rounds.params(_CUT)
  output = specsample.generate(
    {'target': params},
    rounds.PROMPTS,
    rounds.LENGTHS,
    jax.random.key(3),
    model=_CUT.draft_model,
    drafter=drafters.NoDraft(),
    verify=verify.block,
    sampling=Sampling(temperature=1.0),
    max_new_tokens=24,
  )
  assert set(np.unique(output.tokens)) <= set(_D2T)
  same = dataclasses.replace(_CUT, layers=list(_CUT.layers))
  assert hash(same.draft_model) == hash(draft_model.Decoder(_CUT))


def test_it_begins_in_float32_with_what_it_does_not_share():
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), rounds.target_params())
  own = _CUT.init_params(jax.random.key(0), half, _D2T)
  assert set(own) == {'layers', 'norm', 'vocabulary'}
  assert set(_WHOLE.init_params(jax.random.key(0), half)) == {'layers', 'norm'}
  floats = [x for x in jax.tree.leaves(own) if x.dtype != jnp.int32]
  assert {x.dtype for x in floats} == {np.dtype('float32')}
  for i, layer in own['layers'].items():
    expected = jax.tree.map(
      lambda x: x.astype(jnp.float32), half['layers'][_CUT.layers[i]]
    )
    jax.tree.map(np.testing.assert_array_equal, layer, expected)


def test_pard_needs_no_pass_to_catch_up_where_all_drafts_are_kept():
  params, texts, longer = {'drafter': {}}, [[3, 1, 4]], [[3, 1, 4, 1, 5, 8, 2]]
  _, state = rounds.propose(_PARD, params, texts)
  state = rounds.after(_PARD, params, texts, longer, state)
  resumed = _PARD.resume(params, *rounds.rows(longer), state)
  assert resumed.length.tolist() == state.length.tolist() == [3]


def test_all_nodes_of_a_level_of_pard_have_the_same_children():
  pair = dataclasses.replace(_PARD, num_draft_tokens=2)
  drafter = drafters.Tree(drafter=pair, topology=tree.k_ary((2, 2)))
  texts = [[3, 1, 4], [5]]
  draft, _ = rounds.propose(drafter, {'drafter': {}}, texts)
  chain, _ = rounds.propose(pair, {'drafter': {}}, texts)
  for tokens, probs in zip(
    np.asarray(draft.tokens), np.asarray(chain.probs), strict=True
  ):
    first, second = np.argsort(probs, axis=-1)[:, :-3:-1]
    assert tokens.tolist() == [*first, *second, *second]


@pytest.mark.slow
def test_buffer_shorter_than_a_pass_of_pard_is_enough():
  model = testing.tiny_llama(vocab_size=rounds.V, num_layers=1, dim=24)
  testing.assert_greedy_equal(
    {
      'target': rounds.target_params(),
      'drafter': model.init(jax.random.key(1)),
    },
    np.asarray([[5]]),
    np.asarray([1]),
    model=rounds.TARGET,
    drafter=dataclasses.replace(_PARD, model=model, num_draft_tokens=8),
    verify=verify.chain,
    max_new_tokens=2,
  )


def test_pard_names_parameters_that_are_missing():
  with pytest.raises(ValueError, match=r"\['target'\], but PARD reads"):
    _PARD.draft_params({'target': {}})
