"""docs/api.py gives mkdocs a page for every module of the library.

`mkdocs build --strict` itself runs in .github/workflows/docs.yml.
"""

import importlib.util
import pathlib
import re

import specsample

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _hooks():
  path = _ROOT / 'docs' / 'api.py'
  spec = importlib.util.spec_from_file_location('api_pages', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_every_module_is_on_one_page():
  hooks = _hooks()
  named = [
    name
    for room in hooks.rooms()
    for name in re.findall('^::: (.*)$', '\n'.join(hooks.page(room)), re.M)
  ]
  inner = {'specsample.loading.published'}  # on the page of `loading`
  modules = {
    '.'.join(path.relative_to(_ROOT).with_suffix('').parts)
    for path in (_ROOT / 'specsample').rglob('*.py')
  }
  modules = {name.removesuffix('.__init__') for name in modules}
  assert sorted(named) == sorted(modules - inner)


def test_the_first_page_lists_what_the_package_exports():
  hooks = _hooks()
  first = '\n'.join(hooks.page(hooks.rooms()[0]))
  assert {*re.findall(r'\[`(\w+)`\]\[', first)} == {*specsample.__all__}


def test_links_that_leave_the_pages_lead_to_the_repository():
  text = '[a](../README.md#install), [b](cost.md), ![c](rooms.svg)'
  url = 'https://github.com/specsample/specsample/blob/main/README.md#install'
  found = _hooks().on_page_markdown(text, page=None)
  assert found == f'[a]({url}), [b](cost.md), ![c](rooms.svg)'
