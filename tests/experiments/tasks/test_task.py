"""What all tasks have in common: data, refusals, thoughts, and gin's names."""

import dataclasses
import gzip
import hashlib
import json
import sys

import gin
import numpy as np
import pytest

from experiments.tasks import gsm8k
from experiments.tasks import human_eval
from experiments.tasks import math500
from experiments.tasks import questions
from experiments.tasks import source
from experiments.tasks import summarization
from experiments.tasks import task as task_lib

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


def _task(make, folder, *records, **kwargs):
  path = folder / 'data.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return make(path=str(path), **kwargs)


def test_score_is_a_mean_with_its_interval():
  values = np.random.default_rng(1).random(400)
  score = task_lib.average('share', values)
  assert score.name == 'share'
  assert score.value == pytest.approx(values.mean())
  low, high = score.ci95
  error = values.std() / np.sqrt(len(values))
  assert score.value - low == pytest.approx(1.96 * error, rel=0.1)
  assert high - score.value == pytest.approx(1.96 * error, rel=0.1)
  # One prompt says nothing of others.
  assert task_lib.average('share', [0.5]).ci95 is None


def test_gin_makes_tasks_and_nothing_is_read():
  gin.clear_config()
  gin.parse_config(_TASKS)
  tasks = chosen()
  gin.clear_config()
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
  assert [(one.name, one.chat) for one in tasks] == [
    ('HumanEval', True),
    ('GSM8K', False),
    ('Spec-Bench', True),
    ('MT-Bench', True),
    ('Articles', False),
    ('XSum', False),
    ('CNN/DM', False),
    ('MATH-500', False),
  ]
  for absent in (tasks[1], tasks[5], tasks[7]):
    for read in (absent.prompts, absent.source.provenance):
      with pytest.raises(ValueError, match=r'nowhere: No such file'):
        read()


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
  assert task_lib.spoken(answer) == said


_GSM8K = {'question': 'One?', 'answer': '#### 72'}
_MATH500 = {'problem': 'One?', 'solution': 'So.', 'answer': '72'}
_XSUM = {'document': 'x', 'summary': 'Dogs bark at night.'}


@pytest.mark.parametrize(
  ('make', 'record', 'right', 'wrong'),
  [
    (gsm8k.GSM8K, _GSM8K, '72 pens', 'The answer is 4'),
    (math500.MATH500, _MATH500, r'\boxed{72}', r'\boxed{1}'),
    (summarization.xsum, _XSUM, 'Dogs bark at night.', 'Cats do not.'),
  ],
)
def test_what_a_chat_thinks_does_not_count(
  tmp_path, make, record, right, wrong
):
  task = _task(make, tmp_path, record, chat=True)
  answers = [f'<think>{wrong}</think>{right}', f'<think>\n{right}']
  (score,) = task.score(task.prompts(), [answers])
  assert score.value == 0.5


_HUMAN_EVAL = dict.fromkeys(('task_id', 'prompt', 'entry_point', 'test'), 'x')
_CNN = {'article': '', 'highlights': 'Gone.'}
_EMPTY = _XSUM | {'document': ' \n'}
_OF_XSUM, _OF_CNN = summarization.xsum, summarization.cnn_dailymail
_ARTICLES = summarization.articles


@pytest.mark.parametrize(
  ('make', 'records', 'message'),
  [
    *(
      (
        human_eval.HumanEval,
        [_HUMAN_EVAL, {x: 'x' for x in _HUMAN_EVAL if x != missing}],
        f'line 2: "{missing}" is None',
      )
      for missing in _HUMAN_EVAL
    ),
    (gsm8k.GSM8K, [{'question': 'One?'}], 'line 1: "answer" is None'),
    (math500.MATH500, [{'problem': 'One?'}], 'MATH-500: .*"answer" is None'),
    (_OF_XSUM, [_CNN], 'line 1: "document" is '),
    (_OF_XSUM, [{'document': 'a'}], 'line 1: "summary" is None'),
    (_OF_XSUM, [_XSUM | {'summary': ''}], '"summary" is \'\''),
    (_OF_XSUM, [_XSUM | {'document': None}], '"document" is None'),
    (_OF_XSUM, [_EMPTY], 'none of 1 records has a "document"'),
    (_OF_CNN, [_XSUM], 'line 1: "article" is '),
    (_OF_CNN, [_CNN], '"article" is \'\''),
    (_ARTICLES, [_XSUM | {'summary': ''}], 'line 1: "summary" is '),
    (_ARTICLES, [_XSUM, _XSUM, _EMPTY], '"document" is'),
    (_ARTICLES, [_XSUM], 'it has only the example'),
  ],
)
def test_data_of_another_schema_are_refused(tmp_path, make, records, message):
  with pytest.raises(ValueError, match=message) as error:
    _task(make, tmp_path, *records).prompts()
  if ' is ' in message:
    assert f'{make.__name__}.path = "FILE"' in str(error.value)


def test_hub_is_read_without_a_file(monkeypatch):
  monkeypatch.setitem(sys.modules, 'datasets', None)
  task = math500.MATH500(revision='v1')
  with pytest.raises(
    ValueError, match=r'hub: HuggingFaceH4/MATH-500, test, v1: .*specsample\['
  ):
    task.prompts()


def test_what_was_read_is_told_apart(tmp_path):
  before, after = (
    _task(
      gsm8k.GSM8K, tmp_path, {'question': x, 'answer': '#### 1'}
    ).source.provenance()
    for x in ('One?', 'Two?')
  )
  assert before.published is after.published is False
  assert before.sha256 != after.sha256


_TEXT = '{"a": "one"}\n\n{"a": "two", "b": 3}\n'

_TEXT_ONLY = 'but it should be a text'
_REMEDY = (
  """: get it there, and --gin_bindings='Test.path = "FILE"' names a file """
  'of JSON lines with "a"'
)


def _source(path, **kwargs):
  return source.Source(
    task='Test',
    fields=('a',),
    configurable='Test',
    origin='get it there',
    path=None if path is None else str(path),
    **kwargs,
  )


def _file(folder, data, name='data.jsonl'):
  path = folder / name
  path.write_bytes(data if isinstance(data, bytes) else data.encode())
  return path


@pytest.mark.parametrize('name', ['data.jsonl', 'data.jsonl.gz'])
@pytest.mark.parametrize('convert', [bytes, gzip.compress])
def test_records_have_their_lines(tmp_path, name, convert):
  data = convert(_TEXT.encode())
  read = _source(_file(tmp_path, data, name)).read()
  assert read == [
    source.Record(1, {'a': 'one'}),
    source.Record(3, {'a': 'two', 'b': 3}),
  ]


def test_file_is_compared_with_the_published_one(tmp_path):
  digest = hashlib.sha256(_TEXT.encode()).hexdigest()
  for data in (_TEXT, gzip.compress(_TEXT.encode())):
    path = _file(tmp_path, data)
    for known, published in ((digest, True), ('0' * 64, False), (None, None)):
      found = _source(path, sha256=known).provenance()
      assert found == source.Provenance(str(path), digest, published)


@pytest.mark.parametrize(
  ('data', 'message'),
  [
    ('', 'it has no records'),
    ('\n \n', 'it has no records'),
    ('{"a": "one"}\n{"a": "tw', 'line 2 is not JSON'),
    ('{"a": "one"}\n["a"]', 'line 2 is not a JSON object'),
    ('{"a": "one"}\n{"b": "two"}', f'line 2: "a" is None, {_TEXT_ONLY}'),
    ('{"a": 3}', f'line 1: "a" is 3, {_TEXT_ONLY}'),
    ('{"a": " "}', f'line 1: "a" is \' \', {_TEXT_ONLY}'),
    (json.dumps({'a': ['x' * 10**5]}), f'line 1: "a" is .*, {_TEXT_ONLY}'),
    ('{"a": ' + '[' * 10**5, 'line 1 is not JSON .it is nested too deeply'),
    ('{"a": "\\ud83d"}', 'line 1: "a" holds half of a surrogate pair'),
    (b'{"a": "one"}\n{"a": "\xff"}', 'line 2 is not UTF-8: convert'),
  ],
  ids=lambda text: str(text[:40]),
)
def test_what_is_no_data_set_is_refused(tmp_path, data, message):
  path = _file(tmp_path, data)
  with pytest.raises(ValueError, match=message) as error:
    _source(path).read()
  shown = str(error.value)
  assert shown.startswith(f'Test: {path}: ')
  reason = shown.removesuffix(_REMEDY)
  assert reason != shown
  assert len(reason) < len(str(path)) + 200


def test_what_is_not_there_or_damaged_is_refused(tmp_path, monkeypatch):
  half = [gzip.compress(_TEXT.encode())[:size] for size in (3, 30)]
  damaged = [_file(tmp_path, x, f'{len(x)}.jsonl.gz') for x in half]
  absent = _source(tmp_path / 'nowhere.jsonl')
  # Python marks modules that cannot be imported this way.
  monkeypatch.setitem(sys.modules, 'datasets', None)
  subset = source.Subset('owner/set', None, 'test')
  for call, message in (
    *((_source(path).read, 'it is damaged') for path in damaged),
    (absent.read, 'No such file'),
    (absent.provenance, 'No such file'),
    (_source(None).read, 'no file is given'),
    (_source(None, hub=subset).read, r'specsample\[data\]'),
  ):
    with pytest.raises(ValueError, match=rf'{message}.*: get it there'):
      call()


# The part of the hub's library that is called, serving a folder.
_LIBRARY = """
import json, pathlib

def load_dataset(path, name=None, *, split, revision=None):
  file = pathlib.Path(__file__).with_name(f'{split}.jsonl')
  assert (path, name, revision) == ('owner/set', 'main', 'v1')
  return [json.loads(line) for line in file.read_text().splitlines()]
"""


def test_hub_is_read_through_its_library(tmp_path, monkeypatch):
  _file(tmp_path, _LIBRARY, 'datasets.py')
  _file(tmp_path, '{"a": "one"}\n{"a": "two"}', 'test.jsonl')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'datasets', raising=False)
  subset = source.Subset('owner/set', 'main', 'test', 'v1')
  from_hub = _source(None, hub=subset)
  assert [record.values['a'] for record in from_hub.read()] == ['one', 'two']
  lines = ''.join(json.dumps({'a': x}) + '\n' for x in ('one', 'two'))
  from_whole = from_hub.provenance()
  assert from_whole == source.Provenance(
    'hub: owner/set, main, test, v1',
    hashlib.sha256(lines.encode()).hexdigest(),
    None,
  )
  # Records left out count as absent.
  _file(tmp_path, '{"a": "one"}\n{"a": ""}\n{"a": "two"}', 'test.jsonl')
  skipping = _source(None, hub=subset, skip_without='a')
  assert [record.line for record in skipping.read()] == [1, 3]
  assert skipping.provenance() == dataclasses.replace(from_whole, left_out=1)
  absent = _source(None, hub=source.Subset('owner/set', 'main', 'train', 'v1'))
  with pytest.raises(ValueError, match=r'FileNotFoundError.*: get it there'):
    absent.read()
  monkeypatch.delitem(sys.modules, 'datasets', raising=False)
