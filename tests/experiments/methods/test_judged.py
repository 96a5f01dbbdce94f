"""The method whose drafts another rule verifies."""

from experiments import methods
import specsample
from specsample import drafters


def test_a_rule_stays_when_the_method_is_fitted_to_a_batch():
  of_size = lambda _, size: methods.Method(
    drafters.Ngram(num_draft_tokens=size), make=of_size
  )
  judged = methods.judged(of_size(0, 1), specsample.verify.coupled)
  for size in (3, 4):  # fitted twice as well
    judged = methods.remake(judged, batch_size=size)
    assert judged.drafter.num_draft_tokens == size
    assert judged.verify == specsample.verify.coupled
