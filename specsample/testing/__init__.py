"""Enumerable models and assertions for testing drafters and verifiers."""

from specsample.testing.assertions import assert_batch_invariant
from specsample.testing.assertions import assert_draft
from specsample.testing.assertions import assert_drafter
from specsample.testing.assertions import assert_equals_plain_sampling
from specsample.testing.assertions import assert_exact
from specsample.testing.assertions import assert_follows_target
from specsample.testing.assertions import assert_greedy_equal
from specsample.testing.auditing import audit
from specsample.testing.auditing import Finding
from specsample.testing.hash_model import HashModel
from specsample.testing.model_properties import assert_model
from specsample.testing.sample import Group
from specsample.testing.trained import tiny_llama
from specsample.testing.trained import with_noise

__all__ = [
  'Finding',
  'Group',
  'HashModel',
  'assert_batch_invariant',
  'assert_draft',
  'assert_drafter',
  'assert_equals_plain_sampling',
  'assert_exact',
  'assert_follows_target',
  'assert_greedy_equal',
  'assert_model',
  'audit',
  'tiny_llama',
  'with_noise',
]
