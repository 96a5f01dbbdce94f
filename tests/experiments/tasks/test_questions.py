import json

import pytest

from experiments.tasks import questions
from experiments.tasks import source

# An id for each category, and the category's group in Spec-Bench's tables.
_GROUPED = {
  'writing': (81, 'mt_bench'),
  'math': (120, 'mt_bench'),
  'stem': (141, 'mt_bench'),
  'translation': (161, 'translation'),
  'summarization': (320, 'summarization'),
  'qa': (321, 'qa'),
  'math_reasoning': (401, 'math_reasoning'),
  'rag': (560, 'rag'),
}


def _file(folder, records):
  path = folder / 'question.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return str(path)


def _question(category):
  number, group = _GROUPED[category]
  turns = ['one', 'two'] if group == 'mt_bench' else ['one']
  return {'question_id': number, 'category': category, 'turns': turns}


def test_spec_bench_has_six_groups(tmp_path):
  path = _file(tmp_path, [_question(name) for name in _GROUPED])
  task = questions.spec_bench(path=path)
  prompts = task.prompts()
  groups = [group for _, group in _GROUPED.values()]
  assert [prompt.category for prompt in prompts] == groups
  assert len({prompt.category for prompt in prompts}) == 6
  assert {prompt.text for prompt in prompts} == {'one'}
  assert [prompt.next_turns for prompt in prompts] == [
    ('two',) if group == 'mt_bench' else () for group in groups
  ]
  assert [prompt.id for prompt in prompts] == [
    str(number) for number, _ in _GROUPED.values()
  ]
  assert task.chat
  assert 'speed' in task.unscored()
  assert task.score(prompts, [['answer']] * len(prompts)) == []


def test_mt_bench_keeps_its_categories(tmp_path):
  path = _file(tmp_path, [_question('writing'), _question('math')])
  task = questions.mt_bench(path=path)
  assert [p.category for p in task.prompts()] == ['writing', 'math']
  assert task.source.provenance().published is False
  assert 'judge' in task.unscored()


_WRITING, _QA = _question('writing'), _question('qa')
_MT_BENCH, _SPEC_BENCH = questions.mt_bench, questions.spec_bench


@pytest.mark.parametrize(
  ('make', 'record', 'message'),
  [
    (_SPEC_BENCH, _QA | {'turns': []}, 'at least one text'),
    (_SPEC_BENCH, {'question_id': 1}, 'neither "prompt" nor "turns"'),
    (
      _SPEC_BENCH,
      _QA | {'category': 'poetry'},
      "'poetry' is not one of writing,",
    ),
    (_SPEC_BENCH, {'question_id': 1, 'turns': ['a']}, "'none' is not one of"),
    (_MT_BENCH, _QA, "'qa' is not one of writing, .* humanities"),
    (_MT_BENCH, {'prompt': 'Why?'}, "'none' is not one of"),
    (_MT_BENCH, _WRITING | {'turns': ['a', 3]}, 'turn 2 is 3: it must be'),
    (_MT_BENCH, _question('math'), 'question 120 is also on line 1'),
  ],
  ids=lambda value: None if callable(value) else str(value)[:60],
)
def test_another_schema_is_refused(tmp_path, make, record, message):
  path = _file(tmp_path, [_question('math'), record])
  task = make(path=path)
  with pytest.raises(ValueError, match=message) as error:
    task.prompts()
  assert f'{path}: line 2: ' in str(error.value)
  assert f'{make.__name__}.path = "FILE"' in str(error.value)
  assert len(str(error.value)) < len(path) + 500


def test_without_a_file_the_way_is_shown():
  for make, origin in (
    (questions.spec_bench, 'hemingkx/Spec-Bench'),
    (questions.mt_bench, 'lm-sys/FastChat'),
  ):
    with pytest.raises(ValueError, match=origin) as error:
      make().prompts()
    assert f'{make.__name__}.path = "FILE"' in str(error.value)


# As SPEED-Bench publishes them: ids are texts, and a conversation has any
# number of turns.
_CODING = {
  'question_id': 'a1',
  'category': 'coding',
  'sub_category': 'python',
  'turns': ['Sort this.', 'Now faster.', 'Explain it.'],
  'source': 'some/set',
  'src_id': '7',
  'difficulty': None,
  'multiturn': True,
}
_WITHHELD = _CODING | {
  'question_id': 'b2',
  'turns': [
    'FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH'
  ],
}


def test_speed_bench_has_all_turns_and_leaves_placeholders_out(tmp_path):
  path = _file(tmp_path, [_CODING, _WITHHELD])
  task = questions.speed_bench(path=path)
  (prompt,) = task.prompts()
  assert (prompt.id, prompt.category) == ('a1', 'coding')
  assert (prompt.text, *prompt.next_turns) == tuple(_CODING['turns'])
  assert task.name == 'SPEED-Bench qualitative'
  assert task.source.provenance().left_out == 1
  assert 'speed' in task.unscored()


def test_speed_bench_reads_a_split_of_the_hub(monkeypatch):
  asked = []
  stored = [_CODING, _WITHHELD, _CODING | {'question_id': 'c3'}]
  monkeypatch.setattr(
    source.Subset, 'rows', lambda subset: asked.append(str(subset)) or stored
  )
  task = questions.speed_bench(subset='throughput_8k', revision='v1')
  assert [prompt.id for prompt in task.prompts()] == ['a1', 'c3']
  assert asked == ['hub: nvidia/SPEED-Bench, throughput_8k, test, v1']
  # Other questions have another digest.
  before = task.source.provenance().sha256
  stored[0] = _CODING | {'turns': ['Sort that.']}
  assert task.source.provenance().sha256 != before


@pytest.mark.parametrize(
  ('arguments', 'records', 'message'),
  [
    ({'subset': '1k'}, [_CODING], "subset is '1k': choose one of qualitative,"),
    ({}, [_WITHHELD], 'none of 1 records has a text in place of its placehold'),
    ({}, [_CODING, _CODING], 'line 2: question a1 is also on line 1'),
    ({}, [_CODING | {'turns': ['a', '']}], "line 1: turn 2 is ''"),
  ],
)
def test_a_speed_bench_that_cannot_be_decoded_is_refused(
  tmp_path, arguments, records, message
):
  path = _file(tmp_path, records)
  with pytest.raises(ValueError, match=message):
    questions.speed_bench(path=path, **arguments).prompts()
