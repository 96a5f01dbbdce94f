"""The example in README works as it is shown."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_readme_example_prints_a_reply(capsys, monkeypatch, tmp_path):
  monkeypatch.setenv('SPECSAMPLE_CACHE', str(tmp_path))
  text = (_ROOT / 'README.md').read_text('utf-8')
  (example,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
  assert len([line for line in example.splitlines() if line]) <= 12
  exec(compile(example, 'README.md', 'exec'), {})
  assert re.search(r'\w+ \w+', capsys.readouterr().out)
