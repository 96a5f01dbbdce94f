"""Links in the documents lead somewhere, and every page is in the index."""

import json
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_INDEX = _ROOT / 'docs' / 'README.md'
_PAGES = sorted(_ROOT.glob('docs/*.md'))
_DOCUMENTS = [
  *sorted(_ROOT.glob('*.md')),
  *_PAGES,
  _ROOT / 'checkpoints' / 'README.md',
  _ROOT / 'tests' / 'README.md',
  *sorted(_ROOT.glob('colab/*.ipynb')),
]
# [text](target), and what HTML in Markdown refers to.
_LINK = re.compile(
  r'\]\(\s*<?([^()\s<>]+)>?[^()]*\)|(?:src|srcset|href)="([^"]+)"'
)
_CODE = re.compile(r'^(```|~~~).*?^\1|`[^`\n]+`', re.MULTILINE | re.DOTALL)


def _markdown(path: pathlib.Path) -> str:
  text = path.read_text('utf-8')
  if path.suffix != '.ipynb':
    return text
  cells = json.loads(text)['cells']
  return '\n\n'.join(
    ''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown'
  )


def _links(markdown: str) -> list[str]:
  """Returns the relative links of a text, those within the text included."""
  found = [a or b for a, b in _LINK.findall(_CODE.sub('', markdown))]
  return [link for link in found if not re.match(r'\w+:|//', link)]


def _anchors(markdown: str) -> set[str]:
  """Returns the anchors that GitHub gives to the headings of a text."""
  without_code = re.sub(r'^```.*?^```', '', markdown, flags=re.M | re.S)
  anchors: set[str] = set()
  for heading in re.findall(r'^#+ +(.*?)[ #]*$', without_code, re.MULTILINE):
    words = re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')
    same = (words, *(f'{words}-{i}' for i in range(1, 99)))
    anchors.add(next(name for name in same if name not in anchors))
  return anchors


def _broken(document: pathlib.Path, markdown: str) -> list[str]:
  """Returns the links that lead to no file, or to no heading of one."""
  broken = []
  for link in _links(markdown):
    name, _, anchor = link.partition('#')
    target = document.parent / name if name else document
    if not target.exists():
      broken.append(link)
    elif anchor:
      text = _markdown(target) if name else markdown
      if anchor not in _anchors(text):
        broken.append(link)
  return broken


@pytest.mark.parametrize(
  'document', _DOCUMENTS, ids=lambda path: path.relative_to(_ROOT).as_posix()
)
def test_no_link_is_broken(document):
  assert not _broken(document, _markdown(document))


def test_every_page_is_reached_from_the_index():
  reached, waiting = set(), [_INDEX]
  while waiting:
    page = waiting.pop()
    if page in reached or page not in _PAGES:
      continue
    reached.add(page)
    names = [link.partition('#')[0] for link in _links(_markdown(page))]
    waiting += [(page.parent / name).resolve() for name in names if name]
  assert reached == set(_PAGES)
  assert '(docs/README.md)' in _markdown(_ROOT / 'README.md')


def test_a_broken_link_is_found():
  markdown = """# One `word`, two

    [Good](#one-word-two), [good](README.md), [again](#one-word-two-1).
    [No file](nowhere.md), ![no picture](no.svg), [no heading](#three),
    [no heading there](README.md#nothing), <img src="gone.png">,
    [a title](gone.md "of this page"), [elsewhere](https://example.com/no.md).
    `[code](is-not-read.md)`

## One word, two

```
[code](is-not-read-either.md)
```
"""
  assert _broken(_INDEX, markdown) == [
    *('nowhere.md', 'no.svg', '#three', 'README.md#nothing'),
    *('gone.png', 'gone.md'),
  ]
