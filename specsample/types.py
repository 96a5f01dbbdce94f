"""The data types and protocols that the whole library shares.

These letters name array dimensions everywhere in the library:

  B  batch size               K  draft length
  T  tokens in one pass       N  nodes of a draft (N = K for a chain)
  S  sequence buffer size     P  depth of a draft tree (P = K for a chain)
  L  layers                   V  vocabulary size
  D  model width              V' tokens that the drafter can draft, of V
  M  new tokens at most

The *target* is the model whose distribution is reproduced; the *draft* is a
guess of its next tokens. Where a docstring says "for one sequence", shapes omit
the batch axis; the decoding loop maps over it.
"""

from collections.abc import Callable
import dataclasses
import enum
from typing import (
  Any,
  dataclass_transform,
  Protocol,
  runtime_checkable,
)

import jax
import numpy as np

Array = jax.Array
# An argument that may still be on the host.
ArrayLike = jax.Array | np.ndarray
# Nested dictionaries of arrays: {'target': ..., 'drafter': ...} at the top.
Params = Any
# A pytree of arrays that a model or drafter owns; the loop never looks inside.
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

  Fields declared with `static()` are part of the tree's structure, so changing
  one of them causes a new trace.

  Classes that `jax.tree_util.register_dataclass` registers have equal
  structures if their static fields are equal (jaxlib 0.10.2). Where the hashes
  of two such structures are close, `jit` runs the program of the other class.
  """
  cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
  fields = dataclasses.fields(cls)
  static_names = [x.name for x in fields if x.metadata.get('static')]
  names = [x.name for x in fields if not x.metadata.get('static')]
  keys = [jax.tree_util.GetAttrKey(name) for name in names]

  def flatten(node):
    values = vars(node)
    static_values = tuple([values[name] for name in static_names])
    return [values[name] for name in names], static_values

  def flatten_with_keys(node):
    children, static_values = flatten(node)
    return [*zip(keys, children, strict=True)], static_values

  def unflatten(static_values, children):
    return cls(
      **dict(zip(names, children, strict=True)),
      **dict(zip(static_names, static_values, strict=True)),
    )

  jax.tree_util.register_pytree_with_keys(
    cls, flatten_with_keys, unflatten, flatten
  )
  return cls


class DraftKind(enum.Enum):
  """How draft tokens were chosen, which decides which verifiers are exact.

  Below, "the tokens before" a token are those on the path to it. `probs[i]` is
  always the distribution that token i was really drawn from, given the tokens
  before it and its earlier siblings.

  POINT_MASS: token i is a deterministic function of the tokens before it (as in
    n-gram lookup), and so are its siblings (as with the k most likely tokens).
  SAMPLED: token i was drawn from `Draft.probs[i]`. Siblings were drawn
    independently from the same distribution.
  WITHOUT_REPLACEMENT: siblings are distinct. The first was drawn from its
    `probs`, and each later one from the same distribution with its earlier
    siblings removed and renormalised.
  TOP_AND_SAMPLED: all siblings but the last are the most likely tokens of a
    distribution, and the last was drawn from the rest of it.
  """

  POINT_MASS = 'point_mass'
  SAMPLED = 'sampled'
  WITHOUT_REPLACEMENT = 'without_replacement'
  TOP_AND_SAMPLED = 'top_and_sampled'


class StopReason(enum.IntEnum):
  """Why a row stopped."""

  RUNNING = 0
  EOS = 1
  SEQUENCE = 2  # a stop sequence or a stop text
  MAX_NEW_TOKENS = 3
  CACHE_FULL = 4
  INVALID_LOGITS = 5
  NO_TOKEN_ALLOWED = 6  # by the row's constraint


class Origin(enum.IntEnum):
  """Where an emitted token came from.

  CORRECTION replaces the first rejected draft token; BONUS follows a fully
  accepted draft; PLAIN is the token of a round that drafted nothing (and every
  token of autoregressive decoding).
  """

  PROMPT = 0
  ACCEPTED = 1
  CORRECTION = 2
  BONUS = 3
  PLAIN = 4


@dataclasses.dataclass(frozen=True)
class KeysAndValues:
  """Names the keys and values of a layer, among the features of a drafter."""

  layer: int


@pytree
class ModelOutput:
  """The result of one pass of a model over T tokens."""

  logits: Array  # [B, T, V], for the token after each input
  hidden: Array  # [B, T, D], the vectors that `unembed` reads
  # [B, T, D] each, outputs of the requested layers; [B, T, 2, H, head_dim] of
  # `KeysAndValues`.
  features: tuple[Array, ...] = ()


@pytree
class Signals:
  """A drafter's own confidence in its draft tokens, for one sequence.

  All but `confidence` come from the drafter's softmax before temperature,
  penalties and truncation, so they are informative at temperature 0 too.
  `Suffix` derives them from its estimate, and `LatticeTree` from its lattice.
  """

  log_prob: Array  # [N] float32, of each token
  max_log_prob: Array  # [N] float32, of the most likely token at its position
  rank: Array  # [N] int32, how many tokens are more likely at its position
  entropy: Array  # [N] float32, in nats, of the distribution at its position
  # [N] float32, a learned estimate of the probability that the token is kept if
  # those before it are; it must not depend on which token was drawn. None if
  # the drafter has no such estimate.
  confidence: Array | None = None


@pytree
class Draft:
  """A draft for one sequence: a chain of tokens, or a tree.

  A chain shorter than K is padded with token -1 and rows of zero probability.
  Missing nodes of a tree, and all their descendants, are padded the same way.
  """

  tokens: Array  # [N] int32, -1 where nothing was drafted
  probs: Array | None  # [N, V] after warping; None for a point mass
  kind: DraftKind = static()
  # [N] int32, the parent of each node, as in `tree`; None for a chain.
  parents: Array | None = None
  depth: int | None = static(default=None)  # length of a tree's longest path
  # [N + 1] for a tree, the most children that each node may have; None means N.
  num_children: tuple[int, ...] | None = static(default=None)
  signals: Signals | None = None  # what policies decide by


@pytree
class Law:
  """The distribution of a verifier's verdict on one draft, for one sequence.

  On a chain, node i is the i-th draft token; node 0 is the pending token, at
  which no draft token is accepted.
  """

  stop: Array  # [N + 1], probability that the accepted drafts end at node i
  next: Array  # [N + 1, V], distribution of the token after node i


@pytree
class Verdict:
  """A verifier's decision for one sequence."""

  num_accepted: Array  # [] int32, number of accepted draft tokens, on one path
  next_token: Array  # [] int32, the token after them
  path: Array | None = None  # [P] int32, accepted nodes of a tree; 0 pads


@pytree
class TokenCounts:
  """Token occurrences, as the penalties count them."""

  prompt: Array  # [B, V] int32, occurrences in the prompt
  generated: Array  # [B, V] int32, occurrences in the emitted tokens


@pytree
class Choices:
  """How `verify.Certified` found the tokens that the target chooses."""

  scored: Array  # int32, how many tokens were scored exactly for each
  # int32, how many of these, apart from itself, scored no less than the chosen
  # one, as far as rounding allows to tell.
  ties: Array


@pytree
class DecodeState:
  """Everything the decoding loop carries; the batch axis is always first.

  The last token of every row is *pending*: it is in `tokens`, but in no cache
  yet. For a tree, `proposed` and `accepted` are [B, P + 1] and count the tokens
  of one path.
  """

  key: Array  # [B] PRNG keys, one per row
  request_id: Array  # [B] int32
  prompt_length: Array  # [B] int32
  length: Array  # [B] int32, tokens so far, including the prompt
  limit: Array  # [B] int32, the length at which the row stops
  limit_reason: Array  # [B] int32, the StopReason if that length is reached
  done: Array  # [B] bool
  stop_reason: Array  # [B] int32, a StopReason
  round: Array  # [B] int32, target passes since the prefill
  tokens: Array  # [B, S] int32
  # [B, S] each: those of `log_probs`, `warped_log_probs` and `choices`, as in
  # `Output`, that are asked for.
  records: dict[str, Any]
  origin: Array  # [B, S] int8, an Origin
  emit_round: Array  # [B, S] int32, the round that emitted the token
  proposed: Array  # [B, K + 1] int32, rounds that drafted i tokens
  accepted: Array  # [B, K + 1] int32, rounds that emitted i drafted tokens
  sampling: Any  # Sampling with [B] leaves
  counts: TokenCounts | None  # None if no penalty is set
  cache: Cache
  draft: DrafterState
  num_draft_tokens: int = static()  # N; every row leaves room for a draft


@pytree
class Output:
  """The result of `generate`: emitted tokens only, without the prompt."""

  tokens: Array  # [B, M] int32, 0 past the end of a row
  lengths: Array  # [B] int32, emitted tokens, including the stop token
  # [B, M] float32, under the target before warping; None if not asked for.
  log_probs: Array | None = None
  # [B, M] float32, under the target after warping, which is what a lossless
  # rule draws the token from; None if not asked for.
  warped_log_probs: Array | None = None
  choices: Choices | None = None  # [B, M], with `verify.Certified`
  origin: Array  # [B, M] int8, an Origin, 0 past the end of a row
  emit_round: Array  # [B, M] int32, the round that emitted the token
  rounds: Array  # [B] int32, target passes since the prefill
  proposed: Array  # [B, K + 1] int32, rounds that drafted i tokens
  accepted: Array  # [B, K + 1] int32, rounds that emitted i drafted tokens
  stop_reason: Array  # [B] int32, a StopReason


# warp(logits [B, V], drafted [B, n]) -> probs [B, V]: applies the row's
# sampling settings, after the drafted tokens of the row (-1 is skipped).
Warp = Callable[[Array, Array], Array]


class Draw(Protocol):
  """A function that draws draft tokens; equal arguments give equal tokens."""

  def __call__(
    self, probs: Array, position: Array, node: int | None = None
  ) -> Array:
    """Returns tokens [B] drawn from probs [B, V] for `position` [B].

    The position is the token's index in the sequence. Several nodes of a tree
    share a position; `node` gives each of them draws of its own.
    """


class Model(Protocol):
  """A causal language model as pure functions of its parameters.

  Implementations are frozen dataclasses of static configuration. See
  docs/custom_model.md; `testing.assert_model` tests one.
  """

  @property
  def vocab_size(self) -> int:
    """V, including padding ids, whose logits are -inf."""

  @property
  def dim(self) -> int:
    """D, the width of the vectors that `unembed` reads."""

  @property
  def dtype(self) -> str:
    """The dtype of the computation: 'float32' or 'bfloat16'."""

  @property
  def max_length(self) -> int:
    """The longest sequence the model was made for."""

  def init_cache(
    self, batch_size: int, max_length: int, max_new: int | None = None
  ) -> Cache:
    """Returns an empty cache with room for `max_length` tokens per row.

    The first axis of every array is the batch, because rows are refilled. If
    `max_length` is 0, `apply` processes whole sequences and caches nothing.
    `max_new` is the most tokens that are fed before a commit; None means no
    limit. If it is set, a sliding-window layer keeps at most the window and
    `max_new` more tokens.
    """

  def apply(
    self,
    params: Params,
    tokens: Array,
    cache: Cache,
    features: tuple[int, ...] = (),
    parents: Array | None = None,
  ) -> tuple[ModelOutput, Cache]:
    """Feeds tokens [B, T] after each row's committed prefix.

    Returns the output and a cache that holds all T tokens of every row;
    `commit` then says how many of them stay. `features` names layers whose
    outputs are returned too (-1 is the embedding). Raises ValueError if the
    model has no such layer.

    With parents [B, W - 1], the last W entries of each row, which include the
    T new ones, form a tree (see `tree`), and the first of them is its node 0.
    Each node attends to everything before the tree and to the nodes on its
    path, and its position is that of node 0 plus its depth. A node whose
    parent is -1 follows what is before the tree, as node 0 does: chains of such
    nodes are texts that do not see each other.
    """

  def commit(
    self, cache: Cache, length: Array, path: Array | None = None
  ) -> Cache:
    """Keeps the first length [B] tokens of each row.

    With path [B, P + 1], the entries at those indices are first moved to
    consecutive places, starting at the first of them: the pending token stays,
    and the accepted nodes of a tree move up to follow it.
    """

  def embed(self, params: Params, ids: Array) -> Array:
    """Returns the input vectors [..., D] of token ids [...]."""

  def unembed(self, params: Params, hidden: Array) -> Array:
    """Returns the logits [..., V] of hidden vectors [..., D]."""


@runtime_checkable
class Readable(Model, Protocol):
  """A model whose `apply` is `read` followed by `append`.

  The decoding loop can then choose between passes of several widths without
  copying the cache for each of them.
  """

  def read(
    self,
    params: Params,
    tokens: Array,
    cache: Cache,
    features: tuple[int, ...] = (),
    parents: Array | None = None,
  ) -> tuple[ModelOutput, Any]:
    """Runs `Model.apply`, but returns the argument of `append`, not a cache."""

  def widen(self, new: Any, num_tokens: int) -> Any:
    """Pads the result of `read` to `num_tokens` tokens, with any values."""

  def append(self, cache: Cache, new: Any, path: Array | None = None) -> Cache:
    """Returns the cache with the tokens that were read.

    With path [B, P], only the tokens at those indices among them are appended,
    in that order: the path of a tree that is kept.
    """


class Certifiable(Model, Protocol):
  """A model whose best tokens `verify.Certified` finds without all logits."""

  def shadow(self, params: Params) -> Any:
    """Returns a table of bounds beside the unembedding, made once."""

  def is_shadow(self, shadow: Any, params: Params) -> bool:
    """Returns whether the table was made from these parameters. On the host."""

  def bounds(
    self, params: Params, shadow: Any, hidden: Array
  ) -> tuple[Array, Array]:
    """Bounds the logits of hidden vectors [..., D].

    Returns:
      upper: [..., V] float32, at least what `unembed` computes.
      rounding: [..., V] float32, how far a logit of `unembed` or `unembed_at`
        may be from its exact value.
    """

  def unembed_at(self, params: Params, hidden: Array, ids: Array) -> Array:
    """Returns the logits [B, ..., n] of tokens ids [B, ..., n] alone."""


class Verifier(Protocol):
  """A rule that decides how many draft tokens to keep and draws the next token.

  It is a pure function of one sequence. `draft_kinds` are the kinds of drafts
  that it accepts; a lossless verifier is exact for all of them. A draft of
  another kind raises ValueError when the call is traced.
  """

  @property
  def lossless(self) -> bool:
    """Whether the output has exactly the target's distribution."""

  @property
  def positional(self) -> bool:
    """Whether `key` is one key per position [K + 1], not one per round [].

    Keys per position are shared with the drafter.
    """

  @property
  def draft_kinds(self) -> frozenset[DraftKind]:
    """The draft kinds that the verifier accepts."""

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """Returns the law of the verdict, given target_probs [N + 1, V]."""

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    """Draws one verdict from `law`."""


@runtime_checkable
class ByChoice(Verifier, Protocol):
  """A rule that only asks which token the target chooses after each node.

  The loop then finds these tokens without most logits (`loop.certified`). A
  rule that is not `positional` is for greedy rows only.
  """

  @property
  def scored(self) -> tuple[int, ...]:
    """How many tokens are scored exactly, in turn, before all of them are."""

  def of_choices(self, draft: Draft, chosen: Array) -> Verdict:
    """Returns the verdict of one sequence, given the tokens chosen [N + 1]."""
