"""Audits of samplers, yours or others': their law against the target's.

A sampler verifies draft tokens in one call, as engines for inference do. It may
be written in JAX, NumPy or torch. If it takes its uniform numbers as an
argument, its law is enumerated, else it is sampled.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math

import jax
import numpy as np

from specsample import checks
from specsample.sampling import Sampling
from specsample.testing import cases as cases_lib
from specsample.testing import chi_square
from specsample.testing import conditional as conditional_lib
from specsample.testing import enumerate as enumerate_lib
from specsample.testing import proposal as proposal_lib
from specsample.testing import sampler_calls
from specsample.testing import uniforms as uniforms_lib
from specsample.testing.hash_model import HashModel
from specsample.testing.proposal import Drafts
from specsample.testing.proposal import Proposal
from specsample.testing.sampler_calls import Batch
from specsample.testing.sampler_calls import Sampler
from specsample.testing.sampler_calls import Scene
from specsample.types import DraftKind

MODEL = HashModel(vocab_size=4)
# drafts(model, sampling) -> what is drafted after `cases.PROMPT`, for the
# settings of a row, which are scalars; see `drawn`.
DraftsFor = Callable[[HashModel, Sampling], Proposal]
# Several values are those of the rows of one batch.
SETTINGS: Mapping[str, Sampling] = {
  'temperature 1': Sampling(temperature=1.0),
  'top-k 2': Sampling(temperature=1.0, top_k=2),
  'temperature 2, top-p 0.8': Sampling(temperature=2.0, top_p=0.8),
  'temperature 0.5, min-p 0.1': Sampling(temperature=0.5, min_p=0.1),
  'top-k 3, top-p 0.7': Sampling(temperature=1.5, top_k=3, top_p=0.7),
  'top-k 2, min-p 0.3': Sampling(temperature=1.0, top_k=2, min_p=0.3),
  'greedy': Sampling(temperature=0.0),
  'greedy and sampled rows': Sampling(temperature=np.asarray([0.0, 1.0])),
}
# A law in float32 differs from the one in float64 by about 1e-7.
TOLERANCE = 1e-5
# Standard errors by which a mean number of tokens differs once in 2e6 times.
_STANDARD_ERRORS = 5.0
_NUM_DRAFTS = 2


def drawn(model: HashModel, sampling: Sampling) -> Proposal:
  """Returns drafts of two tokens that are drawn from a noisy model."""
  return proposal_lib.sampled(_draft_probs(model, sampling), _NUM_DRAFTS)


def likeliest(model: HashModel, sampling: Sampling) -> Proposal:
  """Returns the two tokens that are most likely under a noisy model."""
  return proposal_lib.most_likely(_draft_probs(model, sampling), _NUM_DRAFTS)


def no_drafts(model: HashModel, sampling: Sampling) -> Proposal:
  """Returns drafts of no tokens: the sampler draws a single token."""
  del sampling

  def propose(t):
    one = (model.vocab_size**t, 1)
    empty = np.zeros((*one, 0), np.int32)
    return Drafts(empty, None, np.ones(one), DraftKind.POINT_MASS)

  return propose


def _draft_probs(model, sampling):
  # About half of the drafts are accepted.
  noisy = dataclasses.replace(model, noise=0.6)
  return conditional_lib.from_model(noisy, {}, cases_lib.PROMPT, sampling)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Finding:
  """What was found with one row's settings. `str` says it in a line."""

  setting: str  # the name of the batch's settings
  sampling: Sampling  # the row's own, scalars
  # [V^n], the law of the first n tokens, in lexicographic order: those before
  # the drafts, and up to K + 1 more. Tokens that the sampler did not emit are
  # drawn from the target.
  law: np.ndarray
  target: np.ndarray  # [V^n], the target's law of the same tokens
  total_variation: float  # between the two
  # Contains the distance of the sampler's true law from the target's, with a
  # probability of 1 - `chi_square.ALPHA` if it was sampled.
  interval: tuple[float, float]
  rows: int  # sampled rows; 0 if the law was enumerated
  # The smallest total variation that is found with a probability of
  # `chi_square.POWER` or more.
  detectable: float
  follows_target: bool
  tokens_per_round: float
  # The same of the token rule (`verify.chain`) on these drafts.
  tokens_of_token_rule: float
  gives_away: bool  # whether it emits fewer tokens than the token rule

  def __str__(self) -> str:
    """Returns one line of numbers."""
    own = ', '.join(
      f'{name} {np.asarray(vars(self.sampling)[name]).item():.4g}'
      for name in sampler_calls.GIVEN
    )
    how = 'enumerated'
    if self.rows:
      low, high = self.interval
      how = (
        f'in [{low:.3f}, {high:.3f}], {self.rows} rows, '
        f'{self.detectable:.3f} is found'
      )
    verdict = 'follows the target' if self.follows_target else 'DIFFERS'
    if self.gives_away:
      verdict += ', GIVES TOKENS AWAY'
    return (
      f'{self.setting} ({own}): {verdict}, total variation '
      f'{self.total_variation:.2g} ({how}), {self.tokens_per_round:.3f} tokens '
      f'per round (token rule: {self.tokens_of_token_rule:.3f})'
    )


def audit(
  sampler: Sampler,
  settings: Mapping[str, Sampling] = SETTINGS,
  *,
  num_uniforms: int | None = None,
  num_rows: int = 65536,
  rows_per_call: int = 1024,
  seed: int = 0,
  model: HashModel = MODEL,
  drafts: DraftsFor = drawn,
  num_before: int = 1,
) -> tuple[Finding, ...]:
  """Finds the law of a sampler's tokens, and how far it is from the target's.

  The sampler is called with NumPy arrays of B rows, which a JAX function can
  take as they are and `torch.from_numpy` converts:

  * draft_tokens [B, K] int32, -1 where nothing was drafted;
  * draft_probs [B, K, V] float32, the distributions that they were drawn from
    by the row's settings; None if they are point masses;
  * target_logits [B, K + 1, V] float32, before any setting is applied;
  * sampling: a `Sampling` whose temperature (0 is greedy), top_k (0 is off),
    top_p and min_p are arrays [B]; what they mean is in `sampling.warp`;
  * key: a PRNG key for the whole batch. A sampler without JAX takes a seed,
    `int(jax.random.bits(key))`. With `num_uniforms`, uniforms [B, U] float32.

  It returns integers [B, K + 1]: the tokens that each row emits, at least one,
  then -1. Rows have to be independent.

  Args:
    sampler: the function.
    settings: what is tried, by name. Where a setting has several values, each
      batch has rows of all of them.
    num_uniforms: U, if the sampler takes its random numbers as an argument and
      compares each with probabilities. The law is then enumerated.
    num_rows: rows to sample for each row of the settings, if `num_uniforms` is
      None.
    rows_per_call: B. Take few if the sampler is not compiled.
    seed: 0 to 2**32 - 1.
    model: the target. Its vocabulary must be small: the law has V^n cells.
    drafts: returns all drafts for the settings of a row, for this vocabulary:
      `drawn`, `likeliest`, `no_drafts`, or those of a drafter of yours, from
      `drafted.from_drafter`.
    num_before: tokens after the prompt and before the drafts. All strings of
      them are equally likely, so V^num_before distributions are tried.

  Returns:
    For each of the settings, a finding for each of its rows.

  Raises:
    ValueError: the sampler's result has another shape or dtype or is no
      sequence of tokens; two calls with one key differ, because it draws from a
      global generator; or settings, counts or drafts are refused.
  """
  _check(num_uniforms, num_rows, num_before)
  checks.seed('seed', seed)
  rows_of = {
    name: sampler_calls.settings_of_rows(name, sampling, model.vocab_size)
    for name, sampling in settings.items()
  }
  most = max(map(len, rows_of.values()), default=0)
  if not 0 < most < rows_per_call:
    raise ValueError(
      f'rows_per_call is {rows_per_call}, and the largest of the settings has '
      f'{most} rows: give settings, and more rows per call than that'
    )
  logits = conditional_lib.logits_after(model, {}, cases_lib.PROMPT)
  findings = []
  for name, rows in rows_of.items():
    scenes = tuple(
      Scene.of(row, num_before, logits, drafts(model, row)) for row in rows
    )
    batch = Batch(sampler, scenes, rows_per_call)
    if num_uniforms is None:
      findings += _sampled(name, batch, num_rows, seed)
    else:
      findings += _enumerated(name, batch, num_uniforms, seed)
  return tuple(findings)


def _enumerated(name, batch, num_uniforms, seed):
  """Yields each scene's finding from its law, enumerated."""
  half = np.full((batch.size, num_uniforms), 0.5, np.float32)
  batch.check_repeats(half)
  num_slots, vocab_size = batch.scenes[0].logits.shape[1:]
  # A token more, for slots without one.
  base = vocab_size + 1
  of_case = uniforms_lib.law(
    lambda case, uniforms: conditional_lib.index(
      batch.call_all(case, uniforms) + 1, base
    ),
    num_cases=batch.starts[-1],
    num_uniforms=num_uniforms,
    num_outcomes=base**num_slots,
    seed=seed,
  )
  tokens = conditional_lib.strings(base, num_slots) - 1
  for scene, start in zip(batch.scenes, batch.starts[:-1], strict=True):
    law = scene.weights[:, None] * of_case[start : start + scene.weights.size]
    case, outcome = np.nonzero(law)
    weights, emitted = law[case, outcome], tokens[outcome]
    pending = {}
    length = (emitted >= 0).sum(axis=1)
    for count in range(1, num_slots + 1):
      own = length == count
      string = scene.string[case[own]] * vocab_size**count
      string += conditional_lib.index(emitted[own, :count], vocab_size)
      t = scene.num_before + count
      pending[t] = np.bincount(string, weights[own], vocab_size**t)
    found = enumerate_lib.completed(pending, scene.law)
    target = scene.target_law()
    variation = conditional_lib.total_variation(found, target)
    mean = float(weights @ length)
    yield Finding(
      setting=name,
      sampling=scene.sampling,
      law=found,
      target=target,
      total_variation=variation,
      interval=(variation, variation),
      rows=0,
      detectable=TOLERANCE,
      follows_target=variation <= TOLERANCE,
      tokens_per_round=mean,
      tokens_of_token_rule=scene.tokens_of_token_rule,
      gives_away=mean < scene.tokens_of_token_rule - TOLERANCE,
    )


def _sampled(name, batch, num_rows, seed):
  """Yields each scene's finding from rows that were drawn."""
  key, rng = jax.random.key(seed), np.random.default_rng(seed)
  batch.check_repeats(key)
  num_scenes = len(batch.scenes)
  of_scene = batch.size // num_scenes
  cases, tokens = [], []
  for i in range(-(-num_rows // of_scene)):
    drawn = [
      start + rng.choice(scene.weights.size, of_scene, p=scene.weights)
      for scene, start in zip(batch.scenes, batch.starts[:-1], strict=True)
    ]
    cases.append(np.stack(drawn, axis=1))
    found = batch.call(cases[-1].reshape(-1), jax.random.fold_in(key, i + 1))
    tokens.append(found.reshape(of_scene, num_scenes, -1))
  all_cases, all_tokens = np.concatenate(cases), np.concatenate(tokens)
  for j, scene in enumerate(batch.scenes):
    string = scene.string[all_cases[:, j] - batch.starts[j]]
    yield _of_sample(name, scene, string, all_tokens[:, j], rng)


def _of_sample(name, scene, string, tokens, rng):
  """Returns the finding from tokens [N, K + 1] after strings of index [N]."""
  size, num_slots = tokens.shape
  length = (tokens >= 0).sum(axis=1)
  for i in range(num_slots):
    t = scene.num_before + i
    probs = scene.law(t, t)[string]
    cumulative = np.cumsum(probs, axis=1) / probs.sum(axis=1, keepdims=True)
    drawn = (rng.random(size)[:, None] >= cumulative).sum(axis=1)
    token = np.where(tokens[:, i] >= 0, tokens[:, i], drawn)
    string = string * probs.shape[1] + token
  target = scene.target_law()
  counts = np.bincount(string, minlength=target.size)
  test = chi_square.test([(counts, target)])
  variation = conditional_lib.total_variation(counts / size, target)
  mean, error = float(length.mean()), float(length.std()) / math.sqrt(size)
  return Finding(
    setting=name,
    sampling=scene.sampling,
    law=counts / size,
    target=target,
    total_variation=variation,
    interval=_interval(variation, target.size, size),
    rows=size,
    detectable=test.detectable,
    follows_target=test.passed,
    tokens_per_round=mean,
    tokens_of_token_rule=scene.tokens_of_token_rule,
    gives_away=bool(
      mean < scene.tokens_of_token_rule - _STANDARD_ERRORS * error - TOLERANCE
    ),
  )


def _interval(variation, num_cells, size):
  """Returns the interval for the total variation of the sampled law.

  One row moves the measured distance by at most 1 / N, so it is near its mean
  (McDiarmid's inequality). The mean is at least the true distance, and by
  Cauchy-Schwarz above it by at most sqrt((cells - 1) / N) / 2.
  """
  spread = math.sqrt(math.log(2 / chi_square.ALPHA) / (2 * size))
  excess = math.sqrt((num_cells - 1) / size) / 2
  return max(variation - spread - excess, 0.0), min(variation + spread, 1.0)


def _check(num_uniforms, num_rows, num_before):
  if num_uniforms is not None and num_uniforms < 1:
    raise ValueError(
      f'num_uniforms is {num_uniforms}: give the number of uniforms that a row '
      'takes, or None to sample'
    )
  if num_rows < 1024 or num_before < 0:
    raise ValueError(
      f'num_rows is {num_rows} and num_before is {num_before}: sample at least '
      '1024 rows, after 0 tokens or more'
    )
