"""What is timed and when: rounds of each width, without compilation."""

import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.decoding import prompts as prompts_lib
from experiments.decoding import setup as setup_lib
from experiments.evaluation import conversations
from experiments.evaluation import decoding
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import round_parts
from experiments.timing import round_times
import specsample
from specsample import drafters
from specsample import policies
from specsample.testing import hash_model
from specsample.testing import trained
from specsample.types import DraftKind

_NGRAM = drafters.Ngram(num_draft_tokens=2)
_PLAIN = methods.Method(drafters.NoDraft())


def _part(evaluation, tokens, folder):
  folder.mkdir(exist_ok=True)
  asked = [prompts_lib.Prompt(str(i), '', 'x', i) for i in range(len(tokens))]
  journal = journal_lib.Journal(folder, {})
  return evaluation_lib.Part(
    evaluation=evaluation, tokens=tokens, prompts=asked, journal=journal
  )


def _units(part):
  return decoding.units(part, conversations.turn(part, 0), {})


@pytest.mark.slow
@pytest.mark.nightly(only=('300-*',))
@pytest.mark.parametrize(
  ('most', 'temperature', 'least_width'),
  [
    (9, 0.0, 1),
    (300, 1.0, 1),  # more tokens than the model takes
    (8, 0.0, 100),  # prompts are padded
  ],
)
def test_nothing_is_compiled_while_it_is_timed(
  checkpoint, num_compiled, tmp_path, most, temperature, least_width
):
  model = hash_model.HashModel(vocab_size=16, seed=most, max_length=128)
  target = specsample.Loaded(model, {}, specsample.load(checkpoint).tokenizer)
  compared = evaluation_lib.Evaluation(
    target=target,
    methods={'none': _PLAIN, 'ngram': methods.Method(_NGRAM)},
    sampling=specsample.Sampling(temperature=temperature),
    max_new_tokens=most,
    batch_size=2,
    least_width=least_width,
    repeats=1,
  )
  _, *work = _units(_part(compared, [[1, 2, 1], [3], [1] * 70, [4]], tmp_path))
  for unit in work:
    unit.warm_up()
    before = num_compiled()
    unit.run()
    # `parts` runs the same rounds and prefills as the generations.
    assert num_compiled() == before, unit.label


@pytest.mark.slow
@pytest.mark.parametrize(
  ('drafter', 'expected'),
  [
    (drafters.NoDraft(), [0]),
    (drafters.Ngram(num_draft_tokens=4), [0, 4]),
    (drafters.Suffix(num_draft_tokens=2, costs=(1.0, 1.2, 1.4)), [0, 1, 2]),
  ],
)
def test_round_of_each_width_is_run(drafter, expected):
  model = trained.tiny_llama(vocab_size=16)
  decoder = specsample.Decoder(model, drafter, specsample.verify.chain)
  params = {'target': model.init(jax.random.key(0)), 'drafter': {}}

  def begin(rows):
    return specsample.prefill(
      decoder,
      params,
      *specsample.pad_prompts(rows),
      jax.random.key(0),
      sampling=specsample.Sampling(),
      max_new_tokens=16,
    )

  drafted = []

  def advance(state):
    state = specsample.advance(decoder, params, state, max_rounds=1)
    drafted.append(np.flatnonzero(np.asarray(state.proposed[0])).tolist())
    return state

  setup_lib.warm_up(begin, advance, [[1, 2, 3, 4, 5, 6]], decoder.widths)
  assert list(decoder.widths) == expected
  assert drafted == [[width] for width in expected]


@pytest.fixture(scope='module')
def evaluation(checkpoint):
  target = specsample.load(checkpoint)
  drafter = drafters.Adaptive(
    drafter=drafters.Chain(model=target.model, num_draft_tokens=2),
    policies=(policies.Fastest(costs=(1.0, 1.3, 1.5), strength=0.5),),
  )
  # Logits with the opposite sign, so that the policy learns not to draft.
  norm = jax.tree.map(lambda x: -x, target.params['norm'])
  return evaluation_lib.Evaluation(
    target=target,
    methods={
      'adaptive': methods.Method(drafter, params=target.params | {'norm': norm})
    },
    sampling=specsample.Sampling(temperature=1.0),
    max_new_tokens=24,
    repeats=0,
    carry_policies=True,
  )


def _decode(evaluation, folder, count=3):
  """Decodes what is missing of the first `count` units; returns the records."""
  part = _part(evaluation, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], folder)
  work = [unit for unit in _units(part) if unit.key[0] == 'generation']
  for unit in work[:count]:
    if unit.key not in part.journal:
      part.journal.add(unit.key, unit.run())
  found = [part.journal[unit.key] for unit in work[:count]]
  part.journal.close()
  return found


def _drafts(records):
  """Returns each prompt's tokens and how many rounds drafted nothing."""
  generations = [record['generations'][0] for record in records]
  return [(one['tokens'], one['stats']['proposed'][0]) for one in generations]


@pytest.mark.slow
def test_prompt_begins_with_what_the_one_before_taught(evaluation, tmp_path):
  # With greedy decoding no draft is ever accepted.
  greedy = specsample.Sampling(temperature=0.0)
  evaluation = dataclasses.replace(
    evaluation, sampling=greedy, max_new_tokens=12
  )
  carried = _drafts(_decode(evaluation, tmp_path / 'carried'))
  fresh = dataclasses.replace(evaluation, carry_policies=False)
  alone = _drafts(_decode(fresh, tmp_path / 'alone'))
  assert carried[0] == alone[0]
  assert carried[1][0] == alone[1][0]
  # The carried policy drafts nothing, while the fresh one tries in vain.
  assert carried[1][1] == 12 > alone[1][1]


def test_run_that_goes_on_draws_what_an_undisturbed_one_draws(
  evaluation, tmp_path
):
  undisturbed = _decode(evaluation, tmp_path / 'whole')
  _decode(evaluation, tmp_path / 'parts', 2)
  resumed = _decode(evaluation, tmp_path / 'parts')
  assert _drafts(resumed) == _drafts(undisturbed)
  policies_of = lambda records: [record['policies'] for record in records]
  assert policies_of(resumed) == policies_of(undisturbed)


@pytest.mark.parametrize(
  ('repeats', 'batches', 'each', 'after'),
  [
    (25, 12, 3, range(12)),
    (4, 10, 1, [1, 4, 6, 9]),
    (1, 3, 1, [2]),
    (5, 1, 5, [0]),
    (0, 3, None, []),
  ],
)
def test_visits_are_spread_over_the_batches(repeats, batches, each, after):
  found = round_parts.visits(repeats, batches)
  assert list(found) == list(after)
  assert {count for count, _ in found.values()} == ({each} if each else set())


@pytest.mark.parametrize('count', [1, 2, 5, 25])
def test_lengths_are_spread_over_those_of_the_prompts(count):
  found = [share for _, share in round_parts.visits(count, count).values()]
  assert found[0] == 0.5
  bounds = [0.0, *sorted(found), 1.0]
  gaps = [after - before for before, after in itertools.pairwise(bounds)]
  # The golden ratio leaves no gap of more than 1.9 times the even one.
  assert max(gaps) < 1.9 / count


def test_batch_has_prompts_of_about_the_length_asked_for():
  of = types.SimpleNamespace(batch_size=2)
  tokens = [[0] * length for length in (5, 1, 4, 2, 6, 3)]
  for shorter, expected in (((0.0,), [1, 2]), ((), [3, 4]), ((0.99,), [5, 6])):
    found = evaluation_lib.Evaluation.typical(of, tokens, *shorter)
    assert list(map(len, found)) == expected


@pytest.mark.parametrize(
  ('bound', 'num_prompts', 'expected'),
  [(None, 3, 0), (None, 4, 8), (None, 80, 8), (2, 1, 2), (0, 80, 0)],
)
def test_parts_are_timed_where_there_are_enough_prompts(
  bound, num_prompts, expected
):
  made = evaluation_lib.Evaluation(
    target=None, methods={'a': _PLAIN}, repeats=bound
  )
  assert made.num_repeats(num_prompts) == expected


def test_times_are_means_over_the_visits(tmp_path):
  journal = journal_lib.Journal(tmp_path, {})
  for i, (draft, plain, wide) in enumerate(((-5, 10, 14), (1, 12, 18))):
    times = {
      'draft_ms': draft,
      'verify_ms': {'0': plain, '4': wide},
      'overhead_ms': {'0': 3, '4': 5},
      'kind': 'sampled',
    }
    journal.add((round_parts.KIND, 'ngram', i), times)
    # Another method whose name begins with the same words.
    journal.add((round_parts.KIND, 'ngram, tree', i), times | {'draft_ms': 9})
  # Drafting takes -2 in the mean, which is taken off the overhead of every
  # width: a round takes as long as before.
  assert round_parts.means(journal, 'ngram') == {
    'draft_ms': 0,
    'verify_ms': {'0': 11, '4': 16},
    'overhead_ms': {'0': 1, '4': 3},
    'kind': 'sampled',
  }
  tree = round_parts.means(journal, 'ngram, tree')
  assert (tree['draft_ms'], tree['overhead_ms']) == (9, {'0': 3, '4': 5})


def test_whole_rounds_are_as_wide_as_they_were():
  # One round of four drafted: 40 ms less 25 for passes and 4 for drafting.
  turn = dict.fromkeys(('prefill', 'plain prefill'), 0.0)
  turn |= dict.fromkeys(('call', 'plain call', 'pass call'), 0.0)
  turn |= dict.fromkeys((('rule call', 0), ('rule call', 4)), 0.0)
  # Times are for sixteen decisions.
  turn |= {('rule', 0): 0.008, ('rule', 4): 0.016}
  turn |= {'drafted call': 0.0, 'plain rounds': 0.02, 'plain done': 4}
  turn |= {'drafted': 0.044, 'drafted width': 2, 'rounds': 0.04, 'done': 4}
  turn |= {('passes', 0): 0.02, ('passes', 4): 0.04}
  found = round_times.medians(
    [turn] * 3, 4, (0, 4), (0, 0, 4, 0), kind=DraftKind.POINT_MASS
  )
  assert found.verify_ms == pytest.approx({'0': 5, '4': 10})
  # The pass over four tokens read the draft of two.
  assert found.draft_ms == pytest.approx(1)
  # In three rounds of four the rule took half a millisecond less.
  rest = 10 - 1 - 25 / 4
  expected = {'0': rest - 0.125, '4': rest + 0.375}
  assert found.overhead_ms == pytest.approx(expected)
  always = round_times.medians([turn], 4, (4,), (4,), kind=DraftKind.SAMPLED)
  assert always.verify_ms == pytest.approx({'4': 10})
  assert always.overhead_ms == pytest.approx({'4': 10 - 1 - 10})
