"""Policies for how much is drafted and verified: filters and lengths."""

from specsample.policies.budget import Budget
from specsample.policies.fastest import EarlyStopping
from specsample.policies.fastest import Fastest
from specsample.policies.fastest import Fixed
from specsample.policies.filters import AdaEDL
from specsample.policies.filters import Confidence
from specsample.policies.filters import ConfidenceProduct
from specsample.policies.filters import LargestProbability
from specsample.policies.filters import PathProbability
from specsample.policies.filters import SVIP
from specsample.policies.filters import TokenProbability
from specsample.policies.filters import TopK
from specsample.policies.filters import TopNodes

__all__ = [
  'SVIP',
  'AdaEDL',
  'Budget',
  'Confidence',
  'ConfidenceProduct',
  'EarlyStopping',
  'Fastest',
  'Fixed',
  'LargestProbability',
  'PathProbability',
  'TokenProbability',
  'TopK',
  'TopNodes',
]
