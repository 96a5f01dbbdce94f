"""The roofline of a pass against sizes known from elsewhere."""

import dataclasses

import jax
import pytest

from specsample.cost import chips
from specsample.cost import work
from specsample.models import experts
from specsample.models import transformer

_SIZES = {
  'num_layers': 2,
  'dim': 8,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 4,
  'mlp_dim': 12,
  'vocab_size': 20,
}
_LLAMA_70B = work.DecoderShape(
  num_layers=80,
  dim=8192,
  num_heads=64,
  num_kv_heads=8,
  head_dim=128,
  mlp_dim=28672,
  vocab_size=128256,
)


def _sizes_of(model):
  params = model.abstract_params()
  return sum(leaf.size for leaf in jax.tree.leaves(params)), params


@pytest.mark.parametrize('tied', [True, False])
def test_weights_are_those_of_the_model(tied):
  model = transformer.Transformer(**_SIZES, tie_embeddings=tied, max_length=16)
  decoder = work.DecoderShape(**_SIZES, tie_embeddings=tied, weight_bytes=4)
  total, params = _sizes_of(model)
  assert decoder.num_weights() == total
  # An untied embedding table is not read as a whole, only one row per token.
  table = 0 if tied else params['embedding'].size
  assert decoder.read_weights(3) == total - table


def test_weights_of_experts_are_those_of_the_model():
  sent = experts.Experts(
    num_experts=8, num_per_token=2, mlp_dim=6, shared_dim=5, dense_layers=(0,)
  )
  model = transformer.Transformer(**_SIZES, max_length=16, experts=sent)
  decoder = work.DecoderShape(
    **_SIZES,
    num_experts=8,
    num_per_token=2,
    expert_dim=6,
    shared_dim=5,
    num_dense_layers=1,
  )
  assert decoder.num_weights() == _sizes_of(model)[0]
  # Only one layer has experts: one token reads two of them, a pass over many
  # tokens nearly all.
  expert = 3 * 8 * 6
  read = [decoder.read_weights(n) for n in (1, 2, 200)]
  assert read[1] - read[0] == pytest.approx((8 * (1 - 0.75**2) - 2) * expert)
  assert read[2] - read[0] == pytest.approx(6 * expert)


def test_the_cache_is_that_of_the_model():
  model = transformer.Transformer(**_SIZES, max_length=16)
  decoder = work.DecoderShape(**_SIZES, cache_bytes=4)
  size = lambda length: sum(
    leaf.size * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(
      jax.eval_shape(lambda: model.init_cache(1, length))
    )
  )
  assert decoder.context_bytes(5) == size(14) - size(9)


def test_the_bound_of_chens_target_is_the_papers():
  # As in the paper: 70B parameters of 2 bytes on 16 chips of 1.2 TB/s.
  read = work.Work(flops=0, memory_bytes=70e9 * 2 / 16, sent_bytes=0)
  assert 1e3 * read.seconds(chips.CHIPS['v4']) == pytest.approx(7.29, abs=0.005)


def test_a_pass_reads_the_weights_once_and_each_context():
  one = _LLAMA_70B.work(1, batch=1, context=1000)
  many = _LLAMA_70B.work(5, batch=16, context=1000)
  # Keys and values of 8 heads of 128 in 80 layers, 2 bytes each.
  of_context = 2 * 80 * 8 * 128 * 2 * 1000
  assert many.memory_bytes - one.memory_bytes == pytest.approx(15 * of_context)
  assert many.flops == pytest.approx(80 * one.flops)
  # About two operations per weight, and four per element of a context's heads.
  attention = 4 * 80 * 64 * 128 * 1000
  assert one.flops - attention == pytest.approx(2 * 69.5e9, rel=0.01)


def test_devices_share_the_pass_and_send_its_sums():
  one = _LLAMA_70B.work(4, context=1000)
  eight = _LLAMA_70B.work(4, context=1000, devices=8)
  sixteen = _LLAMA_70B.work(4, context=1000, devices=16)
  assert one.sent_bytes == 0
  assert eight.flops == one.flops / 8
  assert eight.memory_bytes == pytest.approx(one.memory_bytes / 8)
  # With 8 key-value heads on 16 devices, two devices read the same head.
  cache = _LLAMA_70B.context_bytes(1000)
  weights = one.memory_bytes - cache
  assert sixteen.memory_bytes == pytest.approx(weights / 16 + cache / 8)
  # 160 sums of four vectors of 8192 numbers.
  assert eight.sent_bytes == pytest.approx(160 * 4 * 8192 * 2 * 2 * 7 / 8)


def test_what_binds_a_pass_changes_with_its_tokens():
  chip = chips.CHIPS['h100']
  bound = lambda batch: _LLAMA_70B.work(1, batch=batch, devices=8).bound(chip)
  assert bound(1) == 'memory'
  # 989e12 / 3350e9 = 295 operations per byte: 295 tokens with 2-byte weights.
  assert bound(290) == 'memory'
  assert bound(310) == 'products'
  slow = dataclasses.replace(chip, link_bandwidth=1e9)
  assert _LLAMA_70B.work(64, devices=8).bound(slow) == 'links'
