"""Links, files and commands in the documents: what they name is there."""

import ast
import functools
import importlib
import json
import pathlib
import re
import shlex
import sys

from absl import flags
import gin
import pytest

from experiments.command import config

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
_WITH_COMMANDS = [*_DOCUMENTS, *sorted(_ROOT.glob('experiments/*.py'))]
_SHARED_FLAGS = ''.join(
  path.read_text('utf-8') for path in _ROOT.glob('experiments/command/*.py')
)
# Gin files that the reader writes.
_OF_THE_READER = {'FOLDER/mine.gin', 'MY.gin', 'run.gin'}
# [text](target), and what HTML in Markdown refers to.
_LINK = re.compile(
  r'\]\(\s*<?([^()\s<>]+)>?[^()]*\)|(?:src|srcset|href)="([^"]+)"'
)
_CODE = re.compile(r'^(```|~~~).*?^\1|`[^`\n]+`', re.MULTILINE | re.DOTALL)
_QUOTED_FILE = re.compile(
  r'`([\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|sh|gin|toml|md|ipynb)))`'
)


def _text(path: pathlib.Path, kinds=('code', 'markdown')) -> str:
  """Returns a document, the cells of a notebook, or a command's docstring."""
  text = path.read_text('utf-8')
  if path.suffix == '.py':
    return ast.get_docstring(ast.parse(text)) or ''
  if path.suffix != '.ipynb':
    return text
  cells = [x for x in json.loads(text)['cells'] if x['cell_type'] in kinds]
  return '\n\n'.join(''.join(cell['source']) for cell in cells)


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
      text = _text(target, ['markdown']) if name else markdown
      if anchor not in _anchors(text):
        broken.append(link)
  return broken


@pytest.mark.parametrize(
  'document', _DOCUMENTS, ids=lambda path: path.relative_to(_ROOT).as_posix()
)
def test_no_link_is_broken(document):
  assert not _broken(document, _text(document, ['markdown']))


def test_every_page_is_reached_from_the_index():
  reached, waiting = set(), [_INDEX]
  while waiting:
    page = waiting.pop()
    if page in reached or page not in _PAGES:
      continue
    reached.add(page)
    names = [link.partition('#')[0] for link in _links(_text(page))]
    waiting += [(page.parent / name).resolve() for name in names if name]
  assert reached == set(_PAGES)
  assert '(docs/README.md)' in _text(_ROOT / 'README.md')


def test_broken_link_is_found():
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


def _missing_files(markdown: str) -> set[str]:
  """Returns quoted names of files that are not there."""
  folders = [_ROOT, _ROOT / 'specsample', _ROOT / 'experiments']
  # A name without a folder stands in a table that names the folder above it.
  return {
    name
    for name in _QUOTED_FILE.findall(markdown)
    if not name.startswith('results/')
    and not any((folder / name).exists() for folder in folders)
    and ('/' in name or not list((_ROOT / 'specsample').rglob(name)))
  }


@pytest.mark.parametrize('name', ['README', 'CONTRIBUTING', 'CHANGELOG'])
def test_documents_name_files_that_exist(name):
  assert not _missing_files((_ROOT / f'{name}.md').read_text('utf-8'))


def test_missing_file_is_found():
  text = '`gone.py`, `verify/no.py`, `verify/chain.py`, `configs/no/`, `chain`'
  assert _missing_files(text) == {'gone.py', 'verify/no.py', 'configs/no/'}


def _commands(text: str) -> list[list[str]]:
  """Returns the words of each `python -m experiments...` in a text."""
  found = re.findall(
    # Up to the end of the span of code, or of a line outside quotes.
    r'python3? -m experiments\.(?:"[^"`]*"|\'[^\'`]*\'|[^`\n"\'])*',
    text.replace('\\\n', ' '),
  )
  return [shlex.split(command, comments=True)[2:] for command in found]


def test_commands_are_found():
  text = """
      JAX=1 python -m experiments.a --limit=2 \\
        --gin_bindings="x = {
          'a': 1}"   # why
  `python3 -m experiments.b` and
"""
  assert _commands(text) == [
    ['experiments.a', '--limit=2', "--gin_bindings=x = {\n          'a': 1}"],
    ['experiments.b'],
  ]
  assert sum(len(_commands(_text(path))) for path in _WITH_COMMANDS) > 80


def _source(words: list[str]) -> str:
  name = words[0].removeprefix('experiments.')
  return (_ROOT / 'experiments' / f'{name}.py').read_text('utf-8')


def _values(words: list[str], flag: str) -> tuple[str, ...]:
  start = f'--{flag}='
  return tuple(x.removeprefix(start) for x in words if x.startswith(start))


@pytest.fixture(scope='module')
def parsed():
  """A function that parses settings, those of many commands only once."""
  for path in _ROOT.glob('experiments/*/*.py'):  # what the commands import
    importlib.import_module(f'experiments.{path.parent.name}.{path.stem}')

  @functools.cache
  def parse(paths, bindings, recipe):
    values = flags.FlagValues()
    flags.DEFINE_multi_string('gin_file', [*paths], '', values)
    flags.DEFINE_multi_string('gin_bindings', [*bindings], '', values)
    flags.DEFINE_string('recipe', recipe, '', values)
    values(['command'])
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(flags, 'FLAGS', values)
      patch.setattr(sys, 'path', [*sys.path])
      try:
        config.parse()
      finally:
        gin.clear_config()

  return parse


@pytest.mark.slow(but=('CHANGELOG.md',))
@pytest.mark.parametrize('path', _WITH_COMMANDS, ids=lambda path: path.name)
def test_flags_and_settings_of_commands_are_known(path, parsed, capsys):
  for words in _commands(_text(path)):
    defined = re.findall(
      r"DEFINE_\w+\(\s*'(\w+)'", _source(words) + _SHARED_FLAGS
    )
    named = [re.match(r'--(\w+)', word) for word in words]
    assert {flag[1] for flag in named if flag} <= {*defined}, words
    # One of the tables that such a line stands for.
    paths = _values(words, 'gin_file')
    paths = tuple(x.replace('TABLE', 'medusa') for x in paths)
    bindings = _values(words, 'gin_bindings')
    default = tuple(re.findall(r"\.define_flags\(\s*'(.*?)'", _source(words)))
    if not default:
      assert not paths + bindings, words
    elif _OF_THE_READER.isdisjoint(paths):
      try:
        parsed(paths or default, bindings, ''.join(_values(words, 'recipe')))
      except SystemExit:
        # Short names are those of a command; here all commands are together.
        assert 'Ambiguous selector' in capsys.readouterr().err, words
