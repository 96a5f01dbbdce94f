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
from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.memory import history as history_lib
from specsample.memory import store as store_lib
from specsample.sampling import Sampling
from specsample.testing import cases as cases_lib
from specsample.testing import conditional as conditional_lib
from specsample.testing import drafted
from specsample.testing import law as law_lib
from specsample.testing import sample as sample_lib
from specsample.testing import tiny
from specsample.testing import trained
from specsample.testing.sample import Group
from specsample.testing.sample import Sample
from specsample.types import Array, DraftKind, Params

MODEL = tiny.tiny_llama(vocab_size=2)
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


def cases() -> Iterator[cases_lib.Case]:
  """Yields the second call of both drafters after each text of the first."""
  yield from cases_of(SUFFIX)
  yield from cases_of(EITHER)


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
  logits = conditional_lib.logits_after(MODEL, own['target'], cases_lib.PROMPT)
  target = conditional_lib.from_logits(logits, cases_lib.PROMPT, SAMPLING)
  law = law_lib.from_logits(logits, cases_lib.PROMPT, SAMPLING, target)
  if drafter is SUFFIX:
    own, kind = own | {'drafter': {}}, DraftKind.POINT_MASS
  for string in conditional_lib.strings(MODEL.vocab_size, _NUM_TOKENS):
    text = np.append(cases_lib.PROMPT, string)
    store = store_of(text, MODEL.vocab_size)
    yield cases_lib.Case(
      name=f'{type(drafter).__name__}, {string.tolist()} in its history',
      kind=kind,
      vocab_size=MODEL.vocab_size,
      num_draft_tokens=drafter.num_draft_tokens,
      rounds=(2,),
      proposal=drafted.from_drafter(
        change(drafter),
        drafter.with_store(own, 'history', store),
        MODEL,
        cases_lib.PROMPT,
        SAMPLING,
        rounds=2,
      ),
      target=target,
      law=law,
    )


def draw(
  groups: tuple[Group, ...],
  keys: tuple[Array, Array],
  *,
  decoders: tuple[Decoder, ...],
  num_tokens: int,
  num_rows: int,
) -> Sample:
  """Draws the rows of a second call, each with a history of its own.

  A row's history holds what the first call wrote for it. In a history of
  thousands of rows, the text of a single one would have too little effect.

  Args:
    groups, num_tokens, num_rows: as for `sample.draw`.
    keys: of the two calls; request ids are the same in both.
    decoders: of the two calls, with policies without parameters and `SUFFIX`.
  """
  remembered = trained.remembering().params
  first = sample_lib.draw(
    decoders[0],
    remembered,
    groups,
    keys[0],
    num_tokens=num_tokens,
    num_rows=num_rows,
  )
  prompts = [groups[i % len(groups)].prompt for i in range(len(first.tokens))]
  stores = [
    store_of(np.append(prompt, row), decoders[0].model.vocab_size)
    for prompt, row in zip(prompts, first.tokens, strict=True)
  ]

  def run(shared, state, store):
    return decode.advance(
      decoders[1],
      shared | {'drafter': {'store': store}},
      state,
      max_rounds=num_tokens,
    )

  return sample_lib.draw_in_batches(
    run,
    decoders[1],
    {'target': {}, 'drafter': {'store': stores[0]}},
    groups,
    keys[1],
    own=(jax.tree.map(lambda *x: np.stack(x), *stores),),
    num_tokens=num_tokens,
    num_rows=num_rows,
    at_once=len(stores),
  )
