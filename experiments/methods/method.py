"""A decoding method as the gin files put it together."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Literal

import gin
import jax

import specsample
from specsample import tree as tree_lib
from specsample.loop import step
from specsample.types import Draft, Drafter, DraftLaw, Model, Params, Verifier

# By the name of the package, as configurations have it.
_configurable = gin.configurable(module='experiments.methods')

# The method that every speedup is measured against.
BASELINE = 'autoregressive'

# So that a binding can name them: --gin_bindings='Method.verify = @Block()'.
for _verify in (
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
for _topology in (tree_lib.k_ary, tree_lib.mc_sim_7b_63):
  gin.external_configurable(_topology, module='specsample.tree')


@_configurable
@dataclasses.dataclass(frozen=True, eq=False)
class Method:
  """A drafter, the rule that verifies its drafts, and its own parameters."""

  drafter: Drafter
  verify: Verifier = specsample.verify.chain
  params: Params = None  # None for a drafter without parameters of its own
  # Of a drafter whose parameters depend on K: loads it with another.
  load: Callable[[int], specsample.LoadedDrafter] | None = None
  # Returns the method for another batch size, if what passes cost decides it.
  for_batch: Callable[[int], 'Method'] | None = None
  note: str = ''  # what users are to be told of it


@_configurable
def trained(
  name: str,
  target: specsample.Loaded,
  num_draft_tokens: int | None = None,
  weights: Literal['int8'] | None = None,
) -> Method:
  """The method of a trained drafter, as `specsample.load_drafter` finds it."""
  load = functools.partial(
    specsample.load_drafter, name, target, weights=weights
  )
  loaded = load(num_draft_tokens)
  return Method(drafter=loaded.drafter, params=loaded.params, load=load)


@_configurable
def auto(target: specsample.Loaded, batch_size: int = 1) -> Method:
  """The method that `specsample.auto` chooses."""
  choice = specsample.auto(target, batch_size=batch_size)
  return Method(
    choice.drafter,
    choice.verify,
    choice.drafter_params,
    load=_chosen_length,
    for_batch=functools.partial(auto, target),
    note=f'auto: {choice.reason}',
  )


def _chosen_length(num_draft_tokens):
  raise ValueError(
    f'num_draft_tokens is {num_draft_tokens}, and auto chooses it: leave it '
    'out, or name a drafter'
  )


@_configurable
def tli(
  draft: specsample.Loaded, target: specsample.Loaded, num_draft_tokens: int
) -> Method:
  """The method of a draft model that has another vocabulary.

  Raises:
    ValueError: it shares too few tokens with the target.
  """
  shared = specsample.map_vocabulary(draft, target)
  return of_shared_tokens(draft, target, shared, num_draft_tokens)


def of_shared_tokens(
  draft: specsample.Loaded,
  target: specsample.Loaded,
  shared: specsample.VocabMap,
  num_draft_tokens: int,
) -> Method:
  """As `tli`, where it is known what the two vocabularies share."""
  drafter = specsample.drafters.TLI(
    model=draft.model,
    vocab_size=target.model.vocab_size,
    num_draft_tokens=num_draft_tokens,
  )
  return Method(drafter=drafter, params=shared.params(draft.params))


@_configurable
def drafting(method: Callable[[], Method], num_draft_tokens: int) -> Method:
  """A method with another K; `method` makes it with its own."""
  return with_num_draft_tokens(method(), num_draft_tokens)


@_configurable
def judged(method: Method, verify: Verifier) -> Method:
  """A method whose drafts another rule verifies."""
  return dataclasses.replace(method, verify=verify)


@_configurable
def tree(
  method: Method,
  topology: tree_lib.Topology,
  law: str = 'point_mass',
  verify: Verifier = specsample.verify.tree,
) -> Method:
  """A method's drafter, going on from several drafts at once.

  Args:
    method: its drafter is loaded to be as deep as the tree.
    topology: of the tree.
    law: of siblings, a `types.DraftLaw`; see `drafters.Tree`.
    verify: a rule for trees that takes that law.

  Raises:
    ValueError: the drafter cannot branch, or not so deep; the verifier does not
      take the law.
  """
  taken = sorted(known.value for known in verify.draft_laws)
  if law not in taken:
    raise ValueError(
      f'law is {law!r}, and verify.{file_name(verify)} is exact for {taken}: '
      'choose one of those, or another verifier'
    )
  method = _branching(method, topology.depth)
  drafter = specsample.drafters.Tree(
    drafter=method.drafter, topology=topology, law=DraftLaw(law)
  )
  return _of_tree(drafter, method, verify)


@_configurable
def dynamic_tree(
  method: Method,
  num_draft_tokens: int,
  width: int = 10,
  depth: int | None = None,
) -> Method:
  """A method's drafter, whose most likely tree is drafted (EAGLE-2).

  Args:
    method: its drafter is loaded to be as deep as the tree.
    num_draft_tokens: N. width: as `drafters.DynamicTree` takes them.
    depth: of the tree, None for that of the method.

  Raises:
    ValueError: the drafter cannot branch, or not so deep; too many nodes.
  """
  method = _branching(method, depth or method.drafter.num_draft_tokens)
  drafter = specsample.drafters.DynamicTree(
    drafter=method.drafter, num_draft_tokens=num_draft_tokens, width=width
  )
  return _of_tree(drafter, method, specsample.verify.tree)


def _branching(method, depth):
  drafter = method.drafter
  if not hasattr(drafter, 'grow'):
    raise ValueError(
      f'{type(drafter).__name__} cannot go on from several drafts at once, as '
      'a tree needs: choose Medusa, Hydra, an EAGLE, MTP or a draft model'
    )
  return with_num_draft_tokens(method, depth)


def _of_tree(drafter, method, verify):
  def load(num_draft_tokens):
    raise ValueError(
      f'num_draft_tokens is {num_draft_tokens}, and the draft is a tree of '
      f'{drafter.num_draft_tokens} nodes: bind its topology, or size, instead'
    )

  return Method(drafter, verify, method.params, load)


def with_num_draft_tokens(method: Method, num_draft_tokens: int) -> Method:
  """The method with another K, at least 1.

  Raises:
    ValueError: the drafter was not trained for so many.
  """
  drafter: Any = method.drafter  # a dataclass, which the protocol leaves open
  if num_draft_tokens == drafter.num_draft_tokens:
    return method
  if method.load is not None:
    loaded = method.load(num_draft_tokens)
    return dataclasses.replace(
      method, drafter=loaded.drafter, params=loaded.params
    )
  drafter = dataclasses.replace(drafter, num_draft_tokens=num_draft_tokens)
  return dataclasses.replace(method, drafter=drafter)


@_configurable
def model(loaded: specsample.Loaded) -> Model:
  """The model of `specsample.load`, for drafters that need it."""
  return loaded.model


@_configurable
def params(loaded: specsample.Loaded) -> Params:
  """The parameters of `specsample.load`, for a method with a draft model."""
  return loaded.params


def all_params(target: Params, method: Method) -> Params:
  """The tree that `specsample.generate` takes, given the target's."""
  if method.params is None:
    return {'target': target}
  return {'target': target, 'drafter': method.params}


def abstract_draft(params, state, **components) -> Draft:
  """The shapes and the law of a draft; nothing is computed."""
  propose = functools.partial(step.propose, **components)
  return jax.eval_shape(propose, params, state)[0]


def file_name(component: Drafter | Verifier) -> str:
  """What a drafter or verifier is called: the file it is defined in."""
  return type(component).__module__.rpartition('.')[2]
