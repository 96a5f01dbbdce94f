"""The compiled loop in many batches of two rows, which decide together.

In one batch of thousands of rows none of them would change what all draft.
"""

import functools

import jax

from specsample.loop import decode
from specsample.loop.stopping import Stop
from specsample.testing import sample as sample_lib
from specsample.testing.sample import Group
from specsample.testing.sample import Sample
from specsample.types import Array, Drafter, Model, Params, Verifier

# Rows of one call: half as many batches.
_ROWS = 4096
_NO_STOP = Stop()


def draw(
  params: Params,
  groups: tuple[Group, ...],
  key: Array,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  num_tokens: int,
  num_rows: int,
  stop: Stop = _NO_STOP,
) -> Sample:
  """As `sample.draw`, each row with one of the next group beside it."""
  size = _ROWS - _ROWS % (2 * len(groups))

  def run(state):
    output = _rounds(
      params,
      jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), state),
      model=model,
      drafter=drafter,
      verify=verify,
      stop=stop,
      num_tokens=num_tokens,
    )
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), output)

  return sample_lib.draw_by(
    run,
    params,
    groups,
    key,
    model=model,
    drafter=drafter,
    num_tokens=num_tokens,
    num_rows=num_rows,
    batch_size=size,
  )


@functools.partial(
  jax.jit,
  static_argnames=('model', 'drafter', 'verify', 'stop', 'num_tokens'),
)
def _rounds(params, states, *, model, drafter, verify, stop, num_tokens):
  """The output of states [n, 2, ...], batches of two rows each."""

  def of_batch(state):
    state = decode.advance(
      params,
      state,
      model=model,
      drafter=drafter,
      verify=verify,
      stop=stop,
      # Each round emits a token at least.
      max_rounds=num_tokens,
    )
    return decode.finish(state, max_new_tokens=num_tokens)

  return jax.vmap(of_batch)(states)
