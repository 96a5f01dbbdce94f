"""Audits of greedy outputs that differ from the baseline's.

`divergence` explains what is done at the first difference of each output.
"""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import functools
from typing import Any

from absl import logging
import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.command import distributed
from experiments.command import journal as journal_lib
from experiments.command import units as units_lib
from experiments.evaluation import divergence
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import turns as turns_lib
from experiments.reporting import rows as rows_lib
from specsample import sampling as sampling_lib

# The journal's keys are (KIND, method, prompt), in later turns with the turn.
KIND = 'divergence'
TIE = 'tie'
DIFFERS = 'DIFFERS'

# At most this many per method are shown in the terminal; result.json has all.
_SHOWN = 3
_NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class Parting:
  """The first difference of an output; token -1 means that an output ended."""

  method: str
  prompt: int  # its number, from 0
  turn: int  # of the conversation, from 0
  common: list[int]  # the tokens before the difference
  token: int
  baseline_token: int


def units(
  evaluation: evaluation_lib.Evaluation,
  tokens: Sequence[list[int]],
  journal: journal_lib.Journal | None,
  later: Sequence[turns_lib.Turn] = (),
) -> list[units_lib.Unit]:
  """Returns a unit of work for each greedy output that is not the baseline's.

  Only outputs that must be equal are compared: those of lossless methods at
  temperature 0, if there is a baseline. In a later turn, both methods must also
  have read the same.

  Args:
    evaluation: the evaluation that was run.
    tokens: the prompts as the model reads them.
    journal: holds all generations; None in every process but the first.
    later: the turns after the first.
  """
  if (
    evaluation.sampling.temperature != 0
    or methods_lib.BASELINE not in evaluation.methods
  ):
    return []
  turns = [turns_lib.first(evaluation.methods, 1, tokens), *later]
  found = []
  if journal is not None:
    for turn in turns:
      found += _partings(evaluation, turn, journal)
  audit = lambda parting: _audit_in_batch(
    evaluation, turns[parting.turn], parting
  )
  return _units(evaluation, found, audit)


def units_alone(
  evaluation: evaluation_lib.Evaluation,
  tokens: Sequence[list[int]],
  found: list[Parting],
) -> list[units_lib.Unit]:
  """Returns the units of work for outputs that no batch reproduces.

  Args:
    evaluation: has the methods of the partings.
    tokens: the prompts as the model reads them.
    found: the first difference of each output from another one, which takes
      the place of the baseline's. Only the first process needs them.
  """
  audit = lambda parting: _audit_alone(
    evaluation, tokens[parting.prompt], parting
  )
  return _units(evaluation, found, audit)


def outputs(
  evaluation: evaluation_lib.Evaluation,
  turn: turns_lib.Turn,
  journal: journal_lib.Journal,
  method: str,
) -> list[list[int]]:
  """Returns a method's tokens for each prompt of a turn, from the journal."""
  return [
    generation['tokens']
    for i in range(evaluation.num_calls(len(turn.prompts)))
    for generation in journal[turns_lib.key(method, i, turn.number)][
      'generations'
    ]
  ]


def _units(evaluation, found, audit) -> list[units_lib.Unit]:
  """Returns a unit that audits each parting that the first process found."""
  return [
    _unit(parting, functools.partial(audit, parting))
    for parting in _from_first(evaluation, found)
  ]


def _unit(parting, run):
  label = f'difference, prompt {parting.prompt + 1}, {parting.method}'
  turn = [parting.turn] if parting.turn else []
  return units_lib.Unit(
    label,
    (KIND, parting.method, parting.prompt, *turn),
    functools.partial(_unless_it_fails, label, run),
  )


def _unless_it_fails(label, run):
  """Runs an audit; returns None if the devices have no room for it.

  The audit holds the target in float32 too. If it fails, the decoded outputs
  are kept, and the next run tries again.
  """
  try:
    return run()
  except jax.errors.JaxRuntimeError as error:
    reason, _, _ = str(error).partition('\n')
    logging.warning('%s: not audited: %s', label, reason)
    return None


def partings(
  method: str, outputs: Sequence[list[int]], baseline: Sequence[list[int]]
) -> Iterator[Parting]:
  """Yields the first difference of each output from the baseline's, if any.

  Both sequences have one output per prompt, of the first turn.
  """
  pairs = zip(outputs, baseline, strict=True)
  for prompt, (tokens, base) in enumerate(pairs):
    at = rows_lib.first_difference(tokens, base)
    if at is not None:
      ends = [[*row, _NO_TOKEN][at] for row in (tokens, base)]
      yield Parting(method, prompt, 0, tokens[:at], *ends)


def mismatches(
  method: str,
  outputs: Sequence[list[int]],
  baseline: Sequence[list[int]],
  divergences: Iterable[dict[str, Any]],
) -> rows_lib.Mismatches:
  """Counts the outputs that are not the baseline's, by the audit's verdict."""
  different = sum(1 for _ in partings(method, outputs, baseline))
  verdicts = [one['verdict'] for one in divergences if one['method'] == method]
  ties, errors = map(verdicts.count, (TIE, DIFFERS))
  return rows_lib.Mismatches(ties, errors, different - ties - errors)


def lines(divergences: Sequence[dict[str, Any]]) -> list[str]:
  """Returns a few lines per method, starting with outputs that DIFFER.

  `divergences` are the values of the units.
  """
  shown = []
  for method in dict.fromkeys(one['method'] for one in divergences):
    found = [one for one in divergences if one['method'] == method]
    found.sort(key=lambda one: one['verdict'] != DIFFERS)
    shown += [_line(one) for one in found[:_SHOWN]]
    if len(found) > _SHOWN:
      shown.append(f'  {len(found) - _SHOWN} more of {method} in result.json')
  return shown


def _line(one):
  turn = f', turn {one["turn"]}' if one['turn'] > 1 else ''
  where = (
    f'  {one["method"]}, prompt {one["prompt"]}{turn}, token {one["position"]}'
  )
  texts = f'{one["text"]!r} instead of {one["baseline_text"]!r}'
  if one['audit'] is None:
    return f'{where}: {texts}: one output ended there ({one["verdict"]})'
  audit = one['audit']
  return (
    f'{where}: {texts} ({one["verdict"]}); '
    f'the latter leads by {audit["float32"]["lead"]:.2g} logits in float32 '
    f'(a tie up to {audit["bound"]:.2g}), '
    f'{audit["one_token"]["lead"]:.2g} in passes of 1 token and '
    f'{audit["block"]["lead"]:.2g} in passes of {one["width"]}'
  )


def _partings(evaluation, turn, journal):
  baseline = outputs(evaluation, turn, journal, methods_lib.BASELINE)
  read = turn.tokens[methods_lib.BASELINE, 0]
  for name, method in evaluation.methods.items():
    if not method.verify.lossless or name == methods_lib.BASELINE:
      continue
    of_method = outputs(evaluation, turn, journal, name)
    for one in partings(name, of_method, baseline):
      if turn.tokens[name, 0][one.prompt] == read[one.prompt]:
        yield dataclasses.replace(
          one, prompt=turn.prompts[one.prompt], turn=turn.number
        )


def _from_first(evaluation, found: list[Parting]) -> list[Parting]:
  """Returns the partings that the first process found, in every process."""
  names = list(evaluation.methods)
  (count,) = distributed.from_first(np.asarray([len(found)]))
  if not count:
    return []
  rows = np.full((count, 6 + evaluation.max_new_tokens), _NO_TOKEN)
  for row, one in zip(rows, found, strict=False):
    row[:6] = (
      *(names.index(one.method), one.prompt, one.turn, len(one.common)),
      *(one.token, one.baseline_token),
    )
    row[6 : 6 + len(one.common)] = one.common
  return [
    Parting(names[method], prompt, turn, common[:length], token, base)
    for method, prompt, turn, length, token, base, *common in (
      distributed.from_first(rows).tolist()
    )
  ]


def _audit_in_batch(evaluation, turn, parting) -> dict[str, Any]:
  tokens = turn.tokens[parting.method, 0]
  at = turn.prompts.index(parting.prompt)
  batch = next(
    batch for batch in evaluation.batches(len(tokens)) if at in batch
  )
  rows, row = [tokens[i] for i in batch], batch.index(at)
  ids = [turn.prompts[i] for i in batch]
  return _audit(
    evaluation,
    tokens[at],
    parting,
    _sampling(evaluation, len(batch), row),
    functools.partial(_starts, evaluation, rows, ids, row, parting),
  )


def _audit_alone(evaluation, prompt, parting) -> dict[str, Any]:
  sampling = _sampling(evaluation, 1, 0)
  return _audit(evaluation, prompt, parting, sampling, lambda: [])


def _sampling(evaluation, num_rows, row) -> sampling_lib.Sampling:
  """Returns the settings of one row of a batch."""
  vocab_size = evaluation.target.model.vocab_size
  rows = sampling_lib.per_row(evaluation.sampling, num_rows, vocab_size)
  return jax.tree.map(lambda x: x[row], rows)


def _starts(evaluation, rows, ids, row, parting) -> list[int]:
  """Returns where the method's rounds began, up to the difference.

  Decodes the batch again; returns an empty list if that gives another output,
  or if the method drafted with weights that it has learned.
  """
  if parting.method in evaluation.online_learners:
    return []
  # Request ids matter for limits only: greedy rows draw nothing.
  output = evaluation.generate(evaluation.methods[parting.method], rows, ids)
  count = len(parting.common) + 1
  again = np.asarray(output.tokens)[row, :count].tolist()
  if again != [*parting.common, parting.token]:
    return []
  rounds = np.asarray(output.emit_round)[row, :count]
  return [0, *(1 + np.flatnonzero(np.diff(rounds))).tolist()]


def _audit(evaluation, prompt, parting, sampling, starts) -> dict[str, Any]:
  method = evaluation.methods[parting.method]
  text = lambda token: (
    None
    if token == _NO_TOKEN
    else evaluation.target.tokenizer.decode([token], skip_special=False)
  )
  width = method.drafter.num_draft_tokens + 1
  found = {
    'method': parting.method,
    'prompt': parting.prompt + 1,
    'turn': parting.turn + 1,
    'position': len(parting.common),  # index into the emitted tokens, from 0
    'token': parting.token,
    'text': text(parting.token),
    'baseline_token': parting.baseline_token,
    'baseline_text': text(parting.baseline_token),
    'width': width,  # tokens per pass of the method
  }
  if _NO_TOKEN in (parting.token, parting.baseline_token):
    return found | {'verdict': DIFFERS, 'audit': None}
  audit = divergence.audit(
    evaluation.target.params,
    prompt,
    parting.common,
    parting.token,
    parting.baseline_token,
    model=evaluation.target.model,
    width=width,
    starts=starts(),
    batch_size=evaluation.batch_size,
    max_new_tokens=evaluation.max_new_tokens,
    sampling=sampling,
  )
  verdict = TIE if audit.is_tie else DIFFERS
  return found | {'verdict': verdict, 'audit': audit.to_json()}
