"""Nothing is compiled or run for the first time while it is timed."""

import jax
import numpy as np
import pytest

from experiments import methods
from experiments.decoding import prompts
from experiments.decoding import setup as setup_lib
from experiments.evaluation import evaluation
import specsample
from specsample.loop import step
from specsample.testing import hash_model
from specsample.testing import tiny


@pytest.mark.parametrize(
  ('most', 'temperature'),
  [(9, 0.0), (300, 1.0)],  # 300 is more tokens than the model takes
)
def test_nothing_is_compiled_while_it_is_timed(
  checkpoint, num_compiled, most, temperature
):
  _run_compiled(checkpoint, num_compiled, most, temperature)


def test_nothing_is_compiled_for_prompts_that_are_padded(
  checkpoint, num_compiled
):
  _run_compiled(checkpoint, num_compiled, 8, 0.0, least_width=100)


def _run_compiled(
  checkpoint, num_compiled, most, temperature, *, least_width=1
):
  """Runs an evaluation, and asserts that its work compiles nothing."""
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
    least_width=least_width,
    repeats=1,
  )
  tokens = [[1, 2, 1], [3], [1] * 70, [4]]
  asked = [prompts.Prompt(str(i), '', '', line=i) for i in range(4)]
  _, *work = evaluation.units(compared, asked, tokens)
  for unit in work:
    unit.warm_up()
    before = num_compiled()
    unit.run()
    # `parts` runs the same rounds and prefills as the generations.
    assert num_compiled() == before, unit.label


@pytest.mark.parametrize(
  ('drafter', 'expected'),
  [
    (specsample.drafters.NoDraft(), [0]),
    (specsample.drafters.Ngram(num_draft_tokens=4), [0, 4]),
    (
      specsample.drafters.Suffix(
        num_draft_tokens=4, costs=(1.0, 1.2, 1.4, 1.6, 1.8)
      ),
      [0, 1, 2, 3, 4],
    ),
  ],
)
def test_a_round_of_each_width_is_run(drafter, expected):
  model = tiny.tiny_llama(vocab_size=16)
  settings = {'model': model, 'drafter': drafter}
  params = {'target': model.init(jax.random.key(0)), 'drafter': {}}

  def begin(rows):
    tokens, lengths = specsample.pad_prompts(rows)
    return specsample.prefill(
      *(params, tokens, lengths, jax.random.key(0)),
      sampling=specsample.Sampling(),
      max_new_tokens=16,
      **settings,
    )

  drafted = []

  def advance(state):
    state = specsample.advance(
      *(params, state),
      verify=specsample.verify.chain,
      max_rounds=1,
      **settings,
    )
    drafted.append(np.flatnonzero(np.asarray(state.proposed[0])).tolist())
    return state

  widths = step.widths(model, drafter)
  setup_lib.warm_up(begin, advance, [[1, 2, 3, 4, 5, 6]], widths)
  assert list(widths) == expected
  assert drafted == [[width] for width in widths]
