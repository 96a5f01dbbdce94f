"""The rounds of a trace as rules and policies take them, prompts batched."""

import functools

import jax.numpy as jnp
import numpy as np

from experiments.traces import trace_file
from specsample import types
from specsample.types import Array, Draft, DraftKind, Signals


@types.pytree
class Rounds:
  """Rounds [T, P] of P prompts; T is the most rounds that a prompt has."""

  draft: Draft  # its tokens are columns of the parent node
  target_probs: Array  # [T, P, N + 1, C + E]
  is_end: Array  # [T, P, N] bool, drafts that end the text
  is_there: Array  # [T, P] bool, False after the last round of a prompt


def of_trace(trace: trace_file.Trace) -> Rounds:
  """Returns the rounds of a trace, batched over prompts.

  Raises:
    ValueError: a draft has no column.
  """
  header, arrays = trace.header, trace.arrays
  tokens, before = arrays['tokens'], arrays['ids'][:, :-1]
  if 'parents' in arrays:
    before = arrays['ids'][np.arange(len(tokens))[:, None], arrays['parents']]
  is_it = before == tokens[..., None]
  if not np.all(np.any(is_it, axis=-1) | (tokens < 0)):
    raise ValueError(
      'the trace is damaged, because a draft token has no column: delete its '
      'folder and run '
      f'{trace_file.COMMAND} again'
    )
  columns = np.where(tokens >= 0, np.argmax(is_it, axis=-1), -1)
  in_place = functools.partial(dense, arrays)
  said = {
    name: in_place(x)
    for name, x in arrays.items()
    if name in trace_file.SIGNALS
  }
  optional = lambda name: in_place(arrays[name]) if name in arrays else None
  children = header['num_children']
  return Rounds(
    draft=Draft(
      tokens=in_place(columns.astype(np.int32), fill=-1),
      probs=optional('draft_probs'),
      kind=DraftKind(header['law']),
      parents=optional('parents'),
      depth=header['depth'],
      num_children=None if children is None else tuple(children),
      signals=Signals(**said) if said else None,
    ),
    target_probs=in_place(arrays['target_probs']),
    is_end=in_place(np.isin(tokens, header['eos_ids'])),
    is_there=in_place(np.ones(len(tokens), bool)),
  )


def dense(arrays: dict[str, np.ndarray], x: np.ndarray, fill: int = 0) -> Array:
  """Returns x [R, ...] of a trace's rounds as [T, P, ...], on the device."""
  number, prompt = arrays['round'], arrays['prompt']
  prompts = np.unique(prompt)
  shape = (number.max() + 1, prompts.size, *x.shape[1:])
  found = np.full(shape, fill, x.dtype)
  found[number, np.searchsorted(prompts, prompt)] = x
  return jnp.asarray(found)
