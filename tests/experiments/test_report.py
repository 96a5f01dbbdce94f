"""The page that experiments.report makes from results."""

import dataclasses
import math
import re

import pytest

from experiments.evaluation import plots
from experiments.evaluation import results
from experiments.html_report import page
from experiments.reporting import figures
from experiments.reporting import result_file
from experiments.reporting import rows
from experiments.reporting import tables
from tests.experiments import reports


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  root = tmp_path_factory.mktemp('results')
  reports.write_tree(root)
  return page.render(result_file.find(str(root)), f'Title {reports.NASTY}', 2)


@pytest.fixture(scope='module')
def found(text):
  return reports.Page(text)


@pytest.mark.slow
def test_all_of_the_tree_is_on_the_page(found):
  links = [
    values['href']
    for tag, values in found.elements
    if tag == 'a' and values.get('href', '').startswith('#run-')
    if 'texts' not in values['href']
  ]
  sections = [
    values['id'] for tag, values in found.elements if tag == 'section'
  ]
  assert links == [f'#{name}' for name in sections if name != 'columns']
  assert len(links) == 5
  for name in ('by_k', 'certified/certificate', 'timed/benchmark', 'several'):
    assert f'\n{name}' in found.text or name in found.text
  for fact in (
    *('a <CPU>', 'jax 0.10.2', '--xla_cpu_<fast>', 'abc123-dirty'),
    *('XSum, nucleus', '16.5'),
  ):
    assert fact in found.text


def test_nothing_is_fetched(text, found):
  for tag, values in found.elements:
    for name in ('src', 'href', 'xlink:href', 'data', 'action', 'poster'):
      value = values.get(name) or '#'
      assert value.startswith(('#', 'data:')), (tag, values)
  assert not re.search(r'@import|@font-face', text)
  assert set(re.findall(r'url\(([^)]?)', text)) <= {'#'}
  # Calls that a script could fetch with.
  assert not re.search(r'fetch\(|XMLHttp|import\(|new Image', text)


_THEMES = ('light', 'dark')
# Colours of text and of what is behind it; then of marks, which need less.
_TEXT = [
  *(('ink', x) for x in ('paper', 'shade', 'accepted', 'correction', 'bonus')),
  *(('faint', 'paper'), ('link', 'paper'), ('link', 'shade')),
]
_MARKS = [
  *(('accepted-mark', 'accepted'), ('correction-mark', 'correction')),
  *(('bonus-mark', 'bonus'), ('link', 'paper')),
]


def _luminance(color):
  """Returns the relative luminance of #rrggbb, by WCAG 2."""
  parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
  red, green, blue = (
    x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
  )
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize('theme', _THEMES)
def test_colours_differ_enough_to_read(text, theme):
  block = re.findall(r':root {([^}]*)}', text)[_THEMES.index(theme)]
  colors = dict(re.findall(r'--([a-z-]+): (#[0-9a-f]{6})', block))
  for least, pairs in ((4.5, _TEXT), (3, _MARKS)):
    for one, other in pairs:
      low, high = sorted(_luminance(colors[x]) for x in (one, other))
      assert (high + 0.05) / (low + 0.05) >= least, (one, other)


def test_what_looks_like_markup_is_text(text, found):
  assert found.count('b') == found.count('i') == 0
  # The page's own script, and the texts of three settings.
  assert found.count('script') == 1 + 3
  assert reports.NASTY in found.text
  assert f'Title {reports.NASTY}' in found.text
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
  # One setting of the four has no speedups.
  assert count('Tokens per round against the time') == 3
  assert count("The target's pass over n tokens") == 1
  # One setting has no speedups, and one run has no categories.
  assert count('Speedup by category') == 2
  assert count('Speedup as the parts of a round') == 1
  assert count('Against the number of draft tokens') == 1


def test_tables_hold_the_numbers(found):
  main, *details = (
    one
    for one in found.tables
    if [line[0] for line in one] == ['method', *reports.METHODS]
  )
  # The most important columns fit beside the names.
  assert main[0] == [
    *('method', 'K', 'tokens per round', 'ms per token', 'speedup', 'exact')
  ]
  times, others = details[:2]
  row = {
    heading: cell
    for table in (main, times, others)
    for heading, cell in zip(table[0], table[2], strict=True)
  }
  assert (
    row.items()
    >= {
      'method': 'ngram',
      'K': '4',
      'speedup': '1.50x (1.25-1.75)',
      'tokens': '1,256',
      'acceptance by position': '0.75 - 0.50 0.25',
      'of the roofline': '71%',
      'exact': 'yes',
    }.items()
  )
  assert re.search(r'Not measured: [^.]*rest ms', found.text)
  by_category = next(one for one in found.tables if one[0][0] == 'category')
  categories = [line[0] for line in by_category[1:]]
  assert categories == ['overall', reports.NASTY, 'qa']
  assert by_category[1][2] == '1.50x (1.25-1.75), 2.00'


def test_paper_stands_beside_ours(found):
  (table,) = (one for one in found.tables if one[0][0] == 'row')
  assert table[1:] == [
    ['SpS', 'speedup', '1.92', '1.5', '1.25-1.75'],
    ['SpS', 'rouge2', '-', '-', '-'],
  ]
  assert 'on other hardware' in found.text


def test_a_paper_without_numbers_of_ours_is_named(tmp_path):
  paper = {'source': 'Sun et al.', 'note': 'gains alone', 'targets': ''}
  content = reports.evaluation() | {'paper': paper | {'rows': []}}
  result_file.write(tmp_path / 'result.json', content)
  shown = page.render(result_file.find(str(tmp_path)), 'Results', 1)
  assert 'Beside the paper: Sun et al.' in shown and 'gains alone' in shown


def test_other_commands_have_tables_too(found):
  tables = [one for one in found.tables if one[0][0] in ('', 'case', 'name')]
  assert ['ngram', '55.25', 'yes'] in [line for one in tables for line in one]
  (cases,) = (one for one in tables if one[0][0] == 'case')
  assert len(cases) == 1 + 30
  assert ['K2', '17', 'tie'] in [line for one in found.tables for line in one]
  assert '70 more rows are in certificate.json.' in found.text


def test_every_field_of_a_row_is_explained():
  known = tables.columns(rows.Row)
  names = [field.name for field in dataclasses.fields(rows.Row)]
  unexplained = {x for x in names if not x.endswith('_ci95')} - known.keys()
  assert unexplained == {'scores'}
  assert all(column.meaning for column in known.values())


@pytest.mark.parametrize(
  ('name', 'content', 'why'),
  [
    ('result.json', '{"schema": 5}', 'has schema 5 and no row over all'),
    ('benchmark.json', '{"schema": 9}', 'has schema 9'),
    ('generations.jsonl', '{"schema": 9}', 'line 1, cannot be read (schema 9'),
  ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, why):
  result_file.write(tmp_path / 'result.json', reports.evaluation())
  (tmp_path / name).write_text(content)
  expected = f'^{re.escape(str(tmp_path / name))}.*{re.escape(why)}'
  with pytest.raises(ValueError, match=expected):
    page.render(result_file.find(str(tmp_path)), 'Results', 1)


def test_a_negative_rest_is_explained_below_it(tmp_path):
  content = reports.evaluation(overhead_ms=-2.34)
  result_file.write(tmp_path / 'result.json', content)
  (run,) = result_file.find(str(tmp_path))
  times, others = results.in_detail(run.content['rows'])
  assert 'rest ms' in times.headings and 'rest ms' not in others.headings
  assert 'A negative rest is noise' in times.note
  assert '-2.34' in page.render([run], 'Results', 1)


@pytest.mark.parametrize(
  ('path', 'words'),
  [
    ('', r'has neither result\.json'),
    ('none', 'is not a folder'),
    ('gs://bucket/results', 'copy the folder here'),
  ],
)
def test_a_folder_without_results_is_refused(tmp_path, path, words):
  with pytest.raises(ValueError, match=words):
    result_file.find(path if '://' in path else str(tmp_path / path))


def _curve(overhead_ms):
  """Returns rows of K = 0, 1, 3; only the time per token includes prefill."""
  return [
    rows.Row(
      **reports.row(
        *('a', 'overall', k),
        ms_per_token=ms,
        tokens_per_round=tokens,
        draft_ms=2.0 * k,
        verify_ms=10.0,
        overhead_ms=overhead_ms,
      )
    )
    for k, ms, tokens in ((0, 20.0, 1.0), (1, 15.0, 1.5), (3, 12.5, 2.0))
  ]


def test_figure_1_of_chen_et_al_by_hand():
  figure = plots.against_num_drafts({'a': _curve(1.0)})
  points = [list(axes.lines[0].get_xydata().T) for axes in figure.axes]
  assert [list(x) for x, _ in points] == [[0, 1, 3]] * 3
  seconds, share, per_round = (list(y) for _, y in points)
  assert seconds == pytest.approx([2.56, 1.92, 1.6])
  # Tokens per round over the K + 1 that are possible.
  assert share == pytest.approx([1, 0.75, 0.5])
  # From the time per token, which includes prefill, it would be 20, 22.5, 25.
  assert per_round == pytest.approx([11, 13, 17])


def test_rounds_that_were_not_timed_have_no_point():
  figure = plots.against_num_drafts({'a': _curve(None)})
  (line,) = figure.axes[2].lines
  assert all(math.isnan(y) for y in line.get_ydata())
  # The empty axes have no numbers either.
  assert not list(figure.axes[2].get_xticks())
  assert [text.get_text() for text in figure.axes[2].texts] == ['not measured']
  assert list(figure.axes[0].get_xticks()) and not figure.axes[0].texts


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
  figure = figures.new(2)
  axes = figure.subplots()
  axes.bar([1, 2], [1, 2], hatch='//', edgecolor=figures.paper())
  axes.set_title('$5 and $6')
  return figure
