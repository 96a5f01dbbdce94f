"""Methods of decoding, as gin files assemble them."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Literal

import gin

import specsample
from specsample import checks
from specsample import tree as tree_lib
from specsample.drafter import Drafter
from specsample.drafters import steps
from specsample.loading import card as card_lib
from specsample.types import DraftKind, Model, Params, Verifier

# The method that every speedup is measured against.
BASELINE = 'autoregressive'

# Lets a binding name them: --gin_bindings='Method.verify = @Block()'.
for _verify in (
  specsample.verify.Candidates(),
  specsample.verify.Certified(),
  specsample.verify.Lenient(lenience=1.0),
  specsample.verify.Typical(),
  specsample.verify.block,
  specsample.verify.chain,
  specsample.verify.coupled,
  specsample.verify.greedy_draft,
  specsample.verify.k_seq,
  specsample.verify.multi_path_block,
  specsample.verify.traversal,
  specsample.verify.tree,
):
  gin.external_configurable(type(_verify), module='specsample.verify')
for _topology in (tree_lib.chain, tree_lib.k_ary, tree_lib.mc_sim_7b_63):
  gin.external_configurable(_topology, module='specsample.tree')


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False)
class Method:
  """A drafter, the rule that verifies its drafts, and its own parameters."""

  drafter: Drafter
  verify: Verifier = specsample.verify.chain
  params: Params = None  # None for a drafter without parameters of its own
  # make(K, batch size) returns the method for another K or batch size, if not
  # only the drafter's field differs; call `remake`.
  make: Callable[[int, int], 'Method'] | None = None
  note: str = ''  # a message about it for users
  batch_size: int = 1  # the one that it was made for


def remake(
  method: Method,
  num_draft_tokens: int | None = None,
  batch_size: int | None = None,
) -> Method:
  """Returns the method with another K or for batches of another size.

  It is the same object if that makes no difference. None keeps a number.
  """
  drafter: Any = method.drafter  # a dataclass, which the protocol leaves open
  length = num_draft_tokens or drafter.num_draft_tokens
  size = batch_size or method.batch_size
  if (length, size) == (drafter.num_draft_tokens, method.batch_size):
    return method
  if method.make is not None:
    return dataclasses.replace(method.make(length, size), batch_size=size)
  if length == drafter.num_draft_tokens:
    return method
  drafter = dataclasses.replace(drafter, num_draft_tokens=length)
  return dataclasses.replace(method, drafter=drafter)


def check_length(drafter: Drafter, num_draft_tokens: int, reason: str) -> None:
  """Raises ValueError if another K is asked for, but cannot be chosen."""
  if num_draft_tokens != drafter.num_draft_tokens:
    raise ValueError(f'num_draft_tokens is {num_draft_tokens}, but {reason}')


@gin.configurable
def trained(
  name: str,
  target: specsample.Loaded,
  num_draft_tokens: int | None = None,
  weights: Literal['int8'] | None = None,
) -> Method:
  """Returns the method of a trained drafter; see `specsample.load_drafter`."""
  load = functools.partial(
    specsample.load_drafter, name, target, weights=weights
  )
  return _of_loaded(load, load(num_draft_tokens))


def _of_loaded(load, loaded) -> Method:
  def make(num_draft_tokens, batch_size):
    del batch_size
    if num_draft_tokens == loaded.drafter.num_draft_tokens:
      return method
    return _of_loaded(load, load(num_draft_tokens))

  method = Method(drafter=loaded.drafter, params=loaded.params, make=make)
  return method


@gin.configurable
def auto(
  target: specsample.Loaded, batch_size: int = 1, drafter: str | None = None
) -> Method:
  """Returns the method that `specsample.auto` chooses."""
  choice = specsample.auto(target, batch_size=batch_size, drafter=drafter)

  def make(num_draft_tokens, batch_size):
    reason = 'auto chooses it: leave it out, or name a drafter'
    check_length(choice.drafter, num_draft_tokens, reason)
    return auto(target, batch_size, drafter)

  return Method(
    choice.drafter,
    choice.verify,
    choice.drafter_params,
    make=make,
    note=f'auto: {choice.reason}',
    batch_size=batch_size,
  )


@gin.configurable
def tli(
  draft: specsample.Loaded, target: specsample.Loaded, num_draft_tokens: int
) -> Method:
  """Returns the method of a draft model that has another vocabulary."""
  shared = specsample.map_vocabulary(draft, target)
  drafter = specsample.drafters.TLI(
    model=draft.model,
    vocab_size=target.model.vocab_size,
    num_draft_tokens=num_draft_tokens,
  )
  return Method(
    drafter=drafter,
    params=shared.params(draft.params),
    note=f'tli: {shared.kind.value}: {shared.num_shared} tokens are shared, of '
    f'{shared.num_draft_tokens} in the draft model and '
    f'{shared.num_target_tokens} in the target',
  )


@gin.configurable
def drafting(method: Callable[[], Method], num_draft_tokens: int) -> Method:
  """Returns a method with another K; `method` makes it with its own."""
  return remake(method(), num_draft_tokens)


@gin.configurable
def judged(method: Method, verify: Verifier) -> Method:
  """Returns a method whose drafts another rule verifies."""
  make = lambda *fit: judged(remake(method, *fit), verify)
  return dataclasses.replace(method, verify=verify, make=make)


@gin.configurable
def tree(
  method: Method,
  topology: tree_lib.Topology,
  kind: str = 'point_mass',
  verify: Verifier = specsample.verify.tree,
) -> Method:
  """Returns a method that drafts trees, extending several drafts at once.

  The drafter is loaded to be as deep as the tree. `kind`, a `types.DraftKind`
  that the rule accepts, says how siblings are chosen; see `drafters.Tree`.
  """
  checks.verifier(verify)
  taken = sorted(known.value for known in verify.draft_kinds)
  if kind not in taken:
    raise ValueError(
      f'kind is {kind!r}, but verify.{file_name(verify)} is exact for {taken}: '
      'choose one of these kinds, or another verifier'
    )
  method = _branching(method, topology.depth)
  drafter = specsample.drafters.Tree(
    drafter=method.drafter, topology=topology, kind=DraftKind(kind)
  )
  return _of_tree(drafter, method, verify)


@gin.configurable
def best_tree(name: str, target: specsample.Loaded, num_nodes: int) -> Method:
  """Returns a trained drafter's best tree of N nodes, by its card.

  The name is as for `specsample.load_drafter`.
  """
  load = functools.partial(specsample.load_drafter, name, target)
  loaded = load()
  measured = card_lib.measured(loaded.card) or {}
  if 'acceptance_by_rank' not in measured:
    raise ValueError(
      f'the card of {name} has no acceptance_by_rank: name a drafter that '
      'experiments.train has trained, measure it as docs/draft_length.md says, '
      'or give a topology to methods.tree'
    )
  by_rank = measured['acceptance_by_rank']
  method = _of_loaded(load, loaded)
  return tree(method, tree_lib.best(by_rank, num_nodes, len(by_rank)))


@gin.configurable
def candidates(method: Method, num_candidates: int) -> Method:
  """Returns a method that drafts the best few tokens for each position.

  The target picks among them, and the candidates for the next position follow
  the best one. With K = 1 they are all there is to a draft. As in
  `drafters.Tree`, the drafter's probabilities only choose the candidates.
  """
  checks.count('num_candidates', num_candidates)
  depth = method.drafter.num_draft_tokens
  method = _branching(method, depth)
  most = method.drafter.vocab_size
  if most is not None and num_candidates > most:
    raise ValueError(
      f'num_candidates is {num_candidates}, but there are only {most} tokens: '
      'give fewer'
    )
  best = lambda position: (0,) * position
  paths = [
    (*best(i), rank) for i in range(depth) for rank in range(num_candidates)
  ]
  return tree(method, tree_lib.from_paths(paths))


@gin.configurable
def dynamic_tree(
  method: Method,
  num_draft_tokens: int,
  width: int = 10,
  depth: int | None = None,
) -> Method:
  """Returns a method that drafts its drafter's most likely tree (EAGLE-2).

  The drafter is loaded to be as deep as the tree, whose depth is by default the
  K of the method. The numbers are those of `drafters.DynamicTree`.
  """
  method = _branching(method, depth or method.drafter.num_draft_tokens)
  drafter = specsample.drafters.DynamicTree(
    drafter=method.drafter, num_draft_tokens=num_draft_tokens, width=width
  )
  return _of_tree(drafter, method, specsample.verify.tree)


@gin.configurable
def lattice_tree(
  method: Method, num_draft_tokens: int, candidates: int = 16
) -> Method:
  """Returns a method that drafts the likeliest tree of a lattice (DDTree).

  The drafter has one, as DFlash and DSpark have. The numbers are those of
  `drafters.LatticeTree`.
  """
  drafter = specsample.drafters.LatticeTree(
    drafter=method.drafter,
    num_draft_tokens=num_draft_tokens,
    candidates=candidates,
  )
  return _of_tree(drafter, method, specsample.verify.tree)


def _branching(method, depth):
  drafter = method.drafter
  if not isinstance(drafter, steps.Steps):
    raise ValueError(
      f'{type(drafter).__name__} cannot continue several drafts at once, which '
      'a tree needs: choose a trained drafter or a draft model'
    )
  return remake(method, depth)


def _of_tree(drafter, method, verify):
  def make(num_draft_tokens, batch_size):
    del batch_size
    reason = (
      f'the draft is a tree of {drafter.num_draft_tokens} nodes: bind its '
      'topology or size instead'
    )
    check_length(drafter, num_draft_tokens, reason)
    return made

  made = Method(drafter, verify, method.params, make)
  return made


@gin.configurable
def model(loaded: specsample.Loaded, has_int8_cache: bool = False) -> Model:
  """Returns the model of `specsample.load`, for drafters that need it.

  With `has_int8_cache` its keys and values are stored as 8-bit integers.
  """
  if has_int8_cache:
    return dataclasses.replace(loaded.model, has_int8_cache=True)
  return loaded.model


@gin.configurable
def params(loaded: specsample.Loaded) -> Params:
  """Returns the parameters of `specsample.load`, for a draft model's method."""
  return loaded.params


def file_name(component: Drafter | Verifier) -> str:
  """Returns the name of a drafter or verifier: the file that defines it."""
  return type(component).__module__.rpartition('.')[2]
