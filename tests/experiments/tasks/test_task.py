import gin
import numpy as np
import pytest

from experiments.tasks import gsm8k
from experiments.tasks import human_eval
from experiments.tasks import math500
from experiments.tasks import questions
from experiments.tasks import sandbox
from experiments.tasks import source
from experiments.tasks import summarization
from experiments.tasks import task

_TASKS = """
chosen.tasks = [
  @HumanEval(), @GSM8K(), @spec_bench(), @mt_bench(), @articles(), @xsum(),
  @cnn_dailymail(), @MATH500(),
]
xsum.path = 'nowhere'
GSM8K.path = 'nowhere'
MATH500.path = 'nowhere'
HumanEval.chat = True
"""


@gin.configurable(module='test_task')
def chosen(tasks=()):
  return tasks


@pytest.fixture
def clean_gin():
  gin.clear_config()
  yield
  gin.clear_config()


def test_a_mean_and_its_interval():
  values = np.random.default_rng(1).random(400)
  score = task.average('share', values)
  assert score.name == 'share'
  assert score.value == pytest.approx(values.mean())
  low, high = score.ci95
  error = values.std() / np.sqrt(len(values))
  assert score.value - low == pytest.approx(1.96 * error, rel=0.1)
  assert high - score.value == pytest.approx(1.96 * error, rel=0.1)


def test_one_prompt_says_nothing_of_others():
  assert task.average('share', [0.5]).ci95 is None


@pytest.mark.usefixtures('clean_gin')
def test_gin_makes_tasks_and_nothing_is_read():
  gin.parse_config(_TASKS)
  tasks = chosen()
  assert tasks == [
    human_eval.HumanEval(chat=True),
    gsm8k.GSM8K(path='nowhere'),
    questions.spec_bench(),
    questions.mt_bench(),
    summarization.articles(),
    summarization.xsum(path='nowhere'),
    summarization.cnn_dailymail(),
    math500.MATH500(path='nowhere'),
  ]
  assert [one.name for one in tasks] == [
    *('HumanEval', 'GSM8K', 'Spec-Bench', 'MT-Bench', 'Articles', 'XSum'),
    *('CNN/DM', 'MATH-500'),
  ]
  assert [one.chat for one in tasks] == [True, False, True, True, *4 * [False]]
  for absent in (tasks[1], tasks[5], tasks[7]):
    for read in (absent.prompts, absent.source.provenance):
      with pytest.raises(ValueError, match=r'nowhere: No such file'):
        read()


@pytest.mark.usefixtures('clean_gin')
def test_what_a_program_may_use_can_be_bound():
  gin.parse_config_files_and_bindings(
    ['configs/tasks.gin'],
    ['chosen.tasks = [@HumanEval()]', 'Limits.seconds = 10'],
  )
  (chosen_task,) = chosen()
  assert chosen_task.limits == sandbox.Limits(seconds=10)


def test_what_was_read_is_told_apart(tmp_path):
  path = tmp_path / 'problems.jsonl'
  path.write_text('{"question": "One?", "answer": "#### 1"}')
  before = gsm8k.GSM8K(path=str(path)).source.provenance()
  path.write_text('{"question": "Two?", "answer": "#### 2"}')
  after = gsm8k.GSM8K(path=str(path)).source.provenance()
  assert before.published is after.published is False
  assert isinstance(after, source.Provenance)
  assert before.sha256 != after.sha256
