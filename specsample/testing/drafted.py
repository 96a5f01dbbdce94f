"""Enumeration of what a drafter's own `propose` draws, with exact weights."""

import dataclasses
import functools

import jax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np

from specsample import sampling as sampling_lib
from specsample.drafter import Drafter
from specsample.sampling import Sampling
from specsample.testing import conditional as conditional_lib
from specsample.testing import precision
from specsample.testing.conditional import Conditional
from specsample.testing.conditional import Warp
from specsample.testing.proposal import Drafts
from specsample.testing.proposal import Proposal
from specsample.types import Array, Draft, DraftKind, Model, Params


def from_drafter(
  drafter: Drafter,
  params: Params,
  model: Model,
  prompt: tuple[int, ...],
  sampling: Sampling = Sampling(temperature=1.0),
  *,
  rounds: int,
  by: Warp = sampling_lib.warp,
) -> Proposal:
  """Returns the drafts of a drafter, weighted by how they were really drawn.

  `draw` returns every token in turn. The weight of a draft is the product of
  the probabilities that `draw` was given, whatever `Draft.probs` says. The
  drafter takes in the prompt and the string as a single prefill.

  Args:
    drafter: a drafter of chains, a `drafters.Tree`, or a drafter that draws
      nothing.
    params: the whole tree of parameters, with the target's under 'target'.
    model: the target, whose outputs some drafters read.
    prompt: at least one token.
    sampling: scalar settings, except for the bias [V].
    rounds: the number of rounds that will be enumerated.
    by: the function that applies the settings.
  """
  num_drafts, vocab_size = drafter.num_draft_tokens, model.vocab_size
  topology = drafter.topology
  depth = num_drafts if topology is None else topology.depth
  lengths = np.arange((rounds - 1) * (depth + 1) + 1)
  ends = np.cumsum(vocab_size**lengths)

  @functools.cache
  def everything():
    rows = _rows(vocab_size, prompt, lengths, num_drafts)
    draft, weights = _propose(
      drafter, params, model, prompt, sampling, rows=rows, by=by
    )
    if draft.parents is not None and topology is None:
      raise ValueError(
        f'{type(drafter).__name__} drafts trees that differ from row to row, '
        'which cannot be enumerated: sample them '
        '(testing.assert_follows_target)'
      )
    tokens = np.asarray(draft.tokens).reshape(
      ends[-1], vocab_size**num_drafts, num_drafts
    )
    if draft.kind is DraftKind.POINT_MASS:
      # Nothing was drawn, so the draft is the same on every path.
      tokens, probs = tokens[:, :1], None
      weights = np.ones(tokens.shape[:2])
    else:
      probs = np.asarray(draft.probs).reshape(*tokens.shape, -1)
      weights = weights.reshape(tokens.shape[:2])
    return Drafts(tokens, probs, weights, draft.kind, topology)

  def propose(t):
    drafts = everything()
    rows = slice(ends[t] - vocab_size**t, ends[t])
    return dataclasses.replace(
      drafts,
      tokens=drafts.tokens[rows],
      probs=None if drafts.probs is None else drafts.probs[rows],
      weights=drafts.weights[rows],
    )

  return propose


def conditional(proposal: Proposal) -> Conditional:
  """Returns the distributions that drafts after the prompt are drawn from.

  The proposal must draw all K tokens. The result is defined for strings of
  fewer than K tokens, all of them draft tokens.
  """

  def table(t, committed):
    del committed
    probs = np.asarray(proposal(0).probs)[0]  # [V^K, K, V], the paths in order
    return probs[:: len(probs) // probs.shape[-1] ** t, t]

  return table


def _rows(vocab_size, prompt, lengths, num_drafts):
  """Returns a ragged batch: every string of some lengths with every path of K.

  These are the prompt and the string [n, P + t], -1 at the end, and the path
  [n, K], int32.
  """

  def padded(length):
    strings = conditional_lib.strings(vocab_size, length)
    behind = np.full((len(strings), lengths[-1] - length), -1, np.int32)
    head = np.tile(np.asarray(prompt, np.int32), (len(strings), 1))
    return np.concatenate([head, strings, behind], axis=1)

  tokens = np.concatenate([padded(length) for length in lengths])
  paths = conditional_lib.strings(vocab_size, num_drafts)
  return np.repeat(tokens, len(paths), axis=0), np.tile(paths, (len(tokens), 1))


def _propose(
  drafter, params, model, prompt, sampling, *, rows, by
) -> tuple[Draft, np.ndarray]:
  """Returns each row's draft and the probability [n] that it is drawn."""
  strings, paths = rows
  count, width = strings.shape
  room = width + drafter.num_draft_tokens + 1
  lengths = (strings >= 0).sum(axis=1, dtype=np.int32)
  tokens = np.pad(np.maximum(strings, 0), ((0, 0), (0, room - width)))
  drawn: list[tuple[Array, Array]] = []

  def draw(probs, position, node=None):
    column = position - lengths if node is None else 0 * lengths + node - 1
    forced = jnp.take_along_axis(jnp.asarray(paths), column[:, None], axis=1)
    chosen = jnp.take_along_axis(probs, forced, axis=1)[:, 0]
    # If no token is left to draw, only one of the rows that differ here counts.
    is_left = jnp.sum(probs, axis=1) > 0
    chosen = jnp.where(is_left, chosen, forced[:, 0] == 0)
    # A callback runs outside `enable_x64`, which would round the floats.
    bits = jax.lax.bitcast_convert_type(chosen.astype(jnp.float64), jnp.uint32)
    io_callback(lambda *found: drawn.append(found), None, bits, column)
    return forced[:, 0]

  @jax.jit
  def propose(params, state):
    warp = _warp(by, sampling, prompt, strings, model.vocab_size)
    draft, _ = drafter.propose(params, draw, warp, tokens, lengths, state)
    return draft

  params = jax.device_get(params)  # from any device
  with precision.on_cpu():
    state = _take_in(
      params, tokens, lengths, model=model, drafter=drafter, width=width
    )
  with precision.float64():
    draft = jax.device_get(propose(params, state))
    jax.effects_barrier()
  weights = np.ones(count)
  is_drawn = np.zeros(paths.shape, bool)
  for bits, column in drawn:
    weights *= np.ascontiguousarray(bits).view(np.float64)[:, 0]
    np.put_along_axis(is_drawn, np.asarray(column)[:, None], True, axis=1)
  # One path counts among those that differ only in tokens that no row drew.
  weights *= np.all(is_drawn | (paths == 0), axis=1)
  return draft, weights


@functools.partial(jax.jit, static_argnames=('model', 'drafter', 'width'))
def _take_in(params, tokens, lengths, *, model, drafter, width):
  """Returns the drafter's state after one prefill of `width` tokens.

  The state does not depend on the sampling settings.
  """
  count, room = tokens.shape
  output, _ = model.apply(
    params['target'],
    tokens[:, :width],
    model.init_cache(count, room),
    features=drafter.feature_layers,
  )
  state = drafter.init(params, count, room)
  return drafter.observe(
    params, tokens[:, :width], lengths - 1, output, None, state
  )


def _warp(by, sampling, prompt, strings, vocab_size):
  counts = None
  if sampling.penalised:
    emitted = strings[:, len(prompt) :]
    counts = conditional_lib.count_tokens(prompt, emitted, vocab_size)
    of_rows = jnp.broadcast_to(counts.prompt, counts.generated.shape)
    counts = dataclasses.replace(counts, prompt=of_rows)
  warp = jax.vmap(by, (None, 0, 0, 0))
  return lambda logits, drafted: warp(
    sampling, counts, logits.astype(jnp.float64), drafted
  )
