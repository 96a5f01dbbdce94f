"""The target's choice at each node, found without most of the vocabulary.

`verify.Certified` needs the token of the largest score, the logit plus, for
coupled rows, noise. Bounds on all logits say which tokens can have it. Those
with the largest bounds are scored exactly. If a token beyond them might score
more, some more are scored, and in the end the whole vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specsample import checks
from specsample import drafts
from specsample import indexing
from specsample import sampling as sampling_lib
from specsample import streams
from specsample.loop import emission as emission_lib
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.types import (
  Array,
  ByChoice,
  Choices,
  DecodeState,
  Draft,
  ModelOutput,
  Params,
)

_MADE = (
  "give params | {'shadow': model.shadow(params['target'])}, made after the "
  'last change of the weights'
)


def check(
  decoder: Decoder, params: Params, sampling: Sampling, log_probs: bool
) -> None:
  """Checks the arguments of `decode.generate` if the rule is by choice."""
  if not isinstance(decoder.verify, ByChoice):
    return
  model: Any = decoder.model
  if log_probs:
    raise ValueError(
      'log_probs is True, but verify.Certified does not compute all logits, '
      'which log-probabilities need: give log_probs=False, or another rule'
    )
  checks.has(
    'model',
    model,
    ('bounds', 'unembed_at', 'is_shadow'),
    'verify.Certified needs a types.Certifiable, such as models.Transformer',
  )
  if decoder.drafter.reads_logits:
    raise ValueError(
      f"{type(decoder.drafter).__name__} reads the target's logits, which "
      'verify.Certified does not compute: choose another rule'
    )
  if 'shadow' not in params:
    raise ValueError(f"params has no 'shadow' for verify.Certified: {_MADE}")
  leaves = jax.tree.leaves((params['shadow'], params['target']))
  is_known = not any(
    isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) for x in leaves
  )
  if is_known and not model.is_shadow(params['shadow'], params['target']):
    raise ValueError(f"params['shadow'] is of other weights: {_MADE}")
  check_sampling(decoder, sampling)


def check_sampling(decoder: Decoder, sampling: Sampling) -> None:
  """Raises ValueError for settings with which the rule cannot choose."""
  if not isinstance(decoder.verify, ByChoice):
    return
  if decoder.verify.positional:
    given = [
      name
      for name in ('top_k', 'top_p', 'min_p')
      if vars(sampling)[name] is not None
    ]
    if given:
      raise ValueError(
        f'{given[0]} is set, but it needs the normaliser of all logits, which '
        'verify.Certified does not compute: leave it at None, or choose '
        'verify.coupled'
      )
  elif isinstance(sampling.temperature, jax.core.Tracer):
    raise ValueError(
      'temperature is traced, but verify.Certified() is for greedy rows only: '
      'give 0 itself, or choose Certified(coupled=True)'
    )
  elif jnp.any(jnp.asarray(sampling.temperature) > 0):
    raise ValueError(
      f'temperature is {sampling.temperature}, but a draw needs the normaliser '
      'of all logits, which verify.Certified() does not compute: give '
      'temperature 0, or choose Certified(coupled=True) or another rule'
    )


def judged(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  draft: Draft,
  output: ModelOutput,
) -> tuple[ModelOutput, tuple]:
  """Returns the output without logits, and what `judging` finds from them.

  These are one-hot distributions [B, n, V], where there are some, the verdict
  and the records.
  """
  tokens, valid, choices = choose(decoder, params, state, draft, output.hidden)
  probs = tokens[..., None] == indexing.vocab_ids(decoder.model.vocab_size)
  probs = jnp.where(valid[..., None], probs.astype(jnp.float32), 0)
  draft = drafts.follow_valid(draft, valid)
  verdict = jax.vmap(decoder.verify.of_choices)(draft, tokens)  # type: ignore
  output = dataclasses.replace(output, logits=output.hidden[..., :0])
  return output, (probs, valid, verdict, {'choices': choices})


def choose(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  draft: Draft,
  hidden: Array,
) -> tuple[Array, Array, Choices]:
  """Returns the target's choice after each node that a pass has read.

  Args:
    decoder: with a `Certifiable` model and a rule by choice.
    params: with 'target' and 'shadow'.
    state: before the round.
    draft: that the pass covers.
    hidden: [B, n, D], the output of the pass, for the pending token and n - 1
      nodes.

  Returns:
    The tokens [B, n] int32, whether there is a distribution [B, n] bool, and
    how the tokens were found.
  """
  model: Any = decoder.model
  verify: Any = decoder.verify
  vocab_size = model.vocab_size
  sampling = emission_lib.settings(state)
  of_nodes = jax.vmap(
    functools.partial(sampling_lib.terms, vocab_size=vocab_size),
    (None, None, 0),
  )
  prefixes = drafts.prefixes(draft, hidden.shape[1])
  terms = jax.vmap(of_nodes)(sampling, state.counts, prefixes)
  noise = None
  if verify.positional:
    noise = _noise(state, hidden.shape[1], vocab_size)
  target = params['target']
  upper, rounding = model.bounds(target, params['shadow'], hidden)
  reference = jnp.max(_adjusted(sampling, terms, upper), axis=-1)
  reference = jnp.where(jnp.isfinite(reference), reference, 0)

  def best(logits, ids, terms, noise, rounding):
    """Returns the choice among some tokens, and what it scores at least."""
    score = functools.partial(_scores, sampling, terms, noise, reference)
    scores, least = score(logits), score(logits - 2 * rounding)
    least = jnp.max(least, axis=-1, keepdims=True)
    is_best = scores == jnp.max(scores, axis=-1, keepdims=True)
    tokens = jnp.min(jnp.where(is_best, ids, vocab_size - 1), axis=-1)
    tokens = tokens.astype(jnp.int32)
    largest = jnp.max(_adjusted(sampling, terms, logits), axis=-1)
    choices = Choices(
      scored=jnp.full_like(tokens, ids.shape[-1]),
      ties=jnp.sum(scores >= least, axis=-1, dtype=jnp.int32) - 1,
    )
    return (tokens, jnp.isfinite(largest), choices), least[..., 0]

  def of_all():
    logits = model.unembed(target, hidden)
    ids = indexing.vocab_ids(vocab_size)
    return best(logits, ids, terms, noise, rounding)[0]

  numbers = [n for n in verify.scored if n < vocab_size]
  if not numbers:
    return of_all()
  bounds = _scores(sampling, terms, noise, reference, upper)
  # NaN must be looked at: a sort may put it last.
  bounds = jnp.where(jnp.isnan(bounds), jnp.inf, bounds)
  no_need = state.done[:, None] | jnp.pad(draft.tokens < 0, ((0, 0), (1, 0)))

  def of_first(number, otherwise):
    largest, ids = indexing.top_k(bounds, number + 1)
    own = ids[..., :number]
    logits = model.unembed_at(target, hidden, own)
    take = lambda x: indexing.take(x, own)
    of_own = jax.tree.map(take, (terms, noise, rounding))
    chosen, least = best(logits, own, *of_own)
    # Not so if a bound is NaN.
    is_sure = largest[..., number] < least
    return jax.lax.cond(jnp.all(is_sure | no_need), lambda: chosen, otherwise)

  find = of_all
  for number in reversed(numbers):
    find = functools.partial(of_first, number, find)
  return find()


def _noise(state, num_nodes, vocab_size):
  """Returns the noise [B, n, V] of the positions after n nodes of a chain."""
  positions = state.length[:, None] + jnp.arange(num_nodes)
  draw = lambda key, position: sampling_lib.coupled_noise(
    streams.position_key(key, position), vocab_size
  )
  return jax.vmap(jax.vmap(draw, (None, 0)))(state.key, positions)


def _adjusted(sampling, terms, logits):
  of_nodes = jax.vmap(sampling_lib.adjust, (None, 0, 0))
  return jax.vmap(of_nodes)(sampling, terms, logits)


def _scores(sampling, terms, noise, reference, logits):
  of_nodes = jax.vmap(sampling_lib.coupled_scores, (None, 0, 0, 0))
  adjusted = _adjusted(sampling, terms, logits)
  return jax.vmap(of_nodes)(sampling, adjusted, reference, noise)
