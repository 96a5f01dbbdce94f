import json
import sys

import pytest

from experiments.tasks import summarization


def _file(folder, records, name='articles.jsonl'):
  path = folder / name
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return str(path)


_XSUM = [
  {'document': 'Cats sleep.\nAll day.', 'summary': 'Cats sleep.', 'id': '31'},
  {'document': 'A long one of six words.', 'summary': 'Long.', 'id': '32'},
]


def test_ours_is_an_example_and_twelve_articles():
  task = summarization.articles()
  prompts = task.prompts()
  assert len(prompts) == 12
  begin = prompts[0].text.partition('\n\nArticle: ')[0]
  for prompt in prompts:
    shot, article = prompt.text.split('\n\nArticle: ')
    assert shot == begin
    assert article.endswith('\n\nSummary:')
    assert 120 <= len(article.split()) <= 250
    assert prompt.reference.count('.') == 1
    assert prompt.reference not in prompt.text
  assert task.source.provenance().source == 'experiments/data/articles.jsonl'


def test_xsum_has_our_example_and_its_own_summaries(tmp_path):
  task = summarization.xsum(path=_file(tmp_path, _XSUM))
  first, second = task.prompts()
  (shot,) = {
    prompt.text.partition('\n\nArticle: ')[0]
    for prompt in summarization.articles().prompts()
  } & {first.text.partition('\n\nArticle: ')[0]}
  assert first.text == (f'{shot}\n\nArticle: Cats sleep.\nAll day.\n\nSummary:')
  assert (first.id, first.reference) == ('31', 'Cats sleep.')
  assert (second.id, second.line) == ('32', 2)


def test_xsum_reads_the_split_that_is_named():
  assert summarization.xsum().source.hub.split == 'test'
  assert summarization.xsum(split='validation').source.hub.split == 'validation'
  with pytest.raises(ValueError, match="'dev': choose one of train, valid"):
    summarization.xsum(split='dev')


def test_cnn_dailymail_has_no_example(tmp_path):
  records = [{'article': 'Cats sleep.', 'highlights': 'Cats .\nSleep .'}]
  path = _file(tmp_path, records)
  (prompt,) = summarization.cnn_dailymail(path=path).prompts()
  assert prompt.text == 'Article: Cats sleep.\n\nSummary:'
  assert prompt.reference == 'Cats .\nSleep .'
  (prompt,) = summarization.cnn_dailymail(path=path, chat=True).prompts()
  assert prompt.text.startswith('Summarize this article')


def test_long_articles_are_left_out(tmp_path):
  path = _file(tmp_path, _XSUM)
  (prompt,) = summarization.xsum(path=path, max_words=5).prompts()
  assert prompt.id == '31'
  with pytest.raises(ValueError, match='none of 2 articles has 1 words'):
    summarization.xsum(path=path, max_words=1).prompts()


_EMPTY = {'document': ' \n', 'summary': 'Gone.', 'id': '30'}


def test_articles_of_xsum_without_a_text_are_left_out_and_counted(tmp_path):
  task = summarization.xsum(path=_file(tmp_path, [_EMPTY, *_XSUM]))
  assert [(p.id, p.line) for p in task.prompts()] == [('31', 2), ('32', 3)]
  assert task.source.provenance().left_out == 1
  whole = summarization.xsum(path=_file(tmp_path, _XSUM))
  assert whole.source.provenance().left_out == 0


@pytest.mark.parametrize(
  ('make', 'records', 'message'),
  [
    (summarization.xsum, [_EMPTY], 'none of 1 records has a "document"'),
    (summarization.xsum, [_EMPTY | {'document': None}], '"document" is None'),
    (summarization.xsum, [_EMPTY | {'summary': ''}], '"summary" is \'\''),
    (
      summarization.cnn_dailymail,
      [{'article': '', 'highlights': 'Gone.'}],
      '"article" is \'\'',
    ),
    (summarization.articles, [*_XSUM, _EMPTY], '"document" is'),
  ],
)
def test_no_other_text_may_be_missing(tmp_path, make, records, message):
  with pytest.raises(ValueError, match=message):
    make(path=_file(tmp_path, records)).prompts()


def test_the_example_alone_is_refused(tmp_path):
  task = summarization.articles(path=_file(tmp_path, _XSUM[:1]))
  with pytest.raises(ValueError, match='it has only the example'):
    task.prompts()


@pytest.mark.parametrize(
  ('make', 'other', 'field'),
  [
    (summarization.xsum, {'article': 'a', 'highlights': 'b'}, 'document'),
    (summarization.xsum, {'document': 'a'}, 'summary'),
    (summarization.cnn_dailymail, _XSUM[0], 'article'),
    (summarization.articles, {'document': 'a', 'summary': ''}, 'summary'),
  ],
)
def test_another_schema_is_refused(tmp_path, make, other, field):
  task = make(path=_file(tmp_path, [other]))
  with pytest.raises(ValueError, match=f'line 1: "{field}" is') as error:
    task.prompts()
  assert f'{make.__name__}.path = "FILE"' in str(error.value)


def test_rouge_2_by_hand(tmp_path):
  records = [
    {'document': 'x', 'summary': 'The cat sat on the mat.'},
    {'document': 'y', 'summary': 'Dogs bark.'},
  ]
  task = summarization.xsum(path=_file(tmp_path, records))
  # Three of five bigrams are shared (stems are compared): 3/5 both ways.
  samples = [['The cats sat on a mat', 'nothing else'], ['Dogs bark']]
  (score,) = task.score(task.prompts(), samples)
  assert score.name == 'ROUGE-2'
  assert score.value == pytest.approx((0.6 / 2 + 1) / 2)
  assert score.ci95 is None  # only two


def test_what_a_plain_model_writes_on_does_not_count(tmp_path):
  records = [{'document': 'x', 'summary': 'Dogs bark at night.'}]
  path = _file(tmp_path, records)
  answer = ' Dogs bark at night.\n\nArticle: Another.\n\nSummary: Other.'
  values = {}
  for chat in (False, True):
    task = summarization.xsum(path=path, chat=chat)
    (score,) = task.score(task.prompts(), [[answer]])
    values[chat] = score.value
    assert score.ci95 is None
  assert values[False] == 1 > values[True] > 0


def test_what_a_chat_model_thinks_does_not_count(tmp_path):
  records = [{'document': 'x', 'summary': 'Dogs bark at night.'}]
  task = summarization.xsum(path=_file(tmp_path, records), chat=True)
  answers = [
    '<think>Cats do not bark.</think>Dogs bark at night.',
    '<think>Dogs',
  ]
  (score,) = task.score(task.prompts(), [answers])
  assert score.value == (1 + 0) / 2


def test_without_the_package_there_is_no_score_and_it_says_so(monkeypatch):
  task = summarization.articles()
  assert task.unscored() is None
  monkeypatch.setitem(sys.modules, 'rouge_score', None)
  assert 'ROUGE-2 is left out' in task.unscored()
  assert 'pip install rouge-score' in task.unscored()
  prompts = task.prompts()
  assert task.score(prompts, [['a']] * len(prompts)) == []
