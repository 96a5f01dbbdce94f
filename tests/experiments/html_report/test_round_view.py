"""The view of rounds, read back with Python's own HTML parser."""

from html import parser

from experiments.decoding import rounds
from experiments.html_report import round_view


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
  found = _Cells(round_view.of_rounds([one]))
  assert found.rows == [
    ['', 'drafter', 'target', 'keep', '', 'draft token'],
    ['round 3'],
    ['1 after 0', '(0.500)', '0.250', '0.250', 'rejected', repr(hostile)],
    ['2 after 0', '(0.500)', '0.250', '0.250', 'kept', "' b'"],
    ['3 after 1', '(0.500)', '0.250', '-', 'falls', "' c'"],
    ["+ '<b>' bonus, the target after 2"],
  ]
  assert found.struck == [repr(hostile), "' c'"]
