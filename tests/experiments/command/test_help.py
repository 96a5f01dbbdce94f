"""The docstring of each command, for --help: a sentence, three examples."""

import ast
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_COMMANDS = {
  path.stem: path.read_text('utf-8')
  for path in sorted(_ROOT.glob('experiments/*.py'))
  if path.stem != '__init__'
}
_SHARED = ''.join(
  path.read_text('utf-8') for path in _ROOT.glob('experiments/command/*.py')
)


def _defined(source: str) -> set[str]:
  return set(re.findall(r"DEFINE_\w+\(\s*'(\w+)'", source))


@pytest.mark.parametrize('name', _COMMANDS)
def test_a_command_begins_with_a_sentence_and_three_examples(name):
  sentence, examples = ast.get_docstring(ast.parse(_COMMANDS[name])).split(
    '\n\n'
  )[:2]
  assert re.fullmatch(r'[A-Z][a-z]+s [^\n]*\.', sentence)
  calls = re.findall(
    r'^  python -m experiments\.(\w+)(.*?)$',
    examples.replace('\\\n', ''),
    re.MULTILINE,
  )
  assert len(calls) >= 3
  assert name in {command for command, _ in calls}
  for command, arguments in calls:
    named = set(re.findall(r'--(\w+)', arguments))
    assert named <= _defined(_COMMANDS[command]) | _defined(_SHARED)
    for path in re.findall(r'configs/\S+\.gin', arguments):
      assert (_ROOT / path).exists()
