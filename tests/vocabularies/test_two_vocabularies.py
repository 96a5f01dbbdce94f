"""Gemma 3 270M drafts for SmolLM2, which has another vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import verify
from specsample.vocabularies import vocab_map

_PROMPTS = (
  'The capital of France is',
  'def fibonacci(n):\n  """Returns the nth number."""\n',
)
_NUM_NEW = 12


@pytest.fixture(scope='module')
def gemma():
  return specsample.load('gemma-3-270m')


def _tokens(target):
  return [target.tokenizer.encode(prompt) for prompt in _PROMPTS]


def _check_greedy(target, output):
  """Checks, in one pass, that the emitted tokens are the most likely ones."""
  rows = [
    [*prompt, *emitted.tolist()]
    for prompt, emitted in zip(_tokens(target), output.tokens, strict=True)
  ]
  padded, lengths = specsample.pad_prompts(rows)
  cache = target.model.init_cache(len(rows), 0)
  logits = jax.jit(target.model.apply)(target.params, padded, cache)[0].logits
  best = np.asarray(jnp.argmax(logits, axis=-1))
  for row, most_likely, length in zip(rows, best, lengths, strict=True):
    start = length - _NUM_NEW
    assert row[start:] == most_likely[start - 1 : length - 1].tolist()


@pytest.mark.nightly
def test_greedy_output_is_the_targets(smollm2, gemma):
  # The other direction and drafts of text would each compile both models once
  # more; test_slem.py drafts text with smaller ones.
  draft, target = gemma, smollm2
  found = specsample.map_vocabulary(draft, target)
  assert found.kind is vocab_map.Kind.INTERSECTION
  # SmolLM2 has 49,152 tokens; the rest are mostly its control tokens and words
  # that Gemma doesn't have.
  assert found.num_shared == 46145
  # 'Ġcapital' and '▁capital'.
  own, others = (
    loaded.tokenizer.encode(' capital')[-1] for loaded in (draft, target)
  )
  assert found.draft_ids[others] == own
  output = specsample.generate(
    {'target': target.params, 'drafter': found.params(draft.params)},
    *(*specsample.pad_prompts(_tokens(target)), jax.random.key(0)),
    model=target.model,
    drafter=drafters.TLI(
      model=draft.model, vocab_size=target.model.vocab_size, num_draft_tokens=3
    ),
    verify=verify.chain,
    sampling=specsample.Sampling(),
    max_new_tokens=_NUM_NEW,
  )
  _check_greedy(target, jax.device_get(output))
  assert specsample.stats.summarize(output).tokens_per_round > 1.3
