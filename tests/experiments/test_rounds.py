"""What is in the loops that are timed as parts of a round."""

import jax
import pytest

from experiments import rounds
import specsample
from specsample import drafters
from specsample import step
from specsample import testing
from specsample.verify import chain

_MODEL = testing.tiny_llama(vocab_size=37)
_UNEMBEDDING = f'f32[{_MODEL.dim},{_MODEL.vocab_size}]'


@pytest.mark.parametrize(
  'drafter', [drafters.NoDraft(), drafters.Ngram(num_draft_tokens=2)]
)
def test_a_timed_pass_of_the_target_unembeds(drafter):
  # Of a pass without drafts the compiler found that nobody reads its logits.
  params = {'target': _MODEL.init(jax.random.key(0))}
  prompts, lengths = specsample.pad_prompts([[1, 2, 3]])
  components = {'model': _MODEL, 'drafter': drafter}
  state = specsample.prefill(
    params,
    prompts,
    lengths,
    jax.random.key(0),
    sampling=specsample.Sampling(),
    max_new_tokens=8,
    **components,
  )
  draft, _ = step.propose(params, state, verify=chain, **components)
  loop = rounds._target_rounds.lower(
    params, state, draft, rounds=2, **components
  )
  products = [
    line
    for line in loop.compile().as_text().splitlines()
    if ' dot(' in line and f',{_MODEL.vocab_size}]' in line.split(' dot(')[0]
  ]
  assert products
