"""Ways of drawing rollouts: what they take, and what they look up."""

import numpy as np
import pytest

from experiments import methods
from experiments.reinforcement import arm as arm_lib
from specsample import drafters
from specsample import verify


def _arm(drafter, verify=verify.coupled, **settings):
  return arm_lib.Arm(method=methods.Method(drafter, verify), **settings)


_SUFFIX = drafters.Suffix(num_draft_tokens=2)
_NGRAM = drafters.Ngram(num_draft_tokens=2)


def test_only_a_drafter_that_looks_up_drafts_has_a_history():
  assert _arm(_SUFFIX).looks_up
  assert not _arm(_SUFFIX, history_tokens=0).looks_up
  assert not _arm(_NGRAM).looks_up
  assert _arm(_NGRAM).new_history(9) is None


def test_a_history_notes_texts_in_their_order_and_sorts_them():
  history = _arm(_SUFFIX, history_every=4).new_history(9)
  history.add(np.asarray([5, 1, 2], np.int32))
  assert history.store.tokens.max() <= 0  # not sorted yet
  history.add([3, 1])
  assert history.texts == [[5, 1, 2], [3, 1]]
  assert 5 in history.store.tokens


def test_a_method_is_fitted_to_the_rows():
  fitted = lambda num_rows: methods.Method(
    drafters.Ngram(num_draft_tokens=num_rows)
  )
  method = methods.Method(_NGRAM, for_batch=fitted)
  arm = arm_lib.Arm(method=method, num_rows=5)
  assert arm.method.drafter.num_draft_tokens == 5
  assert not arm.is_plain
  assert _arm(drafters.NoDraft()).is_plain


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'num_rows': 0}, 'Arm.num_rows is 0: give an integer of at least 1'),
    ({'fewest_rows': 0}, 'Arm.fewest_rows is 0: give an integer of at least'),
    ({'history_tokens': -1}, 'Arm.history_tokens is -1: give an integer of'),
    (
      {'verify': verify.Typical()},
      'verifies with typical, which draws answers from another distribution',
    ),
    (
      {'verify': verify.Certified()},
      'verifies with certified, which gives no probabilities of tokens',
    ),
  ],
)
def test_what_cannot_be_rolled_out_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    _arm(_SUFFIX, **settings)


def test_a_rule_is_refused_before_and_after_the_rows_are_known():
  fitted = []

  def for_batch(num_rows):
    fitted.append(num_rows)
    return methods.Method(_NGRAM, verify.Typical())

  for rule, calls in ((verify.Typical(), []), (verify.coupled, [5])):
    method = methods.Method(_NGRAM, rule, for_batch=for_batch)
    with pytest.raises(ValueError, match='verifies with typical'):
      arm_lib.Arm(method=method, num_rows=5)
    assert fitted == calls
