"""Samples of the compiled loop, and their comparison with an exact law."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.testing import chi_square
from specsample.testing import conditional as conditional_lib
from specsample.types import (
  Array,
  DecodeState,
  Model,
  Origin,
  Output,
  Params,
)

# Rows per call: large enough to be fast, small enough to compile fast.
_ROWS = 4096
_NO_STOP = Stop()


@dataclasses.dataclass(frozen=True)
class Group:
  """A prompt and settings; the rows of a group are samples of one law."""

  prompt: tuple[int, ...]
  sampling: Sampling  # scalars


@dataclasses.dataclass(frozen=True)
class Sample:
  """Rows of several groups, mixed in every batch; row i is in group i % G."""

  tokens: np.ndarray  # [n, M] int32, -1 after a row's length
  accepted: np.ndarray  # [n, M], drafts kept in each round
  num_groups: int

  def of_group(self, group: int) -> 'Sample':
    """Returns the rows of one group."""
    rows = slice(group, None, self.num_groups)
    return Sample(self.tokens[rows], self.accepted[rows], 1)


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
  """Generates at least `num_rows` independent rows of `num_tokens` tokens.

  The rows share one key and have a request id each. Every batch mixes prompts
  of all lengths and the settings of all groups.

  Raises:
    ValueError: if there are no groups, no rows or no tokens.
  """
  if not groups or num_rows < 1 or num_tokens < 1:
    raise ValueError(
      f'num_rows is {num_rows}, num_tokens is {num_tokens}, and there are '
      f'{len(groups)} groups: give at least one of each'
    )
  size = _ROWS - _ROWS % len(groups)
  rows = requests(groups, size)

  def batch(start) -> Output:
    output = decode.generate(
      params,
      rows.prompts,
      rows.lengths,
      key,
      request_ids=start + np.arange(size, dtype=np.int32),
      model=decoder.model,
      drafter=decoder.drafter,
      verify=decoder.verify,
      sampling=rows.sampling,
      max_new_tokens=num_tokens,
      stop=stop,
    )
    return jax.device_get(output)

  outputs = [batch(start) for start in range(0, num_rows, size)]
  return join(outputs, num_tokens, len(groups))


def draw_in_pairs(
  decoder: Decoder,
  params: Params,
  groups: tuple[Group, ...],
  key: Array,
  *,
  num_tokens: int,
  num_rows: int,
  stop: Stop = _NO_STOP,
) -> Sample:
  """Draws as `draw` does, in batches of two rows that decide together.

  In a single batch of thousands of rows, no single row would affect what the
  batch drafts. The two are of successive groups.
  """

  def run(params, state):
    # Every round emits at least one token.
    return decode.advance(
      decoder, params, state, stop=stop, max_rounds=num_tokens
    )

  return draw_in_batches(
    run,
    decoder,
    params,
    groups,
    key,
    rows=2,
    num_tokens=num_tokens,
    num_rows=num_rows,
    at_once=_ROWS - _ROWS % (2 * len(groups)),
  )


def draw_in_batches(
  run: Callable[..., DecodeState],
  decoder: Decoder,
  params: Params,
  groups: tuple[Group, ...],
  key: Array,
  *,
  rows: int = 1,
  shared: Any = None,
  own: tuple[Any, ...] = (),
  num_tokens: int,
  num_rows: int,
  at_once: int,
) -> Sample:
  """Draws as `draw` does, in many small batches that run side by side.

  Args:
    run: decodes a batch whose prompts have been prefilled, until its rows are
      done. It gets what all batches share, the batch's state, and its `own`.
    decoder, params, groups, key, num_tokens, num_rows: as for `draw`.
    rows: the rows of a batch.
    shared: by default `params`.
    own: trees of arrays, in which the first axis is that of the batches.
    at_once: rows that are decoded at once, a multiple of len(groups) and of
      `rows`.
  """
  shared = params if shared is None else shared
  requested = requests(groups, at_once)

  @jax.jit
  def decoded(shared, state, own) -> Output:
    def of_batch(state, own):
      state = run(shared, state, *own)
      return decode.finish(state, max_new_tokens=num_tokens)

    split = lambda x: x.reshape(-1, rows, *x.shape[1:])
    output = jax.vmap(of_batch)(jax.tree.map(split, state), own)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), output)

  def batch(start) -> Output:
    state = decode.prefill(
      decoder,
      params,
      requested.prompts,
      requested.lengths,
      key,
      request_ids=start + np.arange(at_once, dtype=np.int32),
      sampling=requested.sampling,
      max_new_tokens=num_tokens,
    )
    return jax.device_get(decoded(shared, state, own))

  outputs = [batch(start) for start in range(0, num_rows, at_once)]
  return join(outputs, num_tokens, len(groups))


@dataclasses.dataclass(frozen=True)
class Requests:
  """The rows of one batch; row i is in group i % G."""

  prompts: np.ndarray  # [n, P] int32, padded with 0
  lengths: np.ndarray  # [n] int32
  sampling: Sampling  # leaves [n, ...]


def requests(groups: tuple[Group, ...], size: int) -> Requests:
  """Returns `size` rows that mix prompts of all lengths and all settings."""
  width = max(len(group.prompt) for group in groups)
  group_of_row = np.arange(size) % len(groups)
  prompts = np.asarray(
    [group.prompt + (0,) * (width - len(group.prompt)) for group in groups]
  )
  lengths = np.asarray([len(group.prompt) for group in groups])
  sampling = mix([group.sampling for group in groups])
  return Requests(
    prompts=prompts[group_of_row],
    lengths=lengths[group_of_row],
    sampling=jax.tree.map(lambda x: np.asarray(x)[group_of_row], sampling),
  )


def join(outputs: Sequence[Output], num_tokens: int, num_groups: int) -> Sample:
  """Joins the outputs of batches into one sample."""
  joined = jax.tree.map(lambda *x: np.concatenate(x), *outputs)
  emitted = np.arange(num_tokens) < joined.lengths[:, None]
  kept = emitted & (joined.origin == Origin.ACCEPTED)
  in_round = joined.emit_round[..., None] == np.arange(num_tokens)
  return Sample(
    tokens=np.where(emitted, joined.tokens, -1),
    accepted=(kept[..., None] & in_round).sum(axis=1),
    num_groups=num_groups,
  )


def mix(samplings: list[Sampling]) -> Sampling:
  """Stacks settings into one `Sampling` with leaves [G].

  A setting that some of them leave out gets its neutral value there.
  Constraints must be of one automaton, or all None.
  """
  leaves: dict[str, np.ndarray] = {}
  for field in dataclasses.fields(Sampling):
    if field.name == 'constraint':
      continue
    values = [vars(sampling)[field.name] for sampling in samplings]
    shapes = [np.shape(value) for value in values if value is not None]
    if shapes:
      neutral = np.full(shapes[0], _NEUTRAL.get(field.name, 0.0))
      leaves[field.name] = np.asarray(
        [neutral if value is None else value for value in values]
      )
  constraint = jax.tree.map(
    lambda *x: np.asarray(x), *[sampling.constraint for sampling in samplings]
  )
  return Sampling(**leaves, constraint=constraint)


_NEUTRAL = {'top_k': 0, 'top_p': 1.0, 'repetition_penalty': 1.0}


def laws(
  model: Model,
  params: Params,
  groups: tuple[Group, ...],
  num_tokens: int,
  eos_id: int | None = None,
) -> list[np.ndarray]:
  """Returns the exact law [V^M] of each group's first tokens.

  Args:
    model: the target.
    params: the target's own tree.
    groups: the prompts and settings.
    num_tokens: M.
    eos_id: if given, a string that contains it continues with `eos_id` only.
  """
  tables = [
    conditional_lib.from_model(model, params, group.prompt, group.sampling)
    for group in groups
  ]
  if eos_id is not None:
    tables = [conditional_lib.ending(table, eos_id) for table in tables]
  return [conditional_lib.joint_law(table, num_tokens) for table in tables]


def compare(
  sample: Sample, laws: list[np.ndarray], eos_id: int | None = None
) -> chi_square.ChiSquare:
  """Tests a sample's tokens against the law of each group.

  Args:
    sample: from `draw`.
    laws: from `laws`, with the same groups and number of tokens.
    eos_id: replaces the missing tokens of a row that stopped. If it is None, no
      row may stop, and a single row that did fails the test.
  """
  num_tokens = sample.tokens.shape[1]

  def group(number):
    law = laws[number]
    vocab_size = round(law.size ** (1 / num_tokens))
    tokens = sample.of_group(number).tokens
    if eos_id is not None:
      tokens = np.where(tokens < 0, eos_id, tokens)
    cells = conditional_lib.index(tokens, vocab_size)
    # One more cell, of probability 0, for strings with invalid tokens.
    is_token = (tokens >= 0) & (tokens < vocab_size)
    cells = np.where(is_token.all(axis=1), cells, law.size)
    return np.bincount(cells, minlength=law.size + 1), np.append(law, 0.0)

  return chi_square.test(group(number) for number in range(len(laws)))


@dataclasses.dataclass(frozen=True)
class Acceptance:
  """The mean number of drafts kept in a round, measured and predicted."""

  measured: float
  predicted: float
  # The standard error of `measured` under the law.
  error: float
  THRESHOLD = 5.0

  @property
  def statistic(self) -> float:
    """The difference in standard errors; by chance it reaches 5 once in 2e6."""
    return abs(self.measured - self.predicted) / self.error

  @property
  def passed(self) -> bool:
    """Whether the two agree."""
    return self.statistic <= self.THRESHOLD


def acceptance(
  sample: Sample, laws: list[np.ndarray], round: int = 0
) -> Acceptance:
  """Compares the mean number of drafts that a round keeps with its exact law.

  Args:
    sample: from `draw`, with at least (K + 1) * (round + 1) tokens, because
      drafts are shorter at the end of a row.
    laws: for each group the distribution [K + 1] of the number of kept drafts.
    round: counted from 0.
  """
  measured, predicted, variance = 0.0, 0.0, 0.0
  size = len(sample.tokens)
  for number, law in enumerate(laws):
    kept = sample.of_group(number).accepted[:, round]
    count = np.arange(law.size)
    mean = law @ count
    measured += float(kept.sum())
    predicted += float(kept.size * mean)
    variance += float(kept.size * (law @ (count - mean) ** 2))
  # Greedy rows have no variance: if all are greedy, no draft may be missing.
  error = max(math.sqrt(variance), 1 / (2 * Acceptance.THRESHOLD)) / size
  return Acceptance(
    measured=measured / size,
    predicted=predicted / size,
    error=error,
  )
