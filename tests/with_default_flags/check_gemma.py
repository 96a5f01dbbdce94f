"""Gemma 3 270M, which a Python package ships, against `transformers`."""

import jax
import numpy as np
import pytest
import torch
import transformers

import specsample
from specsample.models import gemma
from specsample.models import packed
from specsample.models import tensors

# The second prompt is longer than the windows of 512 tokens.
_PROMPTS = (
  'The capital of France is',
  ', '.join(str(number) for number in range(100, 240)),
)
_NUM_NEW = 12


@pytest.fixture(scope='module')
def loaded():
  """Gemma 3 270M, with dequantised weights."""
  return specsample.load('gemma-3-270m')


def _reference(loaded):
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
  params = packed.plain(loaded.params)
  names = gemma.GEMMA3.names
  weights = {
    tensors.source_name(name, names): torch.from_numpy(np.array(leaf.T))
    for name, leaf in tensors.by_name(params).items()
  }
  unset = model.load_state_dict(weights, assign=True, strict=False)
  assert unset.missing_keys == ['lm_head.weight'] and not unset.unexpected_keys
  model.tie_weights()
  return model


@pytest.mark.nightly
def test_greedy_text_equals_that_of_transformers(loaded):
  tokenizer = loaded.tokenizer
  reference = _reference(loaded)
  prompts = [tokenizer.encode(prompt) for prompt in _PROMPTS]
  padded, lengths = specsample.pad_prompts(prompts)
  found = specsample.generate(
    {'target': loaded.params},
    *(padded, lengths, jax.random.key(0)),
    model=loaded.model,
    drafter=specsample.drafters.Ngram(num_draft_tokens=3),
    verify=specsample.verify.chain,
    sampling=specsample.Sampling(),
    max_new_tokens=_NUM_NEW,
    stop=specsample.Stop(),
  )
  for row, prompt in enumerate(prompts):
    expected = reference.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
      max_new_tokens=_NUM_NEW,
      do_sample=False,
      eos_token_id=None,
      pad_token_id=0,
    )[0, len(prompt) :]
    tokens = np.asarray(found.tokens[row, :_NUM_NEW])
    assert tokens.tolist() == expected.tolist()
  assert len(prompts[1]) > 512
  # Equally scrambled weights would agree too.
  texts = [tokenizer.decode(row[:_NUM_NEW]) for row in np.array(found.tokens)]
  assert 'the capital of the country' in texts[0]
  assert texts[1].startswith(', 240, 241')
