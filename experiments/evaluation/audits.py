"""Audits of greedy outputs that differ from the baseline's.

`divergence` explains what is done at the first difference of each output.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import Any

from absl import logging
import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.command import units as units_lib
from experiments.evaluation import conversations
from experiments.evaluation import divergence
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import refilled
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
class FirstDifference:
  """Where an output differs first; token -1 means that an output ended."""

  index: int  # of the output
  common: list[int]  # the tokens before the difference
  token: int
  baseline_token: int


def units(
  part: evaluation_lib.Part, turns: Sequence[conversations.Turn]
) -> Iterator[units_lib.Unit]:
  """Yields an audit of each greedy output that differs.

  Outputs of refilled rows are compared with those of static batches, and these
  with the baseline's, if both methods have read the same. The journal holds all
  generations of the turns.
  """
  evaluation, journal = part.evaluation, part.journal
  for turn in turns:
    outputs = functools.partial(conversations.outputs, journal, turn.number)
    for name in compared(evaluation):
      read, others = (turn.tokens[x, 0] for x in (name, methods_lib.BASELINE))
      for found in differences(outputs(name), outputs(methods_lib.BASELINE)):
        if read[found.index] == others[found.index]:
          yield _unit(evaluation, name, turn, found)
    for name in exact(evaluation) if evaluation.refill else ():
      again = journal[refilled.KIND, name, 0]['tokens']
      for found in differences(again, outputs(name)):
        yield _unit(evaluation, name, turn, found, refilled.label(name))


def exact(evaluation: evaluation_lib.Evaluation) -> list[str]:
  """Returns the methods whose outputs are the target's most likely tokens."""
  if evaluation.sampling.temperature != 0:
    return []
  methods = evaluation.methods.items()
  return [name for name, method in methods if method.verify.lossless]


def compared(evaluation: evaluation_lib.Evaluation) -> list[str]:
  """Returns the methods whose outputs must be those of a baseline, if any."""
  if methods_lib.BASELINE not in evaluation.methods:
    return []
  return [x for x in exact(evaluation) if x != methods_lib.BASELINE]


def _unit(
  evaluation: evaluation_lib.Evaluation,
  name: str,
  turn: conversations.Turn,
  found: FirstDifference,
  label: str | None = None,
) -> units_lib.Unit:
  """Returns the audit of an output; with a label, no batch reproduces it."""
  prompt = turn.prompts[found.index]
  shown = f'difference, prompt {prompt + 1}, {label or name}'

  def run():
    # The audit holds the target in float32 too. If the devices have no room,
    # the decoded outputs are kept, and the next run tries again.
    try:
      return _audit(evaluation, name, turn, found, label)
    except jax.errors.JaxRuntimeError as error:
      reason, _, _ = str(error).partition('\n')
      logging.warning('%s: not audited: %s', shown, reason)
      return None

  number = [turn.number] if turn.number else []
  return units_lib.Unit(shown, (KIND, label or name, prompt, *number), run)


def differences(
  outputs: Sequence[list[int]], baseline: Sequence[list[int]]
) -> Iterator[FirstDifference]:
  """Yields the first difference of each output from the baseline's, if any."""
  pairs = zip(outputs, baseline, strict=True)
  for index, (tokens, base) in enumerate(pairs):
    both = itertools.zip_longest(tokens, base, fillvalue=_NO_TOKEN)
    for at, (token, other) in enumerate(both):
      if token != other:
        yield FirstDifference(index, tokens[:at], token, other)
        break


def mismatches(
  method: str, different: int, divergences: Sequence[dict[str, Any]]
) -> rows_lib.Mismatches:
  """Counts a method's `different` outputs by the verdicts of their audits."""
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


def _audit(evaluation, name, turn, found, label) -> dict[str, Any]:
  target, method = evaluation.target, evaluation.methods[name]
  decode = functools.partial(target.tokenizer.decode, skip_special=False)
  text = lambda token: None if token == _NO_TOKEN else decode([token])
  record = {
    'method': label or name,
    'prompt': turn.prompts[found.index] + 1,
    'turn': turn.number + 1,
    'position': len(found.common),  # index into the emitted tokens, from 0
    'token': found.token,
    'text': text(found.token),
    'baseline_token': found.baseline_token,
    'baseline_text': text(found.baseline_token),
    # Tokens per pass of the method.
    'width': method.drafter.num_draft_tokens + 1,
  }
  if _NO_TOKEN in (found.token, found.baseline_token):
    return record | {'verdict': DIFFERS, 'audit': None}
  sampling = sampling_lib.per_row(
    evaluation.sampling, 1, target.model.vocab_size
  )
  audit = divergence.audit(
    target.params,
    turn.tokens[name, 0][found.index],
    found.common,
    found.token,
    found.baseline_token,
    model=target.model,
    width=record['width'],
    starts=[] if label else _starts(evaluation, name, turn, found),
    batch_size=evaluation.batch_size,
    max_new_tokens=evaluation.max_new_tokens,
    sampling=jax.tree.map(lambda x: x[0], sampling),
  )
  verdict = TIE if audit.is_tie else DIFFERS
  return record | {'verdict': verdict, 'audit': dataclasses.asdict(audit)}


def _starts(evaluation, name, turn, found) -> list[int]:
  """Returns where the method's rounds began, up to the difference.

  Decodes the batch again; returns an empty list if that gives another output,
  or if the method drafted with weights that it has learned.
  """
  if name in evaluation.learners:
    return []
  batches = evaluation.batches(len(turn.prompts))
  batch = next(batch for batch in batches if found.index in batch)
  rows = [turn.tokens[name, 0][i] for i in batch]
  # Request ids matter for limits only: greedy rows draw nothing.
  ids = [turn.prompts[i] for i in batch]
  output, _ = evaluation.decode(evaluation.methods[name], rows, ids)
  row, count = batch.index(found.index), len(found.common) + 1
  again = np.asarray(output.tokens)[row, :count].tolist()
  if again != [*found.common, found.token]:
    return []
  rounds = np.asarray(output.emit_round)[row, :count]
  return [0, *(1 + np.flatnonzero(np.diff(rounds))).tolist()]
