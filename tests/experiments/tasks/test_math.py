"""Answers to the problems of GSM8K and MATH-500."""

import decimal
import json

import pytest

from experiments.tasks import gsm8k
from experiments.tasks import math500

_GSM8K = {
  'question': 'Four boxes of 18 pens each. How many?',
  'answer': '4 * 18 = <<4*18=72>>72 pens.\n#### 72',
}
_MATH500 = {
  'problem': 'What is $\\frac{1}{2} + \\frac{1}{4}$?',
  'solution': 'It is $\\boxed{\\frac{3}{4}}$.',
  'answer': '\\frac{3}{4}',
  'subject': 'Prealgebra',
  'level': 1,
}


def _task(make, folder, *records, **kwargs):
  path = folder / 'problems.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return make(path=str(path), **kwargs)


@pytest.mark.parametrize(
  ('answer', 'number'),
  [
    ('The answer is 72.', '72'),
    ('the answer is: $1,234.50, of which 3 are lost', '1234.50'),
    ('**Answer:** 7. The answer is **-7**', '-7'),
    ('The answer is 3 + 4 = 7.', '7'),
    # No digit before the point.
    ('The answer is .5', '.5'),
    ('The answer is $.50, or -.25', '.50'),
    ('She pays 3, then .75', '.75'),
    ('That is the end.5 apples', '5'),
    ('It is 5. Or is it...6', '6'),
    ('The answer is 3 * $2.5 = $7.5, as 3 > 2', '7.5'),
    ('The answer is x = 5. Then y = 6.', '5'),
    (r'So \boxed{3x = 12}', '12'),
    (r'So \boxed{2{,}125}', '2125'),
    (r'So \boxed{\$12\,125.50}', '12125.50'),
    (r'So \boxed{1\!000}, not 3', '1000'),
    # The result of an equation, if it ends with one.
    ('The answer is 18 as she sells 16 - 3 - 4 = 9', '18'),
    ('The answer is 18, because 16 - 7 = 9 and 9 * 2 = 18 > 3', '18'),
    ('The answer is **$18 per day** (9 x $2 = $18, not 3)', '18'),
    ('The answer is 18 = 9 * $2', '18'),
    ('The answer is 3 apples + 4 apples = 7 apples of 9', '7'),
    ('The answer is (16 - 3 - 4) \N{MULTIPLICATION SIGN} $2 = $18 of 20', '18'),
    ('The answer is 36 \N{DIVISION SIGN} 2 = 18 of 20', '18'),
    ('The answer is 20% of 90 = 18, not 3', '18'),
    ('The answer is that she makes 9 * 2 = $18 at 3 stalls', '18'),
    (r'The answer is \(9 \times 2 = 18\) at 3 stalls', '18'),
    ('The answer is 16 \N{MINUS SIGN} 20 = \N{MINUS SIGN}4, below 0', '-4'),
    ('The answer is 2**3 = 8, not 6', '8'),
    (r'The answer is $16 - \sqrt{4} = 14$ of 20', '14'),
    (r'So \boxed{2 + \frac{36}{2} = 20}, not 3', '20'),
    ('#### Step 1: 4 + 5 = 9\nThe answer is 18, as 2 * 9 = 18.', '18'),
    ('The answer is 18\n#### 2. Check: 9 * 2 = 18, not 7', '18'),
    ('The answer is 3x$4 = $12 of 20', '12'),
    ('The answer is 18\n\n- 3 ducks\n* 2 days', '18'),
    ('Two of 3.\n#### \\(18\\)\nOf 3.', '18'),
    ('#### **$1,080**', '1080'),
    ('#### -5 degrees, not 6', '-5'),
    ('The answer is (16 - 3) x 2 = 26 = 2 * 13', '26'),
    ('The answer is total cost = 12 and not 13', '12'),
    ('The answer is 5 - 4 = 1 and 3 + 3 = 6', '1'),
    (r'The answer is $3 \times 4 = 12$ of 20', '12'),
    ('The final answer is: **18 dollars** for 9 eggs', '18'),
    # In the style of chats.
    ('**The answer is 18.** She has 3 ducks.', '18'),
    ('**The answer is:**\n\n**18**\n\nfor 3 ducks', '18'),
    ('The final answer is $\\boxed{18}$. I hope 1 of 2 is correct.', '18'),
    ('The answer is:\n\\[\n\\boxed{1,080}\n\\]\nfor 3 ducks', '1080'),
    (r'\boxed{18\text{ dollars}} for 3 ducks', '18'),
    (r'\boxed{\text{Total} = \$18} for 3 ducks', '18'),
    (r'\boxed{5} each, so in all \boxed{18} for 3 ducks', '18'),
    ('THE ANSWER IS 18 for 3 ducks', '18'),
    ("The answer isn't 3. She has 18", '18'),
    ('The answer is 18. No: the answer is 20 for 3 ducks', '20'),
    ('### Answer: **1,018** for 3 ducks', '1018'),
    ('Answer: 16 - 3 = 13 are left, each at $2. In all 26', '26'),
    ('Answer: Let me see. 3 * 6 = 18', '18'),
    # A heading doesn't end a reference solution.
    ('#### Step 1: 4 + 5 = 9\nThen 9 * 2 = 18', '18'),
    ('#### Step 1: 4 + 5 = 9\n#### Step 2: 9 * 2 = **18**', '18'),
    ('#### 9 eggs\nThe answer is 18.\n#### 2 checks', '18'),
    ('Two of 3.\n#### $1,018 dollars, or 3 each', '1018'),
    ('Two of 3.\n####18.\nOf 3.', '18'),
    # The last number of all.
    ('She makes 9 * 2 = 18', '18'),
    ('From 9 to 18-20', '20'),
    ('It is 12, 18', '18'),
    ('It falls to -18.0', '-18'),
    ('She has 3.0 of 5', '5'),
    ('The answer is not known', None),
    # A fraction is not what it is divided by.
    ('The answer is 1/2.', None),
    ('Half, or 1 / 2', None),
    ('', None),
  ],
)
def test_number_of_an_answer(answer, number):
  wanted = None if number is None else decimal.Decimal(number)
  assert gsm8k.number(answer) == wanted


@pytest.mark.parametrize(
  ('answer', 'content'),
  [
    (r'So $\boxed{\frac{3}{4}}$.', r'\frac{3}{4}'),
    (r'First \boxed{1}, then \fbox{2}. That is all of 3.', '2'),
    (r'\boxed {\{1, 2\}} of \{3\}', r'\{1, 2\}'),
    (r'\boxed{\left\{x\right.}', r'\left\{x\right.'),
    (r'\boxed{}', ''),
    # Cut short.
    (r'Not \boxed{5} but \boxed{\frac{3', '5'),
    (r'\boxed{\frac{3}{4}', None),
    ('The answer is 5', None),
    (r'\boxed 5', None),
  ],
)
def test_last_box_of_an_answer(answer, content):
  assert math500.boxed(answer) == content


# Answers of the data set, and what models write for them.
@pytest.mark.parametrize(
  'spellings',
  [
    ('3/4', r'\frac{3}{4}', r'\dfrac{3}{4}', r'\tfrac34', r'\frac3{4}', '0.75'),
    (r'\frac{270}{7}', r'\frac{270}7\text{ degrees}', r'\frac{540}{14}'),
    ('-1/2', r'-\frac{1}{2}', r'\frac{-1}{2}', '\N{MINUS SIGN}.50'),
    ('10,080', '10080', r'10{,}080', r'10,\!080', r'10\,080', '10080.00'),
    ('90', r'90^\circ', r'90^{\circ}', r'90\text{ degrees}', '90\xb0'),
    ('5.4', r'5.4 \text{ cents}', r'5.4\ \mathrm{cents}', '$5.4$.'),
    ('10', r'10\%', '10%', r'\$10', '10.'),
    ('3', r'3 \text{ cm}^2', r'3\mbox{ inches}^{2}', 'x = 3'),
    ('Evelyn', r'\text{Evelyn}', r'\textbf{Evelyn}'),
    ('C', r'\text{(C)}', '(C)', r'\textbf{(C)}'),
    (
      r'\left( 3, \frac{\pi}{2} \right)',
      r'(3,\frac{\pi}{2})',
      r'\big(3, \frac{\pi} 2\big)',
    ),
    (r'2\sqrt{3}', r'2 \sqrt3', r'2\sqrt 3'),
    (r'x \in [-2,7]', r'[-2, 7]', r'\left[-2,7\right]'),
    ('2516_8', r'2516_{8}'),
    ('p - q', 'p-q', r'p\,-\,q'),
    (
      r'\begin{pmatrix} -1 \\ 2 \end{pmatrix}',
      r'\begin{pmatrix}-1\\2\end{pmatrix}',
    ),
    ('1,-2', '1, -2', r'1,\; -2'),
  ],
)
def test_spellings_of_one_answer(spellings):
  assert len({math500.normalize(one) for one in spellings}) == 1


@pytest.mark.parametrize(
  ('one', 'other'),
  [
    ('5', '-5'),
    ('5', '50'),
    ('1/2', '2'),
    ('1/0', '2/0'),
    (r'\frac{1}{12}', r'\frac{11}{2}'),
    (r'\frac112', r'\frac{11}{2}'),
    ('(1,2)', '(2,1)'),
    ('(1,2)', '[1,2]'),
    ('1,2', '12'),
    ('12,34', '1234'),
    (r'\text{even}', r'\text{odd}'),
    (r'x = \text{even}', r'x = \text{odd}'),
    ('x = 1, y = 2', 'x = 2, y = 1'),
    (r'x \in [0,1]', r'\infty'),
    ('2^{10}', '2^10'),
    ('2_8', '2^8'),
    ('x', ''),
  ],
)
def test_answers_that_differ(one, other):
  assert math500.normalize(one) != math500.normalize(other)


@pytest.mark.parametrize(
  ('make', 'first', 'other', 'references', 'answers'),
  [
    (
      gsm8k.GSM8K,
      _GSM8K,
      '#### 1,000',
      ['72', '1,000'],
      [
        # A base model may make up another question; that doesn't count.
        ['It is 72.0.\nQuestion: 3 pens?\nAnswer: 3', 'It is 27'],
        ['$1000', '1,000 pens'],
      ],
    ),
    (
      math500.MATH500,
      _MATH500,
      r'\text{Evelyn}',
      [r'\frac{3}{4}', r'\text{Evelyn}'],
      [
        ['\\boxed{0.75}.\nProblem: 1?\nSolution: \\boxed{1}', 'It is 3/4'],
        [r'\boxed{Evelyn}', r'\boxed{Evelyn}'],
      ],
    ),
  ],
)
def test_accuracy_over_samples_and_prompts(
  tmp_path, make, first, other, references, answers
):
  task = _task(make, tmp_path, first, first | {'answer': other})
  prompts = task.prompts()
  assert [prompt.reference for prompt in prompts] == references
  (score,) = task.score(prompts, answers)
  assert (score.name, score.value) == ('accuracy', 0.75)
  assert score.ci95 is None  # only two
  assert task.score_names == (score.name,)
  assert task.unscored() is None


def test_chat_is_told_how_to_end(tmp_path):
  of = lambda make, record: [
    _task(make, tmp_path, record, chat=chat).prompts()[0].text
    for chat in (False, True)
  ]
  plain, chat = of(gsm8k.GSM8K, _GSM8K)
  assert plain == f'Question: {_GSM8K["question"]}\nAnswer:'
  assert '"The answer is"' in chat
  assert chat.endswith(_GSM8K['question'])
  plain, chat = of(math500.MATH500, _MATH500)
  assert plain == f'Problem: {_MATH500["problem"]}\nSolution:'
  assert r'\boxed{}' in chat
  assert chat.endswith(_MATH500['problem'])


@pytest.mark.parametrize('answer', ['72', '#### seventy-two', '####'])
def test_reference_without_a_number_is_refused(tmp_path, answer):
  task = _task(gsm8k.GSM8K, tmp_path, _GSM8K, _GSM8K | {'answer': answer})
  with pytest.raises(ValueError, match=r'line 2: "answer" does not end'):
    task.prompts()
