"""Certifies that decoding is exact, and that the check would notice if not.

  python -m experiments.certify --out=results/certify
  python -m experiments.certify --gin_bindings='Plan.num_rows = 1000000'

Enumerates every lossless rule over its shipped `.law`, samples the compiled
loop with every drafter, and plants known bugs. Prints a summary, writes
certificate.json to --out, and exits with 1 if an entry fails. Until then a
journal there lets the same command go on after an interruption; it is refused
where any of the code has changed since, so that no certificate is of two
versions. This file only wires: experiments/certificate/ finds the entries.
"""

import sys

from absl import flags
import gin

from experiments.certificate import certificate as certificate_lib
from experiments.certificate import terminal
from experiments.command import cli
from experiments.command import config
from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import progress
from experiments.command import run_flags
from experiments.reporting import result_file

config.define_flags('configs/runs/certify.gin')
flags.adopt_module_key_flags(config)
_OUT = run_flags.out('certificate.json')


def main() -> None:
  """Finds every entry, writes and prints them."""
  config.parse()
  environment.set_up()
  with cli.bad_input():
    out = run_flags.folder(_OUT)
    plan = certificate_lib.Plan()
    cli.make_folder(out)
    journal = journal_lib.Journal(out, certificate_lib.header(plan))
  todo = certificate_lib.steps(plan)
  certificate = certificate_lib.build(todo, journal, progress.bar)
  described = environment.describe() | {
    'gin_config': gin.operative_config_str()
  }
  result_file.write(out / 'certificate.json', certificate | described)
  # The next run is to find every entry anew.
  journal.remove()
  terminal.show(certificate)
  print(f'\ncertificate.json is in {out}')
  for failure in terminal.failures(certificate):
    print(f'FAILED {failure}', file=sys.stderr)
  sys.exit(0 if certificate['passed'] else 1)


if __name__ == '__main__':
  cli.run(main, 'interrupted: the same command goes on from here')
