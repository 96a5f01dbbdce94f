"""Samples of the compiled loop, compared with the exact law."""

from typing import Any

import jax
import numpy as np

from experiments.certificate import sampled_cases
from experiments.certificate.sampled_cases import Draw
from specsample.stopping import Stop
from specsample.testing import acceptance
from specsample.testing import chi_square
from specsample.testing import conditional as conditional_lib
from specsample.testing import drafted
from specsample.testing import proposal as proposal_lib
from specsample.testing import sample as sample_lib
from specsample.testing.sample import Group
from specsample.types import DraftKind


def measure(draw: Draw, num_rows: int, seed: int) -> dict[str, Any]:
  """Samples one combination and returns its record in the certificate."""
  sample = draw.sample(
    draw.decoder,
    draw.params,
    draw.groups,
    jax.random.key(seed),
    num_tokens=sampled_cases.NUM_TOKENS,
    num_rows=num_rows,
    stop=Stop(eos_ids=() if draw.eos_id is None else (draw.eos_id,)),
  )
  laws = sample_lib.laws(
    draw.model,
    draw.params['target'],
    draw.groups,
    sampled_cases.NUM_TOKENS,
    draw.eos_id,
  )
  tokens = sample_lib.compare(sample, laws, draw.eos_id)
  record = {
    'drafter': draw.drafter_name,
    'verifier': draw.verifier_name,
    'law': draw.kind.value,
    'settings': draw.settings,
    'num_tokens': sampled_cases.NUM_TOKENS,
    'samples': tokens.samples,
    'statistic': tokens.statistic,
    'threshold': tokens.threshold,
    'dof': tokens.dof,
    'alpha': chi_square.ALPHA,
    'power': chi_square.POWER,
    'detectable_total_variation': tokens.detectable,
    'passed': tokens.passed,
  }
  # A stop token in the first round cuts off drafts that were kept.
  if draw.eos_id is not None or not draw.is_of_one_shape:
    return record
  kept = sample_lib.acceptance(
    sample, [_num_kept(draw, group) for group in draw.groups]
  )
  return record | {
    'accepted': kept.measured,
    'predicted_accepted': kept.predicted,
    'standard_error': kept.error,
    'acceptance_statistic': kept.statistic,
    'acceptance_threshold': kept.THRESHOLD,
    'passed': tokens.passed and kept.passed,
  }


def _num_kept(draw: Draw, group: Group) -> np.ndarray:
  """Returns the law [K + 1] of the number of drafts kept in the first round."""
  target = conditional_lib.from_model(
    draw.model, draw.params['target'], group.prompt, group.sampling
  )
  num_drafts = draw.drafter.num_draft_tokens
  if draw.drafts_from is not None:
    draft = conditional_lib.from_model(
      *draw.drafts_from(), group.prompt, group.sampling
    )
    proposal = proposal_lib.sampled(draft, num_drafts)
  else:
    proposal = drafted.from_drafter(
      draw.drafter,
      draw.params,
      draw.model,
      group.prompt,
      group.sampling,
      rounds=1,
    )
  if draw.verifier_name != 'coupled' or draw.kind is DraftKind.POINT_MASS:
    kept = sampled_cases.KEPT[draw.verifier_name](proposal, target)
  else:
    if draw.drafts_from is None:
      draft = drafted.conditional(proposal)
    kept = acceptance.coupled(draft, target, num_drafts)
  return acceptance.law(kept)
