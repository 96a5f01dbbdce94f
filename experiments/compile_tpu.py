"""Compiles a configuration for TPUs, on a machine that has none.

  python -m experiments.compile_tpu --topology=v4:2x2x4
  python -m experiments.compile_tpu --topology=v5e:4x4 --topology=v6e:4x4
  python -m experiments.compile_tpu --recipe=llama_70b

Prints and writes to compile.json in --out, for each topology, whether the
program fits, what its devices communicate, and its roofline. Exits with code 1
if a program does not fit.
"""

# Only the wiring is here: experiments/tpu/ compiles and counts.

import dataclasses
import sys

from absl import flags

from experiments.command import cli
from experiments.command import frame
from experiments.command import progress
from experiments.reporting import files as reporting_files
from experiments.reporting import result_file
from experiments.reporting import tables
from experiments.tpu import compilation
from experiments.tpu import libtpu
from specsample import files

frame.define_flags('configs/runs/pods.gin', recipe='chinchilla')
_TOPOLOGY = flags.DEFINE_multi_string(
  'topology',
  None,
  "A chip and how many there are along each axis, such as 'v5e:4x4'; "
  'repeatable. Default: the topologies in the configuration.',
)
_OUT = frame.out('compile.json')
_DUMP_HLO = flags.DEFINE_string(
  'dump_hlo', None, "Folder for the HLO of each topology's round."
)

_DOES_NOT_FIT = 1


def main() -> None:
  """Compiles for one topology after another, writing the results so far."""
  with cli.bad_input():
    out = frame.folder(_OUT)
    hlo = files.at(_DUMP_HLO.value) if _DUMP_HLO.value else None
    setup = compilation.CompileTpu()
    topologies = _TOPOLOGY.value or setup.topologies
    libtpu.check(topologies)
    libtpu.find_libtpu()
    targets = [compilation.target(name, setup) for name in topologies]
    for folder in (out, hlo) if hlo else (out,):
      cli.make_folder(folder)
  compiled = []
  with cli.bad_input(), progress.bar(2 * len(targets)) as step:
    for target in targets:
      one, text = compilation.run(target, setup, step)
      compiled.append(one)
      programs = list(map(dataclasses.asdict, compiled))
      result_file.write(out / result_file.COMPILATION, {'programs': programs})
      if hlo and text is not None:
        name = target.topology.replace(':', '_')
        reporting_files.write(hlo / f'{name}.hlo', text.encode())
  names = list(tables.columns(compilation.Compiled))
  tables.console().print(tables.table(compiled, names))
  print(f'compile.json is in {out}')
  if too_large := [one.topology for one in compiled if not one.fits]:
    print(f'DOES NOT FIT: {", ".join(too_large)}')
    sys.exit(_DOES_NOT_FIT)


if __name__ == '__main__':
  libtpu.set_up()
  frame.run(main)
