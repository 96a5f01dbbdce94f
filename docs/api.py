"""Hooks of mkdocs.yml: the pages of the API, and links that leave docs/."""

import ast
from collections.abc import Iterator
import pathlib
import re

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_LIBRARY = _ROOT / 'specsample'
_REPOSITORY = 'https://github.com/specsample/specsample/blob/main'


def on_files(files, config):
  """Adds a page for each folder of the library, and one for its other files.

  They come last in the navigation.
  """
  # Imported only by mkdocs, so that a test without it can read the pages.
  from mkdocs.structure import files as mkdocs_files  # noqa: PLC0415

  paths = []
  for package in packages():
    path = f'api/{_dotted(package)}.md'
    content = '\n'.join(page(package))
    files.append(mkdocs_files.File.generated(config, path, content=content))
    paths.append(path)
  config.nav.append({'API reference': paths})
  return files


def packages() -> list[pathlib.Path]:
  """Returns the library's folder and the folders in it, a page each."""
  inside = sorted(path.parent for path in _LIBRARY.glob('*/__init__.py'))
  return [_LIBRARY, *inside]


def page(package: pathlib.Path) -> Iterator[str]:
  """Yields the page of a folder: a heading, then each of its modules."""
  yield f'---\ntitle: {_dotted(package)}\n---\n'
  options = 'options: {heading_level: 1, members: []}'
  yield f'::: {_dotted(package)}\n    {options}\n'
  modules = package.rglob('*.py')
  if package == _LIBRARY:
    modules = package.glob('*.py')
    yield 'After `import specsample`, these names are at hand:\n'
    yield from _exported()
  for module in sorted(modules):
    if module.name != '__init__.py':
      yield f'::: {_dotted(module)}\n'


def _exported() -> Iterator[str]:
  """Yields a list of the package's names, each with a link to its entry."""
  tree = ast.parse((_LIBRARY / '__init__.py').read_text('utf-8'))
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom):
      for alias in node.names:
        yield f'* [`{alias.name}`][{node.module}.{alias.name}]'
  yield ''


def _dotted(path: pathlib.Path) -> str:
  return '.'.join(path.relative_to(_ROOT).with_suffix('').parts)


def on_page_markdown(markdown, **_):
  """Leads links to files outside docs/ to the repository."""
  return re.sub(r'\]\(\.\./([^)\s]+)\)', rf']({_REPOSITORY}/\1)', markdown)
