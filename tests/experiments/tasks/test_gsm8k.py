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
    ('The answer is 3 * $2.5 = $7.5, as 3 > 2', '7.5'),
    ('The answer is x = 5. Then y = 6.', '5'),
    ('The answer is 18 (since 9 * 2 = 18, not 19)', '18'),
    (r'So \boxed{3x = 12}', '12'),
    (r'Hence \boxed{72} in 4 boxes', '72'),
    (r'So \boxed{2{,}125}', '2125'),
    (r'So \boxed{\$12\,125.50}', '12125.50'),
    (r'So \boxed{1\!000}, not 3', '1000'),
    ('#### Step 1: 4 + 5 = 9\nThe answer is 18, as 2 * 9 = 18.', '18'),
    ('The answer is 18\n#### 2. Check: 9 * 2 = 18, not 7', '18'),
    ('#### **$1,080**', '1080'),
    ('Of 3 pens\n#### 72.', '72'),
    ('#### -5 degrees, not 6', '-5'),
    ('The answer is 18 as she sells 16 - 3 - 4 = 9', '18'),
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
      # What a plain model makes up behind its answer does not count.
      ['It is 72.0.\nQuestion: 3 pens?\nAnswer: 3', 'It is 27'],
      ['$1000', '1,000 pens'],
    ],
  )
  assert (score.name, score.value) == ('accuracy', 0.75)
  assert score.ci95 is None  # of two


def test_a_chat_is_told_how_to_end(tmp_path):
  plain, chat = (_task(tmp_path, _PROBLEM, chat=chat) for chat in (False, True))
  (prompt,) = plain.prompts()
  assert prompt.text == f'Question: {_PROBLEM["question"]}\nAnswer:'
  (prompt,) = chat.prompts()
  assert '"The answer is"' in prompt.text
  assert prompt.text.endswith(_PROBLEM['question'])


@pytest.mark.parametrize('answer', ['72', '#### seventy-two', '####'])
def test_a_reference_without_a_number_is_refused(tmp_path, answer):
  task = _task(tmp_path, _PROBLEM, {**_PROBLEM, 'answer': answer})
  with pytest.raises(ValueError, match=r'line 2: "answer" does not end'):
    task.prompts()
