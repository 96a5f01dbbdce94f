"""--help of each command: one sentence, three examples, its own flags first."""

import ast
import pathlib
import re
import sys

from absl import flags
import pytest

from experiments.command import cli

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


def test_own_flags_come_first_in_the_order_of_their_definition(
  monkeypatch, capsys
):
  values = flags.FlagValues()
  monkeypatch.setattr(flags, 'FLAGS', values)
  monkeypatch.setattr(sys, 'argv', ['main.py', '--help'])
  monkeypatch.setattr(sys.modules['__main__'], '__doc__', 'Counts sheep.\n')
  define = lambda module, name, default: flags.DEFINE_string(
    name, default, f'What {name} is.', values, module_name=module
  )
  shared = define('shared.py', 'gin_file', 'a.gin')
  define('main.py', 'prompt', None)
  define('main.py', 'limit', '3')
  flags.DEFINE_integer(
    *('seed', 0, 'What seed is.'), flag_values=values, module_name='main.py'
  )
  flags.DEFINE_boolean('quiet', False, 'What quiet is.', values, 'main.py')
  values.register_key_flag_for_module('main.py', values[shared.name])
  with pytest.raises(SystemExit) as ended:
    cli._parse_flags(['main.py', '--help'])
  assert ended.value.code == 0
  assert capsys.readouterr().out.splitlines() == [
    'Counts sheep.',
    '',
    'Flags:',
    '  --prompt: What prompt is.',
    "  --limit: What limit is. (default: '3')",
    "  --seed: What seed is. (default: '0')",
    '  --[no]quiet: What quiet is.',
    "  --gin_file: What gin_file is. (default: 'a.gin')",
    '',
    '--helpfull lists the flags of libraries too.',
  ]
