"""Breaks ten lines on purpose; the daytime tests have to notice each of them.

  python -m tests.breaks [NAME ...]

Copies the repository, breaks one line after another in the copy, and runs the
tests that have to fail there. Each takes minutes, so no test suite runs this.
"""

import dataclasses
import pathlib
import shutil
import subprocess
import sys
import tempfile

_ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Break:
  """A line of a file, its replacement, and the tests that should notice."""

  file: str
  old: str
  new: str
  tests: tuple[str, ...]


BREAKS = {
  'a sharding constraint left out': Break(
    'specsample/drafters/steps.py',
    "return sharding.constrain(nothing, 'batch', None)",
    'return nothing',
    ('tests/test_on_8_devices.py',),
  ),
  'an accepted path moved one slot too far': Break(
    'specsample/models/cache.py',
    'taken, path[:, 0] + 1, is_ring',
    'taken, path[:, 0] + 2, is_ring',
    ('tests/models/test_cache.py', 'tests/drafters/test_tree.py'),
  ),
  'one stream for two purposes': Break(
    'specsample/streams.py',
    'fold_in(round_key, _Purpose.RESIDUAL)',
    'fold_in(round_key, _Purpose.ACCEPT)',
    ('tests/test_streams.py',),
  ),
  'offsets of a published drafter read as tokens': Break(
    'specsample/loading/published/eagle.py',
    'ids = offsets + np.arange(offsets.size).reshape(offsets.shape)',
    'ids = offsets',
    ('tests/loading/published/test_eagle.py',),
  ),
  'a run that goes on does everything again': Break(
    'experiments/command/units.py',
    'journal is not None and (unit.is_lost or unit.key not in journal)',
    'journal is not None',
    ('tests/experiments/test_resume.py',),
  ),
  'a token too many in the top k': Break(
    'specsample/sampling.py',
    'jnp.sum(kept, axis=-1) >= k',
    'jnp.sum(kept, axis=-1) > k',
    ('tests/test_sampling.py',),
  ),
  "a refilled row with the drafter's state of the one before": Break(
    'specsample/loop/refill.py',
    '  return jax.tree.map(write, state, fresh)\n',
    '  written = jax.tree.map(write, state, fresh)\n'
    '  return dataclasses.replace(written, draft=state.draft)\n',
    ('tests/loop/test_continuous.py',),
  ),
  'a mean over what is masked out too': Break(
    'specsample/training/losses.py',
    'jnp.sum(kept) / jnp.maximum(jnp.sum(mask), 1)',
    'jnp.sum(kept) / mask.size',
    ('tests/training/test_losses.py', 'tests/training/test_heads.py'),
  ),
  'a rule that is not exact for all that it takes': Break(
    'specsample/verify/rule.py',
    'CHAIN_KINDS = frozenset([types.DraftKind.POINT_MASS, '
    'types.DraftKind.SAMPLED])',
    'CHAIN_KINDS = frozenset(types.DraftKind)',
    ('tests/verify',),
  ),
  'text behind a stop token': Break(
    'specsample/loop/emission.py',
    'count = jnp.where(stopped, first + 1, count)',
    'count = jnp.where(stopped, first + 2, count)',
    ('tests/loop/test_decode.py',),
  ),
}


def is_seen(fault: Break) -> bool:
  """Returns whether a daytime test fails in a copy with this fault.

  Raises:
    ValueError: the line doesn't occur exactly once.
    RuntimeError: pytest could not run the tests.
  """
  with tempfile.TemporaryDirectory() as folder:
    copy = pathlib.Path(folder) / 'specsample'
    ignored = shutil.ignore_patterns('.git', '.venv', '.jax_cache', 'results')
    shutil.copytree(_ROOT, copy, ignore=ignored)
    path = copy / fault.file
    text = path.read_text('utf-8')
    if text.count(fault.old) != 1:
      raise ValueError(f'{fault.file} has not once: {fault.old!r}')
    path.write_text(text.replace(fault.old, fault.new), 'utf-8')
    # `-m` puts the copy first on the path, before an installed package.
    command = [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:xdist']
    command += fault.tests
    done = subprocess.run(
      command, cwd=copy, capture_output=True, text=True, check=False
    )
  if done.returncode not in (0, 1):  # no test ran
    raise RuntimeError(f'{command} ended with {done.returncode}: {done.stdout}')
  return done.returncode == 1


def main(names: list[str]) -> int:
  """Prints which breaks are noticed; returns the number that are not."""
  unknown = set(names) - BREAKS.keys()
  if unknown:
    raise SystemExit(f'no break is {sorted(unknown)}: {sorted(BREAKS)}')
  missed = 0
  for name in names or BREAKS:
    seen = is_seen(BREAKS[name])
    missed += not seen
    print(f'{"seen" if seen else "NOT SEEN"}: {name}', flush=True)
  return missed


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
