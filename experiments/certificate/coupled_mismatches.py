"""Counts of tokens that differ between coupled decoding and plain sampling."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from specsample import drafters
from specsample import verify
from specsample.loop import decode
from specsample.sampling import Sampling
from specsample.testing import acceptance
from specsample.testing import assertions
from specsample.testing import conditional as conditional_lib
from specsample.testing import drafted
from specsample.testing import trained
from specsample.testing.conditional import Conditional
from specsample.testing.hash_model import HashModel
from specsample.testing.trained import Trained
from specsample.types import DraftKind

_MODEL = HashModel(vocab_size=8)
_SAMPLING = Sampling(temperature=0.8, top_p=0.95)
_PROMPT = (3, 1, 4, 1)


def scenes() -> Iterator[tuple[Trained, Callable[[], Conditional]]]:
  """Yields drafters, each with its distributions after the prompt."""
  table = lambda model: conditional_lib.from_model(
    model, {}, _PROMPT, _SAMPLING
  )
  of_hash = lambda drafter: Trained(
    type(drafter).__name__, _MODEL, drafter, {'target': {}, 'drafter': {}}
  )
  other = dataclasses.replace(_MODEL, noise=0.4)
  chain = drafters.Chain(model=other, num_draft_tokens=3)
  yield of_hash(chain), lambda: table(other)
  layers = (0, 2)
  skip = drafters.Skip(model=_MODEL, layers=layers, num_draft_tokens=3)
  yield of_hash(skip), lambda: table(_MODEL.keep_layers(layers))
  for scene in trained.scenes(_MODEL.vocab_size):
    yield scene, functools.partial(_drawn_from, scene)


def _drawn_from(scene: Trained) -> Conditional:
  return drafted.conditional(
    drafted.from_drafter(
      scene.drafter, scene.params, scene.model, _PROMPT, _SAMPLING, rounds=1
    )
  )


def count(
  scene: Trained,
  draft: Callable[[], Conditional],
  num_keys: int,
  seed: int,
) -> list[dict[str, Any]]:
  """Compares coupled decoding with plain sampling, with one key per row."""
  target = conditional_lib.from_model(
    scene.model, scene.params['target'], _PROMPT, _SAMPLING
  )
  kept = acceptance.coupled(draft(), target, scene.drafter.num_draft_tokens)
  run = lambda drafter: decode.generate(
    scene.params,
    np.tile(_PROMPT, (num_keys, 1)),
    np.full(num_keys, len(_PROMPT)),
    jax.random.key(seed),
    model=scene.model,
    drafter=drafter,
    verify=verify.coupled,
    sampling=_SAMPLING,
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
      'expected_accepted': float(kept.sum()),
      'case': f'drafters.{scene.name}, tokens that differ from plain sampling',
      'vocab_size': scene.model.vocab_size,
      'num_draft_tokens': scene.drafter.num_draft_tokens,
      'keys': num_keys,
      'tokens': int(plain.lengths.sum()),
      'passed': mismatches == 0 and int(result.rounds.min()) >= 2,
    }
  ]
