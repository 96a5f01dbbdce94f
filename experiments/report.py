"""Makes one HTML page of results, which can be opened from disk.

  python -m experiments.report
  python -m experiments.report --results=results/quickstart --out=page.html
  python -m experiments.report --title='Two days in May' --prompts=5

Reads result.json and generations.jsonl of evaluate, and what the other commands
write, in any tree of folders (docs/evaluation.md).
"""

# Only the wiring is here: experiments/reporting/ finds the files, and
# experiments/html_report/ makes the page.

from absl import flags

from experiments.command import cli
from experiments.html_report import page
from experiments.reporting import figures
from experiments.reporting import files as reporting_files
from experiments.reporting import result_file
from specsample import files

_RESULTS = flags.DEFINE_string(
  'results', 'results', 'The folder of the results, or one above it.'
)
_OUT = flags.DEFINE_string(
  'out', None, 'The page; default report.html in the results folder.'
)
_TITLE = flags.DEFINE_string('title', 'Results', 'The title of the page.')
_PROMPTS = flags.DEFINE_integer(
  'prompts',
  2,
  'How many texts of each category to show token by token.',
  lower_bound=0,
)


def main() -> None:
  """Reads all results, then writes the page."""
  with cli.bad_input():
    runs = result_file.find(_RESULTS.value)
    out = files.at(_OUT.value or f'{_RESULTS.value}/report.html')
    text = page.render(runs, _TITLE.value, _PROMPTS.value)
    cli.make_folder(out.parent)
    reporting_files.write(out, text.encode(errors='replace'))
  if not figures.are_possible():
    print(f'the figures are left out: {figures.MISSING}')
  count = '1 run is' if len(runs) == 1 else f'{len(runs)} runs are'
  print(f'{count} in {out}')


if __name__ == '__main__':
  cli.run(main)
