"""Articles to summarise, scored by ROUGE-2."""

from collections.abc import Sequence
import dataclasses

from experiments.decoding import prompts as prompts_lib
from experiments.tasks import extraction
from experiments.tasks import rouge
from experiments.tasks import source as source_lib
from experiments.tasks import task

# A plain model that keeps writing has ended its summary here.
_STOPS = ('\n\n', '\nArticle:')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summaries:
  """A data set of articles and their summaries, made in `summarization.py`.

  The source has two fields, the article and its summary. With `one_shot` every
  prompt begins with an example.
  """

  name: str
  source: source_lib.Source
  request: str  # the instruction in a chat prompt
  one_shot: source_lib.Source | None = None  # the example is its first record
  chat: bool = False
  max_words: int | None = None  # longer articles are left out

  @property
  def score_names(self) -> tuple[str, ...]:
    """See `task.Task`."""
    return (rouge.NAME,)

  def prompts(self) -> list[prompts_lib.Prompt]:
    """Returns a prompt per article, with the article's summary as reference."""
    records = self.source.read()
    if self.source == self.one_shot:
      records = records[1:]
    if not records:
      raise self.source.error('it has only the example')
    kept = [record for record in records if self._fits(record)]
    if not kept:
      raise ValueError(
        f'{self.name}: none of {len(records)} articles has {self.max_words} '
        'words or fewer: allow longer articles with max_words'
      )
    begin = f'{self.request}\n\n' if self.chat else ''
    if self.one_shot is not None:
      article, summary = _texts(self.one_shot, self.one_shot.read()[0])
      begin += f'{_ask(article)} {summary}\n\n'
    return [self._prompt(begin, record) for record in kept]

  def provenance(self) -> source_lib.Provenance:
    """Describes the data that `prompts` reads, except for the example."""
    return self.source.provenance()

  def unscored(self) -> str | None:
    """Returns why there is no ROUGE-2 score; None if there is one."""
    return rouge.missing()

  def score(
    self,
    prompts: Sequence[prompts_lib.Prompt],
    answers: Sequence[Sequence[str]],
  ) -> list[task.Score]:
    """Returns the ROUGE-2 score of the summaries in the answers.

    The summary is a chat model's answer without its thoughts, or the first
    paragraph of what a plain model writes.
    """
    summary = extraction.spoken if self.chat else _first_paragraph
    found = [[summary(text) for text in samples] for samples in answers]
    return rouge.score(prompts, found)

  def _prompt(self, begin, record):
    article, summary = _texts(self.source, record)
    return prompts_lib.Prompt(
      str(record.values.get('id', record.line)),
      prompts_lib.NO_CATEGORY,
      begin + _ask(article),
      record.line,
      summary,
    )

  def _fits(self, record):
    article, _ = _texts(self.source, record)
    return self.max_words is None or len(article.split()) <= self.max_words


def _texts(source, record):
  return [record.values[name].strip() for name in source.fields]


def _first_paragraph(text: str) -> str:
  return extraction.cut(text.lstrip(), _STOPS)


def _ask(article: str) -> str:
  return f'Article: {article}\n\nSummary:'
