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

  def parsed(*paths, bindings=(), recipe=''):
    flags.DEFINE_multi_string('gin_file', [*map(str, paths)], '', values)
    flags.DEFINE_multi_string('gin_bindings', [*bindings], '', values)
    flags.DEFINE_string('recipe', recipe, '', values)
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
    parse(tmp_path / 'two.gin', bindings=['Same.size = 3'])
  (line,) = capsys.readouterr().err.splitlines()
  assert "Ambiguous selector 'Same'" in line


_SIZES = """
class Sizes:
  def __init__(self, ladder, decay):
    pass
"""
_RECIPES = """
from __gin__ import dynamic_registration
import own_sizes
TARGET = 'mine'
wide/own_sizes.Sizes.ladder = (0, 8)
wide/own_sizes.Sizes.decay = 0.5
wide/more/own_sizes.Sizes.ladder = (0, 16)
other/own_sizes.Sizes.ladder = (0, 2)
"""


@pytest.mark.parametrize(
  ('binding', 'ladder', 'decay'),
  [
    ('', (0, 16), 0.5),
    ('own_sizes.Sizes.ladder = (0, 4)', (0, 4), 0.5),
    ('own_sizes.Sizes.decay = 0.25', (0, 16), 0.25),
    ('wide/own_sizes.Sizes.ladder = (0, 4)', (0, 4), 0.5),
    ('other/own_sizes.Sizes.ladder = (0, 4)', (0, 16), 0.5),
    (
      'own_sizes.Sizes.ladder = (0, 4)\n'
      'wide/more/own_sizes.Sizes.ladder = (0, 5)',
      (0, 5),
      0.5,
    ),
  ],
)
@pytest.mark.parametrize('is_file', [False, True])
def test_what_comes_later_replaces_what_the_recipe_has(
  parse, tmp_path, binding, ladder, decay, is_file
):
  first, second = tmp_path / 'first.gin', tmp_path / 'second.gin'
  (tmp_path / 'own_sizes.py').write_text(_SIZES)
  first.write_text(_RECIPES)
  second.write_text(
    'from __gin__ import dynamic_registration\nimport own_sizes\n' + binding
  )
  recipe = 'wide/more'
  if is_file:
    parse(first, second, recipe=recipe)
  else:
    parse(first, bindings=binding.splitlines(), recipe=recipe)
  with gin.config_scope(recipe):
    found = gin.get_bindings('own_sizes.Sizes')
  assert (found['ladder'], found['decay']) == (ladder, decay)


def test_a_recipe_that_is_not_there_is_named(parse, tmp_path, capsys):
  (tmp_path / 'own_sizes.py').write_text(_SIZES)
  (tmp_path / 'first.gin').write_text(_RECIPES)
  with pytest.raises(SystemExit):
    parse(tmp_path / 'first.gin', recipe='wyde')
  (line,) = capsys.readouterr().err.splitlines()
  assert '--recipe=wyde is no scope of these files. Did you mean wide?' in line
