"""Records traces: decodes once more, round by round, and keeps each round.

Traces are recorded separately from what is timed, and with the same keys, so
that the tokens are those of the evaluation. `trace_file` says what is kept.
"""

from collections.abc import Iterator, Sequence
import functools
import pathlib
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from experiments import methods as methods_lib
from experiments.command import environment
from experiments.command import units as units_lib
from experiments.evaluation import evaluation as evaluation_lib
from experiments.traces import trace_file
import specsample
from specsample import files
from specsample.loop import certified
from specsample.loop import step
from specsample.types import Array, Draft
from specsample.verify import rule


@gin.configurable
def units(
  evaluation: evaluation_lib.Evaluation,
  out: pathlib.PurePath,
  tokens: Sequence[list[int]],
  num_columns: int = 64,
) -> list[units_lib.Unit]:
  """Returns a unit of work per method and batch, which writes a trace file.

  A unit whose file is gone is done again.

  Args:
    evaluation: its methods are recorded.
    out: the folder of its results.
    tokens: the prompts as token ids.
    num_columns: C, how many tokens of each distribution get a column of their
      own; at least the number of draft tokens.

  Raises:
    ValueError: there are too few columns or several devices, policies are
      carried from batch to batch, or a rule knows no probabilities.
  """
  if not jax.sharding.get_mesh().empty or jax.process_count() > 1:
    raise ValueError(
      '--record works on one device only, but there is a mesh: leave Mesh out'
    )
  if evaluation.carry_policies:
    raise ValueError(
      '--record decodes every batch once more, without what policies learned '
      'before, but Evaluation.carry_policies is True: bind it to False'
    )
  for name, method in evaluation.methods.items():
    chooses = method.verify
    if certified.is_by_choice(chooses) and chooses.positional:
      raise ValueError(
        f'--record keeps distributions, but the rule of method {name!r}, '
        'Certified(coupled=True), knows only what was chosen: give '
        'verify.coupled'
      )
    least = max(1, method.drafter.num_draft_tokens)
    if num_columns < least:
      raise ValueError(
        f'recording.units.num_columns is {num_columns}: method {name!r} needs '
        f'at least {least}'
      )
  return list(_units(evaluation, out, tokens, num_columns))


def _units(evaluation, out, tokens, num_columns) -> Iterator[units_lib.Unit]:
  for name, method in evaluation.methods.items():
    folder = trace_file.folder(out, name)
    written = _names(folder)
    for i, batch in enumerate(evaluation.batches(len(tokens))):
      path = folder / f'{i:05}.npz'
      run = functools.partial(
        _write,
        *(evaluation, method, [tokens[j] for j in batch], batch),
        num_columns=num_columns,
        path=path,
        header={'method': name, 'batch': i, 'num_prompts': len(tokens)},
      )
      label = evaluation_lib.label(batch, len(tokens), name)
      yield units_lib.Unit(
        f'trace, {label}',
        ('trace', name, i),
        run,
        is_lost=path.name not in written,
      )


def _names(folder) -> set[str]:
  """Returns the names in a folder; in a bucket that takes a single request."""
  at = files.at(folder)
  return {one.name for one in at.iterdir()} if files.is_folder(at) else set()


def _write(
  evaluation, method, prompts, request_ids, *, num_columns, path, header
) -> dict[str, Any]:
  trace = record(
    evaluation, method, prompts, request_ids, num_columns=num_columns
  )
  header = trace.header | header | environment.describe()
  trace_file.write(path, trace_file.Trace(header, trace.arrays))
  return {'file': str(path), 'rounds': len(trace.arrays['round'])}


def record(
  evaluation: evaluation_lib.Evaluation,
  method: methods_lib.Method,
  prompts: Sequence[list[int]],
  request_ids: Sequence[int],
  *,
  num_columns: int,
) -> trace_file.Trace:
  """Records the rounds of a batch of prompts, and what was run.

  The rows are ordered by round. `num_columns` has to be at least the number of
  children that a node may have.
  """
  setup = evaluation.setup(method)
  state = setup.prefill(prompts, request_ids=request_ids)
  draft = methods_lib.abstract_draft(setup.params, state, **setup.components)
  vocab_size = evaluation.target.model.vocab_size
  goes_on = functools.partial(
    _round,
    setup.params,
    **setup.components,
    stop=setup.stop,
    num_columns=min(num_columns, vocab_size),
  )
  done = np.asarray(state.done)
  rounds: list[dict[str, np.ndarray]] = []
  while not rounds or not done.all():
    found, state = goes_on(state)
    found, now_done = jax.device_get((found, state.done))
    found['prompt'] = np.asarray(request_ids, np.int32)
    rounds.append({name: x[~done] for name, x in found.items()})
    done = now_done
  arrays = {
    name: np.concatenate([of_round[name] for of_round in rounds])
    for name in rounds[0]
  }
  output = specsample.finish(state, max_new_tokens=evaluation.max_new_tokens)
  is_token = np.arange(output.tokens.shape[1]) < output.lengths[:, None]
  arrays['output'] = np.where(is_token, output.tokens, -1)
  header = {
    'model': repr(evaluation.target.model),
    'drafter': repr(method.drafter),
    'verifier': repr(method.verify),
    'sampling': repr(evaluation.sampling),
    'max_new_tokens': evaluation.max_new_tokens,
    'seed': evaluation.seed,
    'vocab_size': vocab_size,
    'eos_ids': list(setup.stop.eos_ids),
    'law': draft.kind.value,
    'depth': draft.depth,
    'num_children': draft.num_children,
  }
  return trace_file.Trace(header, arrays)


@functools.partial(
  jax.jit,
  static_argnames=('model', 'drafter', 'verify', 'stop', 'num_columns'),
  donate_argnames=('state',),
)
def _round(params, state, *, num_columns, **components):
  """Returns what is kept of a round, and the state after it."""
  number = state.round
  observed, state = step.step(params, state, **components)
  draft = observed.draft
  of_row = functools.partial(in_columns, num_columns=num_columns)
  ids, target_probs, draft_probs = jax.vmap(of_row)(
    draft, observed.target_probs
  )
  kept = {
    'round': number,
    'tokens': draft.tokens,
    'parents': draft.parents,
    'ids': ids,
    'target_probs': target_probs,
    'draft_probs': draft_probs,
    'num_accepted': observed.verdict.num_accepted,
    'num_emitted': observed.num_emitted,
  }
  if draft.signals is not None:
    kept |= vars(draft.signals)
  return {name: x for name, x in kept.items() if x is not None}, state


def in_columns(
  draft: Draft, target_probs: Array, *, num_columns: int
) -> tuple[Array, Array, Array | None]:
  """Reduces distributions to the likeliest tokens and sums over the others.

  Args:
    draft: the draft of one sequence.
    target_probs: [N + 1, V].
    num_columns: C, at most V.

  Returns:
    The tokens [N + 1, C] that have columns of their own. Then, over these and
    the E columns of the other tokens (see `trace_file`), the distributions of
    the target [N + 1, C + E] and of the draft [N, C + E]. The last is None for
    a point mass.
  """
  parents, vocab_size = rule.parents(draft), target_probs.shape[1]
  likely = jnp.zeros_like(target_probs)
  if draft.probs is not None:
    likely = likely.at[parents].max(draft.probs)
  token = jnp.where(draft.tokens >= 0, draft.tokens, vocab_size)
  is_child = jnp.zeros(likely.shape, bool)
  is_child = is_child.at[parents, token].set(True, mode='drop')
  # The score of a child is above every probability.
  scores = jnp.where(is_child, 2, jnp.maximum(target_probs, likely))
  _, ids = jax.lax.top_k(scores, num_columns)
  edges = jnp.asarray(trace_file.RATIOS, target_probs.dtype)
  group = sum(target_probs > edge * likely for edge in edges)

  def rows(probs, ids, group):
    top = jnp.take_along_axis(probs, ids, axis=1)
    left = jnp.put_along_axis(probs, ids, 0, axis=1, inplace=False)
    rest = [
      jnp.sum(jnp.where(group == i, left, 0), axis=1)
      for i in range(trace_file.NUM_GROUPS)
    ]
    return jnp.concatenate([top, jnp.stack(rest, axis=1)], axis=1)

  draft_probs = None
  if draft.probs is not None:
    draft_probs = rows(draft.probs, ids[parents], group[parents])
  return ids, rows(target_probs, ids, group), draft_probs
