"""GSM8K: word problems of arithmetic, whose answer is a number.

Cobbe et al. 2110.14168, the 1,319 problems of the test split.
"""

from collections.abc import Sequence
import dataclasses
import decimal
import re

import gin

from experiments import prompts as prompts_lib
from experiments.tasks import extraction
from experiments.tasks import hub
from experiments.tasks import source as source_lib
from experiments.tasks import task

_FIELDS = ('question', 'answer')
_SCORE = 'accuracy'
_SHA256 = '3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14'
_MARK = '####'  # before the number at the end of a reference
_REQUEST = (
  'Solve this problem step by step. End with "The answer is" and the number.'
)
# Where a model that goes on writing begins a problem of its own.
_STOPS = ('\nQuestion:',)
# As LaTeX has it: 2{,}125, or 2\,125.
_LATEX_COMMA = re.compile(r'(?<=\d)(?:\{,\}|\\[,!])(?=\d{3})')
_NUMBER = r'-?\$?\d[\d,]*(?:\.\d+)?'
_SAYS = re.compile(rf'{_MARK}|answer is:?|\\boxed{{', re.IGNORECASE)
# Where that ends: with a line or a sentence, before what explains it, with the
# bracket of \boxed{...}.
_END = re.compile(r'\n|\.\s|,\s|}')
# '#### 5' gives an answer; '#### Step 2' and '#### 2. Sum up' are headings.
_MARKED = re.compile(rf'[^\w\n-]{{0,5}}(?>({_NUMBER}))(?![.):]\s*[^\W\d])')
# Of what else is said: a unit or punctuation may be before it.
_FIRST = re.compile(rf'[^\d\n-]{{0,20}}({_NUMBER})')
# What an equation has before its right side: numbers with at most a unit, and
# operators between them. In '18 as she sells 9 * 2 = 18' there is prose.
_TERM = rf'{_NUMBER}[\s)]*(?:[^\W\d]|%)*[\s)]*'
_NEXT = rf'(?:[-+*/x\u00d7\u00f7\u2212]|of\b|\\times|\\cdot|\\div)[\s(]*{_TERM}'
_SUM = re.compile(rf'\D*(?:{_TERM}(?:{_NEXT})*)?')
_OPERATION = re.compile(rf'\D*{_TERM}{_NEXT}')


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class GSM8K:
  """Scored by the share of answers whose number is the reference's."""

  path: str | None = None  # None for the hub's
  revision: str | None = None  # of the hub's repository; None for the newest
  chat: bool = False

  @property
  def name(self) -> str:
    """As tables show it."""
    return 'GSM8K'

  @property
  def score_names(self) -> tuple[str, ...]:
    """See `task.Task`."""
    return (_SCORE,)

  def prompts(self) -> list[prompts_lib.Prompt]:
    """A problem each, without examples; a reference is a number."""
    source = self._source()
    return [self._prompt(source, record) for record in source.read()]

  def provenance(self) -> source_lib.Provenance:
    """What `prompts` reads."""
    return self._source().provenance()

  def unscored(self) -> None:
    """It always scores."""

  def score(
    self,
    prompts: Sequence[prompts_lib.Prompt],
    answers: Sequence[Sequence[str]],
  ) -> list[task.Score]:
    """Accuracy; of several samples of a prompt the mean is taken."""
    shares = []
    for prompt, samples in zip(prompts, answers, strict=True):
      given = [
        text if self.chat else extraction.cut(text, _STOPS) for text in samples
      ]
      wanted = number(str(prompt.reference))
      shares.append(sum(number(text) == wanted for text in given) / len(given))
    return [task.average(_SCORE, shares)]

  def _source(self):
    return source_lib.Source(
      task=self.name,
      fields=_FIELDS,
      remedy='test.jsonl of github.com/openai/grade-school-math is it, and '
      + source_lib.binding(self.name, _FIELDS),
      path=self.path,
      hub=hub.Subset('openai/gsm8k', 'main', 'test', self.revision),
      sha256=_SHA256,
    )

  def _prompt(self, source, record):
    values = record.values
    _, mark, reference = values['answer'].rpartition(_MARK)
    if not mark or number(reference) is None:
      raise source.error(
        f'line {record.line}: "answer" does not end with {_MARK} and a number'
      )
    question = values['question'].strip()
    text = f'Question: {question}\nAnswer:'
    if self.chat:
      text = f'{_REQUEST}\n\n{question}'
    return prompts_lib.Prompt(
      str(record.line),
      prompts_lib.NO_CATEGORY,
      text,
      record.line,
      reference.strip(),
    )


def number(answer: str) -> decimal.Decimal | None:
  """The number that an answer gives, None where it gives none.

  That is the last that is said to be the answer ('#### 5', 'the answer is 5', a
  box of LaTeX; of an equation its right side), or else the last number of all.
  """
  answer = _LATEX_COMMA.sub(',', answer)
  said = [
    _said(found[0], answer[found.end() :]) for found in _SAYS.finditer(answer)
  ]
  found = [one for one in said if one] or re.findall(_NUMBER, answer)
  if not found:
    return None
  return decimal.Decimal(found[-1].replace(',', '').replace('$', ''))


def _said(mark: str, behind: str) -> str | None:
  """The number in what follows a mark, None where there is none."""
  if mark == _MARK:
    found = _MARKED.match(behind)
  else:
    found = _FIRST.match(_result(_END.split(behind, 1)[0]))
  return found and found[1]


def _result(said: str) -> str:
  """Of an equation the last side that is no operation, or else all of it."""
  sides = said.split('=')
  is_prose = [not _SUM.fullmatch(side) for side in sides[:-1]]
  sides = sides[: [*is_prose, True].index(True) + 1]
  numbers = [side for side in sides if not _OPERATION.match(side)]
  return numbers[-1] if numbers else said
