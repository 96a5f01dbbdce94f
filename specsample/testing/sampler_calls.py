"""What an audited sampler is called with, and what it may return."""

from collections.abc import Callable
import dataclasses
import functools

import jax
import numpy as np

from specsample import sampling as sampling_lib
from specsample import tree as tree_lib
from specsample import verify
from specsample.sampling import Sampling
from specsample.testing import cases as cases_lib
from specsample.testing import conditional as conditional_lib
from specsample.testing import enumerate as enumerate_lib
from specsample.testing import law as law_lib
from specsample.testing.conditional import Conditional
from specsample.testing.conditional import Logits
from specsample.testing.proposal import Proposal
from specsample.types import Array, ArrayLike

# sampler(draft_tokens, draft_probs, target_logits, sampling, key) -> tokens;
# `auditing.audit` describes them.
Sampler = Callable[
  [np.ndarray, np.ndarray | None, np.ndarray, Sampling, Array | np.ndarray],
  ArrayLike,
]

# The settings that a sampler gets.
GIVEN = ('temperature', 'top_k', 'top_p', 'min_p')


def settings_of_rows(
  name: str, sampling: Sampling, vocab_size: int
) -> list[Sampling]:
  """Returns the settings of each row, scalars, with all of `GIVEN` set.

  Args:
    name: names the settings in messages.
    sampling: has numbers, or an array of one for each row.
    vocab_size: V.

  Raises:
    ValueError: another setting is given, or a value is out of range.
  """
  for field in dataclasses.fields(sampling):
    if field.name not in GIVEN and vars(sampling)[field.name] is not None:
      raise ValueError(
        f'{field.name} is set in {name!r}, but samplers are audited with '
        f'{", ".join(GIVEN)}: leave it out, or apply it to the logits'
      )
  given = Sampling(
    temperature=sampling.temperature,
    top_k=0 if sampling.top_k is None else sampling.top_k,
    top_p=1.0 if sampling.top_p is None else sampling.top_p,
    min_p=0.0 if sampling.min_p is None else sampling.min_p,
  )
  size = max(np.size(value) for value in jax.tree.leaves(given))
  rows = sampling_lib.per_row(given, size, vocab_size)
  return [jax.tree.map(lambda leaf: leaf[i], rows) for i in range(size)]  # noqa: B023


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
  """Every draft after every string of some tokens, for one row's settings."""

  sampling: Sampling  # scalars
  num_before: int  # t
  law: Conditional  # the target's, not computed by `sampling.warp`
  string: np.ndarray  # [n], the index of the string before the draft
  tokens: np.ndarray  # [n, K] int32
  probs: np.ndarray | None  # [n, K, V] float32, as the sampler gets them
  logits: np.ndarray  # [n, K + 1, V] float32
  weights: np.ndarray  # [n], the probability of the string with this draft
  # The mean number of tokens that the token rule emits.
  tokens_of_token_rule: float

  @classmethod
  def of(
    cls,
    sampling: Sampling,
    num_before: int,
    logits: Logits,
    proposal: Proposal,
  ) -> 'Scene':
    """Returns all drafts after every string of `num_before` tokens.

    Args:
      sampling: scalar settings.
      num_before: t; all strings of t tokens are equally likely.
      logits: the target's, after `cases.PROMPT` and a string.
      proposal: the drafts, chains.
    """
    prompt, t = cases_lib.PROMPT, num_before
    target = conditional_lib.from_logits(logits, prompt, sampling)
    drafts = proposal(t)
    if drafts.topology is not None:
      raise ValueError(
        f'the drafts are trees of {drafts.topology.num_nodes} nodes, but '
        'samplers are audited with chains: draft without a topology'
      )
    num_strings, _, num_drafts = drafts.tokens.shape
    emissions = enumerate_lib.Enumeration(
      verify.chain, proposal, target
    ).emissions(t)
    after = conditional_lib.at_nodes(
      lambda t, _: logits(t), t, drafts.tokens, tree_lib.chain(num_drafts)
    )
    probs = drafts.probs
    chosen = string, _ = np.nonzero(drafts.weights)
    return cls(
      sampling=sampling,
      num_before=t,
      law=law_lib.from_logits(logits, prompt, sampling, target),
      string=string,
      tokens=drafts.tokens[chosen].astype(np.int32),
      probs=None if probs is None else probs[chosen].astype(np.float32),
      logits=after[chosen].astype(np.float32),
      weights=drafts.weights[chosen] / num_strings,
      tokens_of_token_rule=sum(
        float((i + 1) * emission.sum()) / num_strings
        for i, emission in enumerate(emissions)
      ),
    )

  def target_law(self) -> np.ndarray:
    """Returns the target's law [V^n] of the string and K + 1 more tokens."""
    num_slots, vocab_size = self.logits.shape[1:]
    num_strings = vocab_size**self.num_before
    longest = np.zeros(num_strings * vocab_size**num_slots)
    pending = {
      self.num_before: np.full(num_strings, 1 / num_strings),
      self.num_before + num_slots: longest,
    }
    return enumerate_lib.completed(pending, self.law)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
  """A sampler, and the scenes whose rows every call has."""

  sampler: Sampler
  scenes: tuple[Scene, ...]
  # Rows of every call, so that a function that is compiled is compiled once.
  size: int

  @functools.cached_property
  def starts(self) -> np.ndarray:
    """The number of each scene's first case, and of all cases, [m + 1]."""
    return np.cumsum([0, *(scene.weights.size for scene in self.scenes)])

  @functools.cached_property
  def _arrays(self):
    join = lambda name: np.concatenate([vars(x)[name] for x in self.scenes])
    probs = None if self.scenes[0].probs is None else join('probs')
    sampling = jax.tree.map(
      lambda *values: np.asarray(values),
      *(scene.sampling for scene in self.scenes),
    )
    scene = np.repeat(np.arange(len(self.scenes)), np.diff(self.starts))
    return join('tokens'), probs, join('logits'), sampling, scene

  def call(self, cases: np.ndarray, random: Array | np.ndarray) -> np.ndarray:
    """Returns the tokens [B, K + 1] for cases [B], checked."""
    tokens, probs, logits, sampling, scene = self._arrays
    found = self.sampler(
      tokens[cases],
      None if probs is None else probs[cases],
      logits[cases],
      jax.tree.map(lambda leaf: leaf[scene[cases]], sampling),
      random,
    )
    return _checked(found, (cases.size, *logits.shape[1:]))

  def check_repeats(self, random: Array | np.ndarray) -> None:
    """Raises ValueError if two calls with the same random numbers differ."""
    cases = np.resize(np.arange(self.starts[-1]), self.size)
    first, second = self.call(cases, random), self.call(cases, random)
    count = int(np.any(first != second, axis=1).sum())
    if count:
      raise ValueError(
        f'two calls of the sampler with one key differ in {count} of '
        f'{self.size} rows, so it draws from a global generator: draw from the '
        'key, or seed a generator with int(jax.random.bits(key)) in each call'
      )

  def call_all(self, cases: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Returns the tokens for any number of cases; every call has all scenes."""
    first = self.starts[:-1]
    step = self.size - first.size
    found = []
    for start in range(0, cases.size, step):
      own = slice(start, start + step)
      missing = self.size - cases[own].size
      of_block = np.concatenate([cases[own], np.resize(first, missing)])
      padded = np.pad(
        uniforms[own], ((0, missing), (0, 0)), constant_values=0.5
      )
      found.append(self.call(of_block, padded)[: cases[own].size])
    return np.concatenate(found)


def _checked(found: ArrayLike, shape: tuple[int, int, int]) -> np.ndarray:
  """Returns tokens [B, K + 1] as an array; `shape` is B, K + 1, V."""
  *expected, vocab_size = shape
  try:
    tokens = np.asarray(found)
  except ValueError as error:
    raise ValueError(
      'the sampler returned rows of several lengths: fill them up to '
      f'{tuple(expected)} with -1'
    ) from error
  if tokens.shape != tuple(expected) or tokens.dtype.kind not in 'iu':
    raise ValueError(
      f'the sampler returned {tokens.dtype} of shape {tokens.shape}: return '
      f'integers of shape {tuple(expected)}, which is [B, K + 1], with the '
      'tokens that a row emits, then -1'
    )
  is_token = (tokens >= 0) & (tokens < vocab_size)
  count = np.cumprod(is_token, axis=1).sum(axis=1)
  is_after = np.arange(tokens.shape[1]) >= count[:, None]
  wrong = (count == 0) | np.any(is_after & (tokens != -1), axis=1)
  if wrong.any():
    raise ValueError(
      f'the sampler returned {int(wrong.sum())} rows such as '
      f'{tokens[wrong][0].tolist()}: a row has one or more tokens from 0 to '
      f'{vocab_size - 1}, then only -1'
    )
  return tokens.astype(np.int64)
