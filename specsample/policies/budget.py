"""The number of nodes of a tree that promises the most tokens per second."""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from specsample import drafts
from specsample import settings
from specsample import types
from specsample.policies import patience as patience_lib
from specsample.policies import policy
from specsample.types import Array, Draft, DraftKind


@types.pytree
class BudgetState:
  """Statistics of a row's drafts; the sums decay."""

  promised: Array  # [D] float32, drafts of each depth that should be kept
  kept: Array  # [D] float32, those that were
  tokens: Array  # [] float32, emitted in rounds with drafts
  cost: Array  # [] float32, of these rounds
  lead: Array  # [] float32, tokens by which drafts are ahead at first
  latest: Array  # [D] float32, `promised` of the present round
  latest_cost: Array  # [] float32, its cost
  wait: patience_lib.Wait


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(patience_lib.Patient):
  """Maximises E[tokens] / cost over the best 0, w_1, w_2, ... nodes of a draft.

  The nodes are ranked by the probability that the drafter gives to their paths,
  times a factor for their depth: how many drafts of that depth were kept so
  far, over how many should have been (drafters are too sure of themselves far
  down). A pass is as wide in every row, so all rows of the batch share one w,
  which maximises (rows + the sum of the w largest probabilities of each) over
  the cost, for rows that are not done (the objective of DSpark's scheduler). If
  rounds with drafts have emitted less than plain decoding would have at their
  cost, the batch decodes plainly, and tries again after a wait that doubles
  each time the try itself emits no more than plain decoding would have.

  The choice reads the drafts themselves, which is exact for point masses alone:
  they are a function of the text. Drawn drafts are refused; `Fastest` and the
  filters serve them. A row's w depends on the rows beside it; its distribution
  does not, and neither do its tokens at temperature 0.

  Attributes:
    ladder: numbers of nodes, rising from 0 to N, for each of which the target's
      pass is compiled.
    costs: of the target's pass over that many nodes in every row, in any unit.
    drafting: the cost of making the draft, in the same unit.
    decay: decay factor of the sums, per round.
    strength: the weight, in drafts, of the prior for a depth's factor (the
      factor of the depth above; 1 at the first), and a head start of drafts
      over plain decoding, in tokens. The rows of a batch share the head start,
      and it decays, so that many rows, or a long run of small losses, still
      stop the drafts.
    patience, most_patience: see `patience.Patient`.
  """

  ladder: Sequence[int]
  costs: Sequence[float]
  drafting: settings.NotNegative = 0.0
  decay: settings.Share = 0.98
  strength: settings.Positive = 2.0
  patience: settings.Count = 8
  reads_token = True

  def _check(self):
    super()._check()
    ladder = tuple(self.ladder)
    is_ladder = len(ladder) > 1 and ladder[0] == 0
    is_ladder &= all(map(settings.is_count, ladder[1:]))
    if not is_ladder or ladder != tuple(sorted(set(ladder))):
      raise ValueError(
        f'ladder is {ladder}: give rising numbers of nodes that begin with 0, '
        'a plain pass, as in (0, 4, 16)'
      )
    costs = tuple(float(cost) for cost in self.costs)
    is_cost = len(costs) == len(ladder) and all(0 < x < math.inf for x in costs)
    if not is_cost:
      raise ValueError(
        f'costs are {costs}: give one above 0 for each of the '
        f'{len(ladder)} numbers of nodes in ladder'
      )
    object.__setattr__(self, 'ladder', ladder)
    object.__setattr__(self, 'costs', costs)

  def init(self, num_draft_tokens):
    zeros = jnp.zeros(num_draft_tokens, jnp.float32)
    nothing = jnp.float32(0)
    return BudgetState(
      promised=zeros,
      kept=zeros,
      tokens=nothing,
      cost=nothing,
      lead=jnp.float32(self.strength),
      latest=zeros,
      latest_cost=nothing,
      wait=self.first_wait(),
    )

  def length(self, state, over=False):
    """See `policy.Policy`: nothing, or whatever the drafter drafts."""
    wait = jax.lax.pmax(jnp.where(over, 0, state.wait.rounds), policy.ROWS)
    depth = state.kept.size
    return jnp.where(self._is_plain(state, over) & (wait > 0), 0, depth)

  def passes(self, draft, state, over=False):
    if draft.kind is not DraftKind.POINT_MASS:
      raise ValueError(
        'Budget looks at whole drafts before it cuts them, but tokens of kind '
        f'{draft.kind.value!r} were drawn, and keeping likely ones is biased: '
        'draft point masses, as LatticeTree and DynamicTree do, or choose '
        'Fastest'
      )
    num_nodes = draft.tokens.size
    if self.ladder[-1] != num_nodes:
      raise ValueError(
        f'ladder ends with {self.ladder[-1]}, but the drafter drafts '
        f'{num_nodes} nodes: end it with {num_nodes}'
      )
    chances = self.chances(draft, state)
    kept = jnp.cumsum(jnp.sort(chances, descending=True))
    tokens = 1 + jnp.pad(kept, (1, 0))[np.asarray(self.ladder)]
    tokens = policy.of_batch(tokens, over)
    promised = tokens / (self.drafting + np.asarray(self.costs, np.float32))
    width = jnp.asarray(self.ladder)[jnp.argmax(promised)]
    return policy.ranks(draft, chances) < width

  def chances(self, draft: Draft, state: BudgetState) -> Array:
    """Returns how likely each node is to be kept, [N] float32."""
    factor = self._factors(state)
    found = self._promised(draft) * factor[drafts.depths(draft) - 1]
    found = jnp.where(draft.tokens >= 0, jnp.minimum(found, 1), 0)
    # No node is more likely than its parent, whatever the factors say.
    before = drafts.on_the_way(draft)[1:]
    return jnp.min(jnp.where(before, found, jnp.inf), axis=-1)

  def _promised(self, draft):
    """Returns the probability that the drafter gives to each path, [N]."""
    log_prob = self.signals(draft).log_prob
    return jnp.exp(policy.along(draft, log_prob))

  def _factors(self, state):
    """Returns the factor of each depth, [D]; what is above is the prior."""

    def after(above, of_depth):
      kept, promised = of_depth
      factor = (kept + self.strength * above) / (promised + self.strength)
      return factor, factor

    _, factors = jax.lax.scan(after, 1.0, (state.kept, state.promised))
    return factors

  def note(self, draft, state):
    """See `policy.Policy`: what the drafts that are verified promise."""
    is_at = drafts.depths(draft)[:, None] == 1 + jnp.arange(state.kept.size)
    is_at &= (draft.tokens >= 0)[:, None]
    of_nodes = self._promised(draft)[:, None]
    promised = jnp.sum(jnp.where(is_at, of_nodes, 0), axis=0)
    most = jax.lax.pmax(jnp.sum(draft.tokens >= 0), policy.ROWS)
    rung = jnp.sum(most > jnp.asarray(self.ladder))
    cost = self.drafting + jnp.asarray(self.costs, jnp.float32)[rung]
    return dataclasses.replace(state, latest=promised, latest_cost=cost)

  def update(self, drafted, kept, state, over=False):
    del drafted
    tried = self.length(state, over) > 0
    is_there = state.latest > 0
    fade = lambda old, new, which: jnp.where(which, self.decay * old + new, old)
    new = dataclasses.replace(
      state,
      promised=fade(state.promised, state.latest, is_there),
      kept=fade(state.kept, jnp.arange(state.kept.size) < kept, is_there),
      tokens=fade(state.tokens, 1.0 + kept, tried),
      cost=fade(state.cost, state.latest_cost, tried),
      lead=fade(state.lead, 0.0, tried),
      latest=jnp.zeros_like(state.latest),
    )
    # In a batch, some row nearly always keeps something: what counts is whether
    # all rows together have gained by it.
    gained = 1.0 + kept - state.latest_cost / self.costs[0]
    in_vain = policy.of_batch(gained, over) <= 0
    wait = self.wait_after(
      state.wait,
      tried=tried,
      in_vain=in_vain,
      is_plain=self._is_plain(new, over),
    )
    return dataclasses.replace(new, wait=wait)

  def _is_plain(self, state, over):
    """Returns whether plain decoding would have emitted more, [] bool."""
    ahead = state.tokens - state.cost / self.costs[0]
    lead = policy.of_batch(state.lead, over) / jnp.maximum(
      1, policy.of_batch(1, over)
    )
    return policy.of_batch(ahead, over) + lead < 0
