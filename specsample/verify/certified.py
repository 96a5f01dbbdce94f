"""The target's best token at each node, certified by bounds on all logits.

The loop does not compute the target's logits for this rule. `loop.certified`
bounds them, scores the few tokens that can be the best, and computes all of
them only where too many can.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from specsample import sampling
from specsample import settings
from specsample.types import Array, Draft, DraftKind, Law, Verdict
from specsample.verify import rule

_Numbers = Annotated[
  tuple[int, ...],
  settings.rule(
    lambda x: (
      bool(x) and all(map(settings.is_count, x)) and list(x) == sorted({*x})
    ),
    'a tuple of ascending numbers of tokens, such as (8, 64)',
  ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certified(rule.Rule):
  """Keeps drafts while they equal the target's choice, for greedy rows.

  It needs `params['shadow']`, from `Loaded.shadow`, and decoding with
  `log_probs=False`, because neither probabilities nor log-probabilities are
  known without all logits.

  Attributes:
    coupled: choose as `verify.coupled` does, at any temperature, from chains,
      without top-k, top-p and min-p. Otherwise every row must be greedy; drafts
      may then be trees.
    scored: how many of the tokens with the largest bounds are scored exactly,
      in ascending order. If a token beyond the first number might still be the
      best, the next number is scored, and after the last the whole vocabulary.
  """

  coupled: settings.Flag = False
  scored: _Numbers = (8, 64)
  lossless = True

  @property
  def positional(self) -> bool:  # type: ignore[override]
    return self.coupled

  @property
  def takes_trees(self) -> bool:  # type: ignore[override]
    return not self.coupled

  @property
  def draft_kinds(self) -> frozenset[DraftKind]:
    return rule.CHAIN_KINDS if self.coupled else frozenset(DraftKind)

  def _law(self, draft, target_probs):
    """See `rule.Rule`, for one-hot target_probs."""
    chosen = jax.vmap(sampling.most_likely)(target_probs)
    return Law(stop=_stop(draft, chosen), next=target_probs)

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    """Returns the verdict under probabilities, which the loop does not need."""
    if self.coupled:
      chosen = jax.vmap(sampling.draw_coupled)(key, target_probs)
    else:
      chosen = jax.vmap(sampling.most_likely)(target_probs)
    return self.of_choices(draft, chosen)

  def of_choices(self, draft: Draft, chosen: Array) -> Verdict:
    """Returns the verdict, given the target's token chosen [N + 1] per node."""
    self.check(draft)
    node = jnp.argmax(_stop(draft, chosen)).astype(jnp.int32)
    return rule.verdict_at(draft, node, chosen[node])


def _stop(draft, chosen):
  """Returns the one-hot law [N + 1] of where the kept drafts end."""
  if not draft.tokens.size:
    return jnp.ones(1)
  parents = rule.parents(draft)
  agrees = (draft.tokens == chosen[parents]) & (draft.tokens >= 0)
  # The first of equal siblings is kept.
  again = rule.is_sibling_before(parents) & agrees
  first = agrees & ~jnp.any(again, axis=1)
  return rule.stop_in_tree(parents, first.astype(jnp.float32))


certified = Certified()
