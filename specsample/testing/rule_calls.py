"""Whether a rule draws its verdicts from its own law.

Enumerations read `law` alone, and the decoding loop calls the rule itself.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import tree
from specsample.testing import chi_square
from specsample.testing import conditional as conditional_lib
from specsample.testing import enumerate as enumerate_lib
from specsample.testing.conditional import Conditional
from specsample.testing.proposal import Proposal
from specsample.types import Verifier

_NUM_DRAWS = 4096  # for each draft
_NUM_DRAFTS = 4  # the most likely ones after the prompt


def compare(
  verify: Verifier,
  proposal: Proposal,
  target: Conditional,
  key: jax.Array,
) -> chi_square.ChiSquare:
  """Tests verdicts on the likeliest drafts after the prompt against the law.

  Args:
    verify: the rule. If it is positional, its law must hold for these drafts.
    proposal: the drafts.
    target: the distributions that they are verified against.
    key: a PRNG key.
  """
  drafts = proposal(0)
  chosen = np.argsort(-drafts.weights[0], kind='stable')[:_NUM_DRAFTS]
  chosen = chosen[drafts.weights[0][chosen] > 0]
  tokens = drafts.tokens[:, chosen]
  topology = drafts.topology or tree.chain(tokens.shape[2])
  probs = conditional_lib.at_nodes(target, 0, tokens, topology)
  of_drafts = None if drafts.probs is None else drafts.probs[0, chosen]
  given = jax.tree.map(jnp.asarray, (tokens[0], of_drafts, probs[0]))
  law, verdicts = _draw(verify, drafts.topology, drafts.kind, key, given)
  stop, following = (np.asarray(x, np.float64) for x in (law.stop, law.next))
  mass = stop[..., None] * following  # [n, N + 1, V]
  vocab_size = mass.shape[-1]
  node = verdicts.num_accepted
  if verdicts.path is not None:
    node = jnp.max(verdicts.path, axis=-1)
  cells = np.asarray(node * vocab_size + verdicts.next_token)
  size = mass.shape[1] * vocab_size
  return chi_square.test(
    (np.bincount(own, minlength=size), of_draft.reshape(-1) / of_draft.sum())
    for own, of_draft in zip(cells, mass, strict=True)
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _draw(verify, topology, kind, key, drafts) -> Any:
  """Returns the law of each draft, and [n, `_NUM_DRAWS`] verdicts."""
  tokens, probs, target_probs = drafts
  shape: tuple[int, ...] = (len(tokens), _NUM_DRAWS)
  if verify.positional:
    shape += (target_probs.shape[1],)

  def of_draft(keys, tokens, probs, target_probs):
    draft = enumerate_lib.draft_of(topology, kind, tokens, probs)
    draw = lambda key: verify(key, draft, target_probs)
    return verify.law(draft, target_probs), jax.vmap(draw)(keys)

  return jax.vmap(of_draft)(
    jax.random.split(key, shape), tokens, probs, target_probs
  )
