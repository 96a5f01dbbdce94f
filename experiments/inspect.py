"""Says what a checkpoint is, how large, and all that is wrong with it.

  python -m experiments.inspect PATH
  python -m experiments.inspect DRAFTER --target=PATH

PATH is what `specsample.load` or `load_drafter` take. Only headers are read,
and nothing is downloaded. Ends with exit code 1 if something is wrong. There is
nothing to configure and nothing is written but the report, to standard output.
This file only wires: experiments/inspection/ finds what it is.
"""

import sys

from absl import flags

from experiments.command import cli
from experiments.inspection import inspection

_TARGET = flags.DEFINE_string(
  'target', None, 'Of a drafter: the model whose sizes it is checked against.'
)

_HAS_PROBLEMS = 1


def main(path: str) -> None:
  """Prints the report."""
  with cli.bad_input():
    report = inspection.inspect(path, _TARGET.value)
  for line in report.lines():
    print(line)
  if report.problems:
    sys.exit(_HAS_PROBLEMS)


if __name__ == '__main__':
  cli.run_on(main, 'PATH')
