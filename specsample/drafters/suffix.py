"""A drafter that copies from remembered texts what followed the same tokens.

SuffixDecoding (Oliaro et al., 2411.04975) and, with a store that never changes,
REST (He et al., 2311.08252).
"""

from collections.abc import Mapping, Sequence
import dataclasses

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample import types
from specsample import widths as widths_lib
from specsample.drafter import Drafter
from specsample.drafters import fields
from specsample.drafters import ngram
from specsample.memory import store as store_lib
from specsample.types import Array, Draft, DraftKind, Params, Signals

# How likely a draft token is kept: the logistic function of a constant, the log
# of the number of matched tokens (earlier drafts included) and the log odds of
# its share. Fitted to greedy answers of SmolLM2-135M-Instruct, each with a
# store of the other answers. The constants are 0.6 below the fit: the source
# with the highest estimate drafts, which is usually too high, and sampled
# answers repeat less. Each row then learns its own correction.
_OWN_TEXT = (-1.75, 1.63, 0.0)
_STORE = (-1.97, 0.81, 0.70)
# Estimates fall into this many bins, each with a correction of its own.
_NUM_BINS = 8


@types.pytree
class SuffixState:
  """The last proposal of each source, and how often it was right.

  Source 0 is the row's own text; the stores follow.
  """

  tokens: Array  # [B, sources, K] int32, -1 after the last
  estimate: Array  # [B, sources, K] float32, before correction
  length: Array  # [B] int32, tokens before the round
  tried: Array  # [B, sources, bins] float32, tokens whose outcome is known
  kept: Array  # [B, sources, bins] float32, those of them that were right


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suffix(Drafter):
  """A drafter that continues the longest suffix that occurred before.

  It looks in the row's own text, as `Ngram` does, and in the stores of
  params['drafter'], a dictionary of `store.Store`. The source with the largest
  expected number of kept tokens drafts, if that number is at least `min_kept`;
  otherwise nothing is drafted, and the round is a pass over one token. Each row
  corrects its estimates by their outcomes, including in rounds without drafts.

  The longest draft of a batch sets the width of the round for all rows. With
  `costs` the batch decides as a whole: all rows draft up to the length that
  maximises the expected tokens of the batch per cost of the round. How much a
  row drafts then depends on the rows beside it; its distribution does not, and
  neither do its tokens at temperature 0.

  Attributes:
    num_draft_tokens: K.
    max_match: the longest suffix to look for.
    min_kept: draft only if at least this many tokens are expected to be kept.
      Drafting pays from t(K + 1) / t(1) - 1 on, where t(n) is the time of a
      pass over n tokens.
    costs: [K + 1] costs of a round with 0, 1, ... K drafts in each row of the
      batch, in any unit, as `choosing.costs` measures them; further entries are
      ignored. They replace `min_kept`.
    num_places: the most occurrences of a suffix in a store that vote.
    strength: pseudo-count: weight of the first estimate, in tokens.
    decay: factor on older outcomes, per round.
  """

  num_draft_tokens: fields.DraftLength
  max_match: settings.Count = 8
  min_kept: settings.NotNegative = 0.7
  costs: Sequence[float] | None = None
  num_places: settings.Count = 32
  strength: settings.Positive = 8.0
  decay: settings.Share = 0.98

  def _check(self):
    if self.min_kept > self.num_draft_tokens:
      raise ValueError(
        f'min_kept is {self.min_kept}, but a draft has only '
        f'{self.num_draft_tokens} tokens: give at most as many'
      )
    if self.costs is not None:
      costs = widths_lib.check_costs(self.costs, self.num_draft_tokens)
      object.__setattr__(self, 'costs', costs)

  @property
  def widths(self) -> tuple[int, ...]:
    """See `Drafter`: 0, K, and the widths that `costs` favour."""
    return widths_lib.ladder(self.costs or (), self.num_draft_tokens)

  def with_store(self, params, name, store):
    return params | {'drafter': {**_stores(params), name: store}}

  def init(self, params, batch_size, max_length):
    del max_length
    sources = 1 + len(_stores(params))
    zeros = lambda dtype, *sizes: sharding.zeros(
      (batch_size, *sizes), dtype, 'batch', *[None] * len(sizes)
    )
    return SuffixState(
      tokens=zeros(jnp.int32, sources, self.num_draft_tokens) - 1,
      estimate=zeros(jnp.float32, sources, self.num_draft_tokens),
      length=zeros(jnp.int32),
      tried=zeros(jnp.float32, sources, _NUM_BINS),
      kept=zeros(jnp.float32, sources, _NUM_BINS),
    )

  def propose(self, params, draw, warp, tokens, length, state):
    del draw, warp
    found, estimate = self._look_up(params, tokens, length)
    chance = jax.vmap(self._corrected)(estimate, state)
    expected = jnp.sum(jnp.cumprod(chance, axis=-1), axis=-1)  # [B, sources]
    best = jnp.argmax(expected, axis=-1)[:, None]
    of_best = lambda x: indexing.at(x, best)[:, 0]
    chance = of_best(chance)
    if self.costs is None:
      pays = indexing.at(expected, best) >= self.min_kept
    else:
      # Every round emits a token in each row that is not done.
      is_live = length > state.length
      width = widths_lib.best(chance, is_live, self.costs, self.widths)
      pays = jnp.arange(self.num_draft_tokens) < width
    draft = Draft(
      tokens=jnp.where(pays, of_best(found), -1),
      probs=None,
      kind=DraftKind.POINT_MASS,
      signals=_signals(jnp.where(pays, chance, 0)),
    )
    return draft, dataclasses.replace(
      state, tokens=found, estimate=estimate, length=length
    )

  def pause(self, params, tokens, length, state):
    """See `Drafter`: drafts that are not used are compared too."""
    return self.propose(params, None, None, tokens, length, state)[1]

  def observe(self, params, tokens, count, output, verdict, state):
    del params, output
    if verdict is None:
      return state
    return jax.vmap(self._learned)(tokens, count, verdict, state)

  def _look_up(self, params, tokens, length):
    """Returns tokens and estimates of each source, both [B, sources, K]."""

    def of_row(tokens, length, stores):
      own, matched = ngram.longest_match(
        tokens, length, self.max_match, self.num_draft_tokens
      )
      drafted = [jnp.where(matched > 0, own, -1)]
      estimates = [_estimate(_OWN_TEXT, matched, jnp.full(own.shape, 0.5))]
      for store in stores.values():
        found = store_lib.look_up(
          store,
          tokens,
          length,
          max_match=self.max_match,
          num_tokens=self.num_draft_tokens,
          num_places=self.num_places,
        )
        drafted.append(found.tokens)
        estimates.append(_estimate(_STORE, found.matched, found.share))
      return [jnp.stack(drafted), jnp.stack(estimates)]

    # Each device looks up its own rows; the stores are replicated.
    stores = dict(_stores(params))
    whole = jax.tree.map(lambda x: (None,) * x.ndim, stores)
    found, estimate = sharding.map_parts(
      jax.vmap(of_row, in_axes=(0, 0, None)),
      (tokens, length, stores),
      (('batch', None), ('batch',), whole),
      result=[('batch', None, None)] * 2,
    )
    return found, jnp.where(found >= 0, estimate, 0)

  def _corrected(self, estimate: Array, state: SuffixState) -> Array:
    """Corrects estimates [sources, K] by the outcomes of similar ones."""
    bins = _bin(estimate)
    tried = jnp.take_along_axis(state.tried, bins, axis=-1)
    kept = jnp.take_along_axis(state.kept, bins, axis=-1)
    chance = (kept + self.strength * estimate) / (tried + self.strength)
    return jnp.where(estimate > 0, chance, 0)

  def _learned(self, tokens, count, verdict, state) -> SuffixState:
    """Updates one row's state; it learns nothing after a wrong token."""
    place = jnp.arange(self.num_draft_tokens)
    emitted = jnp.where(
      place < verdict.num_accepted, tokens[1 + place], verdict.next_token
    )
    right = (emitted == state.tokens) & (place < count)
    right_so_far = jnp.cumprod(right, axis=-1)
    before = jnp.pad(right_so_far[:, :-1], ((0, 0), (1, 0)), constant_values=1)
    known = (before > 0) & (place < count) & (state.tokens >= 0)
    in_bin = jax.nn.one_hot(_bin(state.estimate), _NUM_BINS)
    add_up = lambda flags: jnp.sum(in_bin * flags[..., None], axis=1)
    # A row that is done learns nothing, and forgets nothing.
    decay = jnp.where(count > 0, self.decay, 1.0)
    return dataclasses.replace(
      state,
      tried=decay * state.tried + add_up(known),
      kept=decay * state.kept + add_up(known & right),
    )


def _stores(params: Params) -> Mapping[str, store_lib.Store]:
  """Returns the stores by name; none if there are no parameters."""
  stores = params.get('drafter', {})
  if not isinstance(stores, Mapping):
    raise ValueError(
      f"params['drafter'] is of type {type(stores).__name__}, but Suffix "
      "reads stores by name: give {'store': store.build(...)}, or leave it out"
    )
  for name, store in stores.items():
    if not isinstance(store, store_lib.Store):
      raise ValueError(
        f"params['drafter'][{name!r}] is of type {type(store).__name__}, but "
        "Suffix reads stores: give {'store': store.build(...)}, or leave it out"
      )
  return stores


def _estimate(weights, matched: Array, share: Array) -> Array:
  """Estimates how likely each of K tokens is kept; 0 if nothing matched."""
  constant, of_match, of_share = weights
  so_far = jnp.maximum(matched, 1) + jnp.arange(share.size)
  share = jnp.clip(share, 1e-3, 1 - 1e-3)
  odds = constant + of_match * jnp.log(so_far)
  odds += of_share * jnp.log(share / (1 - share))
  return jnp.where(matched > 0, jax.nn.sigmoid(odds), 0)


def _bin(estimate: Array) -> Array:
  return jnp.minimum((estimate * _NUM_BINS).astype(jnp.int32), _NUM_BINS - 1)


def _signals(chance: Array) -> Signals:
  """Returns signals that follow from how likely each token is kept."""
  log_prob = jnp.log(chance)
  rest = 1 - chance
  entropy = -jax.scipy.special.xlogy(chance, chance)
  entropy -= jax.scipy.special.xlogy(rest, rest)
  return Signals(
    log_prob=log_prob,
    max_log_prob=log_prob,
    rank=jnp.zeros_like(chance, jnp.int32),
    entropy=entropy,
    confidence=chance,
  )
