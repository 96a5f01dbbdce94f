import decimal
import json

import pytest

from experiments.tasks import gsm8k


def _task(folder, *records, **kwargs):
  path = folder / 'problems.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return gsm8k.GSM8K(path=str(path), **kwargs)


_PROBLEM = {
  'question': 'Four boxes of 18 pens each. How many?',
  'answer': '4 * 18 = <<4*18=72>>72 pens.\n#### 72',
}


@pytest.mark.parametrize(
  ('answer', 'number'),
  [
    ('4 * 18 = 72.\n#### 72', '72'),
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
    ('That is 10/2 = 5', '5'),
    ('The answer is 3 * $2.5 = $7.5, as 3 > 2', '7.5'),
    ('The answer is x = 5. Then y = 6.', '5'),
    ('The answer is 18 (since 9 * 2 = 18, not 19)', '18'),
    (r'So \boxed{3x = 12}', '12'),
    (r'Hence \boxed{72} in 4 boxes', '72'),
    (r'So \boxed{2{,}125}', '2125'),
    (r'So \boxed{\$12\,125.50}', '12125.50'),
    (r'So \boxed{1\!000}, not 3', '1000'),
    # The result of an equation, if it ends with one.
    ('The answer is 18 as she sells 16 - 3 - 4 = 9', '18'),
    ('The answer is 18, because 16 - 7 = 9 and 9 * 2 = 18 > 3', '18'),
    ('The answer is **18** (16 - 7 = 9 at $2)', '18'),
    ('The answer is **$18 per day** (9 x $2 = $18, not 3)', '18'),
    ('The answer is 18 = 9 * $2', '18'),
    ('The answer is 3 apples + 4 apples = 7 apples of 9', '7'),
    ('The answer is (16 - 3 - 4) \N{MULTIPLICATION SIGN} $2 = $18 of 20', '18'),
    ('The answer is 3 x 4 = 12 of 20', '12'),
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
    ('Of 3 pens\n#### 72.', '72'),
    ('#### -5 degrees, not 6', '-5'),
    ('The answer is 5 apples + 4 apples = 9 apples', '9'),
    ('The answer is she makes 9 * $2 = $18 every day', '18'),
    ('The answer is (16 - 3) x 2 = 26 = 2 * 13', '26'),
    ('The answer is total cost = 12 and not 13', '12'),
    ('The answer is 5 - 4 = 1 and 3 + 3 = 6', '1'),
    (r'The answer is $3 \times 4 = 12$ of 20', '12'),
    ('The final answer is: **18 dollars** for 9 eggs', '18'),
    (r'The answer is \(\boxed{1,080}\) of 7', '1080'),
    ('The answer is 18 = 9 * 2', '18'),
    ('The answer is 9 + 9', '9'),
    ('The answer is 9 \u00d7 2 = 18', '18'),
    ('The answer is 50% of 8 = 4', '4'),
    # In the style of chats.
    ('**The answer is 18.** She has 3 ducks.', '18'),
    ('The answer is $18. She has 3 ducks.', '18'),
    ('The final answer is: 18 dollars, for 3 ducks', '18'),
    ('**The answer is:**\n\n**18**\n\nfor 3 ducks', '18'),
    ('The final answer is $\\boxed{18}$. I hope 1 of 2 is correct.', '18'),
    ('The answer is:\n\\[\n\\boxed{1,080}\n\\]\nfor 3 ducks', '1080'),
    (r'\boxed{18\text{ dollars}} for 3 ducks', '18'),
    (r'\boxed{\text{Total} = \$18} for 3 ducks', '18'),
    (r'\boxed{5} each, so in all \boxed{18} for 3 ducks', '18'),
    ('THE ANSWER IS 18 for 3 ducks', '18'),
    ("The answer isn't 3. She has 18", '18'),
    ('The answer is 18. No: the answer is 20 for 3 ducks', '20'),
    ('**Answer:** $18 for 3 ducks', '18'),
    ('### Answer: **1,018** for 3 ducks', '1018'),
    ('Answer: 16 - 3 = 13 are left, each at $2. In all 26', '26'),
    ('Answer: Let me see. 3 * 6 = 18', '18'),
    # A heading doesn't end a reference solution.
    ('#### Step 1: 4 + 5 = 9\nThen 9 * 2 = 18', '18'),
    ('#### Step 1: 4 + 5 = 9\n#### Step 2: 9 * 2 = **18**', '18'),
    ('#### 1. Eggs\n4 + 5 = 9\n#### 2. Dollars\n9 * 2 = 18', '18'),
    ('#### 9 eggs\nThe answer is 18.\n#### 2 checks', '18'),
    ('Two of 3.\n#### $1,018 dollars, or 3 each', '1018'),
    ('Two of 3.\n#### -18\nOf 3.', '-18'),
    ('Two of 3.\n#### **18**\nOf 3.', '18'),
    ('Two of 3.\n####18.\nOf 3.', '18'),
    # The last number of all.
    ('She makes 9 * 2 = 18', '18'),
    ('9 eggs at $2 = **$18**.', '18'),
    ('From 9 to 18-20', '20'),
    ('It is 12, 18', '18'),
    ('It falls to -18.0', '-18'),
    ('First 4, then 18, so 72', '72'),
    ('She has 3.0 of 5', '5'),
    ('The answer is not known', None),
    ('', None),
  ],
)
def test_the_number_of_an_answer(answer, number):
  wanted = None if number is None else decimal.Decimal(number)
  assert gsm8k.number(answer) == wanted


def test_accuracy_over_samples_and_prompts(tmp_path):
  task = _task(tmp_path, _PROBLEM, {**_PROBLEM, 'answer': '#### 1,000'})
  prompts = task.prompts()
  assert [prompt.reference for prompt in prompts] == ['72', '1,000']
  (score,) = task.score(
    prompts,
    [
      # A base model may go on to make up another question; that doesn't count.
      ['It is 72.0.\nQuestion: 3 pens?\nAnswer: 3', 'It is 27'],
      ['$1000', '1,000 pens'],
    ],
  )
  assert (score.name, score.value) == ('accuracy', 0.75)
  assert score.ci95 is None  # only two


def test_what_a_chat_thinks_does_not_count(tmp_path):
  task = _task(tmp_path, _PROBLEM, chat=True)
  answers = ['<think>The answer is 4?</think>72 pens', '<think>\nIt is 72']
  (score,) = task.score(task.prompts(), [answers])
  assert score.value == 0.5


def test_a_chat_is_told_how_to_end(tmp_path):
  plain, chat = (_task(tmp_path, _PROBLEM, chat=chat) for chat in (False, True))
  (prompt,) = plain.prompts()
  assert prompt.text == f'Question: {_PROBLEM["question"]}\nAnswer:'
  (prompt,) = chat.prompts()
  assert '"The answer is"' in prompt.text
  assert prompt.text.endswith(_PROBLEM['question'])


@pytest.mark.parametrize('answer', ['The answer is 1/2.', 'Half, or 1 / 2'])
def test_a_fraction_is_not_what_it_is_divided_by(answer):
  assert gsm8k.number(answer) is None


@pytest.mark.parametrize('answer', ['72', '#### seventy-two', '####'])
def test_a_reference_without_a_number_is_refused(tmp_path, answer):
  task = _task(tmp_path, _PROBLEM, {**_PROBLEM, 'answer': answer})
  with pytest.raises(ValueError, match=r'line 2: "answer" does not end'):
    task.prompts()
