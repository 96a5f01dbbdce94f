"""The compiled loop in many batches of two rows, which decide together.

In one batch of thousands of rows none of them would change what all draft.
"""

import functools

import jax
import numpy as np

from specsample import decode
from specsample.stopping import Stop
from specsample.testing import sample as sample_lib
from specsample.testing.sample import Group
from specsample.testing.sample import Sample
from specsample.types import Array, Drafter, Model, Params, Verifier

# Of one call, half as many batches.
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
  requests = sample_lib.requests(groups, size)

  def batch(start):
    state = decode.prefill(
      params,
      requests.prompts,
      requests.lengths,
      key,
      request_ids=start + np.arange(size, dtype=np.int32),
      model=model,
      drafter=drafter,
      sampling=requests.sampling,
      max_new_tokens=num_tokens,
    )
    output = _rounds(
      params,
      jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), state),
      model=model,
      drafter=drafter,
      verify=verify,
      stop=stop,
      num_tokens=num_tokens,
    )
    return jax.device_get(
      jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), output)
    )

  outputs = [batch(start) for start in range(0, num_rows, size)]
  return sample_lib.of(outputs, num_tokens, len(groups))


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
