"""The cost of decoding: the papers' formulas, work and chips."""

from specsample.cost.formulas import best_num_draft_tokens
from specsample.cost.formulas import chain_round
from specsample.cost.formulas import expected_tokens
from specsample.cost.formulas import expected_tokens_by_position
from specsample.cost.formulas import implied_acceptance
from specsample.cost.formulas import implied_tokens
from specsample.cost.formulas import leviathan_speedup
from specsample.cost.formulas import memory_bound_speedup
from specsample.cost.formulas import PassTimes
from specsample.cost.formulas import Round
from specsample.cost.formulas import speedup
from specsample.cost.formulas import width_of

__all__ = [
  'PassTimes',
  'Round',
  'best_num_draft_tokens',
  'chain_round',
  'expected_tokens',
  'expected_tokens_by_position',
  'implied_acceptance',
  'implied_tokens',
  'leviathan_speedup',
  'memory_bound_speedup',
  'speedup',
  'width_of',
]
