"""A target of hashes with drafters for it, and calls of the loop with them."""

import dataclasses

import jax
import numpy as np

import specsample
from specsample import drafters
from specsample import testing
from specsample import verify

VOCAB = 16
TARGET = testing.HashModel(vocab_size=VOCAB, seed=3)
CHAIN = drafters.Chain(
  model=dataclasses.replace(TARGET, noise=0.3), num_draft_tokens=3
)
NGRAM = drafters.Ngram(num_draft_tokens=4, min_ngram=1)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], list(range(12)), [9, 9, 9]]
PARAMS = {'target': {}, 'drafter': {}}
_PARTS = {'model': TARGET, 'drafter': CHAIN, 'verify': verify.chain}
_SETTINGS = {
  'sampling': specsample.Sampling(temperature=1.0),
  'max_new_tokens': 12,
}


def generate(prompts=PROMPTS, params=PARAMS, seed=0, **changes):
  """Decodes prompts, which are padded unless `lengths` are given."""
  arguments = _PARTS | _SETTINGS | changes
  if 'key' not in arguments:
    arguments['key'] = jax.random.key(seed)
  if 'lengths' not in arguments:
    prompts, arguments['lengths'] = specsample.pad_prompts(prompts)
  return specsample.generate(params, prompts, **arguments)


def prefill(prompts=PROMPTS, params=PARAMS, seed=0, **changes):
  """Returns the decoder and the state after `specsample.prefill`."""
  arguments = _PARTS | _SETTINGS | changes
  decoder = specsample.Decoder(*(arguments.pop(name) for name in _PARTS))
  padded, lengths = specsample.pad_prompts(prompts)
  key = jax.random.key(seed)
  return decoder, specsample.prefill(
    decoder, params, padded, lengths, key, **arguments
  )


def rows(output):
  """Returns each row's tokens, without what follows its end."""
  tokens, lengths = jax.device_get((output.tokens, output.lengths))
  pairs = zip(tokens, lengths, strict=True)
  return [row[:length].tolist() for row, length in pairs]


def assert_same(found, expected, *fields):
  """Compares fields of two outputs, or all of them if none is named."""
  names = [field.name for field in dataclasses.fields(expected)]
  for name in fields or names:
    np.testing.assert_array_equal(
      getattr(found, name), getattr(expected, name), name
    )
