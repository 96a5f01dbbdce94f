"""A mistake in how a constraint is followed."""

from specsample import types
from specsample.constraint import Constraint


@types.pytree
class ForgetsDrafts(Constraint):
  """A constraint that the draft tokens do not advance, only emitted ones."""

  def mask(self, drafted):
    return super().mask(drafted[:0])
