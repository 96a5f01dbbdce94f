"""The views of a generation, read back with Python's own HTML parser."""

from html import parser

import numpy as np

from experiments.decoding import rounds
from experiments.html_report import views
import specsample
from specsample import text as text_lib
from specsample.types import Origin


class _Spans(parser.HTMLParser):
  """Collects (classes, title, text) of each span."""

  def __init__(self, source):
    super().__init__()
    self.spans, self.others, self._open = [], [], []
    self.feed(source)
    self.close()

  def handle_starttag(self, tag, attrs):
    self._open.append(tag)
    if tag == 'span':
      attributes = dict(attrs)
      self.spans.append(
        [attributes['class'].split(), attributes.get('title'), '']
      )
    elif tag not in ('div', 'style'):
      self.others.append(tag)

  def handle_endtag(self, tag):
    assert self._open.pop() == tag

  def handle_data(self, data):
    if self._open and self._open[-1] == 'span':
      self.spans[-1][2] += data


def _spans(texts, origins, rounds):
  found = _Spans(views.of_tokens(texts, origins, rounds))
  assert not found.others
  # Those of the legend have no title.
  return [span for span in found.spans if span[1]]


def test_each_token_has_its_author_and_its_round():
  origins = [Origin.ACCEPTED, Origin.BONUS, Origin.CORRECTION]
  spans = _spans(['The', ' sky', ' is'], origins, [0, 0, 1])
  assert spans == [
    [['o', 'accepted', 'first'], 'round 1: accepted draft', 'The'],
    [['o', 'bonus'], 'round 1: bonus token of the target', ' sky'],
    [['o', 'correction', 'first'], 'round 2: correction by the target', ' is'],
  ]


def test_what_a_model_writes_is_text_not_markup():
  hostile = ['<script>alert(1)</script>', '"><img src=x onerror=a()>', '&lt;']
  spans = _spans(hostile, [Origin.BONUS] * 3, [0, 1, 2])
  assert [text for _, _, text in spans] == hostile


def test_no_token_is_without_something_to_see():
  spans = _spans(['\n', '', ' '], [Origin.BONUS] * 3, [0, 1, 2])
  assert [text for _, _, text in spans] == ['⏎\n', '◌', ' ']


def test_the_prompt_begins_no_round():
  spans = _spans(['a', 'b'], [Origin.PROMPT, Origin.BONUS], [0, 0])
  assert spans[0] == [['o', 'prompt'], 'prompt', 'a']


def test_authors_differ_by_more_than_colour():
  style = views.of_tokens([], [], []).replace('\n', ' ')
  # The line style of each origin, which grey print shows too.
  lines = {
    rule.split()[0]: rule.partition('border-bottom:')[2].split()[1]
    for rule in style.split('.origin-view .')
    if 'border-bottom' in rule
  }
  assert lines == {
    'accepted': 'solid',
    'correction': 'double',
    'bonus': 'dotted',
  }


def test_pieces_add_up_to_the_text(smollm2):
  tokenizer = smollm2.tokenizer
  text = 'Blue: 蓝 and 🙂.'
  tokens = [*tokenizer.encode(text), *tokenizer.eos_ids[-1:]]
  pieces = text_lib.pieces(tokenizer, tokens, skip_special=False)
  assert len(pieces) == len(tokens)
  assert ''.join(pieces) == tokenizer.decode(tokens, skip_special=False)
  assert ''.join(pieces).startswith(text)
  assert '' in pieces  # part of a character of several tokens


def test_a_row_of_an_output_is_shown_without_its_padding(smollm2):
  tokens = smollm2.tokenizer.encode('One two three')
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
  found = _Spans(views.of_output(smollm2.tokenizer, output))
  shown = [span for span in found.spans if span[1]]
  assert ''.join(text for _, _, text in shown) == 'One two three'


class _Cells(parser.HTMLParser):
  """Collects the texts of a table's cells by row, and what is struck out."""

  def __init__(self, source):
    super().__init__()
    self.rows, self.struck, self._open = [], [], []
    self.feed(source)
    self.close()
    assert not self._open

  def handle_starttag(self, tag, attrs):
    del attrs
    self._open.append(tag)
    if tag == 'tr':
      self.rows.append([])
    elif tag in ('td', 'th'):
      self.rows[-1].append('')

  def handle_endtag(self, tag):
    assert self._open.pop() == tag

  def handle_data(self, data):
    if {'td', 'th'} & set(self._open):
      self.rows[-1][-1] += data
    if 'del' in self._open:
      self.struck.append(data)


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
  found = _Cells(views.of_rounds([one]))
  assert found.rows == [
    ['', 'drafter', 'target', 'keep', '', 'draft token'],
    ['round 3'],
    ['1 after 0', '(0.500)', '0.250', '0.250', 'rejected', repr(hostile)],
    ['2 after 0', '(0.500)', '0.250', '0.250', 'kept', "' b'"],
    ['3 after 1', '(0.500)', '0.250', '-', 'falls', "' c'"],
    ["+ '<b>' bonus, the target after 2"],
  ]
  assert found.struck == [repr(hostile), "' c'"]
