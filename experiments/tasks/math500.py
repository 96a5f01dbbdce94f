r"""MATH-500: competition problems whose answer is in a box of LaTeX.

500 problems of the test split of MATH (Hendrycks et al. 2103.03874), chosen by
Lightman et al. 2305.20050.
"""

import dataclasses
import fractions
import re
from typing import ClassVar

import gin

from experiments.tasks import source as source_lib
from experiments.tasks import task

_BOX = re.compile(r'\\(?:boxed|fbox)\s*\{')
_BRACE = re.compile(r'(?<!\\)[{}]')

# Parts that an answer may have or lack without changing its meaning.
_THOUSANDS = re.compile(r'(?<=\d)(?:\{,\}|,\\!|\\[,!])(?=\d{3})')
# Not the second backslash of \\, which ends the row of a matrix.
_SPACING = re.compile(
  r'(?<!\\)\\(?:[,;:!\s()]|q?quad(?![a-zA-Z]))|[\s~$]|\\?%|\\\$'
)
_SIZES = re.compile(r'\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])')
_DEGREES = re.compile(r'\^\{?\\circ\}?|\N{DEGREE SIGN}')
_TEXT = r'\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathbf)\{([^{}]*)\}'
# A unit after a number or an expression, perhaps with a power.
_UNIT = re.compile(rf'(?<=[\w)\]}}]){_TEXT}(?:\^\{{?\d\}}?)?$')
_LEFT_SIDE = re.compile(r'^[a-zA-Z](?:=|\\in(?![a-zA-Z]))(?!.*=)')

# Other spellings of the same.
_FRACTION = re.compile(r'\\[dtc]frac(?![a-zA-Z])')
# Arguments without braces: \frac12, \frac{1}2, \sqrt3.
_BARE = re.compile(r'(\\frac(?:\{[^{}]*\})?|\\sqrt)([0-9a-zA-Z])')
_BRACED_SIGN = re.compile(r'([_^])\{(\w)\}')
_CHOICE = re.compile(r'^\(([A-Z])\)$')
_DECIMAL = r'\d+(?:,\d{3})*(?:\.\d*)?|\.\d+'
_NUMBER = re.compile(
  rf'(?P<sign>-?)(?:(?P<whole>{_DECIMAL})(?:/(?P<part>\d+))?'
  r'|\\frac\{(?P<top>-?\d+)\}\{(?P<bottom>\d+)\})'
)


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class MATH500(task.Problems):
  """MATH-500, scored by the share of boxed answers that are the reference's.

  Two answers are the same if `normalize` makes them the same.
  """

  plain: ClassVar[str] = 'Problem: {}\nSolution:'
  request: ClassVar[str] = (
    r'Solve this problem step by step. End with the answer in \boxed{}.'
  )
  stops: ClassVar[tuple[str, ...]] = ('\nProblem:',)

  @property
  def source(self) -> source_lib.Source:
    """The data set."""
    repository = 'HuggingFaceH4/MATH-500'
    return source_lib.Source(
      task='MATH-500',
      configurable='MATH500',
      fields=('problem', 'answer'),
      origin=f'it is test.jsonl of huggingface.co/datasets/{repository}',
      path=self.path,
      hub=source_lib.Subset(repository, None, 'test', self.revision),
    )

  def _is_right(self, reference, answer):
    given = boxed(answer)
    return given is not None and normalize(given) == normalize(reference)


def boxed(answer: str) -> str | None:
  r"""Returns the content of the last \boxed{...}, or None if there is none.

  A box that the answer's end cuts short does not count.
  """
  contents = [
    _to_closing_brace(answer[box.end() :]) for box in _BOX.finditer(answer)
  ]
  closed = [content for content in contents if content is not None]
  return closed[-1] if closed else None


def normalize(answer: str) -> str:
  r"""Returns an answer in a form that equal answers share.

  Spacing, the sizes of brackets, units, signs of degrees, percent and dollars,
  the left side of 'x = 5' and the full stop are left out, and fractions and
  roots have all their braces. Integers, decimals and fractions of integers
  become reduced fractions: 0.5, 1/2 and \frac{2}{4} are the same. Everything
  else is compared as it is written, so x + 1 and 1 + x differ, and so do two
  orders of the same solutions: the accuracy is a lower bound.
  """
  text = answer.replace('\N{MINUS SIGN}', '-').strip().rstrip('.')
  text = _THOUSANDS.sub(',', text)
  for without in (_SPACING, _SIZES, _DEGREES, _UNIT):
    text = without.sub('', text)
  text = _LEFT_SIDE.sub('', re.sub(_TEXT, r'\1', text))
  text = _FRACTION.sub(r'\\frac', text)
  for _ in range(2):  # both arguments of \frac12
    text = _BARE.sub(r'\1{\2}', text)
  text = _CHOICE.sub(r'\1', _BRACED_SIGN.sub(r'\1\2', text))
  return _reduced(text)


def _to_closing_brace(text: str) -> str | None:
  """Returns the text before the brace that closes one before the text."""
  depth = 1
  for brace in _BRACE.finditer(text):
    depth += 1 if brace[0] == '{' else -1
    if not depth:
      return text[: brace.start()]
  return None


def _reduced(text: str) -> str:
  """Returns a number as a reduced fraction, and any other text unchanged."""
  number = _NUMBER.fullmatch(text)
  if number is None:
    return text
  top = fractions.Fraction((number['whole'] or number['top']).replace(',', ''))
  bottom = int(number['part'] or number['bottom'] or 1)
  if not bottom:
    return text
  return str(-top / bottom if number['sign'] else top / bottom)
