"""docs/architecture.md names the layers and the calls that are in the code."""

import ast
from collections.abc import Iterator
import pathlib
import re
from xml.etree import ElementTree

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_LIBRARY = _ROOT / 'specsample'
_PAGE = (_ROOT / 'docs' / 'architecture.md').read_text('utf-8')
# A heading '### `file`: `function`', then items '1. `callee` ...'.
_SECTION = re.compile(
  r'^### `([\w/.]+)`: `([\w.]+)`$(.*?)(?=^#|\Z)', re.M | re.S
)


def _sections(page: str) -> list[tuple[str, str, list[str]]]:
  """Returns the file, the function and the functions that it calls, in turn."""
  return [
    (path, name, re.findall(r'^\d+\. `([\w.]+)`', body, re.MULTILINE))
    for path, name, body in _SECTION.findall(page)
  ]


def _function(source: str, name: str) -> ast.AST | None:
  """Returns the function, or the method Class.name, of a module."""
  found: ast.AST | None = ast.parse(source)
  for part in name.split('.'):
    found = next(
      (x for x in getattr(found, 'body', []) if getattr(x, 'name', '') == part),
      None,
    )
  return found


def _uses(function: ast.AST) -> Iterator[str]:
  """Yields the names that a function uses, arguments before their call."""
  calls = {id(x.func): x for x in ast.walk(function) if isinstance(x, ast.Call)}
  names = [
    x for x in ast.walk(function) if isinstance(x, ast.Name | ast.Attribute)
  ]
  end = lambda x: (x.end_lineno, x.end_col_offset)
  for name in sorted(names, key=lambda x: end(calls.get(id(x), x))):
    yield ast.unparse(name)


def _faults(path: str, name: str, called: list[str], source: str) -> list[str]:
  """Returns what a section says that is not in the source."""
  function = _function(source, name)
  if function is None:
    return [f'{path} has no {name}']
  used = list(_uses(function))
  faults = [f'{name} does not use {x}' for x in called if x not in used]
  places = [used.index(x) for x in called if x in used]
  if places != sorted(places):
    faults.append(f'{name} uses {called} in another order')
  return faults


@pytest.mark.parametrize(
  ('path', 'name', 'called'),
  _sections(_PAGE),
  ids=lambda x: x if isinstance(x, str) else '',
)
def test_a_function_calls_what_the_page_says(path, name, called):
  source = (_LIBRARY / path).read_text('utf-8')
  assert called
  assert not _faults(path, name, called, source)


def test_each_section_explains_a_function_that_another_one_calls():
  sections = _sections(_PAGE)
  assert [name for _, name, _ in sections[:2]] == ['generate', 'prefill']
  used = {
    name.rpartition('.')[2]
    for path, owner, _ in sections
    for name in _uses(_function((_LIBRARY / path).read_text('utf-8'), owner))
  }
  explained = {name.rpartition('.')[2] for _, name, _ in sections}
  # `judge` calls the verifier by the name of its argument.
  assert explained - used == {'generate', '__call__'}


def _rows(picture: pathlib.Path) -> dict[str, int]:
  """Returns the height at which each room is drawn, from the top."""
  svg = picture.read_text('utf-8')
  found = re.findall(r'class="name"[^>]* y="(\d+)">([\w/., ]+)<', svg)
  return {
    name.removesuffix('/').removesuffix('.py'): int(y)
    for y, names in found
    for name in names.split(', ')
  }


def test_the_picture_has_every_room_and_no_import_goes_up():
  rows = _rows(_ROOT / 'docs' / 'rooms.svg')
  folders = {path.parent.name for path in _LIBRARY.glob('*/__init__.py')}
  files = {'types', 'sampling', 'streams', 'tree', 'sharding'}
  assert rows.keys() == folders | files | {'experiments'}
  assert all((_LIBRARY / f'{name}.py').exists() for name in files)
  up = set()
  for path in sorted(_LIBRARY.rglob('*.py')):
    name = path.relative_to(_LIBRARY).as_posix()
    room = name.partition('/')[0].removesuffix('.py')
    imports = re.findall(
      r'from specsample(?:\.(\w+)\S*)? import (\w+)', path.read_text('utf-8')
    )
    for package, module in imports:
      other = package or module
      if room in rows and other in rows and rows[other] < rows[room]:
        up.add((name, other))
  assert not up


@pytest.mark.parametrize('name', ['rooms.svg', 'round.svg', 'speedups.svg'])
def test_a_picture_has_all_its_colours_light_and_dark(name):
  svg = (_ROOT / 'docs' / name).read_text('utf-8')
  root = ElementTree.fromstring(svg)
  assert root.find('{*}title').text and root.find('{*}desc').text
  light, dark = svg.split('@media (prefers-color-scheme: dark)')
  used = set(re.findall(r'var\((--[\w-]+)\)', svg))
  assert used
  assert used == set(re.findall(r'(--[\w-]+):', light))
  assert used == set(re.findall(r'(--[\w-]+):', dark))


def test_a_wrong_section_is_found():
  source = 'def f(x):\n  y = first(x)\n  return last(second(y))\n'
  assert not _faults('f.py', 'f', ['first', 'second', 'last'], source)
  for called in (['second', 'first'], ['last', 'second'], ['third']):
    assert len(_faults('f.py', 'f', called, source)) == 1
  assert _faults('f.py', 'g', ['first'], source) == ['f.py has no g']
