"""Trees and their costs: counting, choosing, and the command."""

import csv
import dataclasses
import functools
import json
import re

import jax
import numpy as np
import pytest

from experiments import methods
from experiments.evaluation import evaluation
from experiments.trees import acceptance
from experiments.trees import comparison
from experiments.trees import costs as costs_lib
import specsample
from specsample import testing
from specsample import tree

# The pending token's children are 1, 2 and 5, and node 1's are 3 and 4.
_MIXED = tree.Topology((0, 0, 1, 1, 0, 4))
_DRAFTED = (7, 8, 3, 4, 9, 5)
_NOTHING = ((0, 0, 0),) * 3
_NEW_TOKENS = 16


@pytest.mark.parametrize(
  ('emitted', 'num_accepted', 'tried', 'kept'),
  [
    # A whole path, and a token after it.
    (
      (7, 4, 5, 2),
      3,
      ((1, 0, 0), (1, 1, 0), (1, 0, 0)),
      ((1, 0, 0), (0, 1, 0), (1, 0, 0)),
    ),
    # The third child, which has no children.
    ((9, 2), 1, ((1, 1, 1), (0, 0, 0), (0, 0, 0)), ((0, 0, 1), *_NOTHING[1:])),
    # A correction.
    ((7, 2), 1, ((1, 0, 0), (1, 1, 0), (0, 0, 0)), ((1, 0, 0), *_NOTHING[1:])),
    # Nothing is tried after a stop token, or in a row that is done.
    ((8,), 1, ((1, 1, 0), (0, 0, 0), (0, 0, 0)), ((0, 1, 0), *_NOTHING[1:])),
    ((), 0, _NOTHING, _NOTHING),
  ],
)
def test_a_round_is_counted_as_by_hand(emitted, num_accepted, tried, kept):
  found = acceptance.count(_MIXED, _DRAFTED, emitted, num_accepted)
  assert found == acceptance.Counts(tried, kept)


def test_what_was_not_drafted_was_not_tried():
  drafted = (7, 8, -1, -1, 9, -1)
  found = acceptance.count(_MIXED, drafted, (7, 4), 1)
  assert found.tried == ((1, 0, 0), (0, 0, 0), (0, 0, 0))
  assert found.kept == ((1, 0, 0), (0, 0, 0), (0, 0, 0))


def test_acceptance_is_the_share_of_those_tried():
  counts = acceptance.Counts(
    tried=((10, 4, 3), (6, 1, 0)), kept=((6, 1, 0), (3, 1, 0))
  )
  # Rank 1 keeps a quarter of the remaining .4 and, at depth 2, all of .5.
  expected = [[0.6, 0.4 * 0.25, 0], [0.5, 0.5, 0]]
  np.testing.assert_allclose(counts.acceptance, expected, atol=1e-12)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_counts_are_those_of_the_generation(checkpoint, temperature):
  """Kept drafts by depth are the histogram that `generate` returns."""
  target = specsample.load(checkpoint)
  drafter = specsample.drafters.Medusa(model=target.model, num_draft_tokens=2)
  own = drafter.init_params(jax.random.key(0))
  method = methods.tree(
    methods.Method(drafter, params=testing.with_noise(own, jax.random.key(1))),
    tree.k_ary((3, 2)),
  )
  compared = evaluation.Evaluation(
    target=target,
    methods={'tree': method},
    sampling=specsample.Sampling(temperature=temperature),
    max_new_tokens=40,
  )
  prompts = [[1, 2, 3, 4], [9, 8]]
  found = acceptance.decode(compared, method, prompts, range(2))
  output = compared.generate(method, prompts, range(2))
  stats = specsample.stats.summarize(jax.tree.map(np.asarray, output))
  for depth in (1, 2):
    assert sum(found.kept[depth - 1]) == sum(stats.accepted[depth:])
  assert found.tried[0][0] == sum(stats.proposed[1:])
  assert sum(found.kept[0]) > 0
  # A second child is tried only if the first was not kept.
  for tried, kept in zip(found.tried, found.kept, strict=True):
    assert tried[1] == tried[0] - kept[0]


_ACCEPTANCE = (0.5, 0.25)
_COSTS = costs_lib.Costs(
  draft_ms={1: 1.0, 2: 2.0},
  verify_ms={0: 10.0, 2: 11.0, 6: 17.0},
  overhead_ms={2: 0.0, 6: 2.0},
  autoregressive_ms=10.0,
)


def test_a_prediction_is_tokens_over_time():
  # Two children at both levels: 1 + .75 + .75 ** 2 tokens in 2 + 17 + 2 ms.
  found = costs_lib.predict(tree.k_ary((2, 2)), _ACCEPTANCE, _COSTS)
  assert found.tokens == pytest.approx(2.3125)
  assert found.round_ms == pytest.approx(21)
  assert found.speedup == pytest.approx(2.3125 * 10 / 21)
  # Halfway between measured times.
  found = costs_lib.predict(tree.Topology((0, 0, 1, 1)), _ACCEPTANCE, _COSTS)
  assert found.round_ms == pytest.approx(2 + 14 + 1)


def test_the_fastest_tree_is_chosen_not_the_largest():
  topologies = costs_lib.grid(_ACCEPTANCE, (1, 2, 6, 60), (1, 2))
  assert max(one.num_nodes for one in topologies) == 6
  # By hand: 1.5 / 11.5, 1.75 / 12, 1.75 / 13 (a chain), 2.3125 / 21.
  chosen = costs_lib.choose(topologies, _ACCEPTANCE, _COSTS)
  assert chosen.topology == tree.k_ary((2,))
  free = dataclasses.replace(_COSTS, verify_ms={0: 10.0}, overhead_ms={0: 0.0})
  chosen = costs_lib.choose(topologies, _ACCEPTANCE, free)
  assert chosen.topology.num_nodes == 6


def test_costs_of_nothing_are_refused():
  with pytest.raises(ValueError, match='draft_ms is empty: give at least one'):
    dataclasses.replace(_COSTS, draft_ms={})


@pytest.fixture(scope='module')
def call(checkpoint, tiny, tmp_path_factory):
  """The command with a tiny drafter of two heads."""
  folder = tmp_path_factory.mktemp('trees')
  target = specsample.load(checkpoint)
  drafter = specsample.drafters.Medusa(model=target.model, num_draft_tokens=2)
  own = drafter.init_params(jax.random.key(0))
  noisy = testing.with_noise(own, jax.random.key(1))
  path = folder / 'medusa'
  specsample.save_drafter(path, drafter, noisy, target=target, card={})
  (folder / 'prompts.txt').write_text('Why is it?\nAnd when?\n')
  bindings = (
    f"medusa/trained.name = '{path}'",
    "Evaluation.methods = {'medusa': @medusa/trained()}",
    f'Evaluation.max_new_tokens = {_NEW_TOKENS}',
    'Evaluation.repeats = 1',
    'Ablation.num_nodes = (3,)',
    'Ablation.candidates = (2, 5)',
    'Ablation.probe = @k_ary()',
    'k_ary.branching = (3, 2)',
    'Ablation.dynamic_num_nodes = 3',
    'Ablation.dynamic_width = 2',
  )
  return [
    'tree_ablation',
    *tiny,
    *(f'--gin_bindings={binding}' for binding in bindings),
    f'--prompts={folder / "prompts.txt"}',
  ]


@pytest.fixture(scope='module')
def story(call, commands, cpu_devices, tmp_path_factory):
  """A run, its folder, and a run resumed from most of its journal."""
  folder = tmp_path_factory.mktemp('ablation')
  first, second = folder / 'first', folder / 'second'
  run = functools.partial(commands.run_all, variables=cpu_devices(1))
  (ended,) = run([[*call, f'--out={first}']])
  assert ended.code == 0, ended.err
  lines = (first / 'journal.jsonl').read_text().splitlines(keepends=True)
  begun = len(lines) - 3
  second.mkdir()
  _plant_a_fault(lines)
  # As a kill leaves it, in the middle of a line.
  torn = ''.join(lines[:begun]) + lines[begun][:20]
  (second / 'journal.jsonl').write_text(torn)
  (resumed,) = run([[*call, f'--out={second}']])
  assert resumed.code == 0, resumed.err
  return ended, first, second, lines[:begun], resumed


def _plant_a_fault(lines):
  """Changes a token of a tree's first output, in a journal's lines."""
  key = ['generation', 'medusa best-3', 0]
  for i, record in enumerate(map(json.loads, lines)):
    if record.get('key') == key:
      tokens = record['value']['generations'][0]['tokens']
      tokens[1] = (tokens[1] + 1) % 9
      lines[i] = json.dumps(record) + '\n'


def _rows(folder):
  return json.loads((folder / 'trees.json').read_text())['rows']


def test_trees_are_compared_with_the_chain(story):
  ended, folder, *_ = story
  assert json.loads((folder / 'result.json').read_text())['divergences'] == []
  assert {path.name for path in folder.iterdir()} == {
    *('journal.jsonl', 'result.json', 'results.csv'),
    *('trees.json', 'trees.csv', 'trees.png'),
  }
  rows = {row['topology']: row for row in _rows(folder)}
  assert [row['is_chosen'] for row in rows.values()].count(True) == 1
  assert set(rows) - {'chosen'} == {'chain', 'best-3', 'dynamic-3'}
  assert rows['chain']['parents'] == [0, 1]
  assert rows['chain']['law'] == 'sampled'
  assert rows['best-3']['num_nodes'] == 3
  assert rows['best-3']['law'] == 'point_mass'
  assert rows['dynamic-3']['parents'] is None
  assert rows['dynamic-3']['expected_tokens'] is None
  of_evaluation = {
    row['method']: row
    for row in json.loads((folder / 'result.json').read_text())['rows']
    if row['category'] == 'overall'
  }
  chain = rows['chain']['tokens_per_round']
  for row in rows.values():
    measured = of_evaluation[row['method']]
    assert row['tokens_per_round'] == measured['tokens_per_round']
    assert row['speedup'] == measured['speedup']
    assert row['over_chain'] == row['tokens_per_round'] / chain
    assert min(row['draft_ms'], row['judge_ms']) >= 0  # call time removed
    assert row['draft_ms'] + row['verify_ms'] + row['overhead_ms'] > 0
  assert (folder / 'trees.png').read_bytes().startswith(b'\x89PNG')
  with (folder / 'trees.csv').open(newline='') as file:
    lines = list(csv.DictReader(file))
  assert [line['method'] for line in lines] == [
    row['method'] for row in rows.values()
  ]
  assert re.search(r'^ *best-3 .*point mass', ended.out, re.MULTILINE)
  assert '\nmedusa best-3: every output equals autoregressive\n' in ended.out


def test_predictions_follow_from_what_was_counted_and_timed(story):
  _, folder, *_ = story
  content = json.loads((folder / 'trees.json').read_text())
  found = content['drafters']['medusa']
  costs = {
    name: {int(x): ms for x, ms in times.items()}
    if isinstance(times, dict)
    else times
    for name, times in found['costs'].items()
  }
  for row in content['rows']:
    if row['parents'] is None:
      continue
    prediction = costs_lib.predict(
      tree.Topology(tuple(row['parents'])),
      found['acceptance'],
      costs_lib.Costs(**costs),
    )
    assert row['expected_tokens'] == pytest.approx(prediction.tokens)
    assert row['predicted_speedup'] == pytest.approx(prediction.speedup)
  best = max(
    row['predicted_speedup']
    for row in content['rows']
    if row['num_nodes'] in (2, 5) and row['parents']
  )
  (chosen,) = (row for row in content['rows'] if row['is_chosen'])
  assert chosen['predicted_speedup'] == best


def test_a_run_goes_on_with_the_same_trees(story):
  _, first, second, kept, _ = story
  records = (second / 'journal.jsonl').read_text().splitlines(keepends=True)
  assert records[: len(kept)] == kept
  keys = [tuple(json.loads(line)['key']) for line in records[1:]]
  assert len(keys) == len(set(keys))
  same = ('method', 'is_chosen', 'parents', 'expected_tokens')
  same = (*same, 'tokens_per_round', 'predicted_speedup')
  before, after = (
    [{name: row[name] for name in same} for row in _rows(folder)]
    for folder in (first, second)
  )
  assert before == after


def test_a_fault_is_looked_into(story):
  _, _, folder, _, resumed = story
  result = json.loads((folder / 'result.json').read_text())
  (found,) = result['divergences']
  assert (found['method'], found['position']) == ('medusa best-3', 1)
  assert found['verdict'] == 'DIFFERS'
  assert found['audit']['float32']['lead'] > found['audit']['bound']
  assert 'medusa best-3: 1 outputs DIFFER' in resumed.out
  assert 'medusa best-3, prompt 1, token 1: ' in resumed.out


_BAD = {
  'Ablation.num_nodes = ()': 'Ablation.num_nodes is (): give at least one',
  'Ablation.depths = (0,)': 'Ablation.depths is (0,): give at least one',
  'Ablation.depths = (3,)': 'num_draft_tokens is 3, but ... heads for only 2',
  'Ablation.num_nodes = (1,)': 'num_nodes has 1, but no tree ... is 2 deep',
  'Ablation.num_nodes = (13,)': 'num_nodes has 13, ... 3 children per node',
  'Ablation.candidates = (99,)': 'Ablation.candidates are (99,), but no tree',
  'Ablation.dynamic_num_nodes = 9': (
    'width 2 finds only 6 candidates down to depth 2'
  ),
  'Evaluation.max_turns = 1': 'max_turns is 1, which this command does not use',
  "Evaluation.methods = {'autoregressive': @medusa/trained()}": 'no drafter',
  "Evaluation.methods = {'ngram': @ngram/Method()}": (
    'Ngram cannot continue several drafts at once ... choose a trained drafter'
  ),
}


@pytest.fixture(scope='module')
def outcomes(call, commands, tmp_path_factory):
  """Outcomes by bad setting, the files left, and the compiled programs."""
  folder = tmp_path_factory.mktemp('bad')
  cache = tmp_path_factory.mktemp('cache')
  here = dataclasses.replace(commands, cache=str(cache))
  calls = [
    [
      *call,
      '--gin_file=configs/runs/tree_ablation.gin',
      f'--gin_bindings={binding}',
      f'--out={folder / str(i)}',
    ]
    for i, binding in enumerate(_BAD)
  ]
  ended = dict(zip(_BAD, here.run_all(calls), strict=True))
  here.close()
  programs = {path.name.partition('-')[0] for path in here.cached()}
  return ended, list(folder.iterdir()), programs


@pytest.mark.parametrize('binding', _BAD)
def test_one_line_says_what_to_do(outcomes, binding):
  outcome = outcomes[0][binding]
  assert outcome.code == 2, outcome.err
  assert outcome.out == ''
  pattern = '.*'.join(map(re.escape, _BAD[binding].split(' ... ')))
  assert re.fullmatch(f'.*{pattern}.*\n', outcome.err), outcome.err


def test_nothing_is_left_and_nothing_compiled(outcomes):
  _, left, programs = outcomes
  assert left == []
  assert not programs & {'jit__prefill', 'jit__advance', 'jit_drafted_rounds'}


def test_no_candidate_is_larger_than_what_is_timed():
  medusa = specsample.drafters.Medusa(
    model=testing.tiny_llama(), num_draft_tokens=2
  )
  ablation = comparison.Ablation(
    evaluation=evaluation.Evaluation(
      target=specsample.Loaded(None, {}, None),
      methods={'medusa': methods.Method(medusa)},
    ),
    num_nodes=(3,),
    candidates=(2, 3, 5, 64),
  )
  assert ablation.candidates_of('medusa') == [2, 3]
  assert ablation.evaluation.num_repeats(1) > 0  # trees need the times
