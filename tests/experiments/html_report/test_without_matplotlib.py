"""An evaluation, its page and a prediction without matplotlib."""

import pytest

from tests.experiments import reports


@pytest.fixture(scope='module')
def without_matplotlib(commands, tiny_evaluate, tmp_path_factory):
  """The outcomes if matplotlib cannot be imported, and their folder."""
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
  return commands.run_all(calls, variables=variables), folder / 'out'


@pytest.mark.nightly
def test_without_matplotlib_the_rest_is_there(without_matplotlib):
  (evaluated, reported), folder = without_matplotlib
  left_out = 'left out: matplotlib is not installed (pip install matplotlib)\n'
  codes = evaluated.code, reported.code
  assert codes == (0, 0), without_matplotlib
  assert evaluated.out.count(f'results.png is {left_out}') == 1
  assert evaluated.out.endswith(f', generations.jsonl are in {folder}\n')
  assert reported.out == (
    f'the figures are {left_out}1 run is in {folder}/report.html\n'
  )
  assert {path.name for path in folder.iterdir()} == {
    *('journal.jsonl', 'result.json', 'results.csv', 'generations.jsonl'),
    'report.html',
  }
  text = (folder / 'report.html').read_text()
  assert 'The figures are left out: matplotlib is not installed' in text
  found = reports.Page(text)
  assert (found.count('svg'), found.count('script')) == (0, 2)
  assert [line[0] for line in found.tables[0][1:]] == [
    *('autoregressive', 'ngram', 'skip')
  ]
