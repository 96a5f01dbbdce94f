import json
import sys

import pytest

from experiments.tasks import math500

_PROBLEM = {
  'problem': 'What is $\\frac{1}{2} + \\frac{1}{4}$?',
  'solution': 'It is $\\boxed{\\frac{3}{4}}$.',
  'answer': '\\frac{3}{4}',
  'subject': 'Prealgebra',
  'level': 1,
}


def _task(folder, *records, **kwargs):
  path = folder / 'problems.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return math500.MATH500(path=str(path), **kwargs)


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
def test_the_last_box_of_an_answer(answer, content):
  assert math500.boxed(answer) == content


# Answers of the data set, and what models write for them.
@pytest.mark.parametrize(
  'spellings',
  [
    ('3/4', r'\frac{3}{4}', r'\dfrac{3}{4}', r'\tfrac34', r'\frac3{4}', '0.75'),
    (r'\frac{270}{7}', r'\frac{270}7\text{ degrees}', r'\frac{540}{14}'),
    ('-1/2', r'-\frac{1}{2}', r'\frac{-1}{2}', '\N{MINUS SIGN}.50'),
    ('10,080', '10080', r'10{,}080', r'10,\!080', r'10\,080', '10080.00'),
    (
      '90',
      r'90^\circ',
      r'90^{\circ}',
      r'90\text{ degrees}',
      '90\N{DEGREE SIGN}',
    ),
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


def test_accuracy_over_samples_and_prompts(tmp_path):
  task = _task(tmp_path, _PROBLEM, {**_PROBLEM, 'answer': r'\text{Evelyn}'})
  prompts = task.prompts()
  assert [prompt.reference for prompt in prompts] == [
    *(r'\frac{3}{4}', r'\text{Evelyn}')
  ]
  (score,) = task.score(
    prompts,
    [
      # A base model may go on to make up another problem; it doesn't count.
      [r'\boxed{0.75}.' + '\nProblem: 1?\nSolution: \\boxed{1}', 'It is 3/4'],
      [r'\boxed{Evelyn}', r'\boxed{Evelyn}'],
    ],
  )
  assert (score.name, score.value) == ('accuracy', 0.75)
  assert task.score_names == (score.name,)
  assert task.unscored() is None


def test_what_a_chat_thinks_does_not_count(tmp_path):
  task = _task(tmp_path, _PROBLEM, chat=True)
  right, wrong = r'\boxed{3/4}', r'\boxed{1}'
  answers = [f'<think>{wrong}</think>{right}', f'<think>\n{right}']
  (score,) = task.score(task.prompts(), [answers])
  assert score.value == 0.5


def test_a_chat_is_asked_for_a_box(tmp_path):
  plain, chat = (_task(tmp_path, _PROBLEM, chat=chat) for chat in (False, True))
  (prompt,) = plain.prompts()
  assert prompt.text == f'Problem: {_PROBLEM["problem"]}\nSolution:'
  (prompt,) = chat.prompts()
  assert r'\boxed{}' in prompt.text
  assert prompt.text.endswith(_PROBLEM['problem'])


def test_a_record_without_an_answer_is_refused(tmp_path):
  record = {key: _PROBLEM[key] for key in ('problem', 'solution')}
  task = _task(tmp_path, _PROBLEM, record)
  with pytest.raises(
    ValueError,
    match=r'MATH-500: .*line 2: "answer" is None.*MATH500\.path = "FILE"',
  ):
    task.prompts()


def test_without_a_file_the_hub_is_read(monkeypatch):
  monkeypatch.setitem(sys.modules, 'datasets', None)
  task = math500.MATH500(revision='v1')
  with pytest.raises(
    ValueError, match=r'hub: HuggingFaceH4/MATH-500, test, v1: .*specsample\['
  ):
    task.prompts()
