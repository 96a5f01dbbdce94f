import pytest

from experiments.tasks import extraction

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
  assert extraction.cut(text, extraction.CODE_STOPS) == before


@pytest.mark.parametrize(
  ('answer', 'code'),
  [
    ('Sure!\n```python\ndef f():\n  pass\n```\nDone.', 'def f():\n  pass\n'),
    ('```\ndef f(): pass\n```', 'def f(): pass\n'),
    # Cut short by the limit of tokens.
    ('Here:\n```py\ndef f():\n  pa', 'def f():\n  pa'),
    ('```bash\npip install x\n```\n```python\ndef f(): 1\n```', 'def f(): 1\n'),
    ('```python\nf = len\n```', 'f = len\n'),
    ('The code from here:\n\nfrom a.b import c\nx', 'from a.b import c\nx'),
    ('import this one\n\ndef f(): pass', 'import this one\n\ndef f(): pass'),
    ('def f(): pass', 'def f(): pass'),
    # In a list, and of the other kind.
    ('1. So:\n  ```python\n  def f():\n    1\n  ```\n', 'def f():\n  1\n'),
    ('~~~python\ndef f(): 1\n~~~\n```\ndef g(): 2\n```', 'def f(): 1\n'),
    (
      '```\ndef f():\n  "\\n  ```"\n  ```\n```',
      'def f():\n  "\\n  ```"\n  ```\n',
    ),
    # Another function before it, or one whose name only begins so.
    ('```\ndef g(): 1\n```\n```\ndef f(): 2\n```', 'def f(): 2\n'),
    ('```\ndef f_2(): 1\n```\n```\ndef f(): 2\n```', 'def f(): 2\n'),
    # What was thought is no answer.
    (
      '<think>\n```\ndef f(): 1\n```\n</think>\n```\ndef f(): 2\n```',
      'def f(): 2\n',
    ),
    ('```\ndef f(): 1\n```\n</think>\ndef f(): 2', 'def f(): 2'),
    ('<think>\n```\ndef f(): 1\n```', ''),
    ('I cannot do that.', 'I cannot do that.'),
    ('', ''),
  ],
)
def test_code_of_a_chat(answer, code):
  assert extraction.code(answer, 'f') == code


@pytest.mark.parametrize(
  'answer',
  [
    '```python\ndef area(r):\n  return math.pi * r**2\n```',
    '```python\n  return math.pi * r**2\n```',
    'Call math.pi.\n\ndef area(r):\n  return math.pi * r**2',
  ],
)
def test_a_chat_completes_or_repeats_the_function(answer):
  names = {}
  exec(extraction.program(_PROMPT, answer, 'area', chat=True), names)
  assert round(names['area'](1), 3) == 3.142


def test_a_plain_model_goes_on_from_the_prompt():
  answer = '  return math.pi * r**2\n\ndef broken('
  names = {}
  exec(extraction.program(_PROMPT, answer, 'area', chat=False), names)
  assert round(names['area'](1), 3) == 3.142
