"""Traces: what they keep of a run, and how they are replayed without models."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import methods
from experiments.evaluation import evaluation as evaluation_lib
from experiments.traces import recording
from experiments.traces import replaying
from experiments.traces import rounds as rounds_lib
from experiments.traces import trace_file
import specsample
from specsample import drafters
from specsample import policies
from specsample import sharding
from specsample import tree
from specsample import verify
from specsample.loop import step
from specsample.types import Draft, DraftKind, Signals

_K = 3
_PROMPTS = ('One.', 'And another one?', 'x', 'The rain in Spain', 'Why?')
_ALL = 1 << 20  # columns: more than there are tokens
_TREE = tree.Topology((0, 0, 1, 1, 2))


@dataclasses.dataclass(frozen=True)
class _Runs:
  """Evaluations of the tiny model, and the traces of their methods."""

  loaded: specsample.Loaded

  def __hash__(self):
    return id(self)

  def method(self, name, rule):
    model = self.loaded.model
    chain = drafters.Chain(model=model, num_draft_tokens=_K)
    shallow = dataclasses.replace(chain, num_draft_tokens=_TREE.depth)
    drafter = {
      'chain': chain,
      'ngram': drafters.Ngram(num_draft_tokens=_K),
      'none': drafters.NoDraft(),
      'tree': drafters.Tree(
        drafter=shallow, topology=_TREE, kind=DraftKind.WITHOUT_REPLACEMENT
      ),
    }[name]
    params = None
    if name in ('chain', 'tree'):
      params = jax.tree.map(lambda x: 0.9 * x, self.loaded.params)
    return methods.Method(drafter, rule, params)

  def evaluation(self, method, temperature=1.0, seed=0):
    return evaluation_lib.Evaluation(
      target=self.loaded,
      methods={'it': method},
      sampling=specsample.Sampling(temperature=temperature),
      max_new_tokens=24,
      seed=seed,
    )

  @functools.cached_property
  def tokens(self):
    return [self.loaded.tokenizer.encode(text) for text in _PROMPTS]

  @functools.cache  # noqa: B019 (as long as the fixture)
  def trace(self, name, rule, temperature=1.0, num_columns=_ALL, seed=0):
    method = self.method(name, rule)
    trace = recording.record(
      self.evaluation(method, temperature, seed),
      method,
      self.tokens,
      range(len(_PROMPTS)),
      num_columns=num_columns,
    )
    return trace_file.Trace(
      trace.header | {'num_prompts': len(_PROMPTS), 'method': name},
      trace.arrays,
    )

  def output(self, method, temperature=1.0):
    output = self.evaluation(method, temperature).generate(
      method, self.tokens, range(len(_PROMPTS))
    )
    return jax.tree.map(np.asarray, output)

  def observed(self, method, rounds):
    """Yields the rules' full input in the first rounds, and the live rows."""
    params = methods.all_params(self.loaded, method)
    padded, lengths = specsample.pad_prompts(self.tokens)
    state = specsample.prefill(
      params,
      padded,
      lengths,
      jax.random.key(0),
      model=self.loaded.model,
      drafter=method.drafter,
      sampling=specsample.Sampling(temperature=1.0),
      max_new_tokens=24,
    )
    go_on = jax.jit(
      functools.partial(
        step.step,
        model=self.loaded.model,
        drafter=method.drafter,
        verify=method.verify,
        stop=specsample.Stop(eos_ids=self.loaded.tokenizer.eos_ids),
      )
    )
    for _ in range(rounds):
      done = np.asarray(state.done)
      observed, state = go_on(params, state)
      yield observed, ~done


@pytest.fixture(scope='module')
def runs(checkpoint):
  loaded = specsample.load(checkpoint)
  # Make some tokens far likelier than others.
  peaked = jax.tree.map(lambda x: 1.5 * x, loaded.params)
  return _Runs(dataclasses.replace(loaded, params=peaked))


def _replay(trace, rule, *chosen, seed=0):
  rounds = rounds_lib.of_trace(trace)
  found = replaying.run(rounds, replaying.Variant(rule, chosen), seed=seed)
  return jax.tree.map(np.asarray, found)


def _path(name, node):
  """Returns the nodes on the path to a node."""
  parents = range(_K) if name == 'chain' else _TREE.parents
  return [*_path(name, parents[node - 1]), node] if node else []


def _total(x):
  return np.sum(np.asarray(x, np.float64))


@pytest.mark.parametrize('name', ['chain', 'tree', 'none'])
def test_what_is_recorded_is_what_is_decoded(runs, name):
  rule = verify.tree if name == 'tree' else verify.chain
  trace, output = runs.trace(name, rule), runs.output(runs.method(name, rule))
  is_token = np.arange(output.tokens.shape[1]) < output.lengths[:, None]
  expected = np.where(is_token, output.tokens, -1)
  np.testing.assert_array_equal(trace.arrays['output'], expected)
  assert len(trace.arrays['round']) == output.rounds.sum()
  assert trace.arrays['num_emitted'].sum() == output.lengths.sum()
  histogram = np.bincount(trace.arrays['num_accepted'], minlength=1)
  accepted = output.accepted.sum(axis=0)
  np.testing.assert_array_equal(histogram, accepted[: histogram.size])


@pytest.mark.parametrize(
  ('name', 'recorded_with', 'rule'),
  [
    ('chain', verify.chain, verify.chain),
    ('chain', verify.chain, verify.block),
    ('tree', verify.tree, verify.tree),
    ('tree', verify.tree, verify.traversal),
    ('tree', verify.tree, verify.Typical()),
  ],
)
def test_with_a_column_a_token_it_is_the_law_itself(
  runs, name, recorded_with, rule
):
  replayed = _replay(runs.trace(name, recorded_with), rule)
  law = jax.jit(jax.vmap(rule.law))
  eos_ids = runs.loaded.tokenizer.eos_ids
  compared = 0
  for i, (observed, going) in enumerate(
    runs.observed(runs.method(name, recorded_with), rounds=4)
  ):
    draft = observed.draft
    stop = np.asarray(law(draft, observed.target_probs).stop, np.float64)
    ends = np.isin(draft.tokens, eos_ids)
    kept, tokens = np.zeros(len(stop)), np.zeros(len(stop))
    for row, node in np.ndindex(stop.shape):
      path = _path(name, node)
      stops = [depth for depth, n in enumerate(path, 1) if ends[row, n - 1]]
      emitted = stops[0] if stops else len(path)
      kept[row] += stop[row, node] * emitted
      tokens[row] += stop[row, node] * (emitted + (not stops))
    np.testing.assert_allclose(replayed.kept[i], kept * going, atol=2e-6)
    np.testing.assert_allclose(replayed.tokens[i], tokens * going, atol=2e-6)
    compared += going.sum()
  assert compared > 3 * len(_PROMPTS)
  assert _total(replayed.kept) / _total(replayed.rounds) > 0.2


def test_the_token_rule_needs_few_columns(runs):
  exact = runs.trace('chain', verify.chain)
  few = runs.trace('chain', verify.chain, num_columns=2)
  assert few.arrays['ids'].shape[2] == 2
  assert trace_file.outside(few)[0] > 0.1
  assert trace_file.outside(exact) == (0, 0)
  for rule, error in ((verify.chain, 1e-6), (verify.block, 0.005)):
    found, expected = (_replay(trace, rule) for trace in (few, exact))
    difference = _total(found.kept) - _total(expected.kept)
    assert abs(difference) <= error * _total(expected.kept)


def test_greedy_rounds_are_replayed_as_they_were(runs):
  for name in ('chain', 'ngram'):
    trace = runs.trace(name, verify.chain, 0.0)
    found, live = _replay(trace, verify.chain), replaying.recorded(trace)
    for value in ('drafted', 'kept', 'tokens', 'rounds'):
      expected = np.asarray(getattr(live, value))
      np.testing.assert_allclose(getattr(found, value), expected, atol=1e-6)
    assert _total(found.variance) < 1e-6


@pytest.mark.parametrize(
  ('name', 'rule'),
  [('chain', verify.chain), ('chain', verify.block), ('tree', verify.tree)],
)
def test_drawn_rounds_agree_with_the_run(runs, name, rule):
  trace = runs.trace(name, rule)
  found, live = _replay(trace, rule), replaying.recorded(trace)
  sd = np.sqrt(_total(found.variance))
  assert 0 < sd < 0.2 * _total(found.tokens)
  assert abs(_total(found.tokens) - _total(live.tokens)) < 3 * sd


def test_block_keeps_no_fewer_than_the_token_rule(runs):
  trace = runs.trace('chain', verify.chain)
  chain, block = (_replay(trace, rule) for rule in (verify.chain, verify.block))
  assert _total(block.tokens) > _total(chain.tokens)


@pytest.mark.parametrize(
  'policy',
  [
    policies.Fixed(2),
    policies.TokenProbability(0.1),
    policies.SVIP(1.75),
    policies.AdaEDL(threshold=0.2),
  ],
)
def test_a_policy_cuts_as_in_a_run_of_its_own(runs, policy):
  # Compares the first round, which begins the same.
  method = runs.method('chain', verify.chain)
  adaptive = drafters.Adaptive(drafter=method.drafter, policies=(policy,))
  method = dataclasses.replace(method, drafter=adaptive)
  ((observed, _),) = runs.observed(method, rounds=1)
  replayed = _replay(runs.trace('chain', verify.chain), verify.chain, policy)
  drafted = np.sum(np.asarray(observed.draft.tokens) >= 0, axis=1)
  assert 0 < drafted.sum() < _K * len(_PROMPTS)
  np.testing.assert_array_equal(replayed.drafted[0], drafted)
  law = jax.vmap(verify.chain.law)(observed.draft, observed.target_probs)
  kept = np.asarray(law.stop) @ np.arange(_K + 1)
  np.testing.assert_allclose(replayed.kept[0], kept, atol=2e-6)


def test_a_policy_goes_on_from_round_to_round(runs):
  trace = runs.trace('chain', verify.chain)
  dear = policies.Fastest(costs=(1, 100, 200, 300), patience=5)
  found = _replay(trace, verify.chain, dear)
  assert found.drafted[0].min() == 1
  assert not found.drafted[1:5].any()
  np.testing.assert_allclose(found.tokens[1:5], found.rounds[1:5], atol=1e-6)
  cheap = policies.Fastest(costs=(1, 1, 1, 1))
  np.testing.assert_allclose(
    _replay(trace, verify.chain, cheap).tokens,
    _replay(trace, verify.chain).tokens,
  )


def test_learning_follows_the_seed(runs):
  trace, policy = (
    runs.trace('chain', verify.chain),
    policies.AdaEDL(threshold=0.2, step=0.5),
  )
  first, again, other = (
    _replay(trace, verify.chain, policy, seed=seed).drafted
    for seed in (0, 0, 1)
  )
  np.testing.assert_array_equal(first, again)
  assert not np.array_equal(first, other)


def test_nothing_is_emitted_behind_an_end():
  # Two rounds of one prompt: certain drafts 0, 1, 2, the second of which ends
  # the text; and a tree whose node 2, a child of node 1, is kept.
  sure = lambda n: jnp.ones((2, 1, n, 1), jnp.float32)
  rounds = rounds_lib.Rounds(
    draft=Draft(
      tokens=jnp.zeros((2, 1, 3), jnp.int32),
      probs=None,
      kind=DraftKind.POINT_MASS,
    ),
    target_probs=sure(4),
    is_end=jnp.asarray([[[False, True, False]], [[False] * 3]]),
    is_there=jnp.ones((2, 1), bool),
  )
  found = replaying.run(rounds, replaying.Variant(verify.chain))
  np.testing.assert_array_equal(found.kept[:, 0], [2, 3])
  np.testing.assert_array_equal(found.tokens[:, 0], [2, 4])
  draft = dataclasses.replace(
    rounds.draft,
    parents=jnp.broadcast_to(jnp.asarray([0, 1, 0]), (2, 1, 3)),
    depth=2,
    num_children=(2, 1, 0, 0),
  )
  is_end = jnp.asarray([[[True, False, False]], [[False, False, True]]])
  in_tree = dataclasses.replace(rounds, draft=draft, is_end=is_end)
  found = replaying.run(in_tree, replaying.Variant(verify.tree))
  np.testing.assert_array_equal(found.kept[:, 0], [1, 2])
  np.testing.assert_array_equal(found.tokens[:, 0], [1, 3])


def test_a_table_of_costs_predicts_speeds(runs):
  trace = runs.trace('chain', verify.chain, seed=1)  # no text ends early
  fixed = {
    n: replaying.Variant(verify.chain, (policies.Fixed(n),)) for n in (0, 2)
  }
  replay = replaying.Replay(variants=fixed, costs=(1.0, 1.25, 1.5, 1.75))
  live, plain, two = replaying.rows(trace, replay)
  assert (plain.drafted, plain.kept, plain.tokens, plain.speed) == (0, 0, 1, 1)
  assert two.drafted == pytest.approx(2, abs=0.2)  # fewer at the limit
  assert two.tokens == pytest.approx(1 + two.kept)
  assert two.tokens < live.tokens
  assert two.tokens * 2 / 3 < two.speed < two.tokens * 2 / 3 * 1.05
  # No draft token was cut after it was drafted. Plain decoding costs 1, not
  # costs[0].
  assert two.speed == two.most_speed
  half = dataclasses.replace(replay, costs=(2.0, 2.5, 3.0, 3.5))
  halved = [row.speed for row in replaying.rows(trace, half)]
  assert halved == pytest.approx([row.speed / 2 for row in (live, plain, two)])
  low, high = two.tokens_ci95
  assert 1 < low < two.tokens < high < 3
  short = dataclasses.replace(replay, costs=(1.0, 2.0))
  with pytest.raises(ValueError, match='2 numbers, but rounds have up to 3'):
    replaying.rows(trace, short)


def test_a_round_costs_what_the_width_that_holds_its_drafts_costs(runs):
  trace = runs.trace('chain', verify.chain, seed=1)  # no text ends early
  fixed = {
    n: replaying.Variant(verify.chain, (policies.Fixed(n),)) for n in (0, 2)
  }
  costs = (1.03, 1.25, 1.5, 1.75)
  replay = replaying.Replay(variants=fixed, costs=costs)
  speeds = lambda widths: [
    row.speed
    for row in replaying.rows(trace, dataclasses.replace(replay, widths=widths))
  ]
  # A fully cut draft costs a plain round, if there is a pass of that width.
  live, plain, two = speeds((0, 3))
  assert plain == pytest.approx(1 / 1.03)
  assert speeds((3,))[1] == pytest.approx(1 / 1.75)
  assert speeds((0, 1, 2, 3)) == speeds(())
  every = speeds(())
  assert live == every[0]  # all drafts are asked for
  # Rounds at the limit have no draft and cost as much as before.
  assert every[2] * 1.5 / 1.75 <= two < every[2] * 1.5 / 1.75 * 1.02


def test_an_n_gram_that_finds_nothing_costs_a_plain_round(runs):
  trace = runs.trace('ngram', verify.chain, 0.0)
  costs = (1.0, 9.0, 9.0, 9.0)
  found = {'all': replaying.Variant(verify.chain)}
  replay = replaying.Replay(variants=found, costs=costs, widths=(0, _K))
  _, row = replaying.rows(trace, replay)
  drafted = np.sum(trace.arrays['tokens'] >= 0, axis=1)
  plain = np.mean(drafted == 0)
  assert 0 < plain < 1
  expected = row.tokens / (plain + 9 * (1 - plain))
  assert row.speed == row.most_speed == pytest.approx(expected)


_LIKELY, _UNLIKELY = 0.0, -9.0


@pytest.mark.parametrize(
  ('policy', 'drafted', 'asked'),
  [
    (policies.Fixed(0), [0, 0], [0, 0]),
    (policies.Fixed(2), [2, 2], [2, 2]),
    # Decided before the draw: the drafter has run for a token that is cut.
    (policies.LargestProbability(0.5), [0, 2], [1, 3]),
    # Decided after the draw: the drafter doesn't run for a further token.
    (policies.TokenProbability(0.5), [1, 3], [1, 3]),
    (policies.LargestProbability(0.0), [3, 3], [3, 3]),
  ],
)
def test_a_draft_that_the_drafter_ran_for_is_counted(policy, drafted, asked):
  # In one prompt's draft the first token is unlikely, in the other's the third.
  log_prob = jnp.asarray(
    [[[_UNLIKELY, _LIKELY, _LIKELY], [_LIKELY, _LIKELY, _UNLIKELY]]]
  )
  sure = lambda n: jnp.ones((1, 2, n, 1), jnp.float32)
  rounds = rounds_lib.Rounds(
    draft=Draft(
      tokens=jnp.zeros((1, 2, 3), jnp.int32),
      probs=sure(3),
      kind=DraftKind.SAMPLED,
      signals=Signals(
        log_prob=log_prob,
        max_log_prob=log_prob,
        rank=jnp.zeros((1, 2, 3), jnp.int32),
        entropy=-log_prob,
      ),
    ),
    target_probs=sure(4),
    is_end=jnp.zeros((1, 2, 3), bool),
    is_there=jnp.ones((1, 2), bool),
  )
  found = replaying.run(rounds, replaying.Variant(verify.chain, (policy,)))
  np.testing.assert_array_equal(found.drafted[0], drafted)
  np.testing.assert_array_equal(found.asked[0], asked)


def test_a_speed_is_between_what_cut_drafts_may_have_cost(runs):
  trace = runs.trace('chain', verify.chain)
  never = replaying.Variant(verify.chain, (policies.LargestProbability(1.0),))
  replay = replaying.Replay(
    variants={'never': never}, costs=(1.03, 1.5, 1.6, 1.7)
  )
  live, row = replaying.rows(trace, replay)
  # Each round but the last ones asks for one draft token, which is then cut.
  assert (row.drafted, row.tokens) == (0, 1)
  assert row.most_speed == pytest.approx(1 / 1.03)
  assert 1 / 1.5 <= row.speed < 1.05 / 1.5
  assert live.speed == pytest.approx(live.tokens / 1.7)
  assert live.speed <= live.most_speed < 1.05 * live.speed


@pytest.mark.parametrize(
  ('name', 'variant', 'message'),
  [
    ('tree', replaying.Variant(verify.block), 'block is for chains'),
    ('tree', replaying.Variant(verify.k_seq), 'k_seq is not exact for'),
    ('chain', replaying.Variant(verify.coupled), 'coupled.law is not exact'),
    (
      'ngram',
      replaying.Variant(verify.chain, (policies.SVIP(),)),
      'SVIP reads Draft.signals',
    ),
    (
      'chain',
      replaying.Variant(verify.chain, (policies.Fastest(costs=(1, 2)),)),
      'costs has 2 numbers',
    ),
  ],
)
def test_what_a_variant_cannot_use_is_refused(runs, name, variant, message):
  trace = runs.trace(name, verify.tree if name == 'tree' else verify.chain)
  replay = replaying.Replay(variants={'odd': variant})
  with pytest.raises(ValueError, match=f"variant 'odd': .*{message}"):
    replaying.rows(trace, replay)


@pytest.mark.parametrize('widths', [(0, 2), (3, 0), (0, 4), (-1, 3)])
def test_widths_fit_the_costs(widths):
  variants = {'it': replaying.Variant(verify.chain)}
  with pytest.raises(ValueError, match=r'Replay\.costs has 4 numbers'):
    replaying.Replay(variants=variants, costs=(1, 2, 3, 4), widths=widths)


def test_a_seed_has_32_bits():
  variants = {'it': replaying.Variant(verify.chain)}
  with pytest.raises(ValueError, match=r'Replay\.seed is 4294967296: give'):
    replaying.Replay(variants=variants, seed=2**32)


def test_a_comparison_has_a_variant():
  with pytest.raises(ValueError, match='variants is empty'):
    replaying.Replay(variants={})


def test_recording_refuses_few_columns_and_meshes(runs, tmp_path):
  evaluation = runs.evaluation(runs.method('tree', verify.tree))
  with pytest.raises(ValueError, match="is 4: method 'it' needs at least 5"):
    recording.units(evaluation, tmp_path, runs.tokens, num_columns=4)
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  refused = pytest.raises(ValueError, match='--record works on one device')
  with jax.set_mesh(mesh), refused:
    recording.units(evaluation, tmp_path, runs.tokens)
  carried = dataclasses.replace(evaluation, carry_policies=True)
  with pytest.raises(ValueError, match='carry_policies is True: bind it to'):
    recording.units(carried, tmp_path, runs.tokens)
  chosen = runs.evaluation(runs.method('ngram', verify.Certified(coupled=True)))
  with pytest.raises(ValueError, match=r"method 'it'.*give verify\.coupled"):
    recording.units(chosen, tmp_path, runs.tokens)


@pytest.fixture
def written(runs, tmp_path):
  """The folder of a trace in two files, and the second file's content."""
  trace = runs.trace('chain', verify.chain, num_columns=4)
  for i, of_file in enumerate((np.arange(2), np.arange(2, len(_PROMPTS)))):
    is_in = np.isin(trace.arrays['prompt'], of_file)
    arrays = {
      name: x[of_file if name == 'output' else is_in]
      for name, x in trace.arrays.items()
    }
    part = trace_file.Trace(trace.header | {'batch': i}, arrays)
    trace_file.write(tmp_path / 'it' / f'{i}.npz', part)
  return tmp_path / 'it', part


def test_a_trace_is_read_as_it_was_written(runs, written):
  folder, _ = written
  found, expected = (
    trace_file.read(folder),
    runs.trace('chain', verify.chain, num_columns=4),
  )
  variant = replaying.Replay(variants={'it': replaying.Variant(verify.block)})
  assert replaying.rows(found, variant) == replaying.rows(expected, variant)
  assert sorted(path.name for path in folder.iterdir()) == ['0.npz', '1.npz']


def test_a_file_holds_the_arrays_and_the_header_alone(written):
  folder, part = written
  with np.load(folder / '1.npz', allow_pickle=False) as found:
    assert set(found) == {'header', *part.arrays}


def test_what_is_no_trace_is_refused(written, tmp_path):
  folder, part = written
  second = folder / '1.npz'
  whole = second.read_bytes()

  def refused(message, path=folder):
    with pytest.raises(ValueError, match=message):
      trace_file.read(path)

  for data in (b'', b'no trace', whole[:99], whole[:-99], whole[99:]):
    second.write_bytes(data)
    refused('1.npz is not a trace, or was cut short: to record it again')
    refused('delete the file and run the same `.* --record` again')
  np.savez(second, header='{}')
  refused('a trace of format None, but this version reads 1')
  np.savez(second, header='{"format": 2}')
  refused('a trace of format 2, but this version reads 1')
  np.savez(second, header=json.dumps({'format': 1}), tokens=np.zeros(3))
  refused('is not a trace')
  np.savez(second, header=np.asarray({}, object))  # a pickle
  refused('is not a trace')
  other = part.header | {'seed': 7}
  trace_file.write(second, trace_file.Trace(other, part.arrays))
  refused('files from different runs')
  second.unlink()
  refused('has 2 of 5 prompts: let .* finish')
  refused(
    'no .npz file: give the folder of one method, such as .*/it', tmp_path
  )
  refused('is not a folder', tmp_path / 'nothing')
