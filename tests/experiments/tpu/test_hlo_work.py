"""Operations and bytes of a round, for instructions whose work is known."""

import pytest

from experiments.tpu import hlo_counts
from tests.experiments.tpu import hlo_texts


def _count(**kwargs):
  return hlo_counts.count(hlo_texts.of(**kwargs), hlo_texts.VOCAB_SIZE)


_ROWS_FUSED = """
%fused (x: bf16[16,1024], w: bf16[1024,1024]) -> f32[16] {
  %x = bf16[16,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %w = WEIGHT parameter(1)
  %c = f32[16,1024]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
  %square = f32[16,1024]{1,0} multiply(%c, %c)
  %zero = f32[] constant(0)
  ROOT %r = f32[16]{0} reduce(%square, %zero), dimensions={1}, to_apply=%sum
}
"""


def _flops(line):
  return _count(outer=line, computations=_ROWS_FUSED).flops


def test_operations_of_products_and_of_a_fusion():
  product = 2 * 16 * 1024 * 1024
  dot = (
    '%d = f32[16,1024]{1,0} dot(%rows, %weight), lhs_contracting_dims={1}, '
    'rhs_contracting_dims={0}'
  )
  assert _flops(dot) == product
  fusion = '%f = f32[16]{0} fusion(%rows, %weight), kind=kOutput, calls=%fused'
  assert _flops(fusion) == product + 2 * 16 * 1024
  assert _flops('%f = s32[8]{0} add(%i, %i)') == 0


def test_operations_of_a_product_with_a_batch():
  """A TPU's compiler writes such a product as a convolution with holes."""
  batch, rows, size, columns = 3, 2, 128, 2053
  operands = (
    f'%q = bf16[{batch},{rows},{size}]{{2,1,0}} broadcast(%i)\n'
    f'  %k = bf16[{batch},{columns},{size}]{{2,1,0}} broadcast(%i)\n'
  )
  product = (
    f'  %c = f32[{batch},{rows},{columns}]{{2,1,0}} convolution(%q, %k), '
    'window={size=3 stride=2 lhs_dilate=3}, dim_labels=0bf_0oi->0bf'
  )
  assert _flops(operands + product) == 2 * batch * rows * columns * size


@pytest.mark.parametrize(
  ('places', 'window', 'taps'),
  [
    # Three taps at each of five places, except for one at either end.
    (5, 'size=3 pad=1_1', 3 * 5 - 2),
    (3, 'size=3 pad=1_1 stride=2', 3 * 3 - 2),
    (1, 'size=3 rhs_dilate=2', 3),
  ],
)
def test_operations_of_a_convolution(places, window, taps):
  line = (
    '%x = f32[1,5,4]{2,1,0} broadcast(%i)\n'
    '  %w = f32[3,4,6]{2,1,0} broadcast(%i)\n'
    f'  %c = f32[1,{places},6]{{2,1,0}} convolution(%x, %w), '
    f'window={{{window}}}, dim_labels=b0f_0io->b0f'
  )
  assert _flops(line) == 2 * taps * 4 * 6


def _bytes(**kwargs):
  return _count(**kwargs).memory_bytes - _count().memory_bytes


_WEIGHT_BYTES = 2 << 20
_BYTES = {
  'read': ('%n = ON_CHIP custom-call(%weight), custom_call_target="x"', 1),
  'read and written': ('%n = WEIGHT negate(%weight)', 2),
  'on the chip': ('%n = ON_CHIP negate(%on_chip)', 0),
  'prefetch': (
    '%c = (ON_CHIP, WEIGHT, u32[]) copy-start(%weight)\n'
    '  %d = ON_CHIP copy-done(%c)\n  %n = ON_CHIP negate(%d)',
    1,
  ),
  'prefetch of half': (
    '%c = ((WEIGHT), bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}, s32[]) '
    'slice-start(%weight), slice={[0:512], [0:1024]}',
    1 / 2,
  ),
  'gathered rows': (
    '%n = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} gather(%weight, %on_chip)',
    1 / 64,
  ),
  'in place': (
    '%n = WEIGHT dynamic-update-slice(%weight, %rows, %on_chip)',
    1 / 64,
  ),
}


@pytest.mark.parametrize('case', _BYTES)
def test_bytes_of_the_large_memory(case):
  line, weights = _BYTES[case]
  assert _bytes(outer=line) == weights * _WEIGHT_BYTES


_VIEW = """
%view (v: bf16[1024,1024]) -> bf16[1024,1024] {
  %v = WEIGHT parameter(0)
  ROOT %b = WEIGHT bitcast(%v)
}
"""


@pytest.mark.parametrize(
  ('read', 'part'),
  [
    ('%n = WEIGHT negate(%x)', 1),
    ('%v = WEIGHT fusion(%x), calls=%view\n  %n = WEIGHT negate(%v)', 1),
    (
      '%v = WEIGHT fusion(%x), calls=%view\n'
      '  %n = bf16[16,1024]{1,0} dynamic-slice(%v, %o, %o)',
      1 / 64,
    ),
    ('%n = WEIGHT add(%x, %x)', 1),
  ],
)
def test_bytes_that_a_fusion_reads(read, part):
  made = '%o = s32[] constant(0)\n  ' + read
  root = 'ROOT %r = ON_CHIP broadcast(%o)'
  plan = hlo_texts.fusion(made, root)
  outer = '%f = ON_CHIP fusion(%weight), kind=kLoop, calls=%fused'
  counted = _bytes(outer=outer, computations=_VIEW + plan['computations'])
  assert counted == part * _WEIGHT_BYTES


@pytest.mark.parametrize(
  ('lines', 'part'),
  [
    (('ROOT %c = WEIGHT copy(%x)',), 2),
    (('%c = WEIGHT copy(%x)', 'ROOT %b = WEIGHT bitcast(%c)'), 2),
    # Only the fusion uses the copy, and it reads a part of it.
    (
      (
        '%o = s32[] constant(0)',
        '%c = WEIGHT copy(%x)',
        'ROOT %s = bf16[16,1024]{1,0:T(8,128)(2,1)} dynamic-slice(%c, %o, %o)',
      ),
      2 / 64,
    ),
  ],
)
def test_bytes_of_a_copy_in_a_fusion(lines, part):
  assert _bytes(**hlo_texts.fusion(*lines)) == part * _WEIGHT_BYTES


def test_bytes_that_a_fusion_writes_in_place():
  update = '%u = bf16[16,1024]{1,0:T(8,128)(2,1)} broadcast(%o)'
  plan = hlo_texts.fusion(
    '%o = s32[] constant(0)',
    update,
    '%w = WEIGHT dynamic-update-slice(%x, %u, %o, %o)',
    'ROOT %b = WEIGHT bitcast(%w)',
  )
  assert _bytes(**plan) == _WEIGHT_BYTES / 64
