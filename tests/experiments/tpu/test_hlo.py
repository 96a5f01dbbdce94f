"""Counts of what a program does, with planted instructions."""

import fractions
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tpu import hlo

_VOCAB_SIZE = 32000
_WEIGHT_BYTES = 2 << 20
_NAMES = {
  # In the device's main memory and in its on-chip memory.
  'WEIGHT': 'bf16[1024,1024]{1,0:T(8,128)(2,1)}',
  'ON_CHIP': 'bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}',
  'ROWS': 'bf16[16,1024]{1,0:T(8,128)(2,1)S(1)}',
  'STORED': 'bf16[16,1024]{1,0:T(8,128)(2,1)}',
  'HALF': 'bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}',
  'LARGE': 'bf16[1024,512]{1,0:T(8,128)(2,1)}',  # 1 MiB
  'FLIPPED': 'bf16[1024,1024]{0,1:T(8,128)(2,1)S(1)}',
  # In the memory of the host.
  'ON_HOST': 'f32[8]{0:T(128)S(5)}',
}
# A program with a loop, as the TPU compiler writes it.
_TEXT = """\
HloModule jit_round, is_scheduled=true, entry_computation_layout={()->()}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %a_plus_b = f32[] add(%a, %b)
}
COMPUTATIONS
%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %end = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[]{:T(512)} compare(%i, %end), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[]{:T(128)}, WEIGHT, /*index=2*/ON_CHIP) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %weight = WEIGHT get-tuple-element(%p), index=1
  %rows = ROWS broadcast(%i)
  INNER
  ROOT %carry = (s32[]{:T(128)}, WEIGHT) tuple(%i, %weight)
}

ENTRY %main (weight: bf16[1024,1024]) -> bf16[1024,1024] {
  %weight = WEIGHT parameter(0), metadata={op_name="a(b"}
  %i = s32[]{:T(128)} constant(0)
  %on_chip = ON_CHIP broadcast(%i)
  %rows = ROWS broadcast(%i)
  OUTER
  %first = (s32[]{:T(128)}, WEIGHT) tuple(%i, %weight)
  %loop = (s32[]{:T(128)}, WEIGHT) while(%first), condition=%condition, \
body=%body
  ROOT %after = WEIGHT get-tuple-element(%loop), index=1
}
"""


def _program(outer='', inner='', computations='', **replaced):
  planted = {'COMPUTATIONS': computations, 'INNER': inner, 'OUTER': outer}
  text = _TEXT
  for word, meaning in (planted | _NAMES | replaced).items():
    text = text.replace(word, meaning)
  return hlo.Program(text)


def _fusion(*lines):
  """Returns a fusion of the weight, x, with the instructions `lines`."""
  made = '\n  '.join(('%x = WEIGHT parameter(0)', *lines))
  return {
    'outer': '%f = WEIGHT fusion(%weight), kind=kLoop, calls=%fused',
    'computations': f'%fused (x: bf16[1,1]) -> bf16[1,1] {{\n  {made}\n}}\n',
  }


def test_with_nothing_planted_nothing_is_counted():
  program = _program()
  assert program.collectives() == program.sent_bytes() == 0
  assert program.vocab_gathers(_VOCAB_SIZE) == program.host_transfers() == 0
  assert program.weight_copies() == 0
  # Each of seven turns reads three integers and writes a flag; each broadcast
  # reads an integer.
  assert program.memory_bytes() == 7 * (3 * 4 + 1) + 2 * 4


def _cases(table):
  """Parametrises a test by a table: a number, then lines of a program."""
  found = re.findall(r'^(\S+) +(.*(?:\n .*)*)', table, re.MULTILINE)
  cases = [
    pytest.param(fractions.Fraction(number), text, id=text)
    for number, text in found
  ]
  return pytest.mark.parametrize(('expected', 'text'), cases)


# The bytes that it sends.
@_cases("""
1024  %c = f32[8,16]{1,0} all-reduce(%i), to_apply=%sum
96    %c = (f32[8]{0}, f32[4]{0}) all-reduce(%i, %i), to_apply=%sum
64    %c = f32[8]{0} all-reduce-start(%i), to_apply=%sum
      %d = f32[8]{0} all-reduce-done(%c)
256   %c = (f32[4]{0}, f32[64]{0}) all-gather-start(%i), dimensions={0}
      %d = f32[64]{0} all-gather-done(%c)
32768 %c = bf16[2,512]{1,0} reduce-scatter(%rows), to_apply=%sum
32    %c = f32[8]{0} all-to-all(%i), dimensions={0}
32    %c = (f32[8]{0}, f32[8]{0}, u32[]) collective-permute-start(%i)
      %d = f32[8]{0} collective-permute-done(%c)
""")
def test_collectives_are_found_in_each_turn_of_a_loop(text, expected):
  program = _program(outer=text, inner=text)
  assert program.collectives() == 8
  assert program.sent_bytes() == 8 * expected


def test_a_note_of_the_compiler_says_how_often_a_loop_turns():
  note = 'body=%body, backend_config={"known_trip_count":{"n":"9"}}'
  line = '%c = f32[8]{0} all-to-all(%i)'
  replaced = {'body=%body': note}
  assert _program(inner=line, **replaced).collectives() == 9


def test_a_loop_of_unknown_turns_counts_once_and_says_so(caplog):
  line = '%c = f32[8]{0} all-to-all(%i)'
  replaced = {'constant(7)': 'get-tuple-element(%p), index=0'}
  with caplog.at_level(logging.WARNING):
    assert _program(inner=line, **replaced).collectives() == 1
  assert 'loop runs depends on values' in caplog.text


# How many collectives it runs. It is not known which branch of a conditional is
# taken: the one with most counts.
@_cases("""
1  %c = f32[8]{0} call(%i), to_apply=%one
1  %c = ((s32[]), f32[8]{0}) async-start(%i), calls=%one
   %d = f32[8]{0} async-done(%c)
1  %c = f32[8]{0} fusion(%i), kind=kCustom, calls=%one
2  %c = f32[8]{0} conditional(%i), branch_computations={%one, %two}
2  %c = f32[8]{0} conditional(%i), true_computation=%one, false_computation=%two
0  %c = f32[8]{0} reduce(%i, %i), to_apply=%none
""")
def test_what_an_instruction_calls_is_counted(text, expected):
  made = '%g = f32[8]{0} all-to-all(%x)\n  '
  computations = ''.join(
    f'%{name} (x: s32[]) -> f32[8] {{\n  %x = s32[] parameter(0)\n  '
    f'{count * made}ROOT %r = f32[8]{{0}} negate(%x)\n}}\n'
    for count, name in enumerate(('none', 'one', 'two'))
  )
  found = _program(outer=text, inner=text, computations=computations)
  assert found.collectives() == 8 * expected


@_cases("""
1  %c = bf16[5,32000]{1,0} all-gather(%rows), dimensions={1}
1  %c = (f32[5,2000]{1,0}, f32[5,32000]{1,0}) all-gather-start(%rows)
   %d = f32[5,32000]{1,0} all-gather-done(%c)
1  %c = f32[1,256,125]{2,1,0} all-gather(%rows), dimensions={1}
1  %c = f32[32000]{0} all-reduce(%rows), to_apply=%sum
1  %c = f32[32000]{0} all-to-all(%rows), dimensions={0}
0  %c = bf16[5,2000]{1,0} all-gather(%rows), dimensions={1}
0  %c = f32[256]{0} all-reduce(%rows), to_apply=%sum
0  %c = bf16[5,32000]{1,0} convert(%rows)
""")
def test_a_gathered_vocabulary_is_found(text, expected):
  assert _program(inner=text).vocab_gathers(_VOCAB_SIZE) == 7 * expected


# Small copies, prefetches, parts, updates in place and copied activations are
# none.
@_cases("""
1  %c = WEIGHT copy(%weight)
1  %c = LARGE copy(%weight)
1  %c = LARGE transpose(%weight), dimensions={}
1  %c = LARGE all-gather(%weight)
1  %c = (WEIGHT, WEIGHT, u32[]) copy-start(%weight)
   %d = WEIGHT copy-done(%c)
1  %c = FLIPPED copy(%weight)
1  %c = WEIGHT copy(%weight)
   %b = WEIGHT bitcast(%c)
   %t = (WEIGHT, WEIGHT) tuple(%c, %b)
1  %u = WEIGHT dynamic-update-slice(%weight, %rows, %i, %i)
   %c = WEIGHT copy(%u)
0  %c = bf16[1024,511]{1,0} copy(%weight)
0  %c = (ON_CHIP, WEIGHT, u32[]) copy-start(%weight)
   %d = ON_CHIP copy-done(%c)
0  %c = ((WEIGHT), HALF, s32[]) slice-start(%weight), slice={[0:512], [0:1024]}
0  %c = WEIGHT dynamic-update-slice(%weight, %rows, %i, %i)
0  %a = bf16[1024,2048]{1,0} dot(%rows, %weight)
   %c = bf16[1024,2048]{1,0} copy(%a)
""")
def test_copied_weights_are_counted(text, expected):
  assert _program(outer=text).weight_copies() == expected


# A fusion copies what it returns, under any name, but not what it reads.
@_cases("""
1  ROOT %c = WEIGHT copy(%x)
1  %c = WEIGHT copy(%x)
   %b = WEIGHT bitcast(%c)
   ROOT %t = (WEIGHT, WEIGHT) tuple(%x, %b)
0  %c = WEIGHT copy(%x)
   ROOT %n = WEIGHT negate(%c)
""")
def test_weights_that_a_fusion_copies_are_counted(text, expected):
  assert _program(**_fusion(text)).weight_copies() == expected


@_cases("""
1  %c = ((s32[4]{0}), token[]) infeed(%i)
1  %c = token[] outfeed(%i)
1  %c = (f32[8]{0}, token[]) send(%i), is_host_transfer=true
1  %c = (f32[8]{0}, token[]) recv(%i), is_host_transfer=true
1  %c = f32[8]{0} custom-call(%i), custom_call_target="MoveToHost"
1  %c = f32[8]{0} custom-call(%i), custom_call_target="xla_ffi_cpu_callback"
1  %c = (ON_HOST, f32[8]{0:T(128)}, u32[]) copy-start(%i)
   %d = ON_HOST copy-done(%c)
1  %h = s32[]{:S(5)} bitcast(%i)
   %c = s32[]{:T(128)} copy(%h)
0  %c = f32[8]{0} custom-call(%i), custom_call_target="TopK"
""")
def test_a_host_transfer_is_found(text, expected):
  assert _program(outer=text, inner=text).host_transfers() == 8 * expected


def _moved(**planted):
  """Returns how often planted text moves the bytes of the weight."""
  found, plain = _program(**planted), _program()
  return (found.memory_bytes() - plain.memory_bytes()) / _WEIGHT_BYTES


@_cases("""
1    %n = ON_CHIP custom-call(%weight), custom_call_target="x"
2    %n = WEIGHT negate(%weight)
0    %n = ON_CHIP negate(%on_chip)
1    %c = (ON_CHIP, WEIGHT, u32[]) copy-start(%weight)
     %d = ON_CHIP copy-done(%c)
     %n = ON_CHIP negate(%d)
1/2  %c = ((WEIGHT), HALF, s32[]) slice-start(%weight), slice={[0:512]}
     %d = HALF slice-done(%c)
1/64 %n = ROWS gather(%weight, %on_chip)
""")
def test_bytes_of_the_large_memory(text, expected):
  assert _moved(outer=text) == expected


# The last one is written in place.
@_cases("""
2    ROOT %n = WEIGHT negate(%x)
2    ROOT %n = WEIGHT add(%x, %x)
2    %c = WEIGHT copy(%x)
     ROOT %b = WEIGHT bitcast(%c)
1/32 ROOT %s = STORED dynamic-slice(%x, %o, %o)
1/64 %u = STORED broadcast(%o)
     %w = WEIGHT dynamic-update-slice(%x, %u, %o, %o)
     ROOT %b = WEIGHT bitcast(%w)
""")
def test_bytes_of_a_fusion(text, expected):
  assert _moved(**_fusion('%o = s32[] constant(0)', text)) == expected


def test_the_least_bytes_are_those_of_the_cheapest_branch():
  computations = ''.join(
    f'%{name} (x: s32[]) -> f32[{size}] {{\n'
    '  %x = s32[] parameter(0)\n'
    f'  ROOT %y = f32[{size}]{{0}} negate(%x)\n'
    '}\n'
    for name, size in (('dear', 4096), ('cheap', 64))
  )
  line = '%c = f32[8]{0} conditional(%i), branch_computations={%dear, %cheap}'
  found, plain = _program(outer=line, computations=computations), _program()
  # What a branch writes, and the scalar that it reads.
  added = lambda pick: found.memory_bytes(pick) - plain.memory_bytes(pick)
  assert added(min) == 64 * 4 + 4
  assert added(max) == 4096 * 4 + 4


def test_a_program_of_this_machine():
  def program(x, weight):
    turn = lambda _, x: jnp.tanh(x @ weight)
    return jax.lax.fori_loop(0, 7, turn, x @ weight)

  rows, width = 8, 256
  shapes = (
    jax.ShapeDtypeStruct((rows, width), np.float32),
    jax.ShapeDtypeStruct((width, width), np.float32),
  )
  text = jax.jit(program).lower(*shapes).compile().as_text()
  weights = 8 * 4 * width * width
  activations = 8 * 4 * 4 * rows * width  # each is read twice and written twice
  moved = hlo.Program(text).memory_bytes()
  assert weights < moved <= weights + activations + 1000
