"""The page of results, opened in a headless browser."""

import html
import json
import re
import shutil
import subprocess

import pytest

from experiments.html_report import page
from experiments.reporting import result_file
from tests.experiments import reports


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  root = tmp_path_factory.mktemp('results')
  reports.write_tree(root)
  return page.render(result_file.find(str(root)), f'Title {reports.NASTY}', 2)


@pytest.fixture(scope='module')
def render(tmp_path_factory):
  """A function that opens a page and returns its elements and console lines."""
  names = ('chromium', 'chromium-browser', 'google-chrome')
  browser = next(filter(None, map(shutil.which, names)), None)
  if browser is None:
    pytest.skip('no chromium, which test.sh installs where it is root')

  def opened(text, *flags):
    folder = tmp_path_factory.mktemp('page')
    (folder / 'page.html').write_text(text, errors='replace')
    done = subprocess.run(
      [
        browser,
        *('--headless', '--no-sandbox', '--disable-gpu', '--dump-dom'),
        *('--disable-dev-shm-usage', '--enable-logging=stderr', '--v=0'),
        f'--user-data-dir={folder / "profile"}',
        *flags,
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


# Clicks everything that can be chosen, and records what is shown then.
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


def _title(shown):
  """Returns what a script left in the title as JSON."""
  title = re.search('<title>(.*?)</title>', shown, re.DOTALL)[1]
  return json.loads(html.unescape(title))


@pytest.mark.slow
def test_browser_finds_no_error(render, text):
  shown, console = render(text)
  assert console == []
  tokens = re.findall(r'<span class="token (\w+)" title="(round [^"]*)"', shown)
  # For each setting's first prompt, the first method with an accepted draft.
  assert [origin for origin, _ in tokens] == 3 * reports.ORIGINS['ngram']
  assert tokens[3][1] == (
    'round 2: drafted and kept; probability 0.5 under the target'
  )


def test_browser_shows_who_wrote_what(render, text):
  shown, console = render(text.replace('</body>', _CHOOSE_ALL + '</body>'))
  assert console == []
  seen, count = _title(shown), len(reports.METHODS)
  assert len(seen) == 3 * 2 * count
  for i, one in enumerate(seen[: 2 * count]):
    method = reports.METHODS[i % count]
    pieces, rounds = reports.PIECES[method], reports.ROUNDS[method]
    if i >= count:
      pieces = pieces[::-1]
    assert one['method'] == method
    assert one['prompt'] == (reports.NASTY, 'é?')[i // count]
    visible = [x.replace('\n', '⏎\n') or '·' for x in pieces]
    assert one['pieces'] == visible
    assert one['origins'] == reports.ORIGINS[method]
    numbers = [int(re.match(r'round (\d+): ', x)[1]) for x in one['titles']]
    assert [number - 1 for number in numbers] == rounds
    assert one['together'] == rounds.count(0)
    accepted = reports.ORIGINS[method].count('accepted')
    assert one['count'] == (
      f'{method}: {len(pieces)} tokens in {rounds[-1] + 1} rounds, '
      f'{accepted} of them drafted'
    )


# Loads the page into a frame of a phone's or a desktop's width, whose style
# rules see that width; a window cannot be as narrow. Everything is unfolded.
_IN_FRAMES = """
<!doctype html><title></title><body><script>
const page = %s;
const seen = {};
let left = 2;
for (const width of [360, 1200]) {
  const frame = document.createElement('iframe');
  frame.style.cssText = `width: ${width}px; height: 800px; border: 0`;
  frame.onload = () => {
    const inside = frame.contentDocument;
    for (const one of inside.querySelectorAll('details')) one.open = true;
    // Without the scroll bar.
    const room = inside.documentElement.clientWidth;
    const beyond = (one) => one.getBoundingClientRect().right > room + 0.5;
    const rules = frame.contentWindow.getComputedStyle(inside.body);
    seen[width] = {
      overflow: inside.documentElement.scrollWidth - room,
      beyond: [...inside.body.querySelectorAll('*')]
        .filter((one) => beyond(one) && !one.closest('.scroll, .round-view'))
        .map((one) => `${one.tagName}.${one.className}`),
      paper: rules.backgroundColor,
    };
    left -= 1;
    if (!left) document.title = JSON.stringify(seen);
  };
  frame.srcdoc = page;
  document.body.append(frame);
}
</script>
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ('flags', 'paper'),
  [
    ((), 'rgb(255, 255, 255)'),
    (('--blink-settings=preferredColorScheme=0',), 'rgb(22, 23, 27)'),
  ],
)
def test_nothing_is_cut_at_two_widths(render, text, flags, paper):
  page_text = json.dumps(text).replace('<', r'\u003c')
  shown, console = render(_IN_FRAMES % page_text, *flags)
  assert console == []
  expected = {'overflow': 0, 'beyond': [], 'paper': paper}
  assert _title(shown) == {'360': expected, '1200': expected}


def test_table_that_is_too_wide_is_noticed(render, text):
  planted = '<main><p style="width: 50rem">x</p>'
  wide = re.sub('<main[^>]*>', planted, text)
  page_text = json.dumps(wide).replace('<', r'\u003c')
  shown, _ = render(_IN_FRAMES % page_text)
  assert _title(shown)['360']['beyond'] == ['P.']
  assert _title(shown)['1200']['beyond'] == []


# Follows a row's link, goes through the text with keys, and back to the row.
_BY_KEYS = """
<script>
const press = (key) => document.activeElement.dispatchEvent(
  new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
const links = [...document.querySelectorAll('a[data-method]')];
const link = links.find((one) => one.dataset.method === 'ngram');
const view = document.querySelector(link.hash).parentElement;
view.querySelector('button').click();
link.click();
const method = view.querySelector('[aria-pressed=true]').textContent;
document.querySelector(link.hash).focus();
const focused = document.activeElement.textContent;
view.querySelector('.text').focus();
const details = [];
for (const key of ['ArrowRight', 'End', 'ArrowLeft', 'Home']) {
  press(key);
  details.push(view.querySelector('.detail').textContent);
}
const back = document.querySelector(view.querySelector('.back').hash);
document.querySelector('a[data-category="qa"]').click();
document.title = JSON.stringify({
  focused, method, details, back: back.contains(link),
  category: view.querySelector('select').selectedOptions[0].text.slice(0, 3),
  names: [...document.querySelectorAll('[tabindex="0"]')].filter((one) =>
    one.getAttribute('aria-label') || one.getAttribute('aria-labelledby') &&
    document.getElementById(one.getAttribute('aria-labelledby'))).length,
  stops: document.querySelectorAll('[tabindex="0"]').length,
});
</script>
"""


def test_keys_lead_from_a_row_to_its_tokens_and_back(render, text):
  shown, console = render(text.replace('</body>', _BY_KEYS + '</body>'))
  assert console == []
  seen = _title(shown)
  assert (seen['focused'], seen['method']) == ('Who wrote what', 'ngram')
  first, last, before, home = seen['details']
  assert first == home
  assert first == (
    'token 1, "</script>", round 1: drafted and kept; '
    'probability 0.5 under the target'
  )
  assert last.startswith('token 5, ') and before.startswith('token 4, ')
  assert seen['back'] and seen['category'] == 'qa:'
  # Whatever a key stops at has a name for a screen reader.
  assert seen['names'] == seen['stops'] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
  ('here', 'there', 'error'),
  [
    ("'use strict';", "throw new Error('planted');", 'Uncaught Error: planted'),
    ('"rounds":', '"turns":', 'Uncaught TypeError'),
    ('select.add(', 'selected.add(', 'Uncaught ReferenceError'),
  ],
)
def test_error_in_the_script_is_noticed(render, text, here, there, error):
  assert here in text
  _, console = render(text.replace(here, there))
  assert any(error in line for line in console)
