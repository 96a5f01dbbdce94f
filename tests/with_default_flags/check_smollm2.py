"""The real model: each kind of drafter, alone and in a ragged batch."""

import jax
import numpy as np
import pytest
import torch

from experiments.timing import transformers_peer
import specsample
from specsample import drafters
from specsample import verify

_QUESTIONS = (
  'Repeat after me, word for word: the cat sat on the mat, the cat sat on it.',
  'Why is the sky blue?',
  'Count from one to twelve in words, then count from one to twelve again.',
)
_NEW_TOKENS = 32
_TRAINED = ('draft', 'dspark', 'eagle3', 'hydra', 'medusa', 'mtp')
_SAMPLING = specsample.Sampling(temperature=0.8, top_p=0.95)


@pytest.fixture(scope='module')
def method(smollm2):
  """A function that returns a drafter, its rule and all parameters."""
  target = {'target': smollm2.params}

  def of(name):
    if name == 'ngram':
      return drafters.Ngram(num_draft_tokens=4), verify.chain, target
    loaded = specsample.load_drafter(f'smollm2-135m-instruct/{name}', smollm2)
    params = target | {'drafter': loaded.params}
    return loaded.drafter, verify.block, params

  return of


@pytest.fixture(scope='module')
def prompts(smollm2):
  return [
    smollm2.tokenizer.encode_chat([{'role': 'user', 'content': question}])
    for question in _QUESTIONS
  ]


def _generate(smollm2, prompts, params=None, request_ids=None, **settings):
  padded, lengths = specsample.pad_prompts(prompts)
  arguments = {
    'model': smollm2.model,
    'drafter': drafters.NoDraft(),
    'verify': verify.chain,
    'sampling': specsample.Sampling(temperature=0.0),
    'max_new_tokens': _NEW_TOKENS,
    'stop': specsample.Stop(eos_ids=smollm2.tokenizer.eos_ids),
  }
  output = specsample.generate(
    params or {'target': smollm2.params},
    padded,
    lengths,
    jax.random.key(0),
    request_ids=request_ids,
    **(arguments | settings),
  )
  return jax.device_get(output)


@pytest.fixture(scope='module')
def greedy(smollm2, prompts):
  return _generate(smollm2, prompts)


@pytest.mark.nightly(but=('mtp',))
@pytest.mark.parametrize('name', ['ngram', *_TRAINED])
def test_greedy_equals_autoregressive(smollm2, prompts, greedy, method, name):
  drafter, rule, params = method(name)
  output = _generate(smollm2, prompts, params, drafter=drafter, verify=rule)
  np.testing.assert_array_equal(output.tokens, greedy.tokens)
  np.testing.assert_array_equal(output.lengths, greedy.lengths)
  np.testing.assert_allclose(output.log_probs, greedy.log_probs, atol=1e-3)
  # A drafter whose drafts are all rejected would pass the checks above too.
  assert specsample.stats.summarize(output).tokens_per_round > 1.1
  assert len(set(output.rounds.tolist())) > 1  # ragged


@pytest.mark.nightly
def test_coupled_equals_plain_sampling(smollm2, prompts, method):
  drafter, _, params = method('hydra')
  settings = {'sampling': _SAMPLING, 'verify': verify.coupled}
  plain = _generate(smollm2, prompts, **settings)
  output = _generate(smollm2, prompts, params, drafter=drafter, **settings)
  np.testing.assert_array_equal(output.tokens, plain.tokens)
  np.testing.assert_array_equal(output.lengths, plain.lengths)
  assert specsample.stats.summarize(output).tokens_per_round > 1


@pytest.mark.nightly
def test_row_is_the_same_alone_padded_and_permuted(smollm2, prompts, method):
  drafter, _, _ = method('ngram')
  settings = {'sampling': _SAMPLING, 'drafter': drafter}
  # Longer than the bucket of the other prompts, which are padded to it.
  long = prompts[1] * 4
  assert len(specsample.pad_prompts([long])[0][0]) > len(
    specsample.pad_prompts(prompts)[0][0]
  )
  prompts = [*prompts, long]
  together = _generate(smollm2, prompts, **settings)
  order = np.asarray([2, 0, 3, 1], np.int32)
  permuted = _generate(
    smollm2, [prompts[i] for i in order], request_ids=order, **settings
  )
  np.testing.assert_array_equal(permuted.tokens, together.tokens[order])
  for i, prompt in enumerate(prompts[:-1]):
    alone = _generate(
      smollm2, [prompt], request_ids=np.asarray([i], np.int32), **settings
    )
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])


def test_greedy_text_of_smollm2_equals_transformers(smollm2):
  tokenizer = smollm2.tokenizer
  reference = transformers_peer.llama(smollm2)
  prompts = [
    tokenizer.encode_chat([{'role': 'user', 'content': question}])
    for question in (
      'What is the capital of France?',
      'Write a haiku about the sea.',
      'List the first ten prime numbers, separated by commas.',
    )
  ]
  found = _generate(smollm2, prompts)
  for i, prompt in enumerate(prompts):
    expected = reference.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
      max_new_tokens=_NEW_TOKENS,
      do_sample=False,
      eos_token_id=list(tokenizer.eos_ids),
      pad_token_id=0,
    )[0, len(prompt) :]
    tokens = np.asarray(found.tokens[i, : found.lengths[i]])
    assert tokens.tolist() == expected.tolist()
  # Equally scrambled weights would agree too.
  assert 'Paris' in tokenizer.decode(found.tokens[0, : found.lengths[0]])
