"""Exact speculative sampling in JAX."""

from specsample import drafters
from specsample import stats
from specsample import verify
from specsample.decode import Stop
from specsample.decode import advance
from specsample.decode import finish
from specsample.decode import generate
from specsample.decode import pad_prompts
from specsample.decode import prefill
from specsample.sampling import Sampling
from specsample.types import Origin, Output, StopReason

__all__ = [
  'Origin',
  'Output',
  'Sampling',
  'Stop',
  'StopReason',
  'advance',
  'drafters',
  'finish',
  'generate',
  'pad_prompts',
  'prefill',
  'stats',
  'verify',
]
