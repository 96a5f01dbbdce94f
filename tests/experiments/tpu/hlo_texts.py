"""The text of a compiled decoding loop, with room for planted operations."""

VOCAB_SIZE = 32000
# 2 MiB, in the device's main memory and in its on-chip memory.
WEIGHT = 'bf16[1024,1024]{1,0:T(8,128)(2,1)}'
ON_CHIP = 'bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}'
# A decoding loop with an inner loop, as the TPU compiler writes it. INNER and
# OUTER stand for what a test plants in the two bodies, and COMPUTATIONS for
# what they call; in all of them WEIGHT and ON_CHIP are the shapes above.
_TEXT = """\
HloModule jit_advance, is_scheduled=true, entry_computation_layout={()->()}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %a_plus_b = f32[] add(%a, %b)
}
COMPUTATIONS
%inner_condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %end = s32[]{:T(128)} constant(END)
  ROOT %lt = pred[]{:T(512)} compare(%i, %end), direction=LT
}

%inner_body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[]{:T(128)}, WEIGHT, /*index=2*/ON_CHIP) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %weight = WEIGHT get-tuple-element(%p), index=1
  %rows = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} broadcast(%i)
  INNER
  ROOT %carry = (s32[]{:T(128)}, WEIGHT) tuple(%i, %weight)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[]{:T(128)}, WEIGHT, /*index=2*/ON_CHIP) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0, metadata={op_name="a(b"}
  %weight = WEIGHT get-tuple-element(%p), index=1
  %on_chip = ON_CHIP get-tuple-element(%p), index=2
  %rows = bf16[16,1024]{1,0:T(8,128)(2,1)S(1)} broadcast(%i)
  OUTER
  %start = s32[]{:T(128)} constant(START)
  %copied_start = s32[]{:T(128)S(6)} copy(%start)
  %first = (s32[]{:T(128)}, WEIGHT) tuple(%copied_start, %weight)
  %loop = (s32[]{:T(128)}, WEIGHT) while(%first), condition=%inner_condition, \
body=%inner_body
  ROOT %carry = (s32[]{:T(128)}, WEIGHT) tuple(%i, %weight)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[]{:T(128)}, WEIGHT) parameter(0)
  ROOT %true = pred[]{:T(512)} constant(true)
}

ENTRY %main (weight: bf16[1024,1024]) -> bf16[1024,1024] {
  %weight = WEIGHT parameter(0)
  %relaid = bf16[1024,1024]{0,1:T(8,128)(2,1)} copy(%weight)
  %zero = s32[]{:T(128)} constant(0)
  %first = (s32[]{:T(128)}, WEIGHT) tuple(%zero, %weight)
  %rounds = (s32[]{:T(128)}, WEIGHT) while(%first), condition=%condition, \
body=%body
  ROOT %weights = WEIGHT get-tuple-element(%rounds), index=1
}
"""


def of(outer='', inner='', computations='', start=0, end=7):
  """Returns the text; the inner loop counts from `start` to `end`."""
  text = _TEXT
  for word, meaning in {
    'COMPUTATIONS': computations,
    'INNER': inner,
    'OUTER': outer,
    'START': str(start),
    'END': str(end),
    'ON_CHIP': ON_CHIP,
    'WEIGHT': WEIGHT,
  }.items():
    text = text.replace(word, meaning)
  return text


_FUSED = """
%fused (x: bf16[1024,1024]) -> bf16[1024,1024] {
  %x = WEIGHT parameter(0)
  MADE
}
"""


def fusion(*lines):
  """Returns a fusion of the weight, x, with the instructions `lines`."""
  made = '\n  '.join(lines)
  computation = _FUSED.replace('MADE', made)
  return {
    'outer': '%f = WEIGHT fusion(%weight), kind=kLoop, calls=%fused',
    'computations': computation,
  }
