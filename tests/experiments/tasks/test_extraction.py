import pytest

from experiments.tasks import human_eval
from experiments.tasks import task

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
def test_a_completion_ends_where_the_function_does(text, before):
  assert task.cut(text, human_eval.CODE_STOPS) == before


_F = 'def f():\n  pass\n'
_G = 'def g():\n  pass\n'


def _fenced(*codes):
  return ''.join(f'So:\n```python\n{code}```\n' for code in codes)


@pytest.mark.parametrize(
  ('answer', 'code'),
  [
    (f'Sure!\n```python\n{_F}```\nDone.', _F),
    (f'```\n{_F}```', _F),
    (f'~~~python\n{_F}~~~\nDone.', _F),
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
    ('def f(): pass', 'def f(): pass'),
    ('I cannot do that.', 'I cannot do that.'),
    ('', ''),
  ],
)
def test_code_of_a_chat(answer, code):
  assert human_eval.code(answer, 'f') == code


@pytest.mark.parametrize(
  ('answer', 'said'),
  [
    ('<think>\nOr 3?\n</think>\n\nIt is 4.', '\n\nIt is 4.'),
    ('\n<think></think>4', '4'),
    # The chat template has opened the block.
    ('Or 3?\n</think>\n4', '\n4'),
    ('<think>\nOr 3? Let me', ''),
    ('I think <think> is no word.', 'I think <think> is no word.'),
    ('', ''),
  ],
)
def test_thoughts_are_no_answer(answer, said):
  assert task.spoken(answer) == said


@pytest.mark.parametrize(
  'answer',
  [
    '```python\ndef area(r):\n  return math.pi * r**2\n```',
    '```python\n  return math.pi * r**2\n```',
    'Call math.pi.\n\ndef area(r):\n  return math.pi * r**2',
    '1. So:\n   ```python\n     return math.pi * r**2\n   ```',
    '<think>\n```\ndef area(r):\n  return 3\n```\n</think>\n'
    '```\ndef area(r):\n  return math.pi * r**2\n```',
  ],
)
def test_a_chat_completes_or_repeats_the_function(answer):
  names = {}
  exec(human_eval.program(_PROMPT, answer, 'area', chat=True), names)
  assert round(names['area'](1), 3) == 3.142


def test_a_plain_model_goes_on_from_the_prompt():
  answer = '  return math.pi * r**2\n\ndef broken('
  names = {}
  exec(human_eval.program(_PROMPT, answer, 'area', chat=False), names)
  assert round(names['area'](1), 3) == 3.142
