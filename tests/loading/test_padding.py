"""Draft models whose vocabulary was padded to another size."""

import dataclasses
import functools
import warnings

import jax
import numpy as np
import pytest
import tokenizers

import specsample
from specsample import testing
from specsample import text
from specsample.models import int8
from specsample.models import packed
from specsample.models import tensors

_SIZE = 24  # of the target's vocabulary
_NAMES = [f'token{i}' for i in range(18)]  # fewer than any model's rows


def _tokenizer(names):
  vocab = {name: i for i, name in enumerate(names)}
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocab, unk_token='token0')
  )
  return text.Tokenizer(backend=backend, named_tokens={})


def _loaded(vocab_size, seed=0, names=_NAMES, **changes):
  model = testing.tiny_llama(vocab_size=vocab_size, num_layers=1)
  model = dataclasses.replace(model, **changes)
  # Larger than at initialisation, so that the logits tell tokens apart.
  params = jax.tree.map(lambda x: 1.6 * x, model.init(jax.random.key(seed)))
  tokenizer = None if names is None else _tokenizer(names)
  return specsample.Loaded(model, params, tokenizer)


_TOKENS = np.arange(8, 18).reshape(2, 5)


def _logits(loaded, tokens):
  cache = loaded.model.init_cache(*tokens.shape)
  return loaded.model.apply(loaded.params, tokens, cache)[0].logits


@pytest.mark.parametrize('form', ['array', 'int8', 'packed'])
@pytest.mark.parametrize('tie_embeddings', [False, True])
@pytest.mark.parametrize('size', [20, 32])
def test_its_logits_are_those_of_the_tokens_that_both_have(
  size, tie_embeddings, form
):
  draft = _loaded(size, tie_embeddings=tie_embeddings)
  if form == 'int8':
    draft = dataclasses.replace(draft, params=int8.weights(draft.params))
  elif form == 'packed':
    draft = dataclasses.replace(
      draft,
      params=tensors.map_named(
        functools.partial(packed.as_is_fast_here, draft.model), draft.params
      ),
    )
  matched = specsample.match_vocabulary(draft, _loaded(_SIZE))
  found, own = _logits(matched, _TOKENS), _logits(draft, _TOKENS)
  shared = min(size, _SIZE)
  assert found.shape[-1] == matched.model.vocab_size == _SIZE
  np.testing.assert_allclose(found[..., :shared], own[..., :shared], atol=1e-5)
  assert np.all(np.isneginf(found[..., shared:]))
  shapes = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)
  expected = matched.model.abstract_params()
  if not form.startswith('int8'):
    assert shapes(packed.plain(matched.params)) == shapes(expected)


@pytest.mark.parametrize('size', [20, 32])
def test_it_drafts_for_its_target(size):
  """It drafts also after tokens that it doesn't have."""
  target = _loaded(_SIZE, seed=1)
  draft = _loaded(size)
  draft = specsample.match_vocabulary(draft, target)
  testing.assert_greedy_equal(
    {'target': target.params, 'drafter': draft.params},
    np.asarray([[3, 23, 22, 1], [21, 4, 0, 0]]),
    np.asarray([4, 2]),
    model=target.model,
    drafter=specsample.drafters.Chain(model=draft.model, num_draft_tokens=3),
    verify=specsample.verify.chain,
    max_new_tokens=12,
  )


def test_what_was_padded_stays_padding():
  draft = _loaded(20)
  padded = specsample.match_vocabulary(draft, _loaded(_SIZE))
  again = specsample.match_vocabulary(padded, _loaded(22))
  assert np.all(np.isneginf(_logits(again, _TOKENS)[..., 20:]))


def test_a_model_of_the_same_size_stays_as_it_is():
  draft = _loaded(_SIZE, names=None)
  assert specsample.match_vocabulary(draft, _loaded(_SIZE)) is draft


def _renamed(count, size=200):
  """A model and its target, of whose tokens some have other names."""
  names = [f'token{i}' for i in range(size)]
  others = [f'other{i}' for i in range(count)] + names[count:]
  return _loaded(size, names=others), _loaded(size, names=names)


def test_other_names_at_the_same_size_are_warned_of():
  draft, target = _renamed(3)
  message = (
    r"equal size, but 3 of 200 tokens differ \(token 0 is 'other0' for the "
    r"draft model but 'token0' for the target\).*drafters\.TLI or slem\."
  )
  with pytest.warns(UserWarning, match=message) as caught:
    assert specsample.match_vocabulary(draft, target) is draft
  assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize('count', [0, 2])
def test_a_few_other_names_at_the_same_size_are_not(count):
  draft, target = _renamed(count)
  with warnings.catch_warnings(action='error'):
    assert specsample.match_vocabulary(draft, target) is draft


def test_other_names_are_refused():
  names = [*_NAMES[:5], 'other', *_NAMES[6:]]
  message = (
    r"token 5 is 'other' for the draft model but 'token5' for the target"
  )
  with pytest.raises(ValueError, match=message):
    specsample.match_vocabulary(_loaded(20, names=names), _loaded(_SIZE))


def test_without_tokenizers_nothing_is_known():
  with pytest.raises(ValueError, match='without a tokenizer'):
    specsample.match_vocabulary(_loaded(20, names=None), _loaded(_SIZE))


def test_the_refusal_of_another_size_names_the_remedy():
  target, draft = _loaded(_SIZE), _loaded(20)
  with pytest.raises(ValueError, match=r'24 tokens, .* 20: .*match_vocabulary'):
    specsample.generate(
      {'target': target.params, 'drafter': draft.params},
      *(np.ones((1, 2), np.int32), np.asarray([2]), jax.random.key(0)),
      model=target.model,
      drafter=specsample.drafters.Chain(model=draft.model, num_draft_tokens=2),
      verify=specsample.verify.chain,
      sampling=specsample.Sampling(),
      max_new_tokens=2,
      stop=specsample.Stop(),
    )


@pytest.mark.parametrize('num_tokens', [0, 25])
def test_more_tokens_than_there_are_rows_are_refused(num_tokens):
  model = testing.tiny_llama(vocab_size=_SIZE)
  with pytest.raises(ValueError, match=f'num_tokens is {num_tokens} and'):
    dataclasses.replace(model, num_tokens=num_tokens)
