"""The target's law a second time, so that a mistake in `warp` is seen.

Enumerations verify drafts against tables from the shipped `sampling.warp`. What
they should find is computed here, in NumPy and float64, from the definitions:
repetition penalty (Keskar et al., 1909.05858), top-p (Holtzman et al.,
1904.09751), min-p (Nguyen et al., 2407.01082). `warp` and this file share no
code, and this one never distinguishes draft tokens from emitted ones.
"""

import functools

import numpy as np

from specsample.constraint import Constraint
from specsample.sampling import Sampling
from specsample.testing import conditional as conditional_lib
from specsample.testing.conditional import Conditional
from specsample.testing.conditional import Logits

# Two computations of a probability differ by about 1e-15. A filter that is
# wrong moves its edge by far more than this.
_SLACK = 1e-9


def from_logits(
  logits: Logits, prompt: tuple[int, ...], sampling: Sampling, like: Conditional
) -> Conditional:
  """Returns the distributions that `sampling` defines for a model's logits.

  If a token is within rounding of the edge of a filter, both keeping and
  dropping it are right. Each distribution is computed with all edges a little
  lower and a little higher, and the one closer to `like` is returned. They
  differ only in such cases.

  Args:
    logits: the model's, after every string.
    prompt: at least one token.
    sampling: scalar settings, except for the bias [V]. The states of a
      constraint's automaton are single integers.
    like: the distributions that will be compared with these.
  """

  @functools.cache
  def after_all(t):
    scores = np.asarray(logits(t), np.float64)
    vocab_size = scores.shape[1]
    if sampling.logit_bias is not None:
      scores = scores + np.asarray(sampling.logit_bias, np.float64)
    tokens = conditional_lib.strings(vocab_size, t)
    scores = _penalise(sampling, scores, prompt, tokens)
    if sampling.constraint is not None:
      allowed = _allowed(sampling.constraint, vocab_size, t)
      scores = np.where(allowed, scores, -np.inf)
    both = [_probs(sampling, scores, slack) for slack in (-_SLACK, _SLACK)]
    few, many = (np.abs(side - like(t, t)).max(axis=1) for side in both)
    return np.where((few < many)[:, None], *both)

  return lambda t, committed: after_all(t)


def _probs(sampling, scores, slack):
  """Applies temperature and filters to penalised logits [n, V].

  A positive slack also keeps tokens just beyond the edge of a filter. A
  negative one drops tokens on it, except for exact ties and the best token.
  """
  if sampling.temperature == 0:
    return np.eye(scores.shape[1])[scores.argmax(axis=1)]  # the first, if tied
  best = scores.max(axis=1, keepdims=True)
  law = _normalise(np.exp((scores - best) / float(sampling.temperature)))
  if sampling.top_k:
    # A token is kept if fewer than k tokens are more likely.
    law = _keep(law, _is_above(law, slack).sum(axis=2) < sampling.top_k)
  if sampling.top_p is not None and sampling.top_p < 1:
    # A token is kept if the tokens that are more likely do not reach p.
    above = (_is_above(law, slack) * law[:, None]).sum(axis=2)
    law = _keep(law, above < sampling.top_p + slack)
  if sampling.min_p is not None:
    least = sampling.min_p * law.max(axis=1, keepdims=True)
    law = _keep(law, law >= least * (1 - slack))
  return law


def _is_above(law, slack):
  """Returns [n, V, V] bool: at [:, x, y], whether y is more likely than x."""
  return law[:, None] > law[:, :, None] * (1 + max(slack, 0))


def _keep(law, kept):
  kept = kept | (law == law.max(axis=1, keepdims=True))
  return _normalise(np.where(kept, law, 0))


def _normalise(weights):
  return weights / weights.sum(axis=1, keepdims=True)


def _penalise(sampling, scores, prompt, tokens):
  ids = np.arange(scores.shape[1])
  count = (tokens[:, :, None] == ids).sum(axis=1)
  if sampling.repetition_penalty is not None:
    penalty = float(sampling.repetition_penalty)
    scaled = np.where(scores > 0, scores / penalty, scores * penalty)
    scores = np.where((count > 0) | np.isin(ids, prompt), scaled, scores)
  if sampling.presence_penalty is not None:
    scores = scores - float(sampling.presence_penalty) * (count > 0)
  if sampling.frequency_penalty is not None:
    scores = scores - float(sampling.frequency_penalty) * count
  return scores


def _allowed(constraint: Constraint, vocab_size: int, t: int) -> np.ndarray:
  """Returns which tokens may follow each string of t tokens, [V^t, V]."""
  automaton = constraint.automaton
  advance = functools.cache(
    lambda state, token: int(automaton.advance(state, token))
  )
  mask = functools.cache(lambda state: np.asarray(automaton.allowed(state)))
  start = automaton.start() if constraint.start is None else constraint.start
  states = [int(start)]
  for _ in range(t):
    states = [advance(x, token) for x in states for token in range(vocab_size)]
  return np.stack([mask(state) for state in states])
