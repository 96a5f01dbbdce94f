"""Replays a trace with other rules and policies.

No model is run. The drafts of each round are cut as the library's policies
decide, and the library's `law` of a rule is evaluated on the recorded
distributions, so the number of kept drafts is an expectation without sampling
noise.

A replay is approximate in these ways:

* Rounds begin where those of the recorded run began. With another rule or draft
  length, some of them would have begun elsewhere.
* A policy can make drafts shorter, never longer. The cost of drafting and
  scoring them is taken from a table of costs for one row: for a tree by its
  depth, and at the end of a text as if no more had been drafted than could be
  emitted.
* A draft that is cut after the drafter has run costs a pass of the drafter but
  none of the target. The table has only both together, so the speed is between
  two bounds: such drafts cost as much as verified ones, or nothing. How many
  drafts the drafter of the recorded run was asked for is not known, so all of
  them are assumed.
* A policy with a state learns from numbers of kept drafts that are drawn from
  the law with a seed, and continues with the next recorded round.
* The tokens without columns of their own are summed up (trace_file.py). That is
  exact for the token rule, for point masses, and if all tokens have a column.
* The kind of the drafts is the recorded one. Rules that do not take it raise
  ValueError, and `Coupled` does so for drawn drafts.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from experiments.reporting import intervals
from experiments.traces import rounds as rounds_lib
from experiments.traces import trace_file
from specsample import checks
from specsample import cost
from specsample import drafts
from specsample import sampling
from specsample import types
from specsample.policies import decision
from specsample.policies import policy as policy_lib
from specsample.types import Array, Draft, DraftKind, Verifier

# The name of the row for the recorded run itself.
RECORDED = 'recorded'


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Variant:
  """A rule, and the policies that cut its drafts."""

  verify: Verifier
  policies: Sequence[policy_lib.Policy] = ()


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Replay:
  """The settings of a replay.

  Attributes:
    variants: the rules and policies to replay, by their names in the table.
    costs: costs of rounds of 0, 1, ... drafts, in rounds of plain decoding, as
      `python -m experiments.length_costs` prints them (`policies.Fastest` takes
      any unit). If None, no speed is predicted.
    widths: increasing numbers of drafts that end with K, as in `types.Drafter`.
      A round costs as much as one with the first of these numbers that holds
      its drafts, so a round without a draft costs a plain round if 0 is one of
      them. Leave it empty if `costs` were measured with the widths.
    seed: for the draws that policies with a state learn from.
  """

  variants: Mapping[str, Variant]
  costs: Sequence[float] | None = None
  widths: Sequence[int] = ()
  seed: int = 0

  def __post_init__(self):
    """Raises ValueError without variants, or if widths do not fit the costs."""
    if not self.variants:
      raise ValueError('Replay.variants is empty: name at least one')
    checks.seed('Replay.seed', self.seed)
    lengths = range(len(self.costs or ()))
    if self.widths and (
      list(self.widths) != sorted({*self.widths} & {*lengths})
      or self.widths[-1] != lengths[-1]
    ):
      raise ValueError(
        f'Replay.widths are {tuple(self.widths)}, but Replay.costs has '
        f'{len(lengths)} numbers: give increasing numbers of draft tokens that '
        'end with that of the last cost'
      )

  @property
  def round_costs(self) -> Sequence[float] | None:
    """The costs of rounds of 0, 1, ... drafts with these widths, or None."""
    if self.costs is None or not self.widths:
      return self.costs
    lengths = range(len(self.costs))
    return [self.costs[cost.width_of(i, self.widths)] for i in lengths]


@types.pytree
class Replayed:
  """The outcome of each round, [T, P] float32; 0 where there was no round."""

  drafted: Array  # length of the draft; the depth of a tree
  asked: Array  # as `drafted`, with what was cut after the drafter had run
  kept: Array  # expected number of emitted draft tokens
  tokens: Array  # expected number of emitted tokens, drafts and the next one
  variance: Array  # of the tokens
  rounds: Array  # 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """The means of a variant per round, over all prompts."""

  variant: str
  lossless: bool | None  # None for the recorded run
  drafted: float
  kept: float
  tokens: float
  tokens_ci95: list[float] | None  # over prompts; None for fewer than three
  tokens_sd: float  # of a live run over just these rounds, around `tokens`
  # Tokens per cost, which is 1 for plain decoding; None without costs. Drafts
  # asked for but cut count as verified in `speed`, as free in `most_speed`.
  speed: float | None
  most_speed: float | None


def rows(trace: trace_file.Trace, replay: Replay) -> list[Row]:
  """Returns the row of the recorded run, then one per variant.

  Raises:
    ValueError: a variant does not take these drafts.
  """
  rounds = rounds_lib.of_trace(trace)
  costs = replay.round_costs
  found = [_row(RECORDED, None, recorded(trace), costs)]
  for name, variant in replay.variants.items():
    try:
      replayed = run(rounds, variant, seed=replay.seed)
      found.append(_row(name, variant.verify.lossless, replayed, costs))
    except ValueError as error:
      raise ValueError(f'variant {name!r}: {error}') from error
  return found


def recorded(trace: trace_file.Trace) -> Replayed:
  """Returns the outcome of the rounds in the recorded run."""
  arrays: dict[str, Any] = trace.arrays
  draft = Draft(
    tokens=arrays['tokens'],
    probs=None,
    kind=DraftKind.POINT_MASS,
    parents=arrays.get('parents'),
  )
  values = lambda x: rounds_lib.dense(arrays, np.asarray(x, np.float32))
  ones = np.ones(len(arrays['round']))
  depth, num_drafts = trace.header['depth'], arrays['tokens'].shape[1]
  return Replayed(
    drafted=values(drafts.depth(draft)),
    asked=values((num_drafts if depth is None else depth) * ones),
    kept=values(arrays['num_accepted']),
    tokens=values(arrays['num_emitted']),
    variance=values(0 * ones),
    rounds=values(ones),
  )


def run(
  rounds: rounds_lib.Rounds, variant: Variant, *, seed: int = 0
) -> Replayed:
  """Replays all rounds, those of each prompt in order.

  Raises:
    ValueError: the rule does not take the drafts' kind, or a policy lacks what
      it reads.
  """
  return _run(
    rounds,
    jax.random.key(seed),
    verify=variant.verify,
    policies=tuple(variant.policies),
  )


@functools.partial(jax.jit, static_argnames=('verify', 'policies'))
def _run(rounds, key, *, verify, policies):
  num_prompts, num_drafts = rounds.draft.tokens.shape[1:]
  depth = num_drafts if rounds.draft.depth is None else rounds.draft.depth
  states = tuple(policy.init(depth) for policy in policies)
  for_all = lambda x: jnp.broadcast_to(x, (num_prompts, *jnp.shape(x)))

  def play(states, inputs):
    one, key = inputs
    wanted = decision.wanted(policies, states, ~one.is_there, depth)
    keep, is_open = decision.decide(
      policies, states, wanted, ~one.is_there, one.draft
    )
    draft = drafts.cut(one.draft, keep)
    noted = decision.note(policies, states, draft)
    # The drafter runs after each open draft; some policies then cut its result.
    is_asked = drafts.of_parents(draft, is_open) & (wanted > 0)[:, None]
    asked = drafts.depth(drafts.cut(one.draft, is_asked))
    stop = jax.vmap(verify.law)(draft, one.target_probs).stop
    kept, tokens = _emitted(draft, one.is_end)
    drafted = drafts.depth(draft)
    node = jax.vmap(sampling.draw)(jax.random.split(key, num_prompts), stop)
    drawn = jnp.take_along_axis(kept, node[:, None], axis=1)[:, 0]
    is_there = one.is_there
    learned = decision.update(policies, noted, drafted, drawn, ~is_there)
    states = jax.tree.map(
      lambda new, old: jnp.where(
        is_there.reshape(-1, *(1,) * (new.ndim - 1)), new, old
      ),
      learned,
      states,
    )
    mean = jnp.sum(stop * tokens, axis=1)
    replayed = Replayed(
      drafted=drafted.astype(jnp.float32),
      asked=asked.astype(jnp.float32),
      kept=jnp.sum(stop * kept, axis=1),
      tokens=mean,
      variance=jnp.sum(stop * (tokens - mean[:, None]) ** 2, axis=1),
      rounds=jnp.ones(num_prompts),
    )
    return states, jax.tree.map(lambda x: jnp.where(is_there, x, 0), replayed)

  keys = jax.random.split(key, rounds.is_there.shape[0])
  _, replayed = jax.lax.scan(
    play, jax.tree.map(for_all, states), (rounds, keys)
  )
  return replayed


def _emitted(draft, is_end):
  """Counts the drafts and tokens emitted if a round stops at each node.

  Both are [B, N + 1]. Nothing is emitted after a draft that ends the text.
  """
  on_the_way = drafts.on_the_way(draft)
  ends = jnp.any(on_the_way & is_end[:, None], axis=-1)  # [B, N + 1]
  is_behind = ~drafts.of_parents(draft, ~ends[:, 1:])
  kept = jnp.sum(on_the_way & ~is_behind[:, None], axis=-1)
  return kept, kept + ~ends


def _row(name, lossless, replayed: Replayed, costs) -> Row:
  of_rounds = jax.tree.map(lambda x: np.asarray(x, np.float64), replayed)
  by_prompt = jax.tree.map(lambda x: x.sum(axis=0), of_rounds)
  rounds = by_prompt.rounds.sum()
  speed = lambda lengths: (
    None if costs is None else _speed(of_rounds, lengths, costs)
  )
  return Row(
    variant=name,
    lossless=lossless,
    drafted=float(by_prompt.drafted.sum() / rounds),
    kept=float(by_prompt.kept.sum() / rounds),
    tokens=float(by_prompt.tokens.sum() / rounds),
    tokens_ci95=intervals.interval(
      lambda sums: sums['tokens'] / sums['rounds'],
      {'tokens': by_prompt.tokens, 'rounds': by_prompt.rounds},
    ),
    tokens_sd=float(np.sqrt(by_prompt.variance.sum()) / rounds),
    speed=speed(of_rounds.asked),
    most_speed=speed(of_rounds.drafted),
  )


def _speed(of_rounds, lengths, costs):
  """Returns tokens per cost if rounds have `lengths` [T, P] drafts."""
  lengths = lengths.astype(np.int64)
  if lengths.max() >= len(costs):
    raise ValueError(
      f'Replay.costs has {len(costs)} numbers, but rounds have up to '
      f'{lengths.max()} draft tokens: give {lengths.max() + 1} numbers'
    )
  total = np.sum(np.asarray(costs, np.float64)[lengths] * of_rounds.rounds)
  return float(of_rounds.tokens.sum() / total)
