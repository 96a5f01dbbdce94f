"""Choosing a drafter that pays off on the machine at hand."""

from specsample.choosing.choice import auto
from specsample.choosing.choice import Choice
from specsample.choosing.round_costs import budget
from specsample.choosing.round_costs import costs

__all__ = [
  'Choice',
  'auto',
  'budget',
  'costs',
]
