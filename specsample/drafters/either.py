"""Drafting from memory if that promises more, else with a trained drafter.

The hybrid of SuffixDecoding (Oliaro et al., 2411.04975), row by row.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample import types
from specsample.drafter import Drafter
from specsample.drafters import adaptive
from specsample.drafters import suffix
from specsample.policies import fastest
from specsample.policies import policy as policy_lib
from specsample.types import Array, Draft, DraftKind, Params


@types.pytree
class EitherState:
  """The states of both drafters, and which of them drafts in each row."""

  remembered: suffix.SuffixState
  trained: adaptive.AdaptiveState
  kept: Array  # [B] float32, running mean of the trained drafter's kept tokens
  is_remembered: Array  # [B] bool, rows that do without the trained drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Either(Drafter):
  """A drafter that proposes, in each row, the more promising of two drafts.

  A remembered draft promises its expected number of kept tokens. The trained
  drafter promises as many as it recently had kept in this row; if it drafts
  nothing, the remembered draft is used. If all rows use remembered drafts, the
  trained drafter does not run, and its caches miss nothing.

  The parameters are {'remembered': stores, 'trained': parameters}. A remembered
  token is a point mass. If the trained drafter draws its tokens, a remembered
  token has a one-hot row in `Draft.probs`, so that one kind holds for the whole
  batch. If it drafts trees, a remembered draft is a tree of one path.

  Attributes:
    remembered: a `Suffix`, which decides by its `min_kept` or `costs` whether
      it drafts; the number of tokens that it expects to be kept is compared.
    trained: drafts chains or trees of the target's tokens and can pause. An
      `Adaptive` also decides whether it drafts.
    prior_kept: the trained drafter's running mean of kept tokens at the start.
    decay: the decay of that mean, per round that the trained drafter drafts in.
  """

  remembered: Any
  trained: Any
  prior_kept: settings.NotNegative = 0.7
  decay: settings.Share = 0.9

  def _check(self):
    if not isinstance(self.remembered, suffix.Suffix):
      raise ValueError(
        f'remembered is {type(self.remembered).__name__}: give a Suffix, which '
        'says how many of its tokens it expects to be kept'
      )
    trained = self.trained
    if not isinstance(trained, adaptive.Adaptive):
      adaptive.check_pauses('Either.trained', trained)
      always = fastest.Fixed(trained.depth)
      trained = adaptive.Adaptive(drafter=trained, policies=(always,))
      object.__setattr__(self, 'trained', trained)
    trained = trained.with_most_kept(self.depth)
    object.__setattr__(self, 'trained', trained)

  @property
  def num_draft_tokens(self) -> int:
    """K of the longer draft, or N."""
    return max(self.remembered.num_draft_tokens, self.trained.num_draft_tokens)

  @property
  def depth(self) -> int:
    return max(self.remembered.depth, self.trained.depth)

  @property
  def widths(self) -> tuple[int, ...]:
    return tuple(sorted({*self.remembered.widths, *self.trained.widths}))

  @property
  def feature_layers(self) -> tuple[int, ...]:
    return self.trained.feature_layers

  @property
  def vocab_size(self) -> int | None:
    return self.trained.vocab_size

  @property
  def reads_logits(self) -> bool:
    return self.trained.reads_logits

  def with_store(self, params, name, store):
    of_memory, _ = _parts(params)
    stores = self.remembered.with_store(of_memory, name, store)['drafter']
    drafter = params.get('drafter', {}) | {'remembered': stores}
    return params | {'drafter': drafter}

  @property
  def policies(self) -> Sequence[policy_lib.Policy]:
    return self.trained.policies

  def untaught(self) -> tuple[policy_lib.State, ...]:
    return self.trained.untaught()

  def learned(self, state: EitherState) -> tuple[policy_lib.State, ...]:
    return self.trained.learned(state.trained)

  def init(self, params, batch_size, max_length):
    of_memory, of_trained = _parts(params)
    mean = sharding.zeros((batch_size,), jnp.float32, 'batch')
    return EitherState(
      remembered=self.remembered.init(of_memory, batch_size, max_length),
      trained=self.trained.init(of_trained, batch_size, max_length),
      kept=mean + self.prior_kept,
      is_remembered=sharding.zeros((batch_size,), bool, 'batch'),
    )

  def propose(self, params, draw, warp, tokens, length, state):
    of_memory, of_trained = _parts(params)
    copied, remembered = self.remembered.propose(
      of_memory, draw, warp, tokens, length, state.remembered
    )
    expected = jnp.sum(jnp.cumprod(copied.signals.confidence, -1), -1)
    is_remembered = (copied.tokens[:, 0] >= 0) & (expected >= state.kept)
    # The trained drafter need not draft for these rows.
    over = state.trained.over | is_remembered
    trained = dataclasses.replace(state.trained, over=over)
    drawn, trained = self.trained.propose(
      of_trained, draw, warp, tokens, length, trained
    )
    # If the trained drafter drafts nothing in a row, which it decides before it
    # draws, the remembered draft stays: the pass is equally wide for all rows.
    is_first = is_remembered | (drawn.tokens[:, 0] < 0)
    draft = _merged(is_first, copied, drawn, self.num_draft_tokens)
    return draft, dataclasses.replace(
      state, remembered=remembered, trained=trained, is_remembered=is_remembered
    )

  def pause(self, params, tokens, length, state):
    of_memory, of_trained = _parts(params)
    remembered = self.remembered.pause(
      of_memory, tokens, length, state.remembered
    )
    trained = self.trained.pause(of_trained, tokens, length, state.trained)
    return dataclasses.replace(
      state,
      remembered=remembered,
      trained=trained,
      is_remembered=jnp.ones_like(state.is_remembered),
    )

  def resume(self, params, tokens, length, state):
    _, of_trained = _parts(params)
    trained = self.trained.resume(of_trained, tokens, length, state.trained)
    return dataclasses.replace(state, trained=trained)

  def observe(self, params, tokens, count, output, verdict, state):
    observed = tokens, count, output, verdict
    of_memory, of_trained = _parts(params)
    trained = self.trained.observe(of_trained, *observed, state.trained)
    remembered = self.remembered.observe(of_memory, *observed, state.remembered)
    if verdict is None:
      return dataclasses.replace(state, trained=trained, remembered=remembered)
    of_trained = ~state.is_remembered
    # Whether remembered drafts were kept says nothing about the trained
    # drafter.
    policies = indexing.where(
      of_trained, trained.policies, state.trained.policies
    )
    drafted = of_trained & (state.trained.drafted > 0)
    mean = self.decay * state.kept + (1 - self.decay) * verdict.num_accepted
    return dataclasses.replace(
      state,
      remembered=remembered,
      trained=dataclasses.replace(trained, policies=policies),
      kept=jnp.where(drafted, mean, state.kept),
    )


def _parts(params: Params) -> list[Params]:
  """Returns the whole tree of parameters for each of the two drafters."""
  own = params.get('drafter', {})
  if not set(own) <= {'remembered', 'trained'}:
    raise ValueError(
      f"params['drafter'] has the keys {sorted(own)}: give only 'remembered', "
      "the stores, and 'trained', the trained drafter's parameters"
    )
  others = {key: value for key, value in params.items() if key != 'drafter'}
  return [
    others | ({'drafter': own[part]} if part in own else {})
    for part in ('remembered', 'trained')
  ]


def _merged(
  is_first: Array, first: Draft, second: Draft, num_drafts: int
) -> Draft:
  """Takes the first draft in rows where is_first [B] holds, else the second."""
  if second.kind not in (DraftKind.POINT_MASS, DraftKind.SAMPLED):
    raise ValueError(
      f'trained has drafts of kind {second.kind.value!r}, but Either takes '
      'only point masses and sampled tokens: give another trained drafter'
    )
  if second.parents is not None:
    first = _as_tree(first)
  first, second = _padded(first, num_drafts), _padded(second, num_drafts)
  probs = None
  if second.probs is not None:
    one_hot = first.tokens[..., None] == indexing.vocab_ids(
      second.probs.shape[-1]
    )
    probs = indexing.where(
      is_first, one_hot.astype(second.probs.dtype), second.probs
    )
  parents = depth = None
  if first.parents is not None and second.parents is not None:
    parents = indexing.where(is_first, first.parents, second.parents)
    depth = max(first.depth or 0, second.depth or 0)
  return Draft(
    tokens=indexing.where(is_first, first.tokens, second.tokens),
    probs=probs,
    kind=second.kind,
    parents=parents,
    depth=depth,
    num_children=second.num_children,
  )


def _as_tree(chain: Draft) -> Draft:
  """Returns a chain as a tree of one path."""
  batch, num_drafts = chain.tokens.shape
  parents = drafts.of_all_rows(range(num_drafts), batch)
  return dataclasses.replace(chain, parents=parents, depth=num_drafts)


def _padded(draft: Draft, num_drafts: int) -> Draft:
  """Pads the draft to `num_drafts` tokens, the new ones -1."""
  missing = num_drafts - draft.tokens.shape[1]
  ends = ((0, 0), (0, missing))
  pad = lambda x: jnp.pad(x, (*ends, *[(0, 0)] * (x.ndim - 2)))
  most = max(draft.num_children or (num_drafts,))
  is_chain = draft.parents is None
  return dataclasses.replace(
    jax.tree.map(pad, draft),
    tokens=jnp.pad(draft.tokens, ends, constant_values=-1),
    num_children=None if is_chain else (most,) * (num_drafts + 1),
  )
