"""The exact joint law of two rows that are decoded together.

A drafter may decide for a whole batch how much is drafted. If what one row
drafts depended on the tokens drawn in the other, each row could still have the
target's distribution, but the rows would not be independent of each other.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsample.drafter import Drafter
from specsample.testing import conditional as conditional_lib
from specsample.testing import precision
from specsample.types import Model, Params, Verdict, Verifier


def joint_law(
  verify: Verifier,
  drafter: Drafter,
  *,
  model: Model,
  draft_model: Model,
  prompt: tuple[int, ...],
  rounds: int,
) -> np.ndarray:
  """Returns the law [V^R, V^R] of the first R tokens of both rows.

  Every outcome of R rounds is decoded in a batch of its own: the tokens that
  are drafted, the number of them that are kept, and the next token. Sampling is
  at temperature 1. The probabilities are exact up to float32's rounding.

  Args:
    verify: a rule for chains whose `.law` accepts these drafts.
    drafter: draws chains from `draft_model`, or leaves some of their tokens
      out.
    model, draft_model: the target, and the model that the drafter draws from.
      Like a `HashModel`, they have no parameters.
    prompt: of both rows, at least two tokens.
    rounds: R. There are ((K + 1) V^(K + 1))^(2 R) outcomes.
  """
  vocab_size, num_drafts = model.vocab_size, drafter.num_draft_tokens
  of_row = (*(vocab_size,) * num_drafts, num_drafts + 1, vocab_size)
  shape = (rounds, 2, len(of_row))
  outcomes = np.stack(list(np.ndindex(of_row * (2 * rounds))))
  with precision.on_cpu():
    texts, weights = _decode(
      outcomes.reshape(-1, *shape).astype(np.int32),
      verify=verify,
      drafter=drafter,
      model=model,
      draft_model=draft_model,
      prompt=prompt,
    )
  emitted = np.asarray(texts)[..., len(prompt) : len(prompt) + rounds]
  first, second = conditional_lib.index(emitted, vocab_size).T
  law = np.zeros([vocab_size**rounds] * 2)
  np.add.at(law, (first, second), np.asarray(weights, np.float64))
  return law


@functools.partial(
  jax.jit,
  static_argnames=('verify', 'drafter', 'model', 'draft_model', 'prompt'),
)
def _decode(outcomes, *, verify, drafter, model, draft_model, prompt):
  """Returns texts [n, 2, S], and the probabilities [n], of outcomes.

  `outcomes` [n, R, 2, K + 2] are K draft tokens, the number of kept ones, and
  the next token.
  """
  params: Params = {'target': {}, 'drafter': {}}
  num_drafts = drafter.num_draft_tokens
  room = len(prompt) + outcomes.shape[1] * (num_drafts + 1)

  def read(model, tokens, length):
    """Returns the output [2, K + 1, ...] for the pending token and drafts."""
    cache = model.init_cache(2, room)
    output, _ = model.apply({}, tokens, cache, drafter.feature_layers)
    index = length[:, None, None] - 1 + jnp.arange(num_drafts + 1)[:, None]
    take = lambda x: jnp.take_along_axis(x, index, axis=1)
    return jax.tree.map(take, output)

  def one_round(tokens, length, state, outcome):
    forced = outcome[:, :num_drafts]
    kept, next_token = outcome[:, -2], outcome[:, -1]
    draw = lambda probs, position, node=None: jnp.take_along_axis(
      forced, (position - length)[:, None], axis=1
    )[:, 0]
    warp = lambda logits, drafted: jax.nn.softmax(logits)
    draft, state = drafter.propose(params, draw, warp, tokens, length, state)
    tokens = _write(tokens, forced, length)
    # Tokens that are left out count too: nothing depends on them.
    drawn = jax.nn.softmax(read(draft_model, tokens, length).logits[:, :-1])
    weight = jnp.prod(jnp.take_along_axis(drawn, forced[..., None], axis=-1))
    output = read(model, tokens, length)
    law = jax.vmap(verify.law)(draft, jax.nn.softmax(output.logits))
    rows = jnp.arange(2)
    weight *= jnp.prod(law.stop[rows, kept])
    weight *= jnp.prod(law.next[rows, kept, next_token])
    pending = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    tokens = _write(tokens, next_token[:, None], length + kept)
    state = drafter.observe(
      params,
      jnp.concatenate([pending, forced], axis=1),
      kept + 1,
      output,
      Verdict(num_accepted=kept, next_token=next_token),
      state,
    )
    return tokens, length + kept + 1, state, weight

  def of_batch(outcomes):
    tokens = jnp.zeros((2, room), jnp.int32).at[:, : len(prompt)].set(prompt)
    length = jnp.full(2, len(prompt), jnp.int32)
    fed = tokens[:, : len(prompt) - 1]
    cache = model.init_cache(2, room)
    output, _ = model.apply({}, fed, cache, drafter.feature_layers)
    state = drafter.observe(
      params,
      fed,
      length - 1,
      output,
      None,
      drafter.init(params, 2, room),
    )
    weight = 1.0
    for outcome in outcomes:
      tokens, length, state, share = one_round(tokens, length, state, outcome)
      weight *= share
    return tokens, weight

  return jax.vmap(of_batch)(outcomes)


def _write(tokens, new, start):
  """Returns tokens [2, S] with `new` [2, n] from index start [2] on."""
  return jax.vmap(
    lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (start,))
  )(tokens, new, start)
