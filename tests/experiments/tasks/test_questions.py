"""Spec-Bench, MT-Bench, SPEED-Bench, and articles to summarise."""

import json
import sys

import pytest

from experiments.tasks import questions
from experiments.tasks import source
from experiments.tasks import summarization

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
_MT_BENCH, _SPEC_BENCH = questions.mt_bench, questions.spec_bench
_SPEED_BENCH = questions.speed_bench


def _task(folder, *records, make=summarization.xsum, **kwargs):
  path = folder / 'data.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return make(path=str(path), **kwargs)


def _question(category):
  number, group = _GROUPED[category]
  turns = ['one', 'two'] if group == 'mt_bench' else ['one']
  return {'question_id': number, 'category': category, 'turns': turns}


_WRITING, _MATH, _QA = map(_question, ('writing', 'math', 'qa'))


def test_spec_bench_has_six_groups(tmp_path):
  task = _task(tmp_path, *map(_question, _GROUPED), make=_SPEC_BENCH)
  prompts = task.prompts()
  assert [(prompt.id, prompt.category) for prompt in prompts] == [
    (str(number), group) for number, group in _GROUPED.values()
  ]
  for prompt in prompts:
    assert prompt.text == 'one'
    turns = ('two',) if prompt.category == 'mt_bench' else ()
    assert prompt.next_turns == turns
  assert task.chat
  assert 'speed' in task.unscored()
  assert task.score(prompts, [['answer']] * len(prompts)) == []


def test_mt_bench_keeps_its_categories(tmp_path):
  task = _task(tmp_path, _WRITING, _MATH, make=_MT_BENCH)
  assert [p.category for p in task.prompts()] == ['writing', 'math']
  assert task.source.provenance().published is False
  assert 'judge' in task.unscored()


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
  task = _task(tmp_path, _CODING, _WITHHELD, make=_SPEED_BENCH)
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
  task = _SPEED_BENCH(subset='throughput_8k', revision='v1')
  assert [prompt.id for prompt in task.prompts()] == ['a1', 'c3']
  assert asked == ['hub: nvidia/SPEED-Bench, throughput_8k, test, v1']
  # Other questions have another digest.
  before = task.source.provenance().sha256
  stored[0] = _CODING | {'turns': ['Sort that.']}
  assert task.source.provenance().sha256 != before


@pytest.mark.parametrize(
  ('make', 'record', 'message'),
  [
    (_SPEC_BENCH, _QA | {'turns': []}, 'at least one text'),
    (_SPEC_BENCH, {'question_id': 1}, 'neither "prompt" nor "turns"'),
    (_SPEC_BENCH, _QA | {'category': 'x'}, "'x' is not one of writing,"),
    (_SPEC_BENCH, {'question_id': 1, 'turns': ['a']}, "'none' is not one of"),
    (_MT_BENCH, _QA, "'qa' is not one of writing, .* humanities"),
    (_MT_BENCH, {'prompt': 'Why?'}, "'none' is not one of"),
    (_MT_BENCH, _WRITING | {'turns': ['a', 3]}, 'turn 2 is 3: it must be'),
    (_MT_BENCH, _MATH, 'question 120 is also on line 1'),
    (_SPEED_BENCH, _MATH, 'question 120 is also on line 1'),
    (_SPEED_BENCH, _CODING | {'turns': ['a', '']}, "turn 2 is ''"),
  ],
)
def test_other_questions_are_refused(tmp_path, make, record, message):
  task = _task(tmp_path, _MATH, record, make=make)
  with pytest.raises(ValueError, match=message) as error:
    task.prompts()
  said, path = str(error.value), str(tmp_path / 'data.jsonl')
  assert f'{path}: line 2: ' in said
  assert f'{make.__name__}.path = "FILE"' in said
  assert len(said) < len(path) + 500


def test_data_without_a_question_are_refused(tmp_path):
  make = lambda **kwargs: _task(
    tmp_path, _WITHHELD, make=_SPEED_BENCH, **kwargs
  )
  with pytest.raises(ValueError, match="subset is '1k': choose one of qualit"):
    make(subset='1k')
  with pytest.raises(ValueError, match='none of 1 records has a text in place'):
    make().prompts()
  # Without a file, the way to it is shown.
  for make, origin in (
    (_SPEC_BENCH, 'hemingkx/Spec-Bench'),
    (_MT_BENCH, 'lm-sys/FastChat'),
  ):
    with pytest.raises(ValueError, match=origin) as error:
      make().prompts()
    assert f'{make.__name__}.path = "FILE"' in str(error.value)


_XSUM = [
  {'document': 'Cats sleep.\nAll day.', 'summary': 'Cats sleep.', 'id': '31'},
  {'document': 'A long one of six words.', 'summary': 'Long.', 'id': '32'},
]
_EMPTY = {'document': ' \n', 'summary': 'Gone.', 'id': '30'}
_DOGS = {'document': 'y', 'summary': 'Dogs bark at night.'}


def test_xsum_has_our_example_and_its_own_summaries(tmp_path):
  # Articles without a text are left out, and counted.
  task = _task(tmp_path, _EMPTY, *_XSUM)
  first, second = task.prompts()
  shot, article = first.text.split('\n\nArticle: ')
  assert article == 'Cats sleep.\nAll day.\n\nSummary:'
  assert (first.id, first.line, first.reference) == ('31', 2, 'Cats sleep.')
  assert (second.id, second.line) == ('32', 3)
  assert task.source.provenance().left_out == 1
  assert _task(tmp_path, *_XSUM).source.provenance().left_out == 0
  for prompt in summarization.articles().prompts():
    assert prompt.text.startswith(f'{shot}\n\nArticle: ')
    assert prompt.reference not in prompt.text


def test_xsum_reads_the_split_that_is_named():
  assert summarization.xsum().source.hub.split == 'test'
  assert summarization.xsum(split='validation').source.hub.split == 'validation'
  with pytest.raises(ValueError, match="'dev': choose one of train, valid"):
    summarization.xsum(split='dev')


def test_cnn_dailymail_has_no_example(tmp_path):
  record = {'article': 'Cats sleep.', 'highlights': 'Cats .\nSleep .'}
  make = summarization.cnn_dailymail
  (prompt,) = _task(tmp_path, record, make=make).prompts()
  assert prompt.text == 'Article: Cats sleep.\n\nSummary:'
  assert prompt.reference == 'Cats .\nSleep .'
  (prompt,) = _task(tmp_path, record, make=make, chat=True).prompts()
  assert prompt.text.startswith('Summarize this article')


def test_long_articles_are_left_out(tmp_path):
  (prompt,) = _task(tmp_path, *_XSUM, max_words=5).prompts()
  assert prompt.id == '31'
  with pytest.raises(ValueError, match='none of 2 articles has 1 words'):
    _task(tmp_path, *_XSUM, max_words=1).prompts()


def test_rouge_2_by_hand(tmp_path):
  cat = {'document': 'x', 'summary': 'The cat sat on the mat.'}
  task = _task(tmp_path, cat, _DOGS | {'summary': 'Dogs bark.'})
  # Three of five bigrams are shared (stems are compared): 3/5 both ways.
  samples = [['The cats sat on a mat', 'nothing else'], ['Dogs bark']]
  (score,) = task.score(task.prompts(), samples)
  assert score.name == 'ROUGE-2'
  assert score.value == pytest.approx((0.6 / 2 + 1) / 2)
  assert score.ci95 is None  # only two


def test_what_a_plain_model_writes_on_does_not_count(tmp_path):
  answer = ' Dogs bark at night.\n\nArticle: Another.\n\nSummary: Other.'
  scores = []
  for chat in (False, True):
    task = _task(tmp_path, _DOGS, chat=chat)
    scores += task.score(task.prompts(), [[answer]])
  plain, chat = (score.value for score in scores)
  assert plain == 1 > chat > 0


def test_score_is_left_out_without_the_package(monkeypatch):
  task = summarization.articles()
  assert task.unscored() is None
  monkeypatch.setitem(sys.modules, 'rouge_score', None)
  assert 'ROUGE-2 is left out' in task.unscored()
  assert 'pip install rouge-score' in task.unscored()
  prompts = task.prompts()
  assert task.score(prompts, [['a']] * len(prompts)) == []
