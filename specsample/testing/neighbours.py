"""The compiled loop in many batches of two rows, which decide together.

In a single batch of thousands of rows, no single row would affect what the
batch drafts.
"""

import functools

import jax

from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.loop.stopping import Stop
from specsample.testing import sample as sample_lib
from specsample.testing.sample import Group
from specsample.testing.sample import Sample
from specsample.types import Array, Params

# Rows per call, in half as many batches.
_ROWS = 4096
_NO_STOP = Stop()


def draw(
  decoder: Decoder,
  params: Params,
  groups: tuple[Group, ...],
  key: Array,
  *,
  num_tokens: int,
  num_rows: int,
  stop: Stop = _NO_STOP,
) -> Sample:
  """Draws as `sample.draw` does, in pairs of rows from successive groups."""
  size = _ROWS - _ROWS % (2 * len(groups))

  def run(state):
    states = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), state)
    output = _rounds(decoder, params, states, stop=stop, num_tokens=num_tokens)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), output)

  return sample_lib.draw_by(
    run,
    decoder,
    params,
    groups,
    key,
    num_tokens=num_tokens,
    num_rows=num_rows,
    batch_size=size,
  )


@functools.partial(jax.jit, static_argnames=('decoder', 'stop', 'num_tokens'))
def _rounds(decoder, params, states, *, stop, num_tokens):
  """Returns the output of states [n, 2, ...], batches of two rows each."""

  def of_batch(state):
    state = decode.advance(
      decoder, params, state, stop=stop, max_rounds=num_tokens
    )
    return decode.finish(state, max_new_tokens=num_tokens)

  return jax.vmap(of_batch)(states)
