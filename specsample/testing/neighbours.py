"""The compiled loop in many batches of two rows, which decide together.

In a single batch of thousands of rows, no single row would affect what the
batch drafts.
"""

import functools

import jax

from specsample.loop import decode
from specsample.loop.stopping import Stop
from specsample.testing import sample as sample_lib
from specsample.testing.sample import Group
from specsample.testing.sample import Sample
from specsample.types import Array, Drafter, Model, Params, Verifier

# Rows per call, in half as many batches.
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
  """Draws as `sample.draw` does, in pairs of rows from successive groups."""
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
  """Returns the output of states [n, 2, ...], batches of two rows each."""

  def of_batch(state):
    state = decode.advance(
      params,
      state,
      model=model,
      drafter=drafter,
      verify=verify,
      stop=stop,
      # Every round emits at least one token.
      max_rounds=num_tokens,
    )
    return decode.finish(state, max_new_tokens=num_tokens)

  return jax.vmap(of_batch)(states)
