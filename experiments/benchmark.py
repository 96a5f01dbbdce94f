"""Times a model on this machine: passes, decoding, memory, the roofline.

  python -m experiments.benchmark --out=results/benchmark
  python -m experiments.benchmark --gin_file=configs/runs/benchmark_drafters.gin
  python -m experiments.benchmark --gin_file=configs/runs/benchmark_8b.gin

Prints a summary and writes benchmark.json to --out. In this file each method
has its own entry in `methods`; draft_ms, verify_ms and overhead_percent at the
top level are those of the first method in Benchmark.methods.
"""

# Only the wiring is here: experiments/timing/ measures and writes.

from absl import flags

from experiments.command import cli
from experiments.command import config
from experiments.command import distributed
from experiments.command import environment
from experiments.command import mesh
from experiments.command import progress
from experiments.command import run_flags
from experiments.timing import benchmark_report
from experiments.timing import benchmarking

config.define_flags('configs/runs/benchmark.gin')
flags.adopt_module_key_flags(config)
distributed.define_flags()
flags.adopt_module_key_flags(distributed)
_OUT = run_flags.out('benchmark.json')


def main() -> None:
  """Measures, prints and writes the results."""
  config.parse()
  with cli.bad_input():
    distributed.start()
  environment.set_up()
  baseline_rss = benchmarking.peak_rss()
  with mesh.configured():
    _benchmark(baseline_rss)


def _benchmark(baseline_rss: int) -> None:
  with cli.bad_input():
    out = run_flags.folder(_OUT)
    benchmark = benchmarking.Benchmark()
    benchmark.check()
    cli.make_folder(out)
  measured = benchmarking.measure(benchmark, baseline_rss, progress.bar)
  if distributed.is_first():
    benchmark_report.write(out, measured)
    print('\n'.join(benchmark_report.lines(measured)))
    print(f'\nbenchmark.json is in {out}')


if __name__ == '__main__':
  cli.run(main)
