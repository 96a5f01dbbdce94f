"""Nothing is compiled while it is timed, and policies are carried over."""

import dataclasses

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
import specsample
from specsample import drafters
from specsample import policies
from specsample.testing import hash_model
from specsample.testing import trained

_TOKENS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
_PROMPTS = [prompts_lib.Prompt(str(i), '', 'x', i) for i in range(3)]


@pytest.mark.nightly(but=('9-0.0',))
@pytest.mark.parametrize(
  ('most', 'temperature'),
  [(9, 0.0), (300, 1.0)],  # 300 is more tokens than the model takes
)
def test_nothing_is_compiled_while_it_is_timed(
  checkpoint, num_compiled, tmp_path, most, temperature
):
  _run_compiled(checkpoint, num_compiled, tmp_path, most, temperature)


def test_nothing_is_compiled_for_prompts_that_are_padded(
  checkpoint, num_compiled, tmp_path
):
  _run_compiled(checkpoint, num_compiled, tmp_path, 8, 0.0, least_width=100)


def _run_compiled(
  checkpoint, num_compiled, tmp_path, most, temperature, *, least_width=1
):
  """Runs an evaluation, and asserts that its work compiles nothing."""
  model = hash_model.HashModel(vocab_size=16, seed=most, max_length=128)
  target = specsample.Loaded(model, {}, specsample.load(checkpoint).tokenizer)
  compared = evaluation_lib.Evaluation(
    target=target,
    methods={
      'none': methods.Method(specsample.drafters.NoDraft()),
      'ngram': methods.Method(specsample.drafters.Ngram(num_draft_tokens=2)),
    },
    sampling=specsample.Sampling(temperature=temperature),
    max_new_tokens=most,
    batch_size=2,
    least_width=least_width,
    repeats=1,
  )
  tokens = [[1, 2, 1], [3], [1] * 70, [4]]
  asked = [prompts_lib.Prompt(str(i), '', '', line=i) for i in range(4)]
  part = evaluation_lib.Part(
    evaluation=compared,
    tokens=tokens,
    prompts=asked,
    journal=journal_lib.Journal(tmp_path, {}),
  )
  _, *work = decoding.units(part, conversations.turn(part, 0), {})
  for unit in work:
    unit.warm_up()
    before = num_compiled()
    unit.run()
    # `parts` runs the same rounds and prefills as the generations.
    assert num_compiled() == before, unit.label


@pytest.mark.parametrize(
  ('drafter', 'expected'),
  [
    (specsample.drafters.NoDraft(), [0]),
    (specsample.drafters.Ngram(num_draft_tokens=4), [0, 4]),
    (
      specsample.drafters.Suffix(
        num_draft_tokens=4, costs=(1.0, 1.2, 1.4, 1.6, 1.8)
      ),
      [0, 1, 2, 3, 4],
    ),
  ],
)
def test_a_round_of_each_width_is_run(drafter, expected):
  model = trained.tiny_llama(vocab_size=16)
  decoder = specsample.Decoder(model, drafter, specsample.verify.chain)
  params = {'target': model.init(jax.random.key(0)), 'drafter': {}}

  def begin(rows):
    tokens, lengths = specsample.pad_prompts(rows)
    return specsample.prefill(
      decoder,
      params,
      tokens,
      lengths,
      jax.random.key(0),
      sampling=specsample.Sampling(),
      max_new_tokens=16,
    )

  drafted = []

  def advance(state):
    state = specsample.advance(decoder, params, state, max_rounds=1)
    drafted.append(np.flatnonzero(np.asarray(state.proposed[0])).tolist())
    return state

  widths = decoder.widths
  setup_lib.warm_up(begin, advance, [[1, 2, 3, 4, 5, 6]], widths)
  assert list(widths) == expected
  assert drafted == [[width] for width in widths]


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


def _decode(evaluation, folder, count):
  """Decodes what is missing of the first `count` units; returns the records."""
  folder.mkdir(exist_ok=True)
  journal = journal_lib.Journal(folder, {})
  part = evaluation_lib.Part(
    evaluation=evaluation, tokens=_TOKENS, prompts=_PROMPTS, journal=journal
  )
  work = [
    unit
    for unit in decoding.units(part, conversations.turn(part, 0), {})
    if unit.key[0] == 'generation'
  ]
  for unit in work[:count]:
    if unit.key not in journal:
      journal.add(unit.key, unit.run())
  found = [journal[unit.key] for unit in work[:count]]
  journal.close()
  return found


def _drafts(records):
  """Returns each prompt's tokens and how many rounds drafted nothing."""
  generations = [record['generations'][0] for record in records]
  return [(one['tokens'], one['stats']['proposed'][0]) for one in generations]


def test_a_prompt_begins_with_what_the_one_before_taught(evaluation, tmp_path):
  # With greedy decoding no draft is ever kept.
  greedy = specsample.Sampling(temperature=0.0)
  evaluation = dataclasses.replace(
    evaluation, sampling=greedy, max_new_tokens=12
  )
  carried = _drafts(_decode(evaluation, tmp_path / 'carried', 3))
  fresh = dataclasses.replace(evaluation, carry_policies=False)
  alone = _drafts(_decode(fresh, tmp_path / 'alone', 3))
  assert carried[0] == alone[0]
  assert carried[1][0] == alone[1][0]
  # The carried policy drafts nothing, while the fresh one tries in vain.
  assert carried[1][1] == 12 > alone[1][1]


def test_a_run_that_goes_on_draws_what_an_undisturbed_one_draws(
  evaluation, tmp_path
):
  undisturbed = _decode(evaluation, tmp_path / 'whole', 3)
  _decode(evaluation, tmp_path / 'parts', 2)
  resumed = _decode(evaluation, tmp_path / 'parts', 3)
  assert _drafts(resumed) == _drafts(undisturbed)
  policies_of = lambda records: [record['policies'] for record in records]
  assert policies_of(resumed) == policies_of(undisturbed)
