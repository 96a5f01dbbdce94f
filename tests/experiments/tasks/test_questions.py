import json

import pytest

from experiments.tasks import questions

_GROUPED = {
  **dict.fromkeys(('writing', 'math', 'stem'), 'mt_bench'),
  **{
    name: name
    for name in ('translation', 'summarization', 'qa', 'math_reasoning', 'rag')
  },
}


def _file(folder, records):
  path = folder / 'question.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return str(path)


def _question(category):
  return {'question_id': 7, 'category': category, 'turns': ['one', 'two']}


def test_spec_bench_has_six_groups(tmp_path):
  path = _file(tmp_path, [_question(name) for name in _GROUPED])
  task = questions.spec_bench(path=path)
  prompts = task.prompts()
  assert [prompt.category for prompt in prompts] == list(_GROUPED.values())
  assert len({prompt.category for prompt in prompts}) == 6
  # Of a conversation the first turn.
  assert {(prompt.id, prompt.text) for prompt in prompts} == {('7', 'one')}
  assert task.chat
  assert 'speed' in task.unscored()
  assert task.score(prompts, [['answer']] * len(prompts)) == []


def test_mt_bench_keeps_its_categories(tmp_path):
  path = _file(tmp_path, [_question('writing'), _question('math')])
  task = questions.mt_bench(path=path)
  assert [p.category for p in task.prompts()] == ['writing', 'math']
  assert task.provenance().published is False
  assert 'judge' in task.unscored()


@pytest.mark.parametrize(
  ('record', 'message'),
  [
    ({**_question('qa'), 'turns': []}, 'at least one text'),
    ({'question_id': 1, 'category': 'qa'}, 'no "prompt" and no "turns"'),
    (_question('poetry'), "category 'poetry' is none of writing, "),
    ({'question_id': 1, 'turns': ['a']}, "category 'none' is none of"),
  ],
)
def test_another_schema_is_refused(tmp_path, record, message):
  task = questions.spec_bench(path=_file(tmp_path, [_question('qa'), record]))
  with pytest.raises(ValueError, match=message) as error:
    task.prompts()
  assert 'line 2' in str(error.value)
  assert 'spec_bench.path = "FILE"' in str(error.value)


def test_without_a_file_the_way_is_shown():
  for make, origin in (
    (questions.spec_bench, 'hemingkx/Spec-Bench'),
    (questions.mt_bench, 'lm-sys/FastChat'),
  ):
    with pytest.raises(ValueError, match=origin) as error:
      make().prompts()
    assert f'{make.__name__}.path = "FILE"' in str(error.value)
