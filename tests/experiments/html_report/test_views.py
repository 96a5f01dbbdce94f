"""The views of a generation, read back with Python's own HTML parser."""

from html import parser

import numpy as np
import pytest

from experiments.decoding import rounds
from experiments.html_report import views
import specsample
from specsample.text import tokenizer_files
from specsample.types import Origin


class _Elements(parser.HTMLParser):
  """Collects the spans that have a title, cells by row, and struck texts."""

  def __init__(self, source):
    super().__init__()
    self.spans, self.rows, self.struck = [], [], []
    self.tags, self._open = set(), []
    self.feed(source)
    self.close()
    assert not self._open
    # Those of the legend have no title.
    self.spans = [span for span in self.spans if span[1]]

  def handle_starttag(self, tag, attrs):
    self._open.append(tag)
    self.tags.add(tag)
    attributes = dict(attrs)
    if tag == 'span':
      classes = attributes.get('class', '').split()
      self.spans.append([classes, attributes.get('title'), ''])
    elif tag == 'tr':
      self.rows.append([])
    elif tag in ('td', 'th'):
      self.rows[-1].append('')

  def handle_endtag(self, tag):
    assert self._open.pop() == tag

  def handle_data(self, data):
    if self._open[-1:] == ['span']:
      self.spans[-1][2] += data
    if {'td', 'th'} & set(self._open):
      self.rows[-1][-1] += data
    if 'del' in self._open:
      self.struck.append(data)


def _spans(*of_tokens):
  found = _Elements(views.of_tokens(*of_tokens))
  assert found.tags <= {'div', 'span', 'style'}
  return found.spans


def test_each_token_has_its_author_and_its_round():
  origins = [Origin.ACCEPTED, Origin.BONUS, Origin.CORRECTION]
  assert _spans(['The', ' sky', ' is'], origins, [0, 0, 1]) == [
    [['o', 'accepted', 'first'], 'round 1: accepted draft', 'The'],
    [['o', 'bonus'], 'round 1: bonus token of the target', ' sky'],
    [['o', 'correction', 'first'], 'round 2: correction by the target', ' is'],
  ]
  # The prompt begins no round.
  first, _ = _spans(['a', 'b'], [Origin.PROMPT, Origin.BONUS], [0, 0])
  assert first == [['o', 'prompt'], 'prompt', 'a']


@pytest.mark.parametrize(
  ('text', 'shown'),
  [
    ('<script>alert(1)</script>', '<script>alert(1)</script>'),
    ('"><img src=x onerror=a()>', '"><img src=x onerror=a()>'),
    ('&lt;', '&lt;'),
    ('\n', '⏎\n'),
    ('', '◌'),
    (' ', ' '),
  ],
)
def test_what_a_model_writes_is_text_that_can_be_seen(text, shown):
  (span,) = _spans([text], [Origin.BONUS], [0])
  assert span[2] == shown


def test_row_of_an_output_is_shown_without_its_padding(checkpoint):
  tokenizer = tokenizer_files.load(checkpoint)
  tokens = tokenizer.encode('One two')
  output = specsample.Output(
    tokens=np.asarray([[*tokens, 0, 0]]),
    lengths=np.asarray([len(tokens)]),
    log_probs=None,
    origin=np.asarray([[3] * len(tokens) + [0, 0]]),
    emit_round=np.asarray([[*range(len(tokens)), 0, 0]]),
    rounds=None,
    proposed=None,
    accepted=None,
    stop_reason=None,
  )
  found = _Elements(views.of_output(tokenizer, output))
  assert ''.join(text for *_, text in found.spans) == 'One two'


def _candidate(node, parent, text, fate):
  return rounds.Candidate(
    node=node,
    parent=parent,
    text=text,
    draft_prob=None,
    confidence=0.5,
    target_prob=0.25,
    keep_prob=None if fate == rounds.FALLS else 0.25,
    fate=fate,
  )


def test_each_token_has_its_numbers_and_its_fate():
  hostile = '<script>&'
  one = rounds.Round(
    number=3,
    candidates=(
      _candidate(1, 0, hostile, rounds.REJECTED),
      _candidate(2, 0, ' b', rounds.KEPT),
      _candidate(3, 1, ' c', rounds.FALLS),
    ),
    next=rounds.Next(
      text='<b>', origin='bonus', prob=None, source='the target after 2'
    ),
  )
  found = _Elements(views.of_rounds([one]))
  assert found.rows == [
    ['', 'drafter', 'target', 'keep', '', 'draft token'],
    ['round 3'],
    ['1 after 0', '(0.500)', '0.250', '0.250', 'rejected', repr(hostile)],
    ['2 after 0', '(0.500)', '0.250', '0.250', 'kept', "' b'"],
    ['3 after 1', '(0.500)', '0.250', '-', 'falls', "' c'"],
    ["+ '<b>' bonus, the target after 2"],
  ]
  assert found.struck == [repr(hostile), "' c'"]
