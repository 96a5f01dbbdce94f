"""A benchmark makes some things once for all of its methods."""

import jax

from experiments import methods
from experiments.timing import benchmarking
from specsample import drafters
from specsample import testing
from specsample import verify

_MODEL = testing.tiny_llama(vocab_size=37)


def test_a_table_of_bounds_is_made_once():
  certified = methods.Method(drafters.NoDraft(), verify=verify.certified)
  benchmark = benchmarking.Benchmark(
    model=_MODEL,
    params=_MODEL.init(jax.random.key(0)),
    methods={'certified': certified},
  )
  first, again = (benchmark.setup(certified).params for _ in range(2))
  assert first['shadow'] is again['shadow']
