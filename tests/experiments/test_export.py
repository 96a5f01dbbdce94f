"""The command that writes a drafter for other engines."""

import json

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample.models import tensors


@pytest.fixture(scope='module')
def saved(checkpoint, target, tmp_path_factory):
  """A folder with an EAGLE-3 of the tiny model."""
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
  ended = commands.complete('export', *flags)
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
  ('flags', 'words'),
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
def test_bad_input_ends_in_one_line(commands, saved, tmp_path, flags, words):
  places = {'=OUT': f'={tmp_path / "out"}', '=EXISTS': f'={saved}'}
  for name, place in places.items():
    flags = [flag.replace(name, place) for flag in flags]
  commands.run('export', f'--drafter={saved}', *flags).check_refused(words)
  assert not [*tmp_path.iterdir()]


def test_a_published_drafter_needs_the_target(commands, saved, tmp_path):
  call = ('export', '--layout=huggingface')
  first = tmp_path / 'first'
  commands.complete(*call, f'--drafter={saved}', f'--out={first}')
  again = commands.run(*call, f'--drafter={first}', f'--out={tmp_path / "x"}')
  again.check_refused('does not say for which model: give --target=MODEL')
