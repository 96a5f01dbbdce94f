"""The certificate's second law, on distributions worked out by hand."""

import dataclasses
import math

import numpy as np
import pytest

from specsample.constraint import Constraint
from specsample.sampling import Sampling
from specsample.testing import cases
from specsample.testing import conditional
from specsample.testing import grammar
from specsample.testing import HashModel
from specsample.testing import law

_PROMPT = (2, 2)
_WARM = Sampling(temperature=1.0)


def _after(tokens, sampling, weights, like=None):
  """Returns what follows `tokens` if the logits are always log weights [V]."""
  logits = lambda t: np.tile(np.log(weights), (len(weights) ** t, 1))
  if like is None:
    like = conditional.from_logits(logits, _PROMPT, sampling)
  table = law.from_logits(logits, _PROMPT, sampling, like)
  row = conditional.index(np.asarray(tokens, np.int32), len(weights))
  return table(len(tokens), 0)[row]


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    # The second and third token are tied.
    ({'top_k': 2}, [0, 4, 4, 16]),
    ({'top_k': 0}, [1, 4, 4, 16]),
    ({'top_p': 0.6}, [0, 0, 0, 1]),
    ({'top_p': 0.7}, [0, 4, 4, 16]),
    ({'min_p': 0.1}, [0, 4, 4, 16]),
    ({'min_p': 0.05}, [1, 4, 4, 16]),
    ({'top_p': 1.0, 'min_p': 1.0}, [0, 0, 0, 1]),
    ({'temperature': 2.0}, [1, 2, 2, 4]),
    # At temperature 2 the best token has only 4 / 9 of the mass.
    ({'temperature': 2.0, 'top_p': 0.6}, [0, 2, 2, 4]),
    # After top-k the best token has 2 / 3 of the mass, not 16 / 25.
    ({'top_k': 3, 'top_p': 0.65}, [0, 0, 0, 1]),
    ({'temperature': 0.0}, [0, 0, 0, 1]),
    # If two tokens are tied, the first is taken.
    (
      {'temperature': 0.0, 'logit_bias': np.asarray([0, 9, 9, 0])},
      [0, 1, 0, 0],
    ),
    # In state 1 token 1 is forbidden, whatever its bias.
    (
      {
        'logit_bias': np.asarray([0, 9, math.log(2), -math.inf]),
        'constraint': Constraint(automaton=grammar.OneForbidden(4), start=1),
      },
      [1, 0, 8, 0],
    ),
  ],
)
def test_settings_give_what_they_are_defined_to(settings, expected):
  found = _after((), dataclasses.replace(_WARM, **settings), [1, 4, 4, 16])
  np.testing.assert_allclose(
    found, np.asarray(expected) / np.sum(expected), atol=1e-15
  )


def test_penalties_follow_the_bias_and_tell_the_prompt_from_the_output():
  sampling = Sampling(
    temperature=1.0,
    repetition_penalty=2.0,
    presence_penalty=math.log(3),
    frequency_penalty=math.log(5),
    logit_bias=np.asarray([0, math.log(2), 0, -math.log(12)]),
  )
  # With the bias 3, 8, 9 and 1 / 4. The prompt has token 2 alone; the output
  # has token 1 twice and token 3. A penalty of 2 makes 9 to 3 and 1/4 to 1/16.
  found = _after((1, 3, 1), sampling, [3, 4, 9, 3])
  expected = np.asarray([3, math.sqrt(8) / 3 / 25, 3, 1 / 16 / 3 / 5])
  np.testing.assert_allclose(found, expected / expected.sum(), atol=1e-15)


def test_a_constraint_follows_the_whole_string():
  sampling = cases.constrained_by(grammar.OneForbidden(3))
  # From state 0, token 2 leads to state 2, and token 1 from there to 5 % 3.
  found = _after((2, 1), sampling, [1, 1, 2])
  np.testing.assert_allclose(found, [1 / 2, 1 / 2, 0], atol=1e-15)
  assert _after((2,), sampling, [1, 1, 2])[2] == 0


@pytest.mark.parametrize(
  ('answer', 'is_right'),
  [([5, 3, 0], True), ([5, 3, 2], True), ([5, 0, 0], False)],
)
def test_on_the_edge_of_a_filter_both_sides_are_right(answer, is_right):
  # Whether five and three tenths add up to top-p depends on the rounding.
  sampling = Sampling(temperature=1.0, top_p=0.8)
  probs = np.asarray(answer) / np.sum(answer)
  found = _after((), sampling, [5, 3, 2], lambda *_: probs[None])
  assert np.allclose(found, probs, atol=1e-12) == is_right


def test_every_setting_is_needed_where_all_are_set():
  logits = conditional.logits_after(HashModel(vocab_size=5), {}, cases.PROMPT)
  every = cases.EVERY_SETTING
  like = conditional.from_logits(logits, cases.PROMPT, every)
  table = lambda sampling: law.from_logits(
    logits, cases.PROMPT, sampling, like
  )(3, 3)
  for field in dataclasses.fields(Sampling):
    neutral = 1.0 if field.name == 'temperature' else None
    without = dataclasses.replace(every, **{field.name: neutral})
    assert np.abs(table(without) - table(every)).max() > 0.01, field.name
