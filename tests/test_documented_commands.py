"""Each command in the documents has flags and settings that exist."""

import ast
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
_DOCUMENTS = [
  *sorted(_ROOT.glob('*.md')),
  *sorted(_ROOT.glob('docs/*.md')),
  _ROOT / 'checkpoints' / 'README.md',
  *sorted(_ROOT.glob('colab/*.ipynb')),
  *sorted(_ROOT.glob('experiments/*.py')),
]
_SHARED = ''.join(
  path.read_text('utf-8') for path in _ROOT.glob('experiments/command/*.py')
)
# Gin files that the reader writes.
_OF_THE_READER = ('FOLDER/mine.gin', 'MY.gin', 'run.gin')


def _text(path: pathlib.Path) -> str:
  text = path.read_text('utf-8')
  if path.suffix == '.py':
    return ast.get_docstring(ast.parse(text)) or ''
  if path.suffix != '.ipynb':
    return text
  return '\n\n'.join(''.join(x['source']) for x in json.loads(text)['cells'])


def _commands(text: str) -> list[list[str]]:
  """Returns the words of each `python -m experiments...` in a text."""
  found = re.findall(
    # Up to the end of the span of code, or of a line outside quotes.
    r'python3? -m experiments\.(?:"[^"`]*"|\'[^\'`]*\'|[^`\n"\'])*',
    text.replace('\\\n', ' '),
  )
  return [shlex.split(command, comments=True)[2:] for command in found]


_FOUND = [
  pytest.param(words, id=f'{path.name}-{i}')
  for path in _DOCUMENTS
  for i, words in enumerate(_commands(_text(path)))
]


def _source(words: list[str]) -> str:
  name = words[0].removeprefix('experiments.')
  return (_ROOT / 'experiments' / f'{name}.py').read_text('utf-8')


def _values(words: list[str], flag: str) -> list[str]:
  start = f'--{flag}='
  return [x.removeprefix(start) for x in words if x.startswith(start)]


@pytest.mark.parametrize('words', _FOUND)
def test_flags_are_known(words):
  defined = re.findall(r"DEFINE_\w+\(\s*'(\w+)'", _source(words) + _SHARED)
  named = [re.match(r'--(\w+)', word) for word in words]
  assert {flag[1] for flag in named if flag} <= {*defined}


@pytest.mark.parametrize('words', _FOUND)
def test_settings_are_known(words, monkeypatch, capsys):
  # One of the tables that such a line stands for.
  paths = [x.replace('TABLE', 'medusa') for x in _values(words, 'gin_file')]
  bindings = _values(words, 'gin_bindings')
  default = re.findall(r"\.define_flags\(\s*'(.*?)'", _source(words))
  if not default or {*paths} & {*_OF_THE_READER}:
    assert default or not paths + bindings
    return
  values = flags.FlagValues()
  flags.DEFINE_multi_string('gin_file', paths or default, '', values)
  flags.DEFINE_multi_string('gin_bindings', bindings, '', values)
  recipe = ''.join(_values(words, 'recipe'))
  flags.DEFINE_string('recipe', recipe, '', values)
  values(['command'])
  monkeypatch.setattr(flags, 'FLAGS', values)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  for path in _ROOT.glob('experiments/*/*.py'):  # what a command imports
    importlib.import_module(f'experiments.{path.parent.name}.{path.stem}')
  try:
    config.parse()
  except SystemExit:
    # Short names are those of a command; here all commands are together.
    assert 'Ambiguous selector' in capsys.readouterr().err
  finally:
    gin.clear_config()


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
  assert len(_FOUND) > 100


@pytest.mark.parametrize('path', _DOCUMENTS, ids=lambda path: path.name)
def test_no_line_begins_with_a_prompt(path):
  """A prompt of a shell or of Python would be copied with the command."""
  assert not re.search(r'^(    |```.*\n|`)(\$|>>>) ', _text(path), re.MULTILINE)
