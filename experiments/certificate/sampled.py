"""Samples of the compiled loop, compared with the exact law.

Coupled decoding is also compared with plain sampling, token by token.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any

import jax
import numpy as np

from experiments.certificate import sampled_cases
from experiments.certificate.sampled_cases import Draw
from specsample import drafters
from specsample import verify
from specsample.loop import decode
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.testing import acceptance
from specsample.testing import assertions
from specsample.testing import chi_square
from specsample.testing import conditional as conditional_lib
from specsample.testing import drafted
from specsample.testing import sample as sample_lib
from specsample.testing import trained
from specsample.testing.hash_model import HashModel
from specsample.testing.sample import Group
from specsample.testing.trained import Trained
from specsample.types import DraftKind

_WIDE = HashModel(vocab_size=8)
_COUPLED = Group((3, 1, 4, 1), Sampling(temperature=0.8, top_p=0.95))


def measure(draw: Draw, num_rows: int, seed: int) -> dict[str, Any]:
  """Samples one combination and returns its record in the certificate."""
  scene = draw.scene
  sample = draw.sample(
    draw.decoder,
    scene.params,
    draw.groups,
    jax.random.key(seed),
    num_tokens=sampled_cases.NUM_TOKENS,
    num_rows=num_rows,
    stop=Stop(eos_ids=() if draw.eos_id is None else (draw.eos_id,)),
  )
  laws = sample_lib.laws(
    scene.model,
    scene.params['target'],
    draw.groups,
    sampled_cases.NUM_TOKENS,
    draw.eos_id,
  )
  tokens = sample_lib.compare(sample, laws, draw.eos_id)
  record = {
    'drafter': scene.name,
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
  if draw.verifier_name == 'coupled' and draw.kind is DraftKind.SAMPLED:
    return acceptance.law(_kept_if_coupled(draw.scene, group))
  kept = sampled_cases.KEPT[draw.verifier_name](*_tables(draw.scene, group))
  return acceptance.law(kept)


def _tables(scene, group):
  """Returns the drafts, and the target's distributions."""
  prompt, sampling = group.prompt, group.sampling
  proposal = drafted.from_drafter(
    scene.drafter, scene.params, scene.model, prompt, sampling, rounds=1
  )
  target = conditional_lib.from_model(
    scene.model, scene.params['target'], prompt, sampling
  )
  return proposal, target


def _kept_if_coupled(scene, group):
  proposal, target = _tables(scene, group)
  draft = drafted.conditional(proposal)
  return acceptance.coupled(draft, target, scene.drafter.num_draft_tokens)


def coupled_scenes() -> Iterator[Trained]:
  """Yields drafters that draw their tokens, for `count_mismatches`."""
  other = dataclasses.replace(_WIDE, noise=0.4)
  chain = drafters.Chain(model=other, num_draft_tokens=3)
  skip = drafters.Skip(model=_WIDE, layers=(0, 2), num_draft_tokens=3)
  yield trained.untrained(_WIDE, chain)
  yield trained.untrained(_WIDE, skip)
  yield from trained.scenes(_WIDE.vocab_size)


def count_mismatches(
  scene: Trained, num_keys: int, seed: int
) -> list[dict[str, Any]]:
  """Compares coupled decoding with plain sampling, with one key per row."""
  run = lambda drafter: decode.generate(
    scene.params,
    np.tile(_COUPLED.prompt, (num_keys, 1)),
    np.full(num_keys, len(_COUPLED.prompt)),
    jax.random.key(seed),
    model=scene.model,
    drafter=drafter,
    verify=verify.coupled,
    sampling=_COUPLED.sampling,
    max_new_tokens=32,
  )
  result, plain = run(scene.drafter), run(drafters.NoDraft())
  mismatches = assertions.count_mismatches(result, plain)
  return [
    {
      'verifier': 'coupled',
      'law': DraftKind.SAMPLED.value,
      'rounds': int(result.rounds.min()),
      'max_error': mismatches,
      'expected_accepted': float(_kept_if_coupled(scene, _COUPLED).sum()),
      'case': f'drafters.{scene.name}, tokens that differ from plain sampling',
      'vocab_size': scene.model.vocab_size,
      'num_draft_tokens': scene.drafter.num_draft_tokens,
      'keys': num_keys,
      'tokens': int(plain.lengths.sum()),
      'passed': mismatches == 0 and int(result.rounds.min()) >= 2,
    }
  ]
