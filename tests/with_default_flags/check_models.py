"""Real models beside `transformers`, alone and with each kind of drafter."""

import pathlib
import re

import jax
import numpy as np
import pytest
import torch
import transformers

from experiments.timing import transformers_peer
import specsample
from specsample import drafters
from specsample import verify
from specsample.models import gemma
from specsample.models import packed
from specsample.models import tensors

_ROOT = pathlib.Path(__file__).resolve().parents[2]
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
  return _chats(smollm2, _QUESTIONS)


def _chats(loaded, questions):
  return [
    loaded.tokenizer.encode_chat([{'role': 'user', 'content': question}])
    for question in questions
  ]


def _generate(loaded, prompts, params=None, request_ids=None, **settings):
  padded, lengths = specsample.pad_prompts(prompts)
  arguments = {
    'model': loaded.model,
    'drafter': drafters.NoDraft(),
    'verify': verify.chain,
    'sampling': specsample.Sampling(temperature=0.0),
    'max_new_tokens': _NEW_TOKENS,
    'stop': specsample.Stop(eos_ids=loaded.tokenizer.eos_ids),
  }
  output = specsample.generate(
    params or {'target': loaded.params},
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


def _assert_as_in_transformers(reference, prompts, found, eos_ids, num_new):
  """Checks greedy tokens, each prompt alone; returns those found, by prompt."""
  rows = [
    row[:length].tolist()
    for row, length in zip(found.tokens, found.lengths, strict=True)
  ]
  for prompt, row in zip(prompts, rows, strict=True):
    expected = reference.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
      max_new_tokens=num_new,
      do_sample=False,
      eos_token_id=eos_ids,
      pad_token_id=0,
    )[0, len(prompt) :]
    assert row == expected.tolist()
  return rows


def test_greedy_text_of_smollm2_equals_transformers(smollm2):
  prompts = _chats(
    smollm2,
    (
      'What is the capital of France?',
      'Write a haiku about the sea.',
      'List the first ten prime numbers, separated by commas.',
    ),
  )
  found = _generate(smollm2, prompts)
  reference = transformers_peer.llama(smollm2)
  eos_ids = smollm2.tokenizer.eos_ids
  first, *_ = _assert_as_in_transformers(
    reference, prompts, found, list(eos_ids), _NEW_TOKENS
  )
  # Equally scrambled weights would agree too.
  assert 'Paris' in smollm2.tokenizer.decode(first)


def _gemma_in_transformers(loaded):
  """Returns the same weights in transformers, with Google's published sizes."""
  config = transformers.Gemma3TextConfig(
    vocab_size=262_144,
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    query_pre_attn_scalar=256,
    sliding_window=512,
  )
  model = transformers.Gemma3ForCausalLM(config).eval()
  names = gemma.GEMMA3.names
  weights = {
    tensors.source_name(name, names): torch.from_numpy(np.array(leaf.T))
    for name, leaf in tensors.by_name(packed.plain(loaded.params)).items()
  }
  unset = model.load_state_dict(weights, assign=True, strict=False)
  assert unset.missing_keys == ['lm_head.weight'] and not unset.unexpected_keys
  model.tie_weights()
  return model


@pytest.mark.nightly
def test_greedy_text_of_gemma_equals_transformers():
  """Gemma 3 270M, which a Python package ships, dequantised."""
  loaded = specsample.load('gemma-3-270m')
  tokenizer = loaded.tokenizer
  # The second prompt is longer than the windows of 512 tokens.
  numbers = ', '.join(str(number) for number in range(100, 240))
  texts = ('The capital of France is', numbers)
  prompts = [tokenizer.encode(text) for text in texts]
  assert len(prompts[1]) > 512
  found = _generate(
    loaded,
    prompts,
    drafter=drafters.Ngram(num_draft_tokens=3),
    max_new_tokens=12,
    stop=specsample.Stop(),
  )
  reference = _gemma_in_transformers(loaded)
  rows = _assert_as_in_transformers(reference, prompts, found, None, 12)
  # Equally scrambled weights would agree too.
  first, second = map(tokenizer.decode, rows)
  assert 'the capital of the country' in first
  assert second.startswith(', 240, 241')


@pytest.mark.nightly
def test_readme_example_prints_a_reply(capsys, monkeypatch, tmp_path):
  monkeypatch.setenv('SPECSAMPLE_CACHE', str(tmp_path))
  text = (_ROOT / 'README.md').read_text('utf-8')
  (example,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
  exec(compile(example, 'README.md', 'exec'), {})
  assert re.search(r'\w+ \w+', capsys.readouterr().out)
