"""What a drafter or a verifier of your own has to satisfy.

Each raises AssertionError with the numbers, and takes seconds to a minute on a
CPU. A `HashModel` needs no parameters and is the strictest of targets.
"""

from collections.abc import Iterable

import jax
import numpy as np

from specsample import sampling as sampling_lib
from specsample.drafters import NoDraft
from specsample.loop import decode
from specsample.loop import step
from specsample.sampling import Sampling
from specsample.testing import cases as cases_lib
from specsample.testing import enumerate as enumerate_lib
from specsample.testing import sample as sample_lib
from specsample.testing import well_formed
from specsample.testing.cases import Case
from specsample.testing.sample import Group
from specsample.types import (
  Array,
  Drafter,
  DraftLaw,
  Model,
  Output,
  Params,
  Verifier,
)


def assert_draft(
  params: Params,
  prompts: Array,
  lengths: Array,
  key: Array,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  sampling: Sampling,
) -> None:
  """What is drafted behind each prompt is a chain or a tree of its law.

  Parents come before their children, and no path is longer, no node has more
  children, than the draft says. Siblings are of one distribution where they are
  independent; otherwise none is there twice, and each of those drawn comes of
  what those before it left. A drawn token has a probability above 0.

  Arguments as `generate`'s; `verify` says whether the draws are positional.
  """
  state = decode.prefill(
    params,
    prompts,
    lengths,
    key,
    model=model,
    drafter=drafter,
    sampling=sampling,
    # So that nothing is cut.
    max_new_tokens=drafter.num_draft_tokens + 1,
  )
  propose = lambda params, state: step.propose(
    params, state, model=model, drafter=drafter, verify=verify
  )
  draft, _ = jax.jit(propose)(params, state)
  problems = list(well_formed.problems(draft))
  assert not problems, f'{drafter} drafts ' + '; '.join(problems)


def assert_exact(
  verify: Verifier,
  cases: Iterable[Case] | None = None,
  tolerance: float = 1e-12,
) -> None:
  """The rule's `.law` reproduces the target: every string of 2 and 3 rounds.

  Enumerates the drafts of the laws that the rule takes; for a positional rule
  the point masses only, as the noise decides the rest (see
  `assert_equals_plain_sampling`).

  Args:
    verify: the rule.
    cases: default `testing.cases.standard_cases()`.
    tolerance: the largest error of a probability, and of their sum.
  """
  if cases is None:
    cases = cases_lib.standard_cases()
  laws = {DraftLaw.POINT_MASS} if verify.positional else verify.draft_laws
  failures, num_found = [], 0
  for case in cases:
    if case.law not in laws:
      continue
    enumeration = enumerate_lib.Enumeration(verify, case.proposal, case.target)
    for rounds in case.rounds:
      num_found += 1
      # A NaN is no error below the tolerance either.
      if not max(enumeration.error(rounds)) <= tolerance:
        error = enumeration.error(rounds)[0]
        failures.append(
          f'{case.name}, {case.law.value}, V = {case.vocab_size}, '
          f'K = {case.num_draft_tokens}, {rounds} rounds: {error:.1e}'
        )
  assert num_found, (
    f'nothing was enumerated: {verify} takes drafts of law '
    f'{sorted(law.value for law in laws)}, and no case has rounds of those'
  )
  assert not failures, (
    f'{verify} is not exact; the largest error of a string is, in '
    + '; '.join(failures)
  )


def assert_follows_target(
  params: Params,
  groups: tuple[Group, ...],
  key: Array,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  num_tokens: int = 4,
  num_rows: int = 65536,
) -> None:
  """Chi-square of the compiled loop's first tokens against their exact law.

  A row that stops before `num_tokens` fails it.

  Args:
    params: the whole tree.
    groups: prompts and settings, mixed in every batch.
    key: a PRNG key.
    model: the target, of a small vocabulary: the law has V^num_tokens cells.
    drafter, verify: what is tested.
    num_tokens: more than K + 1, so that there is a second round.
    num_rows: samples in total.
  """
  sample = sample_lib.draw(
    params,
    groups,
    key,
    model=model,
    drafter=drafter,
    verify=verify,
    num_tokens=num_tokens,
    num_rows=num_rows,
  )
  laws = sample_lib.laws(model, params['target'], groups, num_tokens)
  result = sample_lib.compare(sample, laws)
  assert result.passed, (
    f'{drafter} with {verify} does not follow the target: chi-square '
    f'{result.statistic:.0f} over {result.threshold:.0f} ({result.dof} degrees '
    f'of freedom, {result.samples} rows; total variations from '
    f'{result.detectable:.3f} on are found)'
  )


def assert_greedy_equal(
  params: Params,
  prompts: Array,
  lengths: Array,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  max_new_tokens: int,
) -> None:
  """At temperature 0 the tokens are those of autoregressive decoding.

  Args:
    params: the whole tree.
    prompts: [B, P] int32; lengths: [B].
    model, drafter, verify: as for `generate`. A real network may differ where
      two tokens are equally likely up to rounding.
    max_new_tokens: tokens a row.
  """
  assert_equals_plain_sampling(
    params,
    prompts,
    lengths,
    jax.random.key(0),
    model=model,
    drafter=drafter,
    verify=verify,
    sampling=Sampling(),
    max_new_tokens=max_new_tokens,
  )


def assert_equals_plain_sampling(
  params: Params,
  prompts: Array,
  lengths: Array,
  key: Array,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  sampling: Sampling,
  max_new_tokens: int,
) -> None:
  """Token for token what the same key gives without a drafter.

  For positional rules (coupled) at any temperature, for others at 0. Arguments
  as `generate`'s.
  """
  run = lambda drafter: decode.generate(
    params,
    prompts,
    lengths,
    key,
    model=model,
    drafter=drafter,
    verify=verify,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
  )
  drafted, plain = run(drafter), run(NoDraft())
  _check_emitted(plain)
  mismatches = count_mismatches(drafted, plain)
  assert mismatches == 0, (
    f'{mismatches} of {int(plain.lengths.sum())} tokens of {drafter} with '
    f'{verify} are not those of plain sampling'
  )


def assert_batch_invariant(
  params: Params,
  prompts: Array,
  lengths: Array,
  key: Array,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  sampling: Sampling,
  max_new_tokens: int,
) -> None:
  """A row's tokens are the same alone, in a batch, permuted and padded.

  Arguments as `generate`'s; `sampling` may have one value a row.
  """
  batch, width = np.shape(prompts)
  room = 2 * width + max_new_tokens
  rows = sampling_lib.per_row(sampling, batch, model.vocab_size)

  def run(chosen, padding):
    take = lambda leaf: np.asarray(leaf)[chosen]
    return decode.generate(
      params,
      np.pad(take(prompts), ((0, 0), (0, padding))),
      take(lengths),
      key,
      request_ids=np.asarray(chosen, np.int32),
      model=model,
      drafter=drafter,
      verify=verify,
      sampling=jax.tree.map(take, rows),
      max_new_tokens=max_new_tokens,
      max_length=room,
    )

  together = run(np.arange(batch), 0)
  _check_emitted(together)
  take = lambda chosen: jax.tree.map(lambda x: np.asarray(x)[chosen], together)
  backwards = np.arange(batch)[::-1]
  variants = {
    'in the opposite order': [(backwards, 0)],
    'with prompts padded further': [(np.arange(batch), width)],
    'alone': [(np.asarray([row]), 0) for row in range(batch)],
  }
  for name, runs in variants.items():
    for chosen, padding in runs:
      mismatches = count_mismatches(run(chosen, padding), take(chosen))
      assert mismatches == 0, (
        f'{mismatches} tokens of rows {chosen.tolist()} are others {name} '
        f'({drafter} with {verify})'
      )


def _check_emitted(output):
  lengths = np.asarray(output.lengths).tolist()
  assert lengths and all(lengths), (
    f'rows of {lengths} tokens: one that emits nothing shows nothing'
  )


def count_mismatches(output: Output, other: Output) -> int:
  """In how many places two outputs of one shape differ, missing tokens too."""
  emitted = lambda x: np.where(
    np.arange(x.tokens.shape[1]) < np.asarray(x.lengths)[:, None], x.tokens, -1
  )
  return int((emitted(output) != emitted(other)).sum())
