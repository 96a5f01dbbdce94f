"""A draft model of another vocabulary, as the configurations set it up."""

import pathlib
import re
import textwrap

import gin
import jax
import numpy as np
import pytest
import tokenizers

from experiments import methods
import specsample
from specsample import testing
from specsample import text

_ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _own_gin():
  gin.clear_config()
  gin.add_config_file_search_path(str(_ROOT))
  yield
  gin.clear_config()


def _loaded(names, noise=0.0):
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(
      {name: i for i, name in enumerate(names)}, unk_token=names[0]
    )
  )
  model = testing.HashModel(vocab_size=len(names), noise=noise)
  return specsample.Loaded(
    model, {}, text.Tokenizer(backend=backend, named_tokens={})
  )


def test_the_method_drafts_for_its_target():
  target = _loaded(['a', 'b', 'c', 'd'])
  draft = _loaded(['x', 'd', 'b', 'a', 'y'], noise=0.5)
  method = methods.tli(draft, target, num_draft_tokens=2)
  assert method.params['draft_ids'].tolist() == [3, 2, -1, 1]
  assert method.note == (
    'tli: intersection: 3 tokens are shared, of 5 in the draft model and 4 in '
    'the target'
  )
  testing.assert_greedy_equal(
    {'target': target.params, 'drafter': method.params},
    np.asarray([[0, 2, 3], [1, 0, 0]]),
    np.asarray([3, 1]),
    model=target.model,
    drafter=method.drafter,
    verify=method.verify,
    max_new_tokens=6,
  )
  longer = methods.remake(method, 4)
  assert longer.drafter.num_draft_tokens == 4
  assert jax.tree.all(
    jax.tree.map(np.array_equal, longer.params, method.params)
  )


def test_the_page_drafts_shared_tokens_and_text(capsys):
  target = _loaded(['a', 'b', 'c', 'd'])
  draft = _loaded(['x', 'd', 'b', 'a', 'y'], noise=0.5)
  names = {
    **{'jax': jax, 'specsample': specsample, 'target': target, 'draft': draft},
    'found': specsample.map_vocabulary(draft, target),
  }
  page = (_ROOT / 'docs' / 'vocabularies.md').read_text('utf-8')
  blocks = re.findall(r'(?:^(?: {4}.*)?\n)+', page, re.MULTILINE)
  for call in ('drafters.TLI(', 'slem.generate('):
    (example,) = (block for block in blocks if call in block)
    exec(compile(textwrap.dedent(example), call, 'exec'), names)
    assert names['output'].lengths.tolist() == [64]
  tokens_per_round = float(capsys.readouterr().out.split()[0])
  assert tokens_per_round == 64 / names['stats'].rounds


def test_the_configuration_names_the_pair():
  gin.parse_config_file('configs/runs/vocabularies.gin')
  name = 'specsample.load.name_or_path'
  assert gin.query_parameter(f'other_vocabulary/{name}') == 'gemma-3-270m'
  assert gin.query_parameter(f'target/{name}') == 'smollm2-135m-instruct'
  assert gin.query_parameter('tli/methods.tli.num_draft_tokens') == 3
