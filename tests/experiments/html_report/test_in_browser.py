"""The page of results, opened in a headless browser."""

import html
import json
import re
import shutil
import subprocess

import pytest

from experiments.html_report import files
from experiments.html_report import page
from tests.experiments import reports


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  root = tmp_path_factory.mktemp('results')
  reports.write_tree(root)
  return page.render(files.find(str(root), 2), f'Title {reports.NASTY}')


@pytest.fixture(scope='module')
def browser():
  names = ('chromium', 'chromium-browser', 'google-chrome')
  found = next(filter(None, map(shutil.which, names)), None)
  if found is None:
    pytest.skip('no chromium, which test.sh installs where it is root')
  return found


@pytest.fixture(scope='module')
def render(browser, tmp_path_factory):
  """A function that opens a page and returns its elements and console lines."""

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


def test_browser_finds_no_error(render, text):
  shown, console = render(text)
  assert console == []
  tokens = re.findall(r'<span class="token (\w+)" title="(round [^"]*)"', shown)
  # For each setting's first prompt, the first method with an accepted draft.
  assert [origin for origin, _ in tokens] == 3 * reports.ORIGINS['ngram']
  assert tokens[3][1] == 'round 2: drafted and kept'


def test_browser_shows_who_wrote_what(render, text):
  shown, console = render(text.replace('</body>', _CHOOSE_ALL + '</body>'))
  assert console == []
  title = re.search('<title>(.*?)</title>', shown, re.DOTALL)[1]
  seen = json.loads(html.unescape(title))
  assert len(seen) == 3 * 2 * len(reports.METHODS)
  for i, one in enumerate(seen[: 2 * len(reports.METHODS)]):
    method = reports.METHODS[i % len(reports.METHODS)]
    pieces = reports.PIECES[method]
    if i >= len(reports.METHODS):
      pieces = pieces[::-1]
    assert one['method'] == method
    assert one['prompt'] == (reports.NASTY, 'é?')[i // len(reports.METHODS)]
    visible = [x.replace('\n', '⏎\n') or '·' for x in pieces]
    assert one['pieces'] == visible
    assert one['origins'] == reports.ORIGINS[method]
    numbers = [int(re.match(r'round (\d+): ', x)[1]) for x in one['titles']]
    assert [number - 1 for number in numbers] == reports.ROUNDS[method]
    assert one['together'] == reports.ROUNDS[method].count(0)
    rounds = reports.ROUNDS[method]
    kept = reports.ORIGINS[method].count('accepted')
    assert one['count'] == (
      f'{method}: {len(pieces)} tokens in {rounds[-1] + 1} rounds, '
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
