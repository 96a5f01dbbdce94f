"""The lines of docs/custom_model.md train a drafter for its own model."""

import functools
import importlib
import json
import pathlib
import re
import sys
import textwrap

import pytest

from specsample import drafters

_PAGE = pathlib.Path(__file__).resolve().parents[2] / 'docs' / 'custom_model.md'
_NUM_CONVERSATIONS = 4
_SHORT = (
  'Medusa.draft_vocab_size = None',
  'Training.batch_size = 1',
  'Training.decoded_new_tokens = 4',
  'Training.epochs = 1',
)


def _lines(text, *parts):
  """Returns the indented lines of the page that have all of the parts."""
  blocks = re.findall(r'(?:^    .*\n|^\n(?=\n*    ))+', text, re.MULTILINE)
  found = [x for x in blocks if all(part in x for part in parts)]
  assert len(found) == 1
  return textwrap.dedent(found[0])


@pytest.fixture
def folder(tmp_path, checkpoint, target):
  """The reader's folder, for the tiny model's tokenizer."""
  text = _PAGE.read_text('utf-8')
  network = re.findall(r'```python\n(.*?)```', text, re.DOTALL)[0]
  loading = _lines(text, 'def load():') + _lines(text, 'def layer():')
  for old, new in (
    ('smollm2-135m-instruct', str(checkpoint)),
    ('vocab_size=49152', f'vocab_size={target.model.vocab_size}'),
  ):
    assert old in loading
    loading = loading.replace(old, new)
  (tmp_path / 'mymodel.py').write_text(network)
  (tmp_path / 'loadmine.py').write_text(loading)
  (tmp_path / 'mine.gin').write_text(_lines(text, 'import loadmine'))
  conversations = [
    {
      'temperature': 0,
      'messages': [
        {'role': 'user', 'content': f'Is {i} odd?'},
        {'role': 'assistant', 'content': f'The number {i}, or {i + 1}.'},
      ],
    }
    for i in range(_NUM_CONVERSATIONS)
  ]
  lines = '\n'.join(map(json.dumps, conversations))
  (tmp_path / 'answers.jsonl').write_text(lines)
  return tmp_path


def test_the_page_trains_a_drafter(commands, folder):
  data, out = folder / 'data', folder / 'out'
  mine = f'--gin_file={folder / "mine.gin"}'
  commands.complete(
    *('make_data', '--gin_file=configs/runs/data.gin', mine),
    f'--gin_bindings=Synthesis.prompts_per_shard = {_NUM_CONVERSATIONS // 2}',
    *(f'--answers={folder / "answers.jsonl"}', f'--out={data}'),
  )
  commands.complete(
    *('train', '--gin_file=configs/runs/train.gin', '--recipe=medusa', mine),
    *(f'--data={data}', f'--out={out}'),
    *(f'--gin_bindings={x}' for x in _SHORT),
  )
  assert (out / 'drafter' / 'card.json').exists()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('kind', 'settings'),
  [(drafters.Eagle3, {'feature_layers': (-1, 0, 1)}), (drafters.MTP, {})],
)
def test_the_layer_of_the_page_fits_its_model(
  folder, monkeypatch, kind, settings
):
  monkeypatch.syspath_prepend(str(folder))
  monkeypatch.setattr(sys, 'modules', {**sys.modules})  # forgets them later
  loadmine = importlib.import_module('loadmine')
  model = loadmine.load().model
  make = functools.partial(kind, model=model, num_draft_tokens=2, **settings)
  assert make(layer_config=loadmine.layer()).shape.dim == model.dim
  with pytest.raises(ValueError, match='give a layer_config'):
    make()
  with pytest.raises(ValueError, match=r'a Transformer as the target$'):
    drafters.DraftModel(model=model, num_draft_tokens=2, layers=(0,))
