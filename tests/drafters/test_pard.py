"""PARD: a language model that goes on from masks, one pass per round."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters
from specsample import policies
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.drafters import steps
from specsample.sampling import Sampling
from specsample.testing import conditional as conditional_lib
from specsample.types import DraftKind, Verdict

_V, _K, _MASK = 12, 3, 9
_HASHES = testing.HashModel(vocab_size=_V)
_OF_HASHES = drafters.PARD(
  model=_HASHES, num_draft_tokens=_K, mask_token_id=_MASK
)
_TARGET = testing.tiny_llama(vocab_size=_V)
_MODEL = testing.tiny_llama(vocab_size=_V, num_layers=1, dim=24)
_PARD = dataclasses.replace(_OF_HASHES, model=_MODEL)
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % _V  # the mask is in them too
_LENGTHS = np.asarray([6, 2, 5, 1])
_ROOM, _READ = 24, 8  # the buffer, and the tokens of a prefill


@functools.cache
def _params():
  # Larger than at initialisation, where tokens hardly matter.
  grown = lambda params: jax.tree.map(lambda x: 1.6 * x, params)
  return {
    'target': grown(_TARGET.init(jax.random.key(0))),
    'drafter': grown(_MODEL.init(jax.random.key(1))),
  }


def _rows(texts):
  tokens = np.zeros((len(texts), _ROOM), np.int32)
  for row, text in zip(tokens, texts, strict=True):
    row[: len(text)] = text
  return jnp.asarray(tokens), jnp.asarray([len(text) for text in texts])


@functools.partial(jax.jit, static_argnums=0)
def _prefilled(drafter, params, tokens, lengths):
  state = drafter.init(params, len(tokens), _ROOM)
  read = tokens[:, :_READ]
  return drafter.observe(params, read, lengths - 1, None, None, state)


def _begin(drafter, params, texts):
  """Returns the state after a prefill of all tokens but the pending one."""
  return _prefilled(drafter, params, *_rows(texts))


def _after(drafter, state, before, texts):
  """Returns the state after a round that made `texts` of the texts before."""
  new = [y[len(x) - 1 :] for x, y in zip(before, texts, strict=True)]
  tokens, lengths = _rows(new)
  verdict = Verdict(num_accepted=lengths - 2, next_token=None)
  return drafter.observe({}, tokens, lengths - 1, None, verdict, state)


@functools.partial(jax.jit, static_argnums=0)
def _drafted(drafter, params, tokens, lengths, state):
  # The second most likely token, so that an argmax would be noticed.
  second = lambda probs, position: jnp.argsort(probs, axis=-1)[:, -2]
  warp = lambda logits, drafted: jax.nn.softmax(logits)
  return drafter.propose(params, second, warp, tokens, lengths, state)


def _propose(drafter, params, texts, state):
  return _drafted(drafter, params, *_rows(texts), state)


@jax.jit
def _without_cache(own, fed):
  output, _ = _MODEL.apply(own, fed, _MODEL.init_cache(1, 0))
  return jax.nn.softmax(output.logits[0])


def _of_whole_text(text):
  """Returns the probabilities [K, V] after a text, by a pass without a cache.

  The rows that are read are those of the last token and of K - 1 masks.
  """
  fed = np.full((1, _ROOM), _MASK)
  fed[0, : len(text)] = text
  probs = _without_cache(_params()['drafter'], fed)
  return probs[len(text) - 1 :][:_K]


def test_a_mask_sees_the_text_and_the_masks_before_it():
  # The logits of a hash model tell the whole prefix of a row: that of the last
  # mask here is x0 to x4, a mask, and itself. The last round added x3 and x4.
  texts = [[4, 1, 8], [4, 1, 8, 7, 2]]
  state = _begin(_OF_HASHES, {'drafter': {}}, texts[:1])
  _, state = _propose(_OF_HASHES, {'drafter': {}}, texts[:1], state)
  state = _after(_OF_HASHES, state, texts[:1], texts[1:])
  draft, after = _propose(_OF_HASHES, {'drafter': {}}, texts[1:], state)
  assert draft.kind is DraftKind.SAMPLED
  for i, probs in enumerate(draft.probs[0]):
    prefix = (*texts[1], *[_MASK] * i)
    expected = conditional_lib.from_model(_HASHES, {}, prefix)(0, 0)[0]
    np.testing.assert_allclose(probs, expected, atol=1e-6)
  # Only the text stays in the cache.
  assert after.length.tolist() == after.cache.length.tolist() == [5]


@dataclasses.dataclass(frozen=True)
class _Unmasked:
  """The draft model, reading `text` wherever it is fed a mask."""

  model: Any
  text: tuple[int, ...]

  def __getattr__(self, name):
    return getattr(self.model, name)

  def apply(self, params, tokens, cache, features=(), parents=None):
    index = cache.length[:, None] + jnp.arange(tokens.shape[1])
    text = jnp.asarray(self.text)
    tokens = jnp.where(tokens == _MASK, text[index], tokens)
    return self.model.apply(params, tokens, cache, features, parents)


@pytest.mark.parametrize('length', [1, 5])
def test_with_tokens_for_masks_it_is_the_autoregressive_model(length):
  text = [3, 1, 4, 1, 5, 8, 2, 6, 5, 3, 5, 8]
  fed = _Unmasked(_MODEL, tuple(text))
  drafter = dataclasses.replace(_PARD, model=fed)
  prompts = [text[:length]]
  draft, _ = _propose(
    drafter, _params(), prompts, _begin(drafter, _params(), prompts)
  )
  expected = _without_cache(_params()['drafter'], np.asarray([text]))
  expected = expected[length - 1 :][:_K]
  np.testing.assert_allclose(draft.probs[0], expected, atol=1e-5)


@pytest.mark.parametrize('kept', [(0, 1, 2, 3), (3, 3, 0, 3)])
def test_drafts_are_those_of_a_pass_without_a_cache(kept):
  texts = [
    row[:length].tolist()
    for row, length in zip(_PROMPTS, _LENGTHS, strict=True)
  ]
  state = _begin(_PARD, _params(), texts)
  for next_token in (7, _MASK, 4):
    draft, state = _propose(_PARD, _params(), texts, state)
    for text, probs in zip(texts, draft.probs, strict=True):
      np.testing.assert_allclose(probs, _of_whole_text(text), atol=1e-5)
    before = texts
    texts = [
      [*text, *drafted[:count].tolist(), next_token]
      for text, drafted, count in zip(texts, draft.tokens, kept, strict=True)
    ]
    state = _after(_PARD, state, before, texts)


def test_after_rounds_left_out_it_drafts_as_if_there_had_been_none():
  texts = [[3, 1, 4], [5]]
  state = _begin(_PARD, _params(), texts)
  _, state = _propose(_PARD, _params(), texts, state)
  longer = [[3, 1, 4, 1, 5, 8, 2, 6, 5], [5, 2]]
  # More than a pass of its own takes in, by another drafter.
  state = _after(_PARD, state, texts, longer)
  state = _PARD.pause(_params(), *_rows(longer), state)
  state = _PARD.resume(_params(), *_rows(longer), state)
  draft, _ = _propose(_PARD, _params(), longer, state)
  for text, probs in zip(longer, draft.probs, strict=True):
    np.testing.assert_allclose(probs, _of_whole_text(text), atol=1e-5)


def test_a_round_that_keeps_all_drafts_needs_no_pass_to_catch_up():
  texts = [[3, 1, 4]]
  _, state = _propose(_PARD, _params(), texts, _begin(_PARD, _params(), texts))
  longer = [[3, 1, 4, 1, 5, 8, 2]]
  state = _after(_PARD, state, texts, longer)
  resumed = _PARD.resume(_params(), *_rows(longer), state)
  assert resumed.length.tolist() == state.length.tolist() == [3]


def test_all_nodes_of_a_level_have_the_same_children():
  topology = tree.k_ary((2, 2))
  pair = dataclasses.replace(_PARD, num_draft_tokens=2)
  drafter = drafters.Tree(drafter=pair, topology=topology)
  texts = [[3, 1, 4], [5]]
  draft, _ = _propose(
    drafter, _params(), texts, _begin(drafter, _params(), texts)
  )
  for text, tokens in zip(texts, np.asarray(draft.tokens), strict=True):
    first, second = np.argsort(_of_whole_text(text), axis=-1)[:2, :-3:-1]
    assert tokens.tolist() == [*first, *second, *second]


_DRAFTERS = {
  'chain': (_PARD, verify.block),
  'dynamic tree': (
    drafters.DynamicTree(drafter=_PARD, num_draft_tokens=5, width=2),
    verify.tree,
  ),
  'adaptive': (
    drafters.Adaptive(
      drafter=_PARD,
      policies=(
        policies.TokenProbability(0.15),
        policies.Fastest(costs=(1.0, 1.2, 1.4, 1.6), strength=0.5, patience=1),
      ),
    ),
    verify.block,
  ),
}


def _check(assertion, name, *arguments, **changes):
  drafter, rule = _DRAFTERS[name]
  settings = {
    'model': _TARGET,
    'drafter': drafter,
    'verify': rule,
    'max_new_tokens': 16,
  }
  assertion(_params(), _PROMPTS, _LENGTHS, *arguments, **(settings | changes))


@pytest.mark.parametrize('name', _DRAFTERS)
def test_greedy_output_is_the_targets_own(name):
  _check(testing.assert_greedy_equal, name)


def test_rows_are_the_same_in_any_batch():
  mixed = Sampling(temperature=np.asarray([1.0, 0.0, 0.5, 1.5]), top_k=6)
  _check(
    testing.assert_batch_invariant, 'chain', jax.random.key(2), sampling=mixed
  )


def test_a_buffer_shorter_than_a_pass_is_enough():
  drafter = dataclasses.replace(_PARD, num_draft_tokens=8)
  testing.assert_greedy_equal(
    _params(),
    np.asarray([[5]]),
    np.asarray([1]),
    model=_TARGET,
    drafter=drafter,
    verify=verify.chain,
    max_new_tokens=2,
  )


@pytest.mark.parametrize('mask_id', [_V, -1, 2.5])
def test_a_mask_outside_the_vocabulary_is_refused(mask_id):
  with pytest.raises(
    ValueError, match=f'mask_token_id is {mask_id}, .* tokens 0 to 11: '
  ):
    dataclasses.replace(_PARD, mask_token_id=mask_id)


def test_other_arguments_are_refused():
  with pytest.raises(ValueError, match='num_draft_tokens is 0'):
    dataclasses.replace(_PARD, num_draft_tokens=0)
  with pytest.raises(ValueError, match=r"\['target'\], but PARD reads"):
    _PARD.draft_params({'target': {}})


def test_it_is_drafted_step_by_step():
  assert isinstance(_PARD, steps.Steps)
  assert _PARD.can_pause
  assert _PARD.stops_early
