"""The method whose drafts another rule verifies."""

from experiments import methods
import specsample
from specsample import drafters


def test_a_rule_stays_when_the_method_is_fitted_to_a_batch():
  of_size = lambda size: methods.Method(
    drafters.Ngram(num_draft_tokens=size), for_batch=of_size
  )
  judged = methods.judged(of_size(1), specsample.verify.coupled)
  for _ in range(2):  # fitted twice as well
    judged = judged.for_batch(3)
    assert judged.drafter.num_draft_tokens == 3
    assert judged.verify == specsample.verify.coupled
