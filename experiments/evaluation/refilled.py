"""All prompts, decoded again in rows that are refilled when they are done.

A static batch waits for its longest row, whereas `specsample.generate_all`
gives a finished row to the next prompt (Yu et al., Orca, OSDI 2022). Both emit
the same tokens, except where rounding decides between two.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from experiments.command import clock
from experiments.command import units as units_lib
from experiments.evaluation import evaluation as evaluation_lib
from experiments.reporting import ratios
from experiments.reporting import rows as rows_lib
import specsample
from specsample.loop import continuous
from specsample.loop import refill
from specsample.loop import request

# The journal's keys are (KIND, method, 0) before the static batches and
# (KIND, method, 1) after them: a steady drift of the machine's speed cancels.
KIND = 'refilled'


def label(method: str) -> str:
  """Returns the name of a method's refilled rows in audits and sentences."""
  return f'{method}, refilled'


def units(part: evaluation_lib.Part, repeat: int) -> list[units_lib.Unit]:
  """Returns a unit per method that decodes the first sample of all prompts."""
  if not part.evaluation.refill:
    return []
  return [
    units_lib.Unit(
      f'all prompts in refilled rows, {name}',
      (KIND, name, repeat),
      functools.partial(_decode, part, method),
      program=(KIND, name),
      warm_up=functools.partial(_warm_up, part, method),
    )
    for name, method in part.evaluation.methods.items()
  ]


def fields(
  runs: Sequence[rows_lib.Generation],
  records: Sequence[dict[str, Any]],
  found: rows_lib.Mismatches,
) -> dict[str, Any]:
  """Returns the fields of a `rows.Row` about refilled rows.

  `runs` are the first samples of the static batches, `records` the values of
  the method's units, and `found` says how the outputs of both compare.
  """
  again = []
  for record in records:
    outputs = record['tokens']
    shares = clock.by_tokens(record['seconds'], list(map(len, outputs)))
    again += [
      dataclasses.replace(run, tokens=output, seconds=share)
      for run, output, share in zip(runs, outputs, shares, strict=True)
    ]
  measured = ratios.measure(again, [*runs] * len(records))
  return {
    'refilled_ms_per_token': measured['ms_per_token'],
    'refilled_speedup': measured['speedup'],
    'refilled_speedup_ci95': measured['speedup_ci95'],
    'refilled_tied': found.ties,
    'refilled_differing': found.not_ties,
  }


def _decode(part, method):
  limits = part.evaluation.limits(range(len(part.tokens)))
  run = lambda: list(_generate_all(part, method, part.tokens, limits))
  outputs, seconds = clock.seconds(run)
  emitted = [one.tokens[0, : int(one.lengths[0])].tolist() for one in outputs]
  return {'seconds': seconds, 'tokens': emitted}


def _warm_up(part, method):
  """Decodes short answers until every program has been run.

  Only prefill has several programs: prompts that are refilled at once are
  padded to the longest of them. A group of each width comes first.
  """
  # Every drafter drafts for prompts that repeat one token.
  repeated = [row[-1:] * len(row) for row in part.tokens]
  size = continuous.default_group_size(_num_rows(part))
  groups = {}
  for start in range(0, len(repeated), size):
    group = repeated[start : start + size]
    group += group[-1:] * (size - len(group))  # as `refill` does
    width = refill.width(max(map(len, group)))
    groups[min(width, request.PREFILL_CHUNK)] = group
  first = [row for group in groups.values() for row in group]
  prompts = [*first, *repeated]
  most = max(part.evaluation.limits(range(len(part.tokens))))
  # Enough for a round of the widest pass, and for one without room for drafts.
  widest = part.evaluation.setup(method).decoder.widths[-1]
  limits = np.full(len(prompts), min(widest + 2, most))
  limits[-1] = most  # outputs have as many columns as the longest answer
  outputs = _generate_all(part, method, prompts, limits)
  return list(itertools.islice(outputs, len(first)))


def _generate_all(part, method, prompts, limits) -> Iterator[specsample.Output]:
  """Decodes prompts in rows that have room for all requests of the run."""
  setup = part.evaluation.setup(method)
  room = part.evaluation.limits(range(len(part.tokens)))
  lengths = np.asarray(list(map(len, part.tokens)))
  return specsample.generate_all(
    setup.params,
    prompts,
    setup.key,
    sampling=setup.sampling,
    max_new_tokens=limits,
    stop=setup.stop,
    max_length=int(np.max(room + lengths)),
    batch_size=_num_rows(part),
    log_probs=setup.log_probs,
    model=setup.target.model,
    drafter=method.drafter,
    verify=method.verify,
  )


def _num_rows(part):
  return min(part.evaluation.batch_size, len(part.tokens))
