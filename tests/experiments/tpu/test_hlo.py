"""Counts of what a program does, with planted instructions."""

import logging

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


# The planted text, and the bytes that it sends.
_COLLECTIVES = {
  '%c = f32[8,16]{1,0} all-reduce(%i), to_apply=%sum': 2 * 512,
  '%c = (f32[8]{0}, f32[4]{0}) all-reduce(%i, %i), to_apply=%sum': 2 * 48,
  '%c = f32[8]{0} all-reduce-start(%i), to_apply=%sum\n'
  '  %d = f32[8]{0} all-reduce-done(%c)': 2 * 32,
  '%c = (f32[4]{0}, f32[64]{0}) all-gather-start(%i), dimensions={0}\n'
  '  %d = f32[64]{0} all-gather-done(%c)': 256,
  '%c = bf16[2,512]{1,0} reduce-scatter(%rows), to_apply=%sum': 16 * 1024 * 2,
  '%c = f32[8]{0} all-to-all(%i), dimensions={0}': 32,
  '%c = (f32[8]{0}, f32[8]{0}, u32[]) collective-permute-start(%i)\n'
  '  %d = f32[8]{0} collective-permute-done(%c)': 32,
}


@pytest.mark.parametrize('line', _COLLECTIVES)
def test_collectives_are_found_in_each_turn_of_a_loop(line):
  program = _program(outer=line, inner=line)
  assert program.collectives() == 8
  assert program.sent_bytes() == 8 * _COLLECTIVES[line]


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


@pytest.mark.parametrize(
  ('line', 'times'),
  [
    ('%c = f32[8]{0} call(%i), to_apply=%one', 1),
    (
      '%c = ((s32[]), f32[8]{0}) async-start(%i), calls=%one\n'
      '  %d = f32[8]{0} async-done(%c)',
      1,
    ),
    ('%c = f32[8]{0} fusion(%i), kind=kCustom, calls=%one', 1),
    # It is not known which branch is taken: the one with most counts.
    ('%c = f32[8]{0} conditional(%i), branch_computations={%one, %two}', 2),
    (
      '%c = f32[8]{0} conditional(%i), true_computation=%one, '
      'false_computation=%two',
      2,
    ),
    ('%c = f32[8]{0} reduce(%i, %i), to_apply=%none', 0),
  ],
)
def test_what_an_instruction_calls_is_counted(line, times):
  made = '%g = f32[8]{0} all-to-all(%x)\n  '
  computations = ''.join(
    f'%{name} (x: s32[]) -> f32[8] {{\n  %x = s32[] parameter(0)\n  '
    f'{count * made}ROOT %r = f32[8]{{0}} negate(%x)\n}}\n'
    for count, name in enumerate(('none', 'one', 'two'))
  )
  found = _program(outer=line, inner=line, computations=computations)
  assert found.collectives() == 8 * times


@pytest.mark.parametrize(
  ('is_gather', 'line'),
  [
    (True, '%c = bf16[5,32000]{1,0} all-gather(%rows), dimensions={1}'),
    (
      True,
      '%c = (f32[5,2000]{1,0}, f32[5,32000]{1,0}) all-gather-start(%rows)\n'
      '  %d = f32[5,32000]{1,0} all-gather-done(%c)',
    ),
    (True, '%c = f32[1,256,125]{2,1,0} all-gather(%rows), dimensions={1}'),
    (True, '%c = f32[32000]{0} all-reduce(%rows), to_apply=%sum'),
    (True, '%c = f32[32000]{0} all-to-all(%rows), dimensions={0}'),
    (False, '%c = bf16[5,2000]{1,0} all-gather(%rows), dimensions={1}'),
    (False, '%c = f32[256]{0} all-reduce(%rows), to_apply=%sum'),
    (False, '%c = bf16[5,32000]{1,0} convert(%rows)'),
  ],
)
def test_a_gathered_vocabulary_is_found(line, is_gather):
  assert _program(inner=line).vocab_gathers(_VOCAB_SIZE) == 7 * is_gather


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
    'outer': f'{_COPY}\n  %b = WEIGHT bitcast(%c)\n'
    '  %t = (WEIGHT, WEIGHT) tuple(%c, %b)'
  },
  'fusion': _fusion('ROOT %c = WEIGHT copy(%x)'),
  'written over in part': {
    'outer': '%u = WEIGHT dynamic-update-slice(%weight, %rows, %i, %i)\n'
    '  %c = WEIGHT copy(%u)'
  },
  'behind other names': _fusion(
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
    'outer': '%a = bf16[1024,2048]{1,0} dot(%rows, %weight)\n'
    '  %c = bf16[1024,2048]{1,0} copy(%a)'
  },
  'used in the fusion': _fusion(
    '%c = WEIGHT copy(%x)', 'ROOT %n = WEIGHT negate(%c)'
  ),
}


@pytest.mark.parametrize('case', [*_COPIES, *_NO_COPIES])
def test_copied_weights_are_counted(case):
  program = _program(**(_COPIES | _NO_COPIES)[case])
  assert program.weight_copies() == (case in _COPIES)


_HOST = 'f32[8]{0:T(128)S(5)}'


@pytest.mark.parametrize(
  'line',
  [
    '%c = ((s32[4]{0}), token[]) infeed(%i)',
    '%c = token[] outfeed(%i)',
    '%c = (f32[8]{0}, token[]) send(%i), is_host_transfer=true',
    '%c = (f32[8]{0}, token[]) recv(%i), is_host_transfer=true',
    '%c = f32[8]{0} custom-call(%i), custom_call_target="MoveToHost"',
    '%c = f32[8]{0} custom-call(%i), '
    'custom_call_target="xla_ffi_python_cpu_callback"',
    f'%c = ({_HOST}, f32[8]{{0:T(128)}}, u32[]) copy-start(%i)\n'
    f'  %d = {_HOST} copy-done(%c)',
    '%h = s32[]{:S(5)} bitcast(%i)\n  %c = s32[]{:T(128)} copy(%h)',
  ],
)
def test_a_host_transfer_is_found(line):
  assert _program(outer=line, inner=line).host_transfers() == 8


def test_another_custom_call_is_no_host_transfer():
  line = '%c = f32[8]{0} custom-call(%i), custom_call_target="TopK"'
  assert _program(outer=line, inner=line).host_transfers() == 0


def _bytes(**planted):
  return _program(**planted).memory_bytes() - _program().memory_bytes()


# The planted text, and how often it moves the weight.
_BYTES = {
  '%n = ON_CHIP custom-call(%weight), custom_call_target="x"': 1,
  '%n = WEIGHT negate(%weight)': 2,
  '%n = ON_CHIP negate(%on_chip)': 0,
  '%c = (ON_CHIP, WEIGHT, u32[]) copy-start(%weight)\n'
  '  %d = ON_CHIP copy-done(%c)\n  %n = ON_CHIP negate(%d)': 1,
  '%c = ((WEIGHT), bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}, s32[]) '
  'slice-start(%weight), slice={[0:512], [0:1024]}\n'
  '  %d = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} slice-done(%c)': 1 / 2,
  '%n = ROWS gather(%weight, %on_chip)': 1 / 64,
}


@pytest.mark.parametrize('line', _BYTES)
def test_bytes_of_the_large_memory(line):
  assert _bytes(outer=line) == _BYTES[line] * _WEIGHT_BYTES


_STORED_ROWS = 'bf16[16,1024]{1,0:T(8,128)(2,1)}'


@pytest.mark.parametrize(
  ('lines', 'times'),
  [
    (('ROOT %n = WEIGHT negate(%x)',), 2),
    (('ROOT %n = WEIGHT add(%x, %x)',), 2),
    (('%c = WEIGHT copy(%x)', 'ROOT %b = WEIGHT bitcast(%c)'), 2),
    ((f'ROOT %s = {_STORED_ROWS} dynamic-slice(%x, %o, %o)',), 2 / 64),
    # It is written in place.
    (
      (
        f'%u = {_STORED_ROWS} broadcast(%o)',
        '%w = WEIGHT dynamic-update-slice(%x, %u, %o, %o)',
        'ROOT %b = WEIGHT bitcast(%w)',
      ),
      1 / 64,
    ),
  ],
)
def test_bytes_of_a_fusion(lines, times):
  plan = _fusion('%o = s32[] constant(0)', *lines)
  assert _bytes(**plan) == times * _WEIGHT_BYTES


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
