"""Policies carry what they learned from one prompt to the next."""

import dataclasses

import jax
import pytest

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import evaluation as evaluation_lib
import specsample
from specsample import drafters
from specsample import policies

_TOKENS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
_PROMPTS = [prompts_lib.Prompt(str(i), '', 'x', i) for i in range(3)]


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
  work = [
    unit
    for unit in evaluation_lib.units(
      evaluation, _PROMPTS, _TOKENS, journal=journal
    )
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
