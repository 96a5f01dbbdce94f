"""Nothing is compiled while `evaluate` times it."""

import pytest

from experiments import evaluation
from experiments import methods
from experiments import prompts
import specsample
from specsample.testing import hash_model


@pytest.mark.parametrize(
  ('most', 'temperature'),
  [(9, 0.0), (300, 1.0)],  # more tokens than the model takes, too
)
def test_nothing_is_compiled_while_it_is_timed(
  checkpoint, num_compiled, most, temperature
):
  model = hash_model.HashModel(vocab_size=16, seed=most, max_length=128)
  target = specsample.Loaded(model, {}, specsample.load(checkpoint).tokenizer)
  compared = evaluation.Evaluation(
    target=target,
    methods={
      'none': methods.Method(specsample.drafters.NoDraft()),
      'ngram': methods.Method(specsample.drafters.Ngram(num_draft_tokens=2)),
    },
    sampling=specsample.Sampling(temperature=temperature),
    max_new_tokens=most,
    batch_size=2,
    repeats=1,
  )
  tokens = [[1, 2, 1], [3], [1] * 70, [4]]
  asked = [prompts.Prompt(str(i), '', '', line=i) for i in range(4)]
  _, *work = evaluation.units(compared, asked, tokens)
  for unit in work:
    unit.warm_up()
    before = num_compiled()
    unit.run()
    # Rounds and prefills of `parts` are those of the generations.
    assert num_compiled() == before, unit.label
