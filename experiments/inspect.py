"""Reports what a checkpoint is, its size, and whether it can be loaded.

  python -m experiments.inspect PATH
  python -m experiments.inspect DRAFTER --target=PATH
  python -m experiments.inspect smollm2-135m-instruct

PATH is what `specsample.load` or `load_drafter` takes. This does all that they
do but read weights and download: what they would refuse, it says, and exits
with code 1. There is nothing to configure, and the report on standard output is
all that is written.
"""

# Only the wiring is here: experiments/inspection/ finds what is at PATH.

import sys

from absl import flags

from experiments.command import cli
from experiments.inspection import inspection

_TARGET = flags.DEFINE_string(
  'target', None, 'For a drafter: its model; by default what its card names.'
)

_HAS_PROBLEMS = 1


def main(path: str) -> None:
  """Prints the report."""
  with cli.bad_input():
    report = inspection.inspect(path, _TARGET.value)
  for line in report.lines():
    print(line)
  if report.problem is not None:
    sys.exit(_HAS_PROBLEMS)


if __name__ == '__main__':
  cli.run(main, 'PATH')
