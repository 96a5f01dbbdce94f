"""An evaluation, its page and a prediction without matplotlib."""

import pytest

from tests.experiments import reports


@pytest.mark.nightly
def test_rest_is_there_without_matplotlib(commands, tiny_evaluate, tmp_path):
  (tmp_path / 'modules').mkdir()
  (tmp_path / 'modules' / 'matplotlib.py').write_text('raise ImportError')
  (tmp_path / 'prompts.txt').write_text('One.\n')
  out = tmp_path / 'out'
  calls = [
    [
      *('evaluate', *tiny_evaluate),
      '--gin_bindings=Evaluation.max_new_tokens = 96',
      *(f'--prompts={tmp_path / "prompts.txt"}', f'--out={out}'),
    ],
    ['report', f'--results={out}'],
  ]
  variables = {'PYTHONPATH': str(tmp_path / 'modules')}
  evaluated, reported = commands.run_all(calls, variables=variables)
  left_out = 'left out: matplotlib is not installed (pip install matplotlib)\n'
  assert (evaluated.code, reported.code) == (0, 0), (evaluated, reported)
  assert evaluated.out.count(f'results.png is {left_out}') == 1
  assert evaluated.out.endswith(f', generations.jsonl are in {out}\n')
  assert reported.out == (
    f'the figures are {left_out}1 run is in {out}/report.html\n'
  )
  assert {path.name for path in out.iterdir()} == {
    *('journal.jsonl', 'result.json', 'results.csv', 'generations.jsonl'),
    'report.html',
  }
  text = (out / 'report.html').read_text()
  assert 'The figures are left out: matplotlib is not installed' in text
  found = reports.Page(text)
  assert (found.count('svg'), found.count('script')) == (0, 2)
  names = [line[0] for line in found.tables[0][1:]]
  assert names == ['autoregressive', 'ngram', 'skip']
