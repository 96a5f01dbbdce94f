"""Times of the target's passes and of drafting on the devices at hand."""

from collections.abc import Sequence
import functools

import jax
import numpy as np

from specsample import sampling as sampling_lib
from specsample import sharding
from specsample import verify
from specsample.choosing import loops
from specsample.drafter import Drafter
from specsample.loop import initial
from specsample.loop import request
from specsample.loop.decoder import Decoder
from specsample.types import Model, Params


def passes(
  params: Params,
  model: Model,
  sizes: Sequence[int],
  *,
  length: int,
  max_length: int,
  batch: int | None = None,
  times: int = 4,
  repeats: int = 25,
) -> dict[int, list[float]]:
  """Times passes of the target over several numbers of tokens per row.

  The sizes take turns.

  Args:
    params: {'target': ...}.
    model: the target.
    sizes: numbers of tokens per row.
    length: tokens of each row that are already in the cache.
    max_length: slots of the cache, not counting those for the largest size.
    batch: number of rows; None for one in each part of the mesh's data axis.
    times: passes in a compiled loop; the time of an empty loop is subtracted.
    repeats: how often each loop is timed.

  Returns:
    The seconds per pass, [repeats] for each size.
  """
  rows = sharding.batch_parts() if batch is None else batch

  def of_size(size):
    return lambda count: loops.passes(
      params,
      length,
      model=model,
      rows=rows,
      num_tokens=size,
      max_length=max_length + max(sizes),
      times=count,
    )

  return loops.in_turns(
    {size: functools.partial(of_size, size) for size in sizes},
    count=times,
    repeats=repeats,
  )


def drafting(
  params: Params,
  model: Model,
  drafter: Drafter,
  *,
  length: int,
  batch: int = 1,
  times: int = 4,
  repeats: int = 9,
) -> list[float]:
  """Times a draft of all K tokens for each of `batch` rows.

  Args:
    params: {'target': ..., 'drafter': ...}.
    model: the target.
    drafter: drafts for the target.
    length: tokens of each row before the draft.
    batch: number of rows.
    times: drafts in a compiled loop; the time of an empty loop is subtracted.
    repeats: how often the loop is timed.

  Returns:
    The seconds per draft, [repeats].
  """
  prompts = np.ones((batch, length), np.int32)
  # The rule only decides whether draws are coupled.
  decoder = Decoder(model, drafter, verify.chain)
  checked = request.check(
    decoder,
    params,
    prompts,
    np.full(batch, length),
    jax.random.key(0),
    sampling=sampling_lib.Sampling(),
    max_new_tokens=1 + drafter.num_draft_tokens,
    max_length=None,
  )
  state = initial.state(decoder, params, checked)
  draft = lambda count: loops.drafted_alone(decoder, params, state, count)
  found = loops.in_turns({'draft': lambda: draft}, count=times, repeats=repeats)
  return found['draft']
