"""Times a model on this machine: passes, decoding, memory, the roofline.

  python -m experiments.benchmark --out=results/benchmark
  python -m experiments.benchmark --gin_file=configs/runs/benchmark_8b.gin

Prints a summary and writes benchmark.json to --out. This file only wires:
benchmarking.py measures, summary.py writes.
"""

import pathlib

from absl import flags

from experiments import benchmarking
from experiments import cli
from experiments import config
from experiments import environment
from experiments import methods
from experiments import peer
from experiments import progress
from experiments import summary
import specsample

config.define_flags('configs/runs/benchmark.gin')
flags.adopt_module_key_flags(config)
_OUT = flags.DEFINE_string(
  'out',
  None,
  'Folder of benchmark.json; default results/<name of the gin file>.',
)


def main() -> None:
  """Measures, prints, writes."""
  config.parse()
  environment.enable_compilation_cache()
  out = pathlib.Path(_OUT.value or f'results/{config.name()}')
  baseline_rss = benchmarking.peak_rss()
  with cli.bad_input():
    benchmark = benchmarking.Benchmark()
    if benchmark.loaded is not None:
      peer.check(benchmark.loaded)
    methods.check(
      benchmark.method,
      [benchmark.prompt_tokens()],
      model=benchmark.model,
      target=benchmark.params,
      sampling=specsample.Sampling(),
      max_new_tokens=benchmark.max_new_tokens,
    )
    cli.make_folder(out)
  measured = benchmarking.measure(benchmark, baseline_rss, progress.bar)
  summary.write(out, measured)
  summary.show(out, measured)


if __name__ == '__main__':
  cli.run(main)
