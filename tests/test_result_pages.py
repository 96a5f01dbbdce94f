"""docs/measured.py and docs/speedups.py, and the picture of the README."""

import importlib.util
import json
import pathlib
import re
import types
from xml.etree import ElementTree

import pytest

_DOCS = pathlib.Path(__file__).resolve().parents[1] / 'docs'


def _script(name: str) -> types.ModuleType:
  spec = importlib.util.spec_from_file_location(name, _DOCS / f'{name}.py')
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _row(method, speedup, interval, *, drafts=3, category='overall', **more):
  row = {
    'part': '',
    'category': category,
    'temperature': 0.0,
    'method': method,
    'num_draft_tokens': drafts,
    'tokens_per_round': 1.5,
    'ms_per_token': 20.0,
    'speedup': speedup,
    'speedup_ci95': interval,
    'predicted_speedup': None,
    'draft_ms': None,
    'verify_ms': None,
    'overhead_ms': None,
    'percent_of_roofline': 50.0,
  }
  return row | more


_ROWS = [
  _row('autoregressive', 1.0, None, drafts=0),
  _row('slow & small', 0.8, [0.7, 0.9]),
  _row('mtp', 1.1, [0.95, 1.25]),
  _row('suffix', 1.3, [1.2, 1.4]),
  _row('suffix', 2.0, [1.9, 2.1], category='rag'),
]


def test_the_picture_has_the_fastest_first_and_colours_by_interval():
  root = ElementTree.fromstring(_script('speedups').draw(_ROWS, 'A < B'))
  assert root.find('{*}title').text == 'A < B'
  names = [x.text for x in root.iter() if x.get('class') == 'end']
  assert [x for x in names if 'K' in x] == [
    'suffix, K = 3',
    'mtp, K = 3',
    'slow & small, K = 3',
  ]
  dots = [x for x in root.iter() if x.tag.endswith('circle')]
  assert [x.get('class') for x in dots] == ['faster', 'even', 'slower']
  places = [float(x.get('cx')) for x in dots]
  plain = next(x for x in root.iter() if x.get('class') == 'plain')
  assert places[0] > places[1] > float(plain.get('x1')) > places[2]
  # A row of one category is not shown beside those of all prompts.
  assert '2.00x' not in ''.join(x.text or '' for x in root.iter())


def test_rows_without_intervals_have_no_picture():
  with pytest.raises(ValueError, match='decode more prompts'):
    _script('speedups').draw([_row('mtp', 1.1, None)], '')


def test_the_picture_of_the_readme_has_the_numbers_of_the_page():
  told = ElementTree.parse(_DOCS / 'speedups.svg').getroot().find('{*}desc')
  drawn = re.findall(r'([\w ]+) ([\d.]+x \([\d.-]+\))', told.text)
  drawn = [(name.strip(), speedup) for name, speedup in drawn]
  page = (_DOCS / 'results.md').read_text('utf-8')
  section = page.split('\n## 80 development questions\n')[1]
  table = re.findall(
    r'^\| ([\w ]+) \|.*?\| ([\d.]+x \([\d.-]+\)) \|',
    section.split('\n| | ')[0],  # what follows is by category
    re.MULTILINE,
  )
  assert len(drawn) > 2
  assert dict(drawn) == dict(table)


def test_tables_are_printed_for_what_was_measured(tmp_path, capsys):
  (tmp_path / 'questions').mkdir()
  result = tmp_path / 'questions' / 'result.json'
  result.write_text(json.dumps({'rows': _ROWS}))
  measured = _script('measured')
  assert measured.main([str(tmp_path)]) == 0
  printed = capsys.readouterr().out
  assert '## questions' in printed
  assert '1.30x (1.20-1.40)' in printed and '2.00x (1.90-2.10)' in printed
  assert measured.main([str(tmp_path), 'other']) == 2
  assert 'has no result.json of such a name' in capsys.readouterr().err
