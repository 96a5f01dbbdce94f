"""Certifies that decoding is exact, and that the checks catch known bugs.

  python -m experiments.certify --out=results/certify
  python -m experiments.certify --gin_bindings='Plan.sections = ("cases",)'
  python -m experiments.certify --gin_bindings='Plan.num_rows = 1000000'

Enumerates every lossless rule by its shipped `.law`, samples the compiled
loop with every drafter, and plants known bugs. Prints a summary, writes
certificate.json to --out, and exits with code 1 if an entry fails. Until the
certificate is written, a journal in --out lets the same command resume after an
interruption. The journal is refused if any code has changed since, so that no
certificate mixes two versions.
"""

# Only the wiring is here: experiments/certificate/ computes the entries.

import sys

from experiments.certificate import certificate as certificate_lib
from experiments.certificate import terminal
from experiments.command import cli
from experiments.command import frame
from experiments.command import journal as journal_lib
from experiments.command import progress
from experiments.reporting import result_file

frame.define_flags('configs/runs/certify.gin')
_OUT = frame.out('certificate.json')


def main() -> None:
  """Computes every entry, then writes and prints the certificate."""
  with cli.bad_input():
    out = frame.folder(_OUT)
    plan = certificate_lib.Plan()
    cli.make_folder(out)
    journal = journal_lib.Journal(out, certificate_lib.header(plan))
  todo = certificate_lib.units(plan)
  certificate = certificate_lib.build(todo, journal, progress.bar)
  result_file.write(out / 'certificate.json', certificate)
  # The next run has to compute every entry anew.
  journal.remove()
  terminal.show(certificate)
  print(f'\ncertificate.json is in {out}')
  for failure in terminal.failures(certificate):
    print(f'FAILED {failure}', file=sys.stderr)
  sys.exit(0 if certificate['passed'] else 1)


if __name__ == '__main__':
  frame.run(main, resumes=True)
