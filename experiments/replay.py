r"""Evaluates rules, filters and lengths on a trace, without models.

  python -m experiments.evaluate --gin_file=configs/runs/trace.gin \
    --record --out=results/traced
  python -m experiments.replay --trace=results/traced/traces/draft
  python -m experiments.replay --trace=... --gin_file=MY.gin

Prints a table of the variants in a configuration, and writes replay.json to
--out.
"""

# Only the wiring is here: experiments/traces/replaying.py says what is
# approximate.

from absl import flags

from experiments.command import cli
from experiments.command import config
from experiments.command import environment
from experiments.command import run_flags
from experiments.traces import replaying
from experiments.traces import report
from experiments.traces import trace_file

config.define_flags('configs/runs/replay.gin')
flags.adopt_module_key_flags(config)
_TRACE = flags.DEFINE_string(
  'trace', None, "A method's trace: OUT/traces/<method>, here or in a bucket."
)
_OUT = run_flags.out('replay.json')


def main() -> None:
  """Reads a trace, replays it and reports."""
  config.parse()
  environment.set_up()
  with cli.bad_input():
    if not _TRACE.value:
      raise ValueError('--trace is empty: name OUT/traces/<method>')
    out = run_flags.folder(_OUT)
    replay = replaying.Replay()
    trace = trace_file.read(_TRACE.value)
    rows = replaying.rows(trace, replay)
    cli.make_folder(out)
  report.write(out, trace, rows)
  report.show(out, trace, rows)


if __name__ == '__main__':
  cli.run(main)
