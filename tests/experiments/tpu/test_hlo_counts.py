"""Counts of what a round communicates and copies, with planted operations."""

import pytest

from experiments.tpu import hlo_counts
from tests.experiments.tpu import hlo_texts


def _count(**kwargs):
  return hlo_counts.count(hlo_texts.of(**kwargs), hlo_texts.VOCAB_SIZE)


def test_of_a_loop_with_nothing_planted_nothing_is_counted():
  assert _count() == hlo_counts.Counts(
    collectives=[],
    host_transfers=0,
    vocab_all_gathers=0,
    weight_copies=0,
    flops=0,
    # Integers of 4 bytes: the outer loop reads two of them, and the inner loop
    # reads three and a flag in each of its seven turns.
    memory_bytes=2 * 4 + 7 * (3 * 4 + 1),
    least_memory_bytes=2 * 4 + 7 * (3 * 4 + 1),
  )


def test_the_least_bytes_are_those_of_the_cheapest_branch():
  computations = ''.join(
    f'%{name} (x: s32[]) -> f32[{size}] {{\n'
    '  %x = s32[] parameter(0)\n'
    f'  ROOT %y = f32[{size}]{{0}} negate(%x)\n'
    '}\n'
    for name, size in (('dear', 4096), ('cheap', 64))
  )
  line = '%c = f32[8]{0} conditional(%i), branch_computations={%dear, %cheap}'
  found, plain = _count(outer=line, computations=computations), _count()
  # What a branch writes, and the scalar that it reads.
  added = lambda name: getattr(found, name) - getattr(plain, name)
  assert added('least_memory_bytes') == 64 * 4 + 4
  assert added('memory_bytes') == 4096 * 4 + 4 + 64 * 4 + 4


# The planted text, the operation, and the bytes of its array.
_COLLECTIVES = {
  '%c = f32[8,16]{1,0} all-reduce(%i), to_apply=%sum': ('all-reduce', 512),
  '%c = (f32[8]{0}, f32[4]{0}) all-reduce(%i, %i), to_apply=%sum': (
    'all-reduce',
    48,
  ),
  '%c = f32[8]{0} all-reduce-start(%i), to_apply=%sum\n'
  '  %d = f32[8]{0} all-reduce-done(%c)': ('all-reduce', 32),
  '%c = (f32[4]{0}, f32[64]{0}) all-gather-start(%i), dimensions={0}\n'
  '  %d = f32[64]{0} all-gather-done(%c)': ('all-gather', 256),
  '%c = bf16[2,512]{1,0} reduce-scatter(%rows), to_apply=%sum': (
    'reduce-scatter',
    16 * 1024 * 2,
  ),
  '%c = f32[8]{0} all-to-all(%i), dimensions={0}': ('all-to-all', 32),
  '%c = (f32[8]{0}, f32[8]{0}, u32[]) collective-permute-start(%i)': (
    'collective-permute',
    32,
  ),
}


@pytest.mark.parametrize('line', _COLLECTIVES)
def test_collectives_are_found(line):
  op, size = _COLLECTIVES[line]
  assert _count(outer=line).collectives == [hlo_counts.Collective(op, size, 1)]


def test_collectives_of_an_inner_loop_count_with_its_turns():
  line = '%c = f32[8]{0} all-reduce(%i), to_apply=%sum'
  more = '%d = f32[4]{0} all-reduce(%i), to_apply=%sum'
  counts = _count(outer=f'{line}\n  {more}', inner=line, start=3)
  # Four times in the inner loop, from 3 up to 7, and once outside.
  assert counts.collectives == [
    hlo_counts.Collective('all-reduce', 16, 1),
    hlo_counts.Collective('all-reduce', 32, 5),
  ]
  assert counts.sent_bytes == 2 * (16 + 5 * 32)


@pytest.mark.parametrize(
  'line',
  [
    '%c = bf16[5,32000]{1,0} all-gather(%rows), dimensions={1}',
    '%c = (f32[5,2000]{1,0}, f32[5,32000]{1,0}) all-gather-start(%rows)',
    '%c = f32[1,256,125]{2,1,0} all-gather(%rows), dimensions={1}',
    '%c = f32[32000]{0} all-reduce(%rows), to_apply=%sum',
    '%c = f32[32000]{0} all-to-all(%rows), dimensions={0}',
  ],
)
def test_a_gathered_vocabulary_is_found(line):
  assert _count(inner=line).vocab_all_gathers == 7


@pytest.mark.parametrize(
  'line',
  [
    '%c = bf16[5,2000]{1,0} all-gather(%rows), dimensions={1}',
    '%c = f32[256]{0} all-reduce(%rows), to_apply=%sum',
    '%c = bf16[5,32000]{1,0} convert(%rows)',
  ],
)
def test_what_is_no_gathered_vocabulary_is_not(line):
  assert _count(outer=line).vocab_all_gathers == 0


_LARGE = 'bf16[1024,512]{1,0:T(8,128)(2,1)}'  # 1 MiB
_COPY = '%c = WEIGHT copy(%weight)'
_COPIES = {
  'copy': {'outer': _COPY},
  'a MiB': {'outer': f'%c = {_LARGE} copy(%weight)'},
  'transpose': {'outer': f'%c = {_LARGE} transpose(%weight), dimensions={{}}'},
  'all-gather': {'outer': f'%c = {_LARGE} all-gather(%weight)'},
  'asynchronous': {
    'outer': '%c = (WEIGHT, WEIGHT, u32[]) copy-start(%weight)\n'
    '  %d = WEIGHT copy-done(%c)'
  },
  'another layout on the chip': {
    'outer': '%c = bf16[1024,1024]{0,1:T(8,128)(2,1)S(1)} copy(%weight)'
  },
  'named again': {
    'outer': '%c = WEIGHT copy(%weight)\n  %b = WEIGHT bitcast(%c)\n'
    '  %t = (WEIGHT, WEIGHT) tuple(%c, %b)'
  },
  'fusion': hlo_texts.fusion('ROOT %c = WEIGHT copy(%x)'),
  'written over in part': {
    'outer': '%u = WEIGHT dynamic-update-slice(%weight, %rows, %i, %i)\n'
    '  %c = WEIGHT copy(%u)'
  },
  'written over in a fusion': {
    'outer': '%f = WEIGHT fusion(%rows, %weight, %i), calls=%write\n'
    '  %c = WEIGHT copy(%f)',
    'computations': """
%write (r: bf16[16,1024], x: bf16[1024,1024], i: s32[]) -> bf16[1024,1024] {
  %r = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %x = WEIGHT parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = WEIGHT dynamic-update-slice(%x, %r, %i, %i)
}
""",
  },
  'chosen': {
    'outer': '%a = WEIGHT broadcast(%i)\n'
    '  %s = WEIGHT select(%i, %a, %weight)\n  %c = WEIGHT copy(%s)'
  },
  'behind an inner loop': {
    'outer': '%after = WEIGHT get-tuple-element(%loop), index=1\n'
    '  %c = WEIGHT copy(%after)'
  },
  'behind other names': hlo_texts.fusion(
    '%c = WEIGHT copy(%x)',
    '%b = WEIGHT bitcast(%c)',
    'ROOT %t = (WEIGHT, WEIGHT) tuple(%x, %b)',
  ),
}
_NO_COPIES = {
  'small': {'outer': '%c = bf16[1024,511]{1,0} copy(%weight)'},
  'prefetch': {
    'outer': '%c = (ON_CHIP, WEIGHT, u32[]) copy-start(%weight)\n'
    '  %d = ON_CHIP copy-done(%c)'
  },
  'part': {
    'outer': '%c = ((WEIGHT), bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}, '
    's32[]) slice-start(%weight), slice={[0:512], [0:1024]}'
  },
  'in place': {
    'outer': '%c = WEIGHT dynamic-update-slice(%weight, %rows, %i, %i)'
  },
  'activation': {
    'outer': '%a = WEIGHT dot(%rows, %weight)\n  %c = WEIGHT copy(%a)'
  },
  'activation of a fusion': {
    'outer': '%f = (WEIGHT, WEIGHT) fusion(%weight), calls=%made\n'
    '  %a = WEIGHT get-tuple-element(%f), index=1\n'
    '  %c = WEIGHT copy(%a)',
    'computations': """
%made (x: bf16[1024,1024]) -> (bf16[1024,1024], bf16[1024,1024]) {
  %x = WEIGHT parameter(0)
  %n = WEIGHT negate(%x)
  ROOT %both = (WEIGHT, WEIGHT) tuple(%x, %n)
}
""",
  },
  'used in the fusion': hlo_texts.fusion(
    '%c = WEIGHT copy(%x)',
    'ROOT %n = WEIGHT negate(%c)',
  ),
}


@pytest.mark.parametrize('case', _COPIES)
def test_a_copied_weight_is_found(case):
  assert _count(**_COPIES[case]).weight_copies == 1


@pytest.mark.parametrize('case', _NO_COPIES)
def test_what_is_no_copied_weight_is_not(case):
  assert _count(**_NO_COPIES[case]).weight_copies == 0


def test_an_activation_that_an_inner_loop_carries_is_none():
  text = hlo_texts.of(
    outer='%made = WEIGHT dot(%rows, %weight)', inner=_COPY
  ).replace('tuple(%copied_start, %weight)', 'tuple(%copied_start, %made)')
  assert hlo_counts.count(text, hlo_texts.VOCAB_SIZE).weight_copies == 0


def test_a_weight_copied_in_an_inner_loop_counts_with_its_turns():
  assert _count(outer=_COPY, inner=_COPY).weight_copies == 8


@pytest.mark.parametrize(
  'line',
  [
    '%c = ((s32[4]{0}), token[]) infeed(%i)',
    '%c = token[] outfeed(%i)',
    '%c = (f32[8]{0}, u32[], token[]) send(%i), is_host_transfer=true',
    '%c = (f32[8]{0}, u32[], token[]) recv(%i), is_host_transfer=true',
    '%c = f32[8]{0} custom-call(%i), custom_call_target="MoveToHost"',
    '%c = f32[8]{0} custom-call(%i), '
    'custom_call_target="xla_ffi_python_cpu_callback"',
    '%c = (f32[8]{0:T(128)S(5)}, f32[8]{0:T(128)}, u32[]) copy-start(%i)',
    '%h = s32[]{:T(128)S(5)} bitcast(%i)\n  %c = s32[]{:T(128)} copy(%h)',
  ],
)
def test_a_host_transfer_is_found(line):
  assert _count(outer=line, inner=line).host_transfers == 8


def test_a_custom_call_of_the_device_is_no_host_transfer():
  line = '%c = f32[8]{0} custom-call(%i), custom_call_target="TopK"'
  assert _count(outer=line).host_transfers == 0
