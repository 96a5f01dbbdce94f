"""The compiled loop with a drafter that learns between rounds.

Each row has a drafter of its own, so that the tokens that a row rejected
influence what it drafts next. If thousands of rows shared a drafter, the effect
of a single row would be too small to detect.
"""

from collections.abc import Iterator

import jax
import optax

from specsample import drafters
from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.stopping import Stop
from specsample.testing import sample as sample_lib
from specsample.testing import trained
from specsample.testing.sample import Group
from specsample.testing.sample import Sample
from specsample.training import draft
from specsample.training import eagle
from specsample.training import online
from specsample.types import Array, Params

# Rows per call; each row has its own weights.
_ROWS = 2048
_NO_STOP = Stop()


def scenes() -> Iterator[tuple[str, online.Learner, Params]]:
  """Yields names, learners and parameters, with three tokens to draft.

  A single rejection changes the drafter a lot.
  """
  model = trained.tiny_llama(vocab_size=3)
  params = jax.tree.map(lambda x: 1.6 * x, model.init(jax.random.key(0)))
  of_model = drafters.DraftModel(model=model, num_draft_tokens=2, layers=(0,))
  of_features = drafters.Eagle(model=model, num_draft_tokens=2)
  of_draft = draft.DraftObjective(
    drafter=of_model, token_weight=0.0, teacher_weight=1.0
  )
  of_eagle = eagle.FeatureObjective(drafter=of_features, num_steps=2)
  # EAGLE's gradients grow with its vectors: without a limit it diverges.
  limited = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3))
  for drafter, objective, optimizer, scale in (
    (of_model, of_draft, optax.sgd(4.0), 0.3),
    (of_features, of_eagle, limited, 0.1),
  ):
    learner = online.Learner(
      objective=objective, optimizer=optimizer, rounds=1, window=16
    )
    begun = drafter.init_params(jax.random.key(1), params)
    noisy = trained.with_noise(begun, jax.random.key(2), scale=scale)
    name = type(drafter).__name__
    yield name, learner, {'target': params, 'drafter': noisy}


def draw(
  decoder: Decoder,
  params: Params,
  groups: tuple[Group, ...],
  key: Array,
  *,
  learner: online.Learner,
  num_tokens: int,
  num_rows: int,
  stop: Stop = _NO_STOP,
) -> Sample:
  """Draws as `sample.draw` does, while each row's drafter learns.

  Args:
    decoder: with `learner.drafter`, or a drafter with the same kind of state.
    params, groups, key, num_tokens, num_rows, stop: as for `sample.draw`.
    learner: how a row's drafter learns.
  """
  learned = online.init(params, learner)

  def run(learned, state):
    def next_update(carry, _):
      state, learned = carry
      state = decode.advance(
        decoder,
        online.params_of(learned, learner),
        state,
        stop=stop,
        max_rounds=learner.rounds,
      )
      state, learned, _ = online.update(state, learned, learner)
      return (state, learned), None

    # Every round emits at least one token.
    (state, _), _ = jax.lax.scan(
      next_update, (state, learned), length=num_tokens
    )
    return state

  return sample_lib.draw_in_batches(
    run,
    decoder,
    params,
    groups,
    key,
    shared=learned,
    num_tokens=num_tokens,
    num_rows=num_rows,
    at_once=_ROWS - _ROWS % len(groups),
  )
