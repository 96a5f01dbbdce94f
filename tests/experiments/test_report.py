"""The page that experiments.report makes of results."""

import dataclasses
import html
import html.parser
import json
import pathlib
import re
import shutil
import subprocess

import pytest

from experiments import figures
from experiments import page
from experiments import report_columns
from experiments import report_files
from experiments import result_file
from experiments import results

# What a careless page would take for its own.
_NASTY = '</script><script>throw Error()</script> <b>"q"</b> $5 & $6 {{ x }}'
_METHODS = ('autoregressive', 'ngram', 'a "draft" <i>')
_PIECES = {
  'autoregressive': ['one', ' two', '\n'],
  'ngram': ['</script>', '', 'é', ' <!--', '\u2028x'],
  'a "draft" <i>': [' 😀', '&amp;', ' the'],
}
_ORIGINS = {
  'autoregressive': ['bonus'] * 3,
  'ngram': ['accepted', 'accepted', 'correction', 'accepted', 'bonus'],
  'a "draft" <i>': ['correction', 'bonus', 'accepted'],
}
_ROUNDS = {
  'autoregressive': [0, 1, 2],
  'ngram': [0, 0, 0, 1, 1],
  'a "draft" <i>': [0, 1, 2],
}
_DESCRIPTION = {
  'hardware': {'platform': 'cpu', 'cpu': 'a <CPU>', 'cpu_cores': 2},
  'versions': {'python': '3.11.2', 'jax': '0.10.2'},
  'git_commit': 'abc123-dirty',
  'command': f"python -m experiments.evaluate --out='{_NASTY}'",
  'gin_config': f"x = '{_NASTY}'",
}


def _row(method, category, num_drafts, **changes):
  values = {
    'method': method,
    'drafter': 'none' if method == _METHODS[0] else 'ngram',
    'verifier': 'chain',
    'law': 'point_mass',
    'lossless': True,
    'benchmark': 'prompts',
    'category': category,
    'num_draft_tokens': num_drafts,
    'temperature': 0.0,
    'batch_size': 1,
    'prompts': 2,
    'tokens': 1256,
    'rounds': 628,
    'tokens_per_round': 2.0,
    'acceptance_by_position': [0.75, None, 0.5, 0.25][:num_drafts],
    'ms_per_token': 16.25,
    'speedup': 1.5,
    'speedup_ci95': [1.25, 1.75],
    'draft_ms': 0.5,
    'verify_ms': 20.0,
    'overhead_ms': None,
    'percent_of_roofline': 71.0,
  }
  return values | changes


def _rows(**changes):
  return [
    _row(method, category, num_drafts, **changes)
    for category in ('overall', _NASTY, 'qa')
    for num_drafts, method in zip((0, 4, 2), _METHODS, strict=True)
  ]


def _write_texts(folder):
  folder.mkdir(parents=True, exist_ok=True)
  lines = [{'schema': result_file.SCHEMA}]
  for i, (category, text) in enumerate([('qa', _NASTY), ('math', 'é\ud800')]):
    methods = {
      name: {
        # The second prompt's texts are the other way round.
        'pieces': _PIECES[name][:: 1 - 2 * i],
        'origins': _ORIGINS[name],
        'rounds': _ROUNDS[name],
      }
      for name in _METHODS
    }
    one = {'id': str(i), 'category': category, 'text': text}
    lines.append(one | {'methods': methods})
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (folder / 'generations.jsonl').write_text(text)


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
  """Three evaluations, one of them of two settings, and two other files."""
  root = tmp_path_factory.mktemp('results')
  settings = _rows(part='XSum, greedy') + _rows(
    part='XSum, nucleus', temperature=1.0, speedup=None, speedup_ci95=None
  )
  paper = {
    'source': f'Chen et al. {_NASTY}',
    'note': 'on other hardware',
    'rows': [
      {'row': 'SpS', 'quantity': 'speedup', 'paper': 1.92, 'ours': 1.5}
      | {'ci95': [1.25, 1.75], 'note': 'printed'},
      {'row': 'SpS', 'quantity': 'rouge2', 'paper': None, 'ours': None}
      | {'ci95': None, 'note': ''},
    ],
  }
  by_k = [
    _row(f'K{k}' if k else 'autoregressive', 'overall', k, predicted_speedup=p)
    for k, p in enumerate((None, 1.4, 1.5, 1.6))
  ]
  contents = {
    'one/result.json': {'rows': _rows()},
    'several/result.json': {'rows': settings, 'paper': paper},
    'by_k/result.json': {
      'rows': by_k,
      'divergences': [{'method': 'K2', 'position': 17, 'verdict': 'tie'}],
    },
    'timed/benchmark.json': {
      't_ms': {'1': 16.5, '2': 18.0},
      'methods': {'ngram': {'tokens_per_s': 55.25, 'lossless': True}},
    },
    'certified/certificate.json': {
      'cases': [{'case': str(i), 'max_error': 1e-16} for i in range(100)],
      'passed': True,
    },
  }
  for name, content in contents.items():
    (root / name).parent.mkdir()
    result_file.write(root / name, _DESCRIPTION | content)
  _write_texts(root / 'one')
  _write_texts(root / 'several' / 'XSum, greedy')
  _write_texts(root / 'several' / 'XSum, nucleus')
  return root


class _Page(html.parser.HTMLParser):
  """The elements, the text and the cells of a page."""

  def __init__(self, text):
    super().__init__()
    self.elements = []
    self.tables = []
    self.text = ''
    self._in = ''
    self.feed(text)

  def handle_starttag(self, tag, attributes):
    self.elements.append((tag, dict(attributes)))
    if tag == 'table':
      self.tables.append([])
    elif tag == 'tr':
      self.tables[-1].append([])
    elif tag in ('th', 'td'):
      self.tables[-1][-1].append('')
    self._in = tag

  def handle_endtag(self, tag):
    self._in = 'th' if tag == 'abbr' else ''

  def handle_data(self, data):
    self.text += data
    if self._in in ('th', 'td', 'abbr'):
      self.tables[-1][-1][-1] += data.strip()

  def count(self, tag):
    return sum(name == tag for name, _ in self.elements)


@pytest.fixture(scope='module')
def text(tree):
  return page.render(report_files.find(str(tree), 2), f'Title {_NASTY}')


@pytest.fixture(scope='module')
def found(text):
  return _Page(text)


def test_all_of_the_tree_is_on_the_page(found):
  links = [values['href'] for tag, values in found.elements if tag == 'a']
  sections = [
    values['id'] for tag, values in found.elements if tag == 'section'
  ]
  assert links == [f'#{name}' for name in sections if name != 'columns']
  assert len(links) == 5
  for name in ('by_k', 'certified/certificate', 'timed/benchmark', 'several'):
    assert f'\n{name}' in found.text or name in found.text
  for fact in ('a <CPU>', 'jax 0.10.2', 'abc123-dirty', 'XSum, nucleus'):
    assert fact in found.text


def test_nothing_is_fetched(text, found):
  for tag, values in found.elements:
    for name in ('src', 'href', 'xlink:href', 'data', 'action', 'poster'):
      value = values.get(name) or '#'
      assert value.startswith(('#', 'data:')), (tag, values)
  assert not re.search(r'@import|@font-face', text)
  assert set(re.findall(r'url\(([^)]?)', text)) <= {'#'}
  # Of what a script could fetch with.
  assert not re.search(r'fetch\(|XMLHttp|import\(|new Image', text)


def test_what_looks_like_markup_is_text(text, found):
  assert found.count('b') == found.count('i') == 0
  # The page's own, and the texts of three settings.
  assert found.count('script') == 1 + 3
  assert _NASTY in found.text
  assert f'Title {_NASTY}' in found.text
  assert '{{' in found.text


def test_ids_are_of_one_element(found):
  ids = [values['id'] for _, values in found.elements if values.get('id')]
  assert len(ids) == len(set(ids))


def test_figures_are_those_that_the_rows_have_values_for(found):
  captions = [
    values['aria-label']
    for _, values in found.elements
    if values.get('role') == 'img'
  ]
  assert found.count('svg') == len(captions)
  count = lambda start: sum(one.startswith(start) for one in captions)
  assert count('Tokens a round') == count('A round: its parts') == 4
  # One setting has no speedups, one run no categories.
  assert count('Speedup by category') == 2
  assert count('Speedup as the cost model') == 1
  assert count('Against the number of drafts') == 1


def test_tables_hold_the_numbers(found):
  overall = next(
    one
    for one in found.tables
    if [line[0] for line in one] == ['method', *_METHODS]
  )
  row = dict(zip(overall[0], overall[2], strict=True))
  assert (
    row.items()
    >= {
      'method': 'ngram',
      'K': '4',
      'speedup': '1.50 (1.25-1.75)',
      'tokens': '1,256',
      'acceptance by position': '0.75 - 0.50 0.25',
      'of the roofline': '71',
      'exact': 'yes',
    }.items()
  )
  assert 'Not measured: rest ms.' in found.text
  by_category = next(one for one in found.tables if one[0][0] == 'category')
  assert [line[0] for line in by_category[1:]] == ['overall', _NASTY, 'qa']
  assert by_category[1][2] == '1.50 (1.25-1.75), 2.00'


def test_paper_stands_beside_ours(found):
  (table,) = (one for one in found.tables if one[0][0] == 'row')
  assert table[1:] == [
    ['SpS', 'speedup', '1.92', '1.5 (1.25-1.75)', 'printed'],
    ['SpS', 'rouge2', '-', '-', ''],
  ]
  assert 'on other hardware' in found.text


def test_other_commands_have_tables_too(found):
  tables = [one for one in found.tables if one[0][0] in ('', 'case', 'name')]
  assert ['ngram', '55.25', 'yes'] in [line for one in tables for line in one]
  (cases,) = (one for one in tables if one[0][0] == 'case')
  assert len(cases) == 1 + 30
  assert ['K2', '17', 'tie'] in [line for one in found.tables for line in one]
  assert '70 more rows are in certificate.json.' in found.text


def test_every_field_of_a_row_is_explained():
  row = dict.fromkeys(field.name for field in dataclasses.fields(results.Row))
  unexplained = [
    name
    for name in row
    if name not in report_columns.COLUMNS
    and not report_columns.is_interval(name, row)
  ]
  assert set(unexplained) <= {'scores'}


def test_field_that_is_not_known_is_shown(tree, tmp_path):
  rows = [row | {'new_field': 2.5, 'new_field_ci95': [2, 3]} for row in _rows()]
  result_file.write(tmp_path / 'result.json', _DESCRIPTION | {'rows': rows})
  text = page.render(report_files.find(str(tmp_path), 1), 'Results')
  table = _Page(text).tables[0]
  assert table[0][-1] == 'new field'
  assert table[1][-1] == '2.5 (2-3)'


@pytest.mark.parametrize(
  ('name', 'content', 'why'),
  [
    ('result.json', '{"rows": []}', 'is of schema 1 and has no hardware'),
    ('benchmark.json', '{"schema": 9}', 'is of schema 9'),
    ('generations.jsonl', '{"schema": 9}', 'line 1, cannot be read (schema 9'),
  ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, why):
  folder = tmp_path / 'run'
  folder.mkdir()
  result_file.write(folder / 'result.json', _DESCRIPTION | {'rows': _rows()})
  (folder / name).write_text(content)
  expected = f'^{re.escape(str(folder / name))}.*{re.escape(why)}'
  with pytest.raises(ValueError, match=expected):
    report_files.find(str(tmp_path), 1)


def test_a_folder_without_results_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r'holds no result\.json'):
    report_files.find(str(tmp_path), 1)
  with pytest.raises(ValueError, match='is no folder'):
    report_files.find(str(tmp_path / 'none'), 1)
  with pytest.raises(ValueError, match='copy the folder here'):
    report_files.find('gs://bucket/results', 1)


def test_figure_takes_the_colours_of_the_page():
  figure = figures.to_svg(_dollars, 'a')
  assert 'currentColor' in figure and 'var(--paper)' in figure
  assert '$5 and $6' in figure
  assert not re.search('#0+10203|#fdfefc|20[0-9]{2}-', figure)
  ids = re.findall(r' id="([^"]*)"', figure)
  assert ids and all(name.startswith('a-') for name in ids)
  used = re.findall(r'(?:url\(|href=")#([^)"]*)', figure)
  assert used and set(used) <= set(ids)


def _dollars():
  figure = figures.new(2, 2)
  axes = figure.subplots()
  axes.bar([1, 2], [1, 2], hatch='//', edgecolor=figures.paper())
  axes.set_title('$5 and $6')
  return figure


@pytest.fixture(scope='module')
def browser():
  names = ('chromium', 'chromium-browser', 'google-chrome')
  found = next(filter(None, map(shutil.which, names)), None)
  if found is None:
    pytest.skip('no chromium, which test.sh installs where it is root')
  return found


@pytest.fixture(scope='module')
def render(browser, tmp_path_factory):
  """The function that opens a page: its elements, and its console's lines."""

  def opened(text):
    folder = tmp_path_factory.mktemp('page')
    (folder / 'page.html').write_text(text, errors='replace')
    done = subprocess.run(
      [
        browser,
        *('--headless', '--no-sandbox', '--disable-gpu', '--dump-dom'),
        *('--disable-dev-shm-usage', '--enable-logging=stderr', '--v=0'),
        f'--user-data-dir={folder / "profile"}',
        (folder / 'page.html').as_uri(),
      ],
      capture_output=True,
      text=True,
      check=True,
      timeout=300,
    )
    console = [line for line in done.stderr.splitlines() if ':CONSOLE' in line]
    return done.stdout, console

  return opened


# Clicks all that can be chosen, and keeps what is then shown.
_CHOOSE_ALL = """
<script>
const seen = [];
for (const view of document.querySelectorAll('.written')) {
  const select = view.querySelector('select');
  for (let i = 0; i < select.options.length; i++) {
    select.selectedIndex = i;
    select.dispatchEvent(new Event('change'));
    for (const button of view.querySelectorAll('button')) {
      button.click();
      const tokens = [...view.querySelectorAll('.text .token')];
      tokens[0].dispatchEvent(new Event('mouseover', {bubbles: true}));
      seen.push({
        method: view.querySelector('[aria-pressed=true]').textContent,
        prompt: view.querySelector('.prompt').textContent,
        pieces: tokens.map((token) => token.textContent),
        origins: tokens.map((token) => token.classList[1]),
        titles: tokens.map((token) => token.title),
        together: view.querySelectorAll('.same-round').length,
        count: view.querySelector('.count').textContent,
      });
    }
  }
}
document.title = JSON.stringify(seen);
</script>
"""


def test_browser_finds_no_error(render, text):
  shown, console = render(text)
  assert console == []
  tokens = re.findall(r'<span class="token (\w+)" title="(round [^"]*)"', shown)
  # Of each setting's first prompt the first method with a draft that was kept.
  assert [origin for origin, _ in tokens] == 3 * _ORIGINS['ngram']
  assert tokens[3][1] == 'round 2: drafted and kept'


def test_browser_shows_who_wrote_what(render, text):
  shown, console = render(text.replace('</body>', _CHOOSE_ALL + '</body>'))
  assert console == []
  title = re.search('<title>(.*?)</title>', shown, re.DOTALL)[1]
  seen = json.loads(html.unescape(title))
  assert len(seen) == 3 * 2 * len(_METHODS)
  for i, one in enumerate(seen[: 2 * len(_METHODS)]):
    method = _METHODS[i % len(_METHODS)]
    pieces = _PIECES[method]
    if i >= len(_METHODS):
      pieces = pieces[::-1]
    assert one['method'] == method
    assert one['prompt'] == (_NASTY, 'é?')[i // len(_METHODS)]
    visible = [x.replace('\n', '⏎\n') or '·' for x in pieces]
    assert one['pieces'] == visible
    assert one['origins'] == _ORIGINS[method]
    numbers = [int(re.match(r'round (\d+): ', x)[1]) for x in one['titles']]
    assert [number - 1 for number in numbers] == _ROUNDS[method]
    assert one['together'] == _ROUNDS[method].count(0)
    kept = _ORIGINS[method].count('accepted')
    assert one['count'] == (
      f'{method}: {len(pieces)} tokens in {_ROUNDS[method][-1] + 1} rounds, '
      f'{kept} of them drafted'
    )


@pytest.mark.parametrize(
  ('here', 'there', 'error'),
  [
    ("'use strict';", "throw new Error('planted');", 'Uncaught Error: planted'),
    ('"rounds":', '"turns":', 'Uncaught TypeError'),
    ('select.add(', 'selected.add(', 'Uncaught ReferenceError'),
  ],
)
def test_an_error_in_the_script_is_noticed(render, text, here, there, error):
  assert here in text
  _, console = render(text.replace(here, there))
  assert any(error in line for line in console)


@pytest.fixture(scope='module')
def without_matplotlib(commands, tiny_evaluate, tmp_path_factory):
  """An evaluation and its page where matplotlib cannot be imported."""
  folder = tmp_path_factory.mktemp('without')
  (folder / 'modules').mkdir()
  (folder / 'modules' / 'matplotlib.py').write_text('raise ImportError')
  (folder / 'prompts.txt').write_text('One.\n')
  calls = [
    [
      *('evaluate', *tiny_evaluate),
      '--gin_bindings=Evaluation.max_new_tokens = 96',
      f'--prompts={folder / "prompts.txt"}',
      f'--out={folder / "out"}',
    ],
    ['report', f'--results={folder / "out"}'],
  ]
  variables = {'PYTHONPATH': str(folder / 'modules')}
  return commands.run_in_forks(calls, variables=variables), folder / 'out'


def test_without_matplotlib_the_rest_is_there(without_matplotlib):
  (evaluated, reported), folder = without_matplotlib
  left_out = 'left out: matplotlib is not installed (pip install matplotlib)\n'
  assert (evaluated.code, reported.code) == (0, 0), without_matplotlib
  assert evaluated.out.count(f'results.png is {left_out}') == 1
  assert reported.out == (
    f'the figures are {left_out}1 run is in {folder}/report.html\n'
  )
  assert {path.name for path in folder.iterdir()} == {
    *('journal.jsonl', 'result.json', 'results.csv', 'generations.jsonl'),
    'report.html',
  }
  text = pathlib.Path(folder / 'report.html').read_text()
  assert 'The figures are left out: matplotlib is not installed' in text
  found = _Page(text)
  assert (found.count('svg'), found.count('script')) == (0, 2)
  assert [line[0] for line in found.tables[0][1:]] == [
    *('autoregressive', 'ngram', 'skip')
  ]
