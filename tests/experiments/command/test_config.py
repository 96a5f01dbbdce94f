"""Where gin files are found, and what they include and import."""

import sys

from absl import flags
import gin
import pytest

from experiments.command import config

_FILES = {
  'my_drafter.py': 'class Mine:\n  pass\n',
  'common.gin': "TARGET = 'mine'\n",
  'mine.gin': """
from __gin__ import dynamic_registration
import my_drafter
include 'configs/runs/evaluate.gin'
include 'common.gin'
gin.singleton.constructor = @my_drafter.Mine
""",
}


@pytest.fixture
def parse(monkeypatch):
  """The function that parses the gin file that it is given."""
  monkeypatch.setattr(sys, 'path', [*sys.path])
  values = flags.FlagValues()
  monkeypatch.setattr(flags, 'FLAGS', values)

  def parsed(path, bindings=()):
    flags.DEFINE_multi_string('gin_file', [str(path)], '', values)
    flags.DEFINE_multi_string('gin_bindings', [*bindings], '', values)
    values(['command'])
    config.parse()
    return gin.query_parameter('TARGET/gin.macro.value')

  yield parsed
  gin.clear_config()


def test_a_file_finds_its_neighbours_from_any_folder(
  parse, tmp_path, monkeypatch
):
  folder = tmp_path / 'drafters'
  folder.mkdir()
  for name, text in _FILES.items():
    (folder / name).write_text(text)
  monkeypatch.chdir(tmp_path)
  assert parse('drafters/mine.gin') == 'mine'
  assert sys.modules['my_drafter'].__file__ == str(folder / 'my_drafter.py')


def test_a_short_name_of_two_classes_is_one_line(parse, tmp_path, capsys):
  imports = ('from __gin__ import dynamic_registration', 'TARGET = 1')
  for name in ('first_one', 'second_one'):
    (tmp_path / f'{name}.py').write_text('class Same:\n  pass\n')
    imports += (
      f'import {name}',
      f'{name}/gin.singleton.constructor = @{name}.Same',
    )
  (tmp_path / 'two.gin').write_text('\n'.join(imports))
  with pytest.raises(SystemExit):
    parse(tmp_path / 'two.gin', ['Same.size = 3'])
  (line,) = capsys.readouterr().err.splitlines()
  assert "Ambiguous selector 'Same'" in line
