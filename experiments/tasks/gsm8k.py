"""GSM8K: arithmetic word problems whose answer is a number.

Cobbe et al. 2110.14168, the 1,319 problems of the test split.
"""

import dataclasses
import decimal
import re
from typing import ClassVar

import gin

from experiments.tasks import source as source_lib
from experiments.tasks import task

_MARK = '####'  # before the number at the end of a reference
# Thousands separators in LaTeX: 2{,}125 or 2\,125.
_LATEX_COMMA = re.compile(r'(?<=\d)(?:\{,\}|\\[,!])(?=\d{3})')
_SIGNS = re.compile(
  '[\N{MULTIPLICATION SIGN}\N{DIVISION SIGN}\N{MIDDLE DOT}]'
  r'|\\(?:times|cdot|div)\b|(?<=[\d)])\s*x\s*(?=[\d$(])'
)
# The marks of bold text, but not the power in 2**3.
_BOLD = re.compile(r'(?<!\d)\*\*|\*\*(?!\d)')
# Matches all digits of a number or none. '.5' is a number, but in 'the end.5',
# after the full stop of a sentence, only '5' is. A minus after an operand means
# subtraction and is not part of the number.
_NUMBER = (
  r'(?:(?<![\w)])-)?\$?(?:(?<!(?<![\w.])\.)\d++(?:,\d{3}(?!\d))*+(?:\.\d++)?+'
  r'|(?<![\w.])\.\d++)'
)
# The text before a denominator, which does not count as an answer.
_FRACTION = re.compile(r'\d[ \t]*/[ \t]*$')
# The left side of an equation, without prose: its only words are units and
# variables, which an operator follows, 'of', and LaTeX commands. A bracket
# right after a number begins an explanation.
_EQUATION = (
  r'(?:\\[a-z]+|[-+*/^%${})\\ \t\d]|[.,](?=\d)|(?<!\d)(?<!\d )\('
  r'|\bof\b|[^\W\d_]+(?=[ )}]*[-+*/^=]))*+='
)
# Words, markup, or the beginning of LaTeX mathematics.
_BETWEEN = r'[^\d\n-]{0,20}'
# A number, unless an operator and another number follow it on the same line.
_RESULT = rf'({_NUMBER})(?![ \t]*[-+*/^][ \t$\\(]*\d)'
_SAID = re.compile(
  r'(?:answer is\b[\s:]*+|\\boxed\{)'
  rf'(?:{_BETWEEN}(?:{_EQUATION})+)?{_BETWEEN}{_RESULT}',
  re.IGNORECASE,
)
# '####' also begins Markdown headings: '#### Step 1' and '#### 1. Step' do not
# count.
_MARKED = re.compile(
  rf'(?:{_MARK}(?![ \t]*\d+[.):][ \t]*[^\W\d])|answer:)[ \t\\($£€]*{_RESULT}',
  re.IGNORECASE,
)


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class GSM8K(task.Problems):
  """GSM8K, scored by the share of answers that give the reference's number."""

  plain: ClassVar[str] = 'Question: {}\nAnswer:'
  request: ClassVar[str] = (
    'Solve this problem step by step. End with "The answer is" and the number.'
  )
  stops: ClassVar[tuple[str, ...]] = ('\nQuestion:',)

  @property
  def source(self) -> source_lib.Source:
    """The data set."""
    return source_lib.Source(
      task='GSM8K',
      configurable='GSM8K',
      fields=('question', 'answer'),
      origin='it is test.jsonl of github.com/openai/grade-school-math',
      path=self.path,
      hub=source_lib.Subset('openai/gsm8k', 'main', 'test', self.revision),
      sha256='3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14',
    )

  def _reference(self, record, answer):
    _, mark, reference = answer.rpartition(_MARK)
    if not mark or number(reference) is None:
      raise self.source.error(
        f'line {record.line}: "answer" does not end with {_MARK} and a number'
      )
    return reference.strip()

  def _is_right(self, reference, answer):
    return number(answer) == number(reference)


def number(answer: str) -> decimal.Decimal | None:
  """Returns the number that an answer gives, or None if it gives none.

  This is the last number that is said to be the answer, as in 'the answer is 5'
  or in a LaTeX box. Both 'the answer is 2 + 3 = 5' and 'the answer is 5 as
  7 - 2 = 5' say 5. Failing that, it is the last number right after '####' or
  'Answer:', or else the last number of all, unless that is a denominator.
  """
  answer = _plain(answer)
  found = _SAID.findall(answer) or _MARKED.findall(answer)
  if not found:
    last = [*re.finditer(_NUMBER, answer)][-1:]
    found = [
      one[0] for one in last if not _FRACTION.search(answer[: one.start()])
    ]
  if not found:
    return None
  return decimal.Decimal(found[-1].replace(',', '').replace('$', ''))


def _plain(answer):
  """Replaces special signs by those of a keyboard and removes bold markup."""
  answer = _LATEX_COMMA.sub(',', _BOLD.sub('', answer))
  return _SIGNS.sub(' * ', answer).replace('\N{MINUS SIGN}', '-')
