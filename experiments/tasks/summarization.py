"""Articles to summarise, scored by ROUGE-2 (Lin, 2004).

XSum is by Narayan et al. 1808.08745. CNN/DailyMail is by Hermann et al.
1506.03340, as prepared by See et al. 1704.04368. Chen et al. 2302.01318 put one
example before each article of XSum, but do not print it; here it is the first
of twelve articles of our own.
"""

import dataclasses
from typing import Any, ClassVar

import gin

from experiments.decoding import prompts as prompts_lib
from experiments.tasks import source as source_lib
from experiments.tasks import task

_ROUGE = 'ROUGE-2'
# A plain model that keeps writing has ended its summary here.
_STOPS = ('\n\n', '\nArticle:')
_ONE_SHOT = (
  'Summarize the last article in one sentence, as the first one is summarized.'
)
_PLAIN = 'Summarize this article in three or four sentences.'
_OURS = 'experiments/data/articles.jsonl'
_SPLITS = ('train', 'validation', 'test')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summaries(task.Task):
  """A data set of articles and their summaries.

  The source has two fields, the article and its summary. With `one_shot` every
  prompt begins with an example.
  """

  score_names: ClassVar[tuple[str, ...]] = (_ROUGE,)

  source: source_lib.Source
  request: str  # the instruction in a chat prompt
  one_shot: source_lib.Source | None = None  # the example is its first record
  chat: bool = False
  max_words: int | None = None  # longer articles are left out

  def prompts(self) -> list[prompts_lib.Prompt]:
    """Returns a prompt per article, with the article's summary as reference."""
    records = self.source.read()
    if self.source == self.one_shot:
      records = records[1:]
    if not records:
      raise self.source.error('it has only the example')
    most = self.max_words
    texts: list[Any] = [(x, *self.source.texts(x)) for x in records]
    kept = [x for x in texts if most is None or len(x[1].split()) <= most]
    if not kept:
      raise ValueError(
        f'{self.name}: none of {len(records)} articles has {most} words or '
        'fewer: allow longer articles with max_words'
      )
    begin = f'{self.request}\n\n' if self.chat else ''
    if self.one_shot is not None:
      article, summary = self.one_shot.texts(self.one_shot.read()[0])
      begin += f'{_ask(article)} {summary}\n\n'
    name = lambda record: str(record.values.get('id', record.line))
    return [
      task.prompt(record, begin + _ask(article), summary, name(record))
      for record, article, summary in kept
    ]

  def unscored(self) -> str | None:
    """Returns why there is no ROUGE-2 score; None if there is one."""
    try:
      _scorer()
    except ImportError as error:
      return f'{_ROUGE} is left out ({error}): pip install rouge-score'
    return None

  def _value(self, reference, answer):
    """Returns F1 over bigrams of stems.

    The summary is a chat model's answer without its thoughts, or the first
    paragraph of what a plain model writes.
    """
    summary = task.final(answer.lstrip(), _STOPS, chat=self.chat)
    return _scorer().score(reference, summary)['rouge2'].fmeasure


def _ask(article: str) -> str:
  return f'Article: {article}\n\nSummary:'


def _scorer():
  from rouge_score import rouge_scorer  # noqa: PLC0415

  return rouge_scorer.RougeScorer(['rouge2'], use_stemmer=True)


@gin.configurable
def articles(*, path: str = _OURS, chat: bool = False) -> Summaries:
  """Returns twelve articles that were written for this repository.

  They stand in for XSum on any machine, but are too few to compare models by.
  The first article of the file is the example, and not a prompt.
  """
  own = _articles(path)
  return Summaries(source=own, request=_ONE_SHOT, one_shot=own, chat=chat)


@gin.configurable
def xsum(
  *,
  path: str | None = None,
  split: str = 'test',
  revision: str | None = None,
  chat: bool = False,
  max_words: int | None = None,
) -> Summaries:
  """Returns a split of XSum, whose summaries are one sentence long.

  For a few articles the hub has only the summary; these are left out.

  Args:
    path: a file with the data set; None reads from the hub.
    split: of the hub: 'train', 'validation' or 'test'. A file is read whole.
    revision: of the hub's repository; None for the newest. If that holds a
      script, which the library no longer runs, use 'refs/convert/parquet'.
    chat: whether a prompt is one user turn of a chat.
    max_words: longer articles are left out; None keeps all.
  """
  if split not in _SPLITS:
    raise ValueError(
      f'xsum.split is {split!r}: choose one of {", ".join(_SPLITS)}'
    )
  return Summaries(
    source=source_lib.Source(
      task='XSum',
      configurable='xsum',
      fields=('document', 'summary'),
      origin='it is EdinburghNLP/xsum on the hub',
      path=path,
      hub=source_lib.Subset('EdinburghNLP/xsum', None, split, revision),
      skip_without='document',
    ),
    request=_ONE_SHOT,
    one_shot=_articles(_OURS),
    chat=chat,
    max_words=max_words,
  )


@gin.configurable
def cnn_dailymail(
  *,
  path: str | None = None,
  revision: str | None = None,
  chat: bool = False,
  max_words: int | None = None,
) -> Summaries:
  """Returns CNN/DailyMail's test split, zero-shot; arguments as for `xsum`."""
  return Summaries(
    source=source_lib.Source(
      task='CNN/DM',
      configurable='cnn_dailymail',
      fields=('article', 'highlights'),
      origin='it is abisee/cnn_dailymail on the hub',
      path=path,
      hub=source_lib.Subset('abisee/cnn_dailymail', '3.0.0', 'test', revision),
    ),
    request=_PLAIN,
    chat=chat,
    max_words=max_words,
  )


def _articles(path: str) -> source_lib.Source:
  return source_lib.Source(
    task='Articles',
    configurable='articles',
    fields=('document', 'summary'),
    origin='the repository has them',
    path=path,
  )
