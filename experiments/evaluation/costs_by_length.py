"""The cost of a round of each draft length, timed in the decoding loop."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments import methods as methods_lib
from experiments.command import clock
from experiments.command import environment
from experiments.command import progress as progress_lib
from experiments.evaluation import evaluation as evaluation_lib
from experiments.reporting import result_file
from experiments.reporting import tables
import specsample
from specsample import drafters
from specsample.policies import policy as policy_lib

# Rounds per timed call, and how often each length is timed, in turns.
_ROUNDS, _REPEATS = 8, 25


@dataclasses.dataclass(frozen=True)
class Asked(policy_lib.Length):
  """A policy that drafts as many tokens as the caller wrote into its state."""

  def init(self, num_draft_tokens):
    """See `policy.Policy`."""
    return jnp.int32(num_draft_tokens)

  def length(self, state, over):
    """See `policy.Policy`."""
    del over
    return state

  def update(self, drafted, kept, state, over):
    """See `policy.Policy`."""
    del drafted, kept, over
    return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Milliseconds per round of 0, 1, ... K drafts, and of plain decoding."""

  ms: list[float]  # [K + 1]
  plain_ms: float  # NoDraft in the same loop

  @property
  def relative(self) -> tuple[float, ...]:
    """The costs [K + 1] relative to a round of plain decoding."""
    return tuple(round(ms / self.plain_ms, 3) for ms in self.ms)


def work(
  evaluation: evaluation_lib.Evaluation,
) -> dict[str, methods_lib.Method]:
  """Returns the adaptive methods, made to draft any length on request.

  If the drafters of several methods differ only in their policies, only the
  first of these methods is returned.

  Raises:
    ValueError: no method is adaptive, or max_new_tokens is too small.
  """
  found: dict[str, methods_lib.Method] = {}
  for name, method in evaluation.methods.items():
    if not isinstance(method.drafter, drafters.Adaptive):
      continue
    drafter = dataclasses.replace(method.drafter, policies=(Asked(),))
    if all(other.drafter != drafter for other in found.values()):
      found[name] = dataclasses.replace(method, drafter=drafter)
  if not found:
    raise ValueError(
      f'none of the methods {sorted(evaluation.methods)} is adaptive: give one '
      'made by adaptive.adaptive'
    )
  depth = max(method.drafter.depth for method in found.values())
  if evaluation.max_new_tokens < (_ROUNDS + 1) * (depth + 1):
    raise ValueError(
      f'Evaluation.max_new_tokens is {evaluation.max_new_tokens}, but the '
      f'timed rounds may emit {(_ROUNDS + 1) * (depth + 1)} tokens: allow at '
      'least that many'
    )
  return found


def measure(
  evaluation: evaluation_lib.Evaluation,
  work: Mapping[str, methods_lib.Method],
  tokens: Sequence[list[int]],
  progress: progress_lib.Bar,
) -> dict[str, Costs]:
  """Returns the median times of rounds after a batch of typical prompts.

  Plain decoding and the draft lengths take turns.
  """
  typical = evaluation.typical(tokens)
  plain = methods_lib.Method(drafters.NoDraft())
  with progress(len(work)) as step:
    found = {}
    for name, method in work.items():
      step(f'rounds of {name}')
      of_method = functools.partial(_round_ms, evaluation, method, typical)
      of_plain = functools.partial(_round_ms, evaluation, plain, typical)
      lengths = range(method.drafter.depth + 1)
      taken: dict[int, list[float]] = {length: [] for length in (-1, *lengths)}
      for repeat in range(_REPEATS + 1):
        for length, of_length in taken.items():
          ms = of_plain(None) if length < 0 else of_method(length)
          if repeat:  # the first one compiles
            of_length.append(ms)
      medians = {length: float(np.median(ms)) for length, ms in taken.items()}
      found[name] = Costs(
        ms=[medians[length] for length in lengths], plain_ms=medians[-1]
      )
  return found


def _round_ms(evaluation, method, prompts, length):
  # No answer may end while its rounds are timed.
  setup = dataclasses.replace(evaluation.setup(method), stop=specsample.Stop())
  state = setup.prefill(prompts)
  if length is not None:
    (asked,) = state.draft.policies
    draft = dataclasses.replace(
      state.draft, policies=(jnp.full_like(asked, length),)
    )
    state = dataclasses.replace(state, draft=draft)
  # One untimed round, so that no work of the prefill is timed.
  state = jax.block_until_ready(setup.advance(state, 1))
  before = np.max(state.round)
  state, seconds = clock.seconds(setup.advance, state, _ROUNDS)
  # There are fewer rounds if the rows stop, for example for lack of room.
  rounds = np.max(state.round) - before
  if not rounds:
    raise ValueError(
      'the prompts leave no room for a round that can be timed: give shorter '
      'ones'
    )
  return 1e3 * seconds / rounds


def write(out: pathlib.PurePath, costs: Mapping[str, Costs]) -> None:
  """Writes costs.json, with the environment in which it was measured."""
  record = {name: dataclasses.asdict(found) for name, found in costs.items()}
  result_file.write(
    out / 'costs.json', {'environment': environment.describe(), 'costs': record}
  )


def show(out: pathlib.PurePath, costs: Mapping[str, Costs]) -> None:
  """Prints the costs, and the setting that passes them to `Fastest`."""
  console = tables.console()
  for name, found in costs.items():
    ms = ', '.join(f'{x:.1f}' for x in found.ms)
    console.print(
      f'{name}: a round of 0, 1, ... draft tokens takes {ms} ms, a round of '
      f'plain decoding {found.plain_ms:.1f} ms'
    )
    console.print(f'  policies.Fastest.costs = {found.relative}')
  console.print(f'written to {out / "costs.json"}')
