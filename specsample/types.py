"""The values of speculative decoding, the two protocols, and the letters.

Letters used for array dimensions everywhere in the library:

  B batch    T tokens fed at once    S sequence buffer    K drafted tokens
  N draft nodes (N = K on a chain)   V vocabulary         D model width
  L layers   M new tokens at most    V' tokens that are drafted, of V

`target` is the model whose distribution is reproduced, `draft` the guess.
Arrays are written for one sequence where a docstring says so; `decode` maps
them over the batch.
"""

from collections.abc import Callable
import dataclasses
import enum
from typing import Any, dataclass_transform, Protocol

import jax
import numpy as np

Array = jax.Array
# An argument that may still be on the host.
ArrayLike = jax.Array | np.ndarray
# Nested dictionaries of arrays: {'target': ..., 'drafter': ...} at the top.
Params = Any
# A pytree of arrays that a model or drafter owns; decode never looks inside.
Cache = Any
DrafterState = Any


def static(**kwargs: Any) -> Any:
  """Declares a pytree field that is structure (hashable), not an array."""
  return dataclasses.field(metadata={'static': True}, **kwargs)


@dataclass_transform(
  kw_only_default=True,
  frozen_default=True,
  field_specifiers=(static, dataclasses.field),
)
def pytree(cls):
  """Makes `cls` a frozen keyword-only dataclass that JAX can traverse.

  Fields declared with `static()` are part of the tree's structure, so that a
  change in one of them is a new trace.
  """
  cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
  return jax.tree_util.register_dataclass(cls)


class DraftLaw(enum.Enum):
  """How the tokens of a draft came about; what a verifier is exact for.

  The tokens before one are those on the way to it. `probs[i]` is always what
  token i was really drawn from, given those before it and its earlier siblings.

  POINT_MASS: token i is a function of the tokens before it (n-gram lookup), and
    so are its siblings (the k most likely ones).
  SAMPLED: token i was drawn from `Draft.probs[i]`. Siblings have the same
    distribution, and were drawn independently.
  WITHOUT_REPLACEMENT: of siblings none is there twice. The first was drawn from
    its `probs`, which the others have too, but for their earlier siblings.
  TOP_AND_SAMPLED: of siblings the last was drawn, and the others are the most
    likely tokens of a distribution of which it got the rest.
  """

  POINT_MASS = 'point_mass'
  SAMPLED = 'sampled'
  WITHOUT_REPLACEMENT = 'without_replacement'
  TOP_AND_SAMPLED = 'top_and_sampled'


class StopReason(enum.IntEnum):
  """Why a row stopped."""

  RUNNING = 0
  EOS = 1
  SEQUENCE = 2
  MAX_NEW_TOKENS = 3
  CACHE_FULL = 4
  INVALID_LOGITS = 5


class Origin(enum.IntEnum):
  """Where an emitted token came from.

  CORRECTION replaces the first rejected draft; BONUS follows a draft that was
  accepted whole; PLAIN is the token of a round that drafted nothing (and every
  token of autoregressive decoding).
  """

  PROMPT = 0
  ACCEPTED = 1
  CORRECTION = 2
  BONUS = 3
  PLAIN = 4


@pytree
class ModelOutput:
  """What one pass of a model over T tokens returns."""

  logits: Array  # [B, T, V], of the token after each input
  hidden: Array  # [B, T, D], the vectors that `unembed` reads
  features: tuple[
    Array, ...
  ] = ()  # [B, T, D] each, outputs of the asked layers


@pytree
class Signals:
  """What a drafter says of its drafts by itself, for one sequence.

  Of its own softmax, before temperature, penalties and truncation: at
  temperature 0 too it says how sure the drafter is.
  """

  log_prob: Array  # [N] float32, of each token
  max_log_prob: Array  # [N] float32, of the most likely one in its place
  rank: Array  # [N] int32, how many are more likely in its place
  entropy: Array  # [N] float32, in nats, of the distribution in its place
  # [N] float32, a trained estimate of how likely it is to be kept if those
  # before are, which does not read the token; None where there is none.
  confidence: Array | None = None


@pytree
class Draft:
  """A drafted chain of one sequence, or a tree.

  A chain shorter than K is padded with token -1 and rows of zero probability.
  So are nodes of a tree that are not there, with all behind them.
  """

  tokens: Array  # [N] int32, -1 where nothing was drafted
  probs: Array | None  # [N, V] after warping; None for a point mass
  law: DraftLaw = static()
  # [N] int32, the node before each, as in `tree`; None for a chain.
  parents: Array | None = None
  depth: int | None = static(default=None)  # of a tree, its longest path
  # Of a tree [N + 1], the most children that each node may have; None is N.
  num_children: tuple[int, ...] | None = static(default=None)
  signals: Signals | None = None  # of which filters and lengths follow


@pytree
class Law:
  """A verifier's distribution given one draft, for one sequence.

  On a chain node i is the i-th draft, and 0 is none.
  """

  stop: Array  # [N + 1], probability that the accepted drafts end at node i
  next: Array  # [N + 1, V], distribution of the token after them


@pytree
class Verdict:
  """A verifier's decision for one sequence."""

  num_accepted: Array  # [] int32, how many drafts are kept, one behind another
  next_token: Array  # [] int32, the token after them
  path: Array | None = None  # [P] int32, their nodes in a tree, then 0


@pytree
class TokenCounts:
  """What the penalties count."""

  prompt: Array  # [B, V] int32, occurrences in the prompt
  generated: Array  # [B, V] int32, occurrences in the emitted tokens


@pytree
class DecodeState:
  """Everything the decoding loop carries; the batch axis is always first.

  The last token of every row is *pending*: in `tokens`, but in no cache.
  """

  key: Array  # [B] PRNG keys, one a row
  request_id: Array  # [B] int32
  prompt_length: Array  # [B] int32
  length: Array  # [B] int32, tokens so far, the prompt counted in
  limit: Array  # [B] int32, the length at which the row stops
  limit_reason: Array  # [B] int32, the StopReason of reaching it
  done: Array  # [B] bool
  stop_reason: Array  # [B] int32, a StopReason
  round: Array  # [B] int32, passes of the target since the prefill
  tokens: Array  # [B, S] int32
  log_probs: Array  # [B, S] float32, of the target before warping
  origin: Array  # [B, S] int8, an Origin
  emit_round: Array  # [B, S] int32, the round that emitted the token
  proposed: Array  # [B, K + 1] int32, rounds that drafted i tokens
  accepted: Array  # [B, K + 1] int32, rounds that emitted i drafted tokens
  sampling: Any  # Sampling with [B] leaves
  counts: TokenCounts | None  # None where no penalty is set
  cache: Cache
  draft: DrafterState
  num_draft_tokens: int = static()  # N, for which there is room behind a row


@pytree
class Output:
  """The result of `generate`: emitted tokens only, the prompt left out."""

  tokens: Array  # [B, M] int32, 0 after a row's length
  lengths: Array  # [B] int32, emitted tokens, the stop token counted in
  log_probs: Array  # [B, M] float32, of the target before warping
  origin: Array  # [B, M] int8, an Origin, 0 after a row's length
  emit_round: Array  # [B, M] int32
  rounds: Array  # [B] int32, passes of the target
  proposed: Array  # [B, K + 1] int32, rounds that drafted i tokens
  accepted: Array  # [B, K + 1] int32, rounds that emitted i drafted tokens
  stop_reason: Array  # [B] int32, a StopReason


# warp(logits [B, V], drafted [B, n]) -> probs [B, V]: the row's sampling
# settings, with the drafted tokens (-1 is skipped) counted by the penalties.
Warp = Callable[[Array, Array], Array]


class Draw(Protocol):
  """Draws drafts; equal arguments give equal tokens."""

  def __call__(
    self, probs: Array, position: Array, node: int | None = None
  ) -> Array:
    """Tokens [B] of probs [B, V], for that index [B] of the sequence.

    In a tree several nodes are for one, and each has draws of its own.
    """


class Model(Protocol):
  """A causal language model as pure functions of its parameters.

  Implementations are frozen dataclasses of static configuration.
  """

  @property
  def vocab_size(self) -> int:
    """V. Ids of padding among them have logits of -inf."""

  @property
  def dim(self) -> int:
    """D, of the vectors that `unembed` reads."""

  @property
  def dtype(self) -> str:
    """That of the computation: 'float32' or 'bfloat16'."""

  @property
  def max_length(self) -> int:
    """The longest sequence the model was made for."""

  def init_cache(
    self, batch_size: int, max_length: int, max_new: int | None = None
  ) -> Cache:
    """An empty cache with room for `max_length` tokens a row.

    With room for none, `apply` reads whole sequences and leaves it empty.
    `max_new` is the most tokens that are fed before a commit; None is no limit.
    Layers that see a window only then keep no more than that and the window.
    """

  def apply(
    self,
    params: Params,
    tokens: Array,
    cache: Cache,
    features: tuple[int, ...] = (),
    parents: Array | None = None,
  ) -> tuple[ModelOutput, Cache]:
    """Feeds tokens [B, T] behind each row's committed prefix.

    Returns the output and a cache that holds all T tokens of every row;
    `commit` then says how many of them stay. `features` names layers whose
    outputs are returned too, -1 the embedding; ValueError if one is missing.

    With parents [B, W - 1] the last W entries of each row, those T included,
    are a tree (`tree`), the first of them its node 0: each sees what is before
    the tree and the nodes on the way to it, whose number is its position there.
    """

  def commit(
    self, cache: Cache, length: Array, path: Array | None = None
  ) -> Cache:
    """Keeps the first length [B] tokens of each row.

    With path [B, P], the entries at those indices follow each other from the
    first of them on: the nodes of a tree that are kept, moved into place.
    """

  def embed(self, params: Params, ids: Array) -> Array:
    """Input vectors [..., D] of token ids [...]."""

  def unembed(self, params: Params, hidden: Array) -> Array:
    """Logits [..., V] of hidden vectors [..., D]."""


class Readable(Model, Protocol):
  """A model whose `apply` is `read`, then `append`.

  What is read may then be one of several passes, without a copy of the cache
  for each of them.
  """

  def read(
    self,
    params: Params,
    tokens: Array,
    cache: Cache,
    features: tuple[int, ...] = (),
    parents: Array | None = None,
  ) -> tuple[ModelOutput, Any]:
    """As `Model.apply`, and instead of the cache what `append` puts there."""

  def widen(self, new: Any, num_tokens: int) -> Any:
    """What `append` puts there, made up to so many tokens by any others."""

  def append(self, cache: Cache, new: Any) -> Cache:
    """The cache with the tokens that were read."""


class Drafter(Protocol):
  """Proposes up to `num_draft_tokens` tokens a round, for a whole batch.

  Implementations are frozen dataclasses of static configuration. `params` is
  the whole tree {'target': ..., 'drafter': ...}: a drafter may read the
  target's. The state's leaves have the batch axis first.

  A drafter that often drafts less than K tokens may have `widths`, rising
  numbers of drafts that end with K: in each round the target reads no more than
  the first of them that holds all drafts of all rows. A tree has a `depth`, the
  most drafts that a round keeps.
  """

  @property
  def num_draft_tokens(self) -> int:
    """K, at least 0."""

  @property
  def feature_layers(self) -> tuple[int, ...]:
    """Layers of the target whose outputs the drafter reads."""

  @property
  def vocab_size(self) -> int | None:
    """V of a drafter with a vocabulary of its own, else None."""

  def init(
    self, params: Params, batch_size: int, max_length: int
  ) -> DrafterState:
    """The state before any token."""

  def extend(
    self,
    params: Params,
    tokens: Array,
    count: Array,
    output: ModelOutput,
    state: DrafterState,
  ) -> DrafterState:
    """Takes in a prefill chunk: the first count [B] of tokens [B, T]."""

  def propose(
    self,
    params: Params,
    draw: Draw,
    warp: Warp,
    tokens: Array,
    length: Array,
    state: DrafterState,
  ) -> tuple[Draft, DrafterState]:
    """Drafts behind the first length [B] of tokens [B, S]."""

  def update(
    self,
    params: Params,
    tokens: Array,
    length: Array,
    output: ModelOutput,
    verdict: Verdict,
    state: DrafterState,
  ) -> DrafterState:
    """Learns the round's outcome: the new tokens and length, what the target
    returned for [pending, drafts], and how many drafts were kept. The drafts
    may have been another drafter's (`drafters.Either`).

    Of a tree the output [B, P + 1, ...] is of the pending token and the kept
    path.
    """


class Verifier(Protocol):
  """Decides how many drafts to keep and draws the token after them.

  A pure function of one sequence. `draft_laws` are the laws for which the
  output is distributed as the target's own; others raise ValueError when the
  call is traced.
  """

  @property
  def lossless(self) -> bool:
    """Whether the output is distributed exactly as the target's."""

  @property
  def positional(self) -> bool:
    """Whether `key` is one key a position [K + 1], shared with the draft,
    or one key a round []."""

  @property
  def draft_laws(self) -> frozenset[DraftLaw]:
    """The laws of drafts that the rule takes."""

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """The distribution of the verdict, given draft and target [K + 1, V]."""

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    """One draw from `law`."""
