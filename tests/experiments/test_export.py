"""The command that writes a drafter for other engines."""

import json

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample.models import tensors


@pytest.fixture(scope='module')
def saved(checkpoint, tmp_path_factory):
  """A folder with an EAGLE-3 of the tiny model."""
  target = specsample.load(checkpoint)
  drafter = drafters.Eagle3(
    model=target.model,
    num_draft_tokens=3,
    draft_vocab_size=20,
    feature_layers=(-1, 0),
  )
  params = drafter.init_params(
    jax.random.key(0), target.params, np.arange(5, 25)
  )
  path = tmp_path_factory.mktemp('saved') / 'eagle3'
  card = {'target': str(checkpoint)}
  specsample.save_drafter(path, drafter, params, target=target, card=card)
  return path


@pytest.mark.parametrize('layout', ['huggingface', 'speculators'])
def test_a_saved_drafter_is_written(
  commands, saved, checkpoint, tmp_path, layout
):
  out = tmp_path / 'out'
  flags = (f'--drafter={saved}', f'--layout={layout}', f'--out={out}')
  ended = commands.run('export', *flags)
  assert ended.code == 0, ended.err
  assert f'Eagle3 in the {layout} layout: {out}' in ended.out
  assert {path.name for path in out.iterdir()} == {
    'README.md',
    'config.json',
    'model.safetensors',
  }
  config = json.loads((out / 'config.json').read_text())
  if layout == 'speculators':
    verifier = config['speculators_config']['verifier']
    assert verifier['name_or_path'] == str(checkpoint)
  target = specsample.load(checkpoint, dtype='bfloat16')
  given = specsample.load_drafter(saved, target)
  found = specsample.load_drafter(out, target)
  expected = jax.tree_util.tree_leaves_with_path(given.params)
  values = dict(jax.tree_util.tree_leaves_with_path(found.params))
  assert len(values) == len(expected)
  for path, leaf in expected:
    name = tensors.key(path)
    np.testing.assert_array_equal(values[path], leaf, name, strict=True)


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--layout=gguf', '--out=OUT'], '--layout=gguf'),
    (['--layout=huggingface', '--out=OUT', '--upload=me'], "'me' is no repos"),
    (
      ['--layout=huggingface', '--out=OUT', '--upload=me/drafter'],
      'is not on the hub, where others would look for it: give target_name=',
    ),
    (['--layout=huggingface', '--out=EXISTS'], 'exists: remove it, or name'),
  ],
)
def test_bad_input_ends_in_one_line(commands, saved, tmp_path, flags, message):
  places = {'OUT': str(tmp_path / 'out'), 'EXISTS': str(saved)}
  for name, place in places.items():
    flags = [flag.replace(f'--out={name}', f'--out={place}') for flag in flags]
  ended = commands.run('export', f'--drafter={saved}', *flags)
  assert ended.code == 2
  assert message in ended.err
  assert not [*tmp_path.iterdir()]


def test_a_published_drafter_needs_the_target(commands, saved, tmp_path):
  first, again = tmp_path / 'first', tmp_path / 'again'
  flags = ('--layout=huggingface', f'--out={first}')
  assert commands.run('export', f'--drafter={saved}', *flags).code == 0
  flags = ('--layout=huggingface', f'--out={again}')
  ended = commands.run('export', f'--drafter={first}', *flags)
  assert ended.code == 2
  assert 'does not say for which model: give --target=MODEL' in ended.err
