"""Summarisation tasks: XSum, CNN/DailyMail, and a few articles of our own.

XSum is by Narayan et al. 1808.08745. CNN/DailyMail is by Hermann et al.
1506.03340, as prepared by See et al. 1704.04368. Chen et al. 2302.01318 put one
example before each article of XSum, but do not print it; here it is the first
article of our own.
"""

import gin

from experiments.tasks import hub
from experiments.tasks import source
from experiments.tasks import summaries

_ONE_SHOT = (
  'Summarize the last article in one sentence, as the first one is summarized.'
)
_PLAIN = 'Summarize this article in three or four sentences.'
_OURS = 'experiments/data/articles.jsonl'
_SPLITS = ('train', 'validation', 'test')


@gin.configurable
def articles(*, path: str = _OURS, chat: bool = False) -> summaries.Summaries:
  """Returns twelve articles that were written for this repository.

  They stand in for XSum on any machine, but are too few to compare models by.
  The first article of the file is the example, and not a prompt.
  """
  own = _articles(path)
  return summaries.Summaries(
    name='Articles', source=own, request=_ONE_SHOT, one_shot=own, chat=chat
  )


@gin.configurable
def xsum(
  *,
  path: str | None = None,
  split: str = 'test',
  revision: str | None = None,
  chat: bool = False,
  max_words: int | None = None,
) -> summaries.Summaries:
  """Returns a split of XSum, whose summaries are one sentence long.

  For a few articles the hub has only the summary; these are left out.

  Args:
    path: a file with the data set; None reads from the hub.
    split: of the hub: 'train', 'validation' or 'test'. A file is read whole.
    revision: of the hub's repository; None for the newest. If that holds a
      script, which the library no longer runs, use 'refs/convert/parquet'.
    chat: whether a prompt is one user turn of a chat.
    max_words: longer articles are left out; None keeps all.

  Raises:
    ValueError: there is no such split.
  """
  if split not in _SPLITS:
    raise ValueError(
      f'xsum.split is {split!r}: choose one of {", ".join(_SPLITS)}'
    )
  return summaries.Summaries(
    name='XSum',
    source=_on_hub(
      'XSum',
      'xsum',
      ('document', 'summary'),
      path,
      hub.Subset('EdinburghNLP/xsum', None, split, revision),
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
) -> summaries.Summaries:
  """Returns CNN/DailyMail's test split, zero-shot; arguments as for `xsum`."""
  return summaries.Summaries(
    name='CNN/DM',
    source=_on_hub(
      'CNN/DM',
      'cnn_dailymail',
      ('article', 'highlights'),
      path,
      hub.Subset('abisee/cnn_dailymail', '3.0.0', 'test', revision),
    ),
    request=_PLAIN,
    chat=chat,
    max_words=max_words,
  )


def _on_hub(
  task: str,
  configurable: str,
  fields: tuple[str, str],
  path: str | None,
  subset: hub.Subset,
  skip_without: str | None = None,
) -> source.Source:
  return source.Source(
    task=task,
    fields=fields,
    remedy=f'it is {subset.repository} on the hub, and '
    + source.binding(configurable, fields),
    path=path,
    hub=subset,
    skip_without=skip_without,
  )


def _articles(path: str) -> source.Source:
  fields = ('document', 'summary')
  return source.Source(
    task='Articles',
    fields=fields,
    remedy='the repository has them, and ' + source.binding('articles', fields),
    path=path,
  )
