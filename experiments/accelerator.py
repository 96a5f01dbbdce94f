"""Measures one accelerator in ten minutes.

  python -m experiments.accelerator --out=results/accelerator
  python -m experiments.accelerator --minutes=30 --parts=target,8b_int8
  python -m experiments.accelerator --parts=target --tokens=16 --minutes=5

The last command is a rehearsal for a CPU, without the 8B shape. Runs
`benchmark` and `evaluate` part by part, the most important parts first, and
writes accelerator.md to --out: passes over 1 to 17 tokens, the share of the
roofline, the overhead of the loop, all drafters that ship, and an 8B shape in
bfloat16 and int8. The page says which parts did not fit in the time. The same
command continues with these, also after an interruption (docs/accelerator.md).
"""

# Only the wiring is here: experiments/timing/ measures and writes.

import functools
import os
import pathlib
import sys

from absl import flags

from experiments.command import cli
from experiments.command import environment
from experiments.command import progress
from experiments.reporting import files as reporting_files
from experiments.tasks import system_calls
from experiments.timing import accelerator_page
from experiments.timing import accelerator_parts
from specsample import files

_PAGE = 'accelerator.md'
_OUT = flags.DEFINE_string(
  'out', 'results/accelerator', 'Local folder of the page, results and logs.'
)
_MINUTES = flags.DEFINE_float(
  'minutes',
  10,
  'Time budget of this run; what does not fit is left out.',
  lower_bound=0,
)
_PARTS = flags.DEFINE_list(
  'parts',
  [],
  'Parts to run, by the names in docs/accelerator.md; default: all.',
)
_TOKENS = flags.DEFINE_integer(
  'tokens', 128, 'New tokens of each answer.', lower_bound=1
)
_BINDINGS = flags.DEFINE_multi_string(
  'gin_bindings', [], 'A gin setting for all parts; repeatable.'
)


def main() -> None:
  """Runs the parts that are missing, and writes the page after each of them."""
  with cli.bad_input():
    # No JAX here: some accelerators can be used by one process only.
    if files.is_remote(_OUT.value):
      raise ValueError(
        f'--out={_OUT.value} is in a bucket: give a local folder, and copy it'
      )
    out = pathlib.Path(_OUT.value).resolve()
    work = accelerator_parts.chosen(
      accelerator_parts.parts(_TOKENS.value, _BINDINGS.value), _PARTS.value
    )
    journal = accelerator_parts.open_journal(
      out,
      {
        'code': environment.source(),
        'versions': environment.versions(),
        'compiler flags': environment.compiler_flags(),
        'JAX_DEFAULT_MATMUL_PRECISION': os.environ.get(
          'JAX_DEFAULT_MATMUL_PRECISION'
        ),
        'JAX_PLATFORMS': os.environ.get('JAX_PLATFORMS'),
        'tokens': _TOKENS.value,
        'gin_bindings': _BINDINGS.value,
      },
    )

  def write_page(left_out):
    found = {
      part.name: result
      for part in work
      if (result := journal.get(('part', part.name)))
    }
    page = accelerator_page.text(work, found, left_out)
    reporting_files.write(out / _PAGE, page.encode())

  end_with_this = None
  if sys.platform == 'linux':
    # Killed with -9, too, this process leaves no part on the device.
    end_with_this = functools.partial(system_calls.end_with, os.getpid())
  accelerator_parts.run(
    work,
    out,
    journal,
    minutes=_MINUTES.value,
    progress=progress.bar,
    after_each=write_page,
    in_child=end_with_this,
  )
  print((out / _PAGE).read_text('utf-8'))
  print(f'{_PAGE} is in {out}')


if __name__ == '__main__':
  cli.run(main, 'interrupted: run the same command again to continue')
