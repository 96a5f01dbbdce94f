"""A draft model of another vocabulary, as the configurations set it up."""

import dataclasses
import json
import pathlib

import gin
import jax
import numpy as np
import pytest
import tokenizers

from experiments import methods
from experiments.command import progress
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import two_vocabularies
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
  testing.assert_greedy_equal(
    methods.all_params(target, method),
    np.asarray([[0, 2, 3], [1, 0, 0]]),
    np.asarray([3, 1]),
    model=target.model,
    drafter=method.drafter,
    verify=method.verify,
    max_new_tokens=6,
  )
  longer = methods.with_num_draft_tokens(method, 4)
  assert longer.drafter.num_draft_tokens == 4
  assert jax.tree.all(
    jax.tree.map(np.array_equal, longer.params, method.params)
  )


def test_both_ways_are_compared_with_the_target_alone(tmp_path):
  target = _loaded(['a', 'b', 'c', 'd'])
  evaluation = evaluation_lib.Evaluation(
    target=target,
    methods={'autoregressive': methods.Method(specsample.drafters.NoDraft())},
    max_new_tokens=6,
    chat=False,
  )
  comparison = two_vocabularies.Comparison(
    evaluation=evaluation,
    draft=_loaded(['x', 'd', 'b', 'a', 'y'], noise=0.5),
    num_draft_tokens=2,
  )
  tokens = [[0, 2, 3], [1]]
  comparison.check(tokens)
  rows = list(two_vocabularies.rows(comparison, tokens, progress.bar))
  assert [row.way for row in rows] == ['TLI', 'SLEM']
  for row in rows:
    assert row.tokens == 12 and row.equals_target
    assert row.tokens_per_round == row.tokens / row.rounds
    assert 0 <= row.plain_rounds < 1
  two_vocabularies.write(tmp_path, comparison.shared, rows)
  written = json.loads((tmp_path / 'vocabularies.json').read_text())
  sizes = {'kind': 'intersection', 'shared': 3}
  assert written['vocabularies'] == sizes | {
    'of_draft_model': 5,
    'of_target': 4,
  }
  assert written['rows'][0] == dataclasses.asdict(rows[0])
  assert {'hardware', 'git_commit', 'command'} < written.keys()
  first, tli, _ = two_vocabularies.lines(comparison.shared, rows)
  assert first.startswith('intersection: 3 tokens are shared, of 5 in')
  assert tli.startswith(f'TLI: {rows[0].tokens_per_round:.2f} tokens per round')
  too_long = [[0] * target.model.max_length]
  with pytest.raises(
    ValueError, match=r'leaves no room for new tokens in .*: shorten it'
  ):
    comparison.check(too_long)


def test_the_configuration_names_the_pair():
  gin.parse_config_file('configs/runs/evaluate_tli.gin')
  name = 'specsample.load.name_or_path'
  assert gin.query_parameter(f'other_vocabulary/{name}') == 'gemma-3-270m'
  assert gin.query_parameter(f'target/{name}') == 'smollm2-135m-instruct'
  assert gin.query_parameter('tli/methods.tli.num_draft_tokens') == 3
