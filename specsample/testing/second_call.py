"""A second call, after the policy and its drafter have moved.

What the first call wrote is in its history. Reinforcement learning calls
`rollout` like this: whatever the first call wrote, and whatever weights the
drafter has by now, the second call has the law of the current policy.
"""

from collections.abc import Callable, Iterator
import functools

import jax
import numpy as np

from specsample import drafters
from specsample.drafter import Drafter
from specsample.memory import history as history_lib
from specsample.memory import store as store_lib
from specsample.sampling import Sampling
from specsample.testing import cases as cases_lib
from specsample.testing import conditional as conditional_lib
from specsample.testing import trained
from specsample.testing.trained import Trained
from specsample.types import DraftKind, Params

MODEL = trained.tiny_llama(vocab_size=2)
SUFFIX = drafters.Suffix(num_draft_tokens=2, min_kept=0.0)
_EAGLE = drafters.Eagle(model=MODEL, num_draft_tokens=2)
EITHER = drafters.Either(remembered=SUFFIX, trained=_EAGLE, prior_kept=1.0)
SAMPLING = Sampling(temperature=0.8, presence_penalty=0.5)
_NUM_TOKENS = 2  # that the first call wrote
_CAPACITY = 16


@functools.cache
def params(step: int) -> Params:
  """Returns the whole tree for `EITHER` after `step` steps, without a store."""
  target = jax.tree.map(lambda x: 1.6 * x, MODEL.init(jax.random.key(0)))
  own = _EAGLE.init_params(jax.random.key(1), target)
  tree = trained.with_noise({'target': target, 'drafter': own}, _key(0))
  for i in range(step):
    tree = trained.with_noise(tree, _key(i + 1))
  own = {'remembered': {}, 'trained': tree['drafter']}
  return {'target': tree['target'], 'drafter': own}


def _key(step):
  return jax.random.fold_in(jax.random.key(2), step)


def store_of(text: np.ndarray, vocab_size: int) -> store_lib.Store:
  """Returns the store of a history that received one text."""
  history = history_lib.History(
    vocab_size=vocab_size, capacity=_CAPACITY, every=1
  )
  history.add(text)
  return history.store


def cases_of(
  drafter: Drafter,
  change: Callable[[Drafter], Drafter] = lambda drafter: drafter,
) -> Iterator[cases_lib.Case]:
  """Yields the second call after each text that the first may have written.

  Args:
    drafter: `SUFFIX` or `EITHER`.
    change: makes the drafter that really drafts.
  """
  own, kind = params(1), DraftKind.SAMPLED
  if drafter is SUFFIX:
    own, kind = own | {'drafter': {}}, DraftKind.POINT_MASS
  for string in conditional_lib.strings(MODEL.vocab_size, _NUM_TOKENS):
    store = store_of(np.append(cases_lib.PROMPT, string), MODEL.vocab_size)
    name = f'{type(drafter).__name__}, {string.tolist()} in its history'
    tree = drafter.with_store(own, 'history', store)
    scene = Trained(name, MODEL, change(drafter), tree)
    yield cases_lib.of_scene(name, scene, SAMPLING, kind=kind)
