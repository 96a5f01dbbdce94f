"""Reports what a checkpoint is, its size, and everything wrong with it.

  python -m experiments.inspect PATH
  python -m experiments.inspect DRAFTER --target=PATH
  python -m experiments.inspect smollm2-135m-instruct

PATH is what `specsample.load` or `load_drafter` takes. Only headers are read,
and nothing is downloaded. Exits with code 1 if something is wrong. There is
nothing to configure, and the report on standard output is all that is written.
"""

# Only the wiring is here: experiments/inspection/ finds what is at PATH.

import sys

from absl import flags

from experiments.command import cli
from experiments.inspection import inspection

_TARGET = flags.DEFINE_string(
  'target', None, 'For a drafter: the model to check its sizes against.'
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
