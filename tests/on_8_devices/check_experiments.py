"""Results and measurements of the experiments on a mesh."""

import jax
import numpy as np
import pytest

from experiments import methods
from experiments.decoding import setup
from experiments.methods import random_weights
from experiments.timing import roofline
from experiments.timing import round_times
import specsample
from specsample import sharding
from specsample import types
from specsample.choosing import pass_times
from specsample.models import transformer

_MODEL = transformer.Transformer(
  vocab_size=96,
  num_layers=1,
  dim=64,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  mlp_dim=96,
  max_length=256,
)


@pytest.mark.slow
@pytest.mark.parametrize(('data', 'explicit'), [(1, True), (4, False)])
def test_random_weights_are_the_same_on_every_mesh(data, explicit):
  expected = random_weights.params(_MODEL)
  with jax.set_mesh(sharding.make_mesh(data, 8 // data, explicit=explicit)):
    params = random_weights.params(_MODEL)
    shardings = sharding.of_tree(_MODEL.param_axes())

  def check(array, whole, expected_sharding):
    assert array.sharding == expected_sharding
    np.testing.assert_array_equal(array, whole)

  jax.tree.map(check, params, expected, shardings)


def test_a_device_makes_its_part_of_the_weights():
  whole = sum(x.nbytes for x in jax.tree.leaves(random_weights.params(_MODEL)))
  with jax.set_mesh(sharding.make_mesh(1, 8)):
    init = random_weights.initializer(_MODEL)
    used = init.lower(jax.random.key(0)).compile().memory_analysis()
  assert used.temp_size_in_bytes + used.output_size_in_bytes < whole


@pytest.mark.slow
@pytest.mark.parametrize('explicit', [True, False])
def test_roofline_counts_what_each_device_reads(explicit):
  with jax.set_mesh(sharding.make_mesh(2, 4, explicit=explicit)):
    params = {'target': random_weights.params(_MODEL)}
    found = roofline.Roofline.of(params, _MODEL, memory_bandwidth=100.0)
    cache = roofline.cache_bytes(_MODEL, length=10)
  assert cache == 4 * (2 * 10 * 2 * 16 + 1)  # and the length
  # In four parts: 4 query heads of 16, the three feed-forward matrices and the
  # unembedding. In two: 2 key-value heads, each on two devices. Whole: 3 norms.
  in_four = 2 * 64 * 64 + 3 * 64 * 96 + 64 * 96
  in_two = 2 * 64 * 32
  whole = 3 * 64
  data = 2
  assert found.weight_bytes == 4 * data * (in_four + 2 * in_two + 4 * whole)
  assert found.cache_copies == pytest.approx(2, rel=0.02)
  # A process's devices share the memory of the CPU.
  assert found.bytes_per_second == 100
  assert found.seconds(3, 50, 1) == pytest.approx(
    (3 * found.weight_bytes + found.cache_copies * 50) / 100
  )


def test_without_a_mesh_one_device_reads_all():
  params = {'target': random_weights.params(_MODEL)}
  found = roofline.Roofline.of(params, _MODEL, memory_bandwidth=100.0)
  assert found.weight_bytes == roofline.weight_bytes(params)
  assert (found.cache_copies, found.bytes_per_second) == (1, 100)


@pytest.mark.nightly
def test_parts_of_a_round_are_timed():
  with jax.set_mesh(sharding.make_mesh(2, 4)):
    params = {'target': random_weights.params(_MODEL)}
    ngram = specsample.drafters.Ngram(num_draft_tokens=2)
    times = round_times.times(
      setup.Setup(
        target=specsample.Loaded(_MODEL, params['target'], None),
        method=methods.Method(ngram),
        sampling=specsample.Sampling(),
        max_new_tokens=64,
      ),
      [[1, 2, 1, 2], [3], [4, 5]],
      rounds=20,  # the time of a call could hide fewer
      repeats=1,
    )
    passes = pass_times.passes(
      params, _MODEL, (1, 3), length=4, max_length=32, times=20, repeats=1
    )
  assert times.kind == types.DraftKind.POINT_MASS
  assert min(times.verify_ms['2'], times.least_ms) > 0
  # N-gram lookup takes less than a microsecond; noise is smaller than a pass.
  assert times.draft_ms > -times.verify_ms['2']
  assert passes.keys() == {1, 3}
  assert min(map(min, passes.values())) > 0
