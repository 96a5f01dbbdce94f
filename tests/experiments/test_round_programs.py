"""What is in the loops that are timed as parts of a round."""

import jax
import pytest

from experiments import round_programs
import specsample
from specsample import drafters
from specsample import testing
from specsample.verify import chain

_MODEL = testing.tiny_llama(vocab_size=37)


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
  lowered = round_programs.drafted_rounds.lower(
    params, state, verify=chain, rounds=2, **components
  )
  assert _num_unembeddings(lowered) == 1
  _, draft = lowered.out_info
  lowered = round_programs.target_rounds.lower(
    params, state, draft, rounds=2, **components
  )
  assert _num_unembeddings(lowered) == 1


def _num_unembeddings(lowered) -> int:
  """How many products have the vocabulary in their results."""
  lines = lowered.compile().as_text().splitlines()
  results = [line.partition(' dot(')[0] for line in lines if ' dot(' in line]
  return sum(f',{_MODEL.vocab_size}]' in result for result in results)
