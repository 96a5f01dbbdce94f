"""Digests of the library's outputs, to show that a change leaves them alone.

  python -m tests.golden.record --write        # before a change
  python -m tests.golden.record                # after it: what differs

golden.json has a digest for every field of every output. The cases are each
drafter under the rules that take it, greedy and sampled with filters and
penalties, in batches of one and of ragged rows, refilled, learning and on a
mesh, and twenty steps of each training. Another machine or version of JAX may
round differently, so run `--write` there first. `--arrays=FILE` saves the
arrays themselves. With `--ties=FILE`, such a file from before the change, the
command also says whether greedy tokens differ only if both were equally likely,
to 1e-4. `--only=TEXT` records the cases whose names contain the text, and
`--write` then keeps the others.
"""

import argparse
from collections.abc import Callable, Iterator
import functools
import hashlib
import json
import os
import pathlib
import sys
from typing import Any

# Set before JAX starts. The results are compared here, not the speed.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault(
  'XLA_FLAGS',
  '--xla_force_host_platform_device_count=8 '
  '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true',
)

import jax
import numpy as np

from experiments.certificate import sampled_cases
from experiments.command import units
import specsample
from specsample import sharding
from specsample.testing import sample as sample_lib
from specsample.training import step
from tests.on_8_devices import check_continuous
from tests.on_8_devices import check_generate
from tests.on_8_devices import check_training

_FILE = pathlib.Path(__file__).with_name('golden.json')
_NUM_TOKENS = 16
_NUM_STEPS = 20
# The rules and settings under which the tiny random target is decoded.
_CASES = (
  ('chain', 'greedy'),
  ('chain', 'penalties'),
  ('block', 'filters'),
  ('coupled', 'filters'),
)
_CASE_ON_A_MESH = ('coupled', 'filters')

Record = dict[str, np.ndarray]


def records() -> Iterator[tuple[str, Callable[[], Record]]]:
  """Yields each case: its name, and a function that computes its arrays."""
  for draw in sampled_cases.draws():
    record = functools.partial(_of_draw, draw)
    whole = functools.partial(record, len(draw.groups))
    yield f'hash model: {draw.name}', whole
    # Draws with a loop of their own always take all rows.
    if draw.sample is sample_lib.draw:
      alone = functools.partial(record, 1)
      yield f'hash model, alone: {draw.name}', alone
  for drafter in check_generate.DRAFTERS:
    for case in _CASES:
      found = functools.partial(_on_one_device, drafter, *case)
      yield f'tiny target: {drafter}, {", ".join(case)}', found
  mesh = sharding.make_mesh(2, 4)
  for drafter in check_generate.DRAFTERS:
    yield f'on a mesh: {drafter}', functools.partial(_on, mesh, drafter)
  yield 'refilled', _refilled
  for name in check_training.OBJECTIVES:
    yield f'training: {name}', functools.partial(_trained, name)


def _on_one_device(drafter, rule, settings) -> Record:
  return _fields(check_generate.unsharded(drafter, rule, settings))


def _on(mesh, drafter) -> Record:
  return _fields(check_generate.sharded(mesh, drafter, *_CASE_ON_A_MESH))


def _of_draw(draw, num_rows) -> Record:
  """Returns the output of a draw's first rows, or of the draw's own loop."""
  verify = (sampled_cases.VERIFIERS | sampled_cases.TREE_VERIFIERS)[
    draw.verifier_name
  ]
  stop = specsample.Stop(eos_ids=() if draw.eos_id is None else (draw.eos_id,))
  if draw.sample is not sample_lib.draw:
    sample = draw.sample(
      draw.decoder,
      draw.scene.params,
      draw.groups,
      jax.random.key(0),
      num_tokens=sampled_cases.NUM_TOKENS,
      num_rows=1,
      stop=stop,
    )
    return {'tokens': sample.tokens, 'accepted': sample.accepted}
  rows = sample_lib.requests(draw.groups[:num_rows], num_rows)
  return _fields(
    specsample.generate(
      *(draw.scene.params, rows.prompts, rows.lengths, jax.random.key(0)),
      model=draw.scene.model,
      drafter=draw.scene.drafter,
      verify=verify,
      sampling=rows.sampling,
      max_new_tokens=_NUM_TOKENS,
      stop=stop,
    )
  )


def _refilled() -> Record:
  outputs = check_continuous._generate_all(check_continuous._PARAMS)
  return {
    f'{name} of prompt {i}': value
    for i, output in enumerate(outputs)
    for name, value in _fields(output).items()
  }


def _trained(name) -> Record:
  """Returns the losses and the last weights of twenty steps."""
  objective = check_training.OBJECTIVES[name]
  params = check_training.host_params(name)
  is_trained = {
    'target': jax.tree.map(lambda _: name == 'medusa-2', params['target']),
    'drafter': objective.drafter.is_trained(),
  }
  optimizer = check_training.OPTIMIZER
  state, frozen = step.init(params, is_trained, optimizer)
  losses = []
  for _ in range(_NUM_STEPS):
    state, report = step.train_step(
      *(state, frozen, check_training.BATCH),
      objective=objective,
      optimizer=optimizer,
    )
    losses.append(report['loss'])
  leaves = jax.tree_util.tree_leaves_with_path(state.trained)
  weights = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
  return {'losses': np.asarray(losses)} | weights


def _fields(output) -> Record:
  given = {name: x for name, x in vars(output).items() if x is not None}
  if choices := given.pop('choices', None):
    given |= vars(choices)
  return {name: np.asarray(x) for name, x in given.items()}


def digest(record: Record) -> dict[str, str]:
  """Returns a digest of each array, its dtype and its shape."""
  found = {}
  for name, value in sorted(record.items()):
    text = f'{value.dtype} {value.shape} '.encode() + value.tobytes()
    found[name] = hashlib.sha256(text).hexdigest()[:16]
  return found


def differences(
  found: dict[str, dict[str, str]], known: dict[str, dict[str, str]]
) -> list[str]:
  """Returns a line for each case that is new, gone or different."""
  lines = [f'gone: {name}' for name in known if name not in found]
  for name, record in found.items():
    if name not in known:
      lines.append(f'new: {name}')
    elif record != known[name]:
      fields = sorted(
        x for x in record | known[name] if record.get(x) != known[name].get(x)
      )
      lines.append(f'differs: {name}: {", ".join(fields)}')
  return lines


def ties(found: Any, known: Any) -> list[str]:
  """Returns a line for each row whose first different token is not a tie.

  Args:
    found, known: arrays by 'case/field', as `--arrays` keeps them.
  """
  lines = []
  for key in found:
    case, _, field = key.rpartition('/')
    if field != 'tokens' or key not in known:
      continue
    if f'{case}/log_probs' not in found:
      continue
    for row, (new, old) in enumerate(zip(found[key], known[key], strict=True)):
      others = np.flatnonzero(new != old)
      if not others.size:
        continue
      of = lambda x, case=case, row=row, i=others[0]: x[f'{case}/log_probs'][
        row, i
      ]
      gap = abs(of(found) - of(known))
      if not gap < 1e-4:
        lines.append(f'{case}, row {row}, token {others[0]}: {gap:.2g}')
  return lines


def main() -> int:
  """Records the cases, then writes or compares them."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--write', action='store_true')
  parser.add_argument('--arrays', type=pathlib.Path)
  parser.add_argument('--ties', type=pathlib.Path)
  parser.add_argument('--only', default='')
  flags = parser.parse_args()
  found: dict[str, dict[str, str]] = {}
  arrays: Record = {}
  known = json.loads(_FILE.read_text())['cases'] if _FILE.exists() else {}
  for name, compute in records():
    assert name not in found, name
    if flags.only not in name:
      continue
    record = compute()
    found[name] = digest(record)
    if flags.arrays or flags.ties:
      arrays |= {f'{name}/{field}': x for field, x in record.items()}
    if units.are_few_mappings_left():
      jax.clear_caches()
    print(f'\r{len(found)} cases', end='', file=sys.stderr, flush=True)
  print(file=sys.stderr)
  if flags.arrays:
    np.savez_compressed(flags.arrays, **arrays)
  if flags.write:
    cases = known | found if flags.only else found
    text = json.dumps({'jax': jax.__version__, 'cases': cases}, indent=1)
    _FILE.write_text(text + '\n')
    return 0
  known = {name: x for name, x in known.items() if flags.only in name}
  lines = differences(found, known)
  print('\n'.join(lines or [f'all {len(found)} cases are as they were']))
  if flags.ties:
    no_ties = ties(arrays, np.load(flags.ties))
    print('\n'.join(['no tie:', *no_ties] if no_ties else ['all are ties']))
  return bool(lines)


if __name__ == '__main__':
  sys.exit(main())
