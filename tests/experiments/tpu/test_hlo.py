"""Compiled programs as text, and their loops' rounds."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tpu import hlo
from experiments.tpu import hlo_counts
from experiments.tpu import hlo_loop
from experiments.tpu import hlo_work
from tests.experiments.tpu import hlo_texts


def test_a_text_without_a_loop_is_refused():
  with pytest.raises(ValueError, match='not an HLO module'):
    hlo.parse('HloModule nothing')
  text = jax.jit(jnp.sin).lower(1.0).compile().as_text()
  with pytest.raises(ValueError, match='no loop'):
    hlo_counts.count(text, hlo_texts.VOCAB_SIZE)


def test_shapes_are_read_with_tiles_and_memories():
  line = (
    '  %x = (bf16[2,3,64]{2,1,0:T(8,128)(2,1)}, '
    '/*index=1*/f32[3,64]{0,1:T(2,128)S(1)}, pred[]) tuple(%a, %b, %c)'
  )
  module = hlo.parse('ENTRY %e () -> f32[] {\n' + line + '\n}\n')
  one, two, three = module.entry.root.shapes
  assert (one.dims, one.space, one.size) == ((2, 3, 64), 0, 768)
  assert one.padded_size == 2 * 8 * 128 * 2
  assert (two.dims, two.space, two.size) == ((3, 64), 1, 768)
  assert two.padded_size == 64 * 128 * 4
  assert (three.dims, three.size) == ((), 1)


def test_a_note_of_the_compiler_says_how_often_a_loop_turns():
  config = 'body=%inner_body, backend_config={"known_trip_count":{"n":"9"}}'
  text = hlo_texts.of(inner='%c = f32[8]{0} all-to-all(%i)').replace(
    'body=%inner_body', config
  )
  (collective,) = hlo_counts.count(text, hlo_texts.VOCAB_SIZE).collectives
  assert collective.per_round == 9


def test_a_loop_of_unknown_turns_counts_once_and_says_so(caplog):
  text = hlo_texts.of(inner='%c = f32[8]{0} all-to-all(%i)').replace(
    'constant(7)', 'get-tuple-element(%p), index=0'
  )
  with caplog.at_level(logging.WARNING):
    (collective,) = hlo_counts.count(text, hlo_texts.VOCAB_SIZE).collectives
  assert collective.per_round == 1
  assert 'loop runs depends on values' in caplog.text


def test_a_program_of_this_machine():
  def program(x, weight, end):
    turn = lambda _, x: jnp.tanh(x @ weight)

    def body(carry):
      x, i = carry
      return jax.lax.fori_loop(0, 7, turn, x @ weight), i + 1

    return jax.lax.while_loop(lambda carry: carry[1] < end, body, (x, 0))

  rows, width = 8, 256
  shapes = (
    jax.ShapeDtypeStruct((rows, width), np.float32),
    jax.ShapeDtypeStruct((width, width), np.float32),
    jax.ShapeDtypeStruct((), np.int32),
  )
  text = jax.jit(program).lower(*shapes).compile().as_text()
  module = hlo.parse(text)
  executed = hlo_loop.round_of(module)
  assert hlo_work.flops(executed) == 8 * 2 * rows * width * width
  weights = 8 * 4 * width * width
  activations = 8 * 4 * 4 * rows * width  # each is read twice and written twice
  moved = hlo_work.memory_bytes(module, executed)
  assert weights < moved <= weights + activations + 1000


@pytest.mark.parametrize(
  ('line', 'times'),
  [
    ('%c = f32[8]{0} call(%i), to_apply=%one', 1),
    ('%c = ((s32[]), f32[8]{0}) async-start(%i), calls=%one', 1),
    ('%c = f32[8]{0} fusion(%i), kind=kCustom, calls=%one', 1),
    # It is not known which branch is taken, so both count.
    ('%c = f32[8]{0} conditional(%i), branch_computations={%one, %two}', 2),
    (
      '%c = f32[8]{0} conditional(%i), true_computation=%one, '
      'false_computation=%two',
      2,
    ),
    ('%c = f32[8]{0} reduce(%i, %i), to_apply=%one', 0),
  ],
)
def test_what_an_instruction_calls_is_counted(line, times):
  computations = ''.join(
    f'%{name} (x: s32[]) -> f32[8] {{\n'
    '  %x = s32[] parameter(0)\n'
    '  ROOT %g = f32[8]{0} all-to-all(%x)\n'
    '}\n'
    for name in ('one', 'two')
  )
  text = hlo_texts.of(outer=line, inner=line, computations=computations)
  counts = hlo_counts.count(text, hlo_texts.VOCAB_SIZE)
  assert sum(one.per_round for one in counts.collectives) == 8 * times
