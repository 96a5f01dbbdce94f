"""Assertions that your own drafter or verifier has to satisfy.

Each raises an AssertionError with the numbers, and takes from seconds to a few
minutes on a CPU. A `HashModel` needs no parameters and is the strictest target.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import checks
from specsample import sampling as sampling_lib
from specsample.drafter import Drafter
from specsample.drafters import NoDraft
from specsample.loop import continuous
from specsample.loop import decode
from specsample.loop import request as request_lib
from specsample.loop import step
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.testing import cases as cases_lib
from specsample.testing import enumerate as enumerate_lib
from specsample.testing import sample as sample_lib
from specsample.testing import well_formed
from specsample.testing.cases import Case
from specsample.testing.sample import Group
from specsample.testing.trained import Trained
from specsample.types import Array, DraftKind, Model, Output, Params, Verifier

# Buffers are as long as a number of chunks of this many tokens.
_CHUNK = 128
# Between two lines of `_counted`.
_SECONDS = 10


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
  """Asserts that the draft after each prompt is a chain or a tree of its kind.

  Parents come before their children. No path is longer, and no node has more
  children, than the draft says. Siblings of kind SAMPLED have the same
  distribution. Siblings of the other kinds are distinct, and the distribution
  of a drawn one excludes the tokens of those before it. A drawn token has a
  probability above 0.

  The arguments are those of `generate`; `verify` determines whether the draws
  are positional.
  """
  decoder = Decoder(model, drafter, verify)
  # Leaves room for the whole draft, so that nothing is cut.
  room = drafter.num_draft_tokens + 1
  state = decode.prefill(
    decoder,
    params,
    prompts,
    lengths,
    key,
    sampling=sampling,
    max_new_tokens=room,
  )
  propose = jax.jit(functools.partial(step.propose, decoder))
  draft, _ = propose(params, state)
  problems = list(well_formed.problems(draft))
  assert not problems, f'the draft of {drafter} is invalid: ' + '; '.join(
    problems
  )


def assert_exact(
  verify: Verifier,
  cases: Iterable[Case] | None = None,
  tolerance: float = 1e-12,
) -> None:
  """Asserts that the rule reproduces the target's distribution.

  Enumerates every string of a few rounds (2 and 3 by default) by `.law`, with
  drafts of the kinds that the rule accepts, and tests whether the rule itself
  draws from that law. For a positional rule these are point masses only,
  because other drafts depend on the noise (see `assert_equals_plain_sampling`).
  By default this takes two minutes on a CPU; lines on stderr say how far it is.

  Args:
    verify: the rule.
    cases: by default `testing.cases.rule_cases()`.
    tolerance: the largest allowed error of a string's probability, and the
      largest allowed total variation distance.

  Raises:
    ValueError: the rule declares its draft kinds by their old name.
  """
  checks.verifier(verify)
  if cases is None:
    cases = cases_lib.rule_cases()
  chosen, errors = _errors(verify, cases)
  # Written so that NaN fails as well.
  failures = [
    f'{name}: {error:.1e}'
    for name, error in errors.items()
    if not error <= tolerance
  ]
  assert not failures, (
    f'{verify} is not exact; the largest error of a string, by case: '
    + '; '.join(failures)
  )
  contrary = [
    _named(case)
    for case in _counted(chosen, 'verdicts drawn')
    if not enumerate_lib.compare_calls(
      verify, case.proposal, case.target, jax.random.key(0)
    ).passed
  ]
  assert not contrary, (
    f'{verify} does not draw from its own law when it is called: '
    + '; '.join(contrary)
  )


def _errors(verify, cases) -> tuple[list[Case], dict[str, float]]:
  """Returns the cases of the rule's kinds, and the largest error of each."""
  kinds = {DraftKind.POINT_MASS} if verify.positional else verify.draft_kinds
  chosen = [case for case in cases if case.kind in kinds]
  found = {}
  for case in _counted(chosen, 'laws enumerated'):
    enumeration = enumerate_lib.Enumeration(verify, case.proposal, case.target)
    for rounds in case.rounds:
      found[f'{_named(case)}, {rounds} rounds'] = np.max(
        enumeration.error(rounds, case.law)
      )
  assert found, (
    f'nothing was enumerated: {verify} takes drafts of kind '
    f'{sorted(kind.value for kind in kinds)}, but no case of these kinds has '
    'rounds'
  )
  return chosen, found


def _counted(cases: list[Case], done: str) -> Iterator[Case]:
  """Yields cases; says on stderr every few seconds how many are done."""
  last = time.monotonic()
  for i, case in enumerate(cases):
    yield case
    if time.monotonic() - last >= _SECONDS and i + 1 < len(cases):
      last = time.monotonic()
      print(f'{done}: {i + 1} of {len(cases)} cases', file=sys.stderr)


def _named(case):
  return (
    f'{case.name}, {case.kind.value}, V = {case.vocab_size}, '
    f'K = {case.num_draft_tokens}'
  )


def assert_drafter(
  params: Params,
  key: Array,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
) -> None:
  """Asserts that decoding with a drafter gives the target's output.

  These are the checks that every drafter of the library passes: the draft is of
  its kind; every string of two rounds has its probability, by enumeration; the
  compiled loop follows the target; greedy output is that of plain decoding; and
  a row's tokens are the same alone and in a batch. A minute on a CPU.

  Args:
    params: the whole tree of parameters, `{'target': {}}` for a drafter without
      any and a `HashModel`.
    key: a PRNG key.
    model: the target, of a vocabulary of few tokens: `HashModel(vocab_size=3)`.
    drafter: a drafter for it, of few tokens: chains, or trees of one topology.
    verify: the rule with which it is used.
  """
  settings = Sampling(temperature=0.8, top_p=0.9)
  of_all: Any = {'model': model, 'drafter': drafter, 'verify': verify}
  texts = cases_lib.PROMPT, (2, 1), (0, 0, 0, 0)
  prompts, lengths = map(jnp.asarray, request_lib.pad_prompts(texts))
  assert_draft(params, prompts, lengths, key, sampling=settings, **of_all)
  scene = Trained(type(drafter).__name__, model, drafter, params)
  _assert_exact_drafts(verify, scene, settings)
  groups = (
    Group(cases_lib.PROMPT, settings),
    Group((2, 0, 2, 2), Sampling(temperature=1.3)),
  )
  assert_follows_target(params, groups, key, num_rows=16384, **of_all)
  assert_greedy_equal(params, prompts, lengths, max_new_tokens=12, **of_all)
  assert_batch_invariant(
    params,
    prompts,
    lengths,
    key,
    sampling=Sampling(temperature=1.0),
    max_new_tokens=12,
    **of_all,
  )


def _assert_exact_drafts(verify, scene, sampling):
  """Asserts that a drafter's strings have their probability; says whose fault.

  An exact rule gives another distribution if tokens were not drawn from the
  probabilities that it was told.
  """
  _, errors = _errors(verify, [cases_lib.of_scene(scene.name, scene, sampling)])
  worst = np.max(list(errors.values()))
  hint = (
    'another sum of float32 numbers errs as little: give Draft.probs the very '
    'array that the tokens were drawn from, as `sampling.warp` returned it'
    if worst < 1e-6
    else 'a draft token was not drawn from its row of Draft.probs, or its row '
    'is not from the tokens before it alone'
  )
  assert worst <= 1e-12, (
    f"{scene.drafter} with {verify} does not give the target's distribution; "
    f'the largest error of a string is {worst:.1e}. If '
    f'`assert_exact({verify})` passes, the drafter is at fault: {hint}'
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
  """Asserts that the compiled loop's first tokens follow their exact law.

  The test is a chi-square test. A row that stops before `num_tokens` fails it.

  Args:
    params: the whole tree of parameters.
    groups: prompts and settings, mixed in every batch.
    key: a PRNG key.
    model: the target; its vocabulary must be small, because the law has
      V^num_tokens cells.
    drafter, verify: the drafter and the rule under test.
    num_tokens: more than K + 1, so that there is a second round.
    num_rows: at least this many samples are drawn in total.
  """
  sample = sample_lib.draw(
    Decoder(model, drafter, verify),
    params,
    groups,
    key,
    num_tokens=num_tokens,
    num_rows=num_rows,
  )
  laws = sample_lib.laws(model, params['target'], groups, num_tokens)
  result = sample_lib.compare(sample, laws)
  assert result.passed, (
    f'{drafter} with {verify} does not follow the target: chi-square is '
    f'{result.statistic:.0f}, above {result.threshold:.0f} ({result.dof} '
    f'degrees of freedom, {result.samples} rows; total variations of at least '
    f'{result.detectable:.3f} are found)'
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
  """Asserts that greedy tokens are those of autoregressive decoding.

  Args:
    params: the whole tree of parameters.
    prompts: [B, P] int32.
    lengths: [B].
    model, drafter, verify: as for `generate`. A real network may differ where
      two tokens are equally likely up to rounding.
    max_new_tokens: tokens per row.
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
  """Asserts that the tokens are those that the key gives without a drafter.

  This holds for positional rules (coupled) at any temperature, and for other
  rules at temperature 0. The arguments are those of `generate`.
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
    f'{verify} differ from plain sampling'
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
  """Asserts that a row's tokens depend on its text alone.

  Each row is decoded in the batch, in the reversed batch, with prompts padded
  further, in longer buffers, with other tokens behind its text, in the place of
  a row that has finished, and alone. The arguments are those of `generate`;
  `sampling` may have one value per row.
  """
  batch, width = np.shape(prompts)
  room = 2 * width + max_new_tokens
  rows = sampling_lib.per_row(sampling, batch, model.vocab_size)
  decoder = Decoder(model, drafter, verify)
  parts: Any = {'model': model, 'drafter': drafter, 'verify': verify}

  def given(chosen, padding=0) -> dict[str, Any]:
    take = lambda leaf: np.asarray(leaf)[chosen]
    return {
      'params': params,
      'key': key,
      'max_new_tokens': max_new_tokens,
      'prompts': np.pad(take(prompts), ((0, 0), (0, padding))),
      'lengths': take(lengths),
      'request_ids': np.asarray(chosen, np.int32),
      'sampling': jax.tree.map(take, rows),
    }

  def run(chosen, padding=0, extra=0):
    return decode.generate(
      **parts, **given(chosen, padding), max_length=room + extra
    )

  def among_others(chosen):
    state = decode.prefill(decoder, **given(chosen), max_length=room)
    places = np.arange(state.tokens.shape[1])
    junk = np.resize(np.arange(model.vocab_size)[::-1], state.tokens.shape)
    is_text = places < np.asarray(state.length)[:, None]
    state = dataclasses.replace(
      state, tokens=jnp.where(is_text, state.tokens, junk.astype(np.int32))
    )
    state = decode.advance(decoder, params, state)
    return decode.finish(state, max_new_tokens=max_new_tokens)

  def refilled(chosen):
    arguments = parts | given(chosen)
    texts = zip(arguments['prompts'], arguments.pop('lengths'), strict=True)
    arguments['prompts'] = [text[:length] for text, length in texts]
    found = continuous.generate_all(**arguments, max_length=room, batch_size=1)
    return jax.tree.map(lambda *x: np.concatenate(x), *found)

  everything = np.arange(batch)
  together = run(everything)
  _check_emitted(together)
  take = lambda chosen: jax.tree.map(lambda x: np.asarray(x)[chosen], together)
  for name, chosen, decoded in (
    ('in the opposite order', everything[::-1], run),
    ('with prompts padded further', everything, lambda x: run(x, width)),
    ('in longer buffers', everything, lambda x: run(x, extra=_CHUNK)),
    ('with other tokens behind their text', everything, among_others),
    *(('alone', everything[[row]], run) for row in range(batch)),
    ('in a row that was refilled', everything, refilled),
  ):
    mismatches = count_mismatches(decoded(chosen), take(chosen))
    assert mismatches == 0, (
      f'{mismatches} tokens of rows {chosen.tolist()} differ when decoded '
      f'{name} ({drafter} with {verify})'
    )


def _check_emitted(output):
  lengths = np.asarray(output.lengths).tolist()
  assert lengths and all(lengths), (
    f'the rows emit {lengths} tokens: test with rows that all emit at least one'
  )


def count_mismatches(output: Output, other: Output) -> int:
  """Counts the positions where two outputs of one shape differ.

  A token that only one of them has counts as a difference.
  """
  emitted = lambda x: np.where(
    np.arange(x.tokens.shape[1]) < np.asarray(x.lengths)[:, None], x.tokens, -1
  )
  return int((emitted(output) != emitted(other)).sum())
