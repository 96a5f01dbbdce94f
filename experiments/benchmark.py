"""Times a model on this machine: passes, decoding, memory, the roofline.

  python -m experiments.benchmark --out=results/benchmark
  python -m experiments.benchmark --recipe=drafters
  python -m experiments.benchmark --recipe=llama_8b

Prints tables and writes benchmark.json to --out.
"""

# Only the wiring is here: experiments/timing/ measures and writes.

import dataclasses

from experiments.command import cli
from experiments.command import distributed
from experiments.command import frame
from experiments.command import progress
from experiments.reporting import result_file
from experiments.timing import benchmarking

frame.define_flags('configs/runs/benchmark.gin', on_hosts=True, recipe='')
_OUT = frame.out('benchmark.json')


def main() -> None:
  """Measures, prints and writes the results."""
  baseline_rss = benchmarking.peak_rss()
  with cli.bad_input():
    out = frame.folder(_OUT)
    benchmark = benchmarking.Benchmark()
    benchmark.check()
    cli.make_folder(out)
  measured = benchmarking.measure(benchmark, baseline_rss, progress.bar)
  if distributed.is_first():
    result_file.write(out / 'benchmark.json', dataclasses.asdict(measured))
    benchmarking.show(measured)
    print(f'\nbenchmark.json is in {out}')


if __name__ == '__main__':
  frame.run(main)
