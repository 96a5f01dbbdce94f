"""Adaptive methods as gin files name them, and their rounds' costs."""

import json
import re

import jax
import pytest

from experiments import methods
from experiments.methods import adaptive
import specsample
from specsample import drafters
from specsample import policies
from specsample import testing

_K = 2


@pytest.fixture(scope='module')
def flags(checkpoint, tiny, tmp_path_factory):
  """Flags for the shipped configuration with a tiny draft model."""
  path = tmp_path_factory.mktemp('drafter') / 'draft'
  target = specsample.load(checkpoint)
  drafter = drafters.DraftModel(
    model=target.model, num_draft_tokens=_K, layers=(1,)
  )
  own = drafter.init_params(jax.random.key(0), target.params)
  specsample.save_drafter(path, drafter, own, target=target, card={})
  bindings = (
    f"draft/methods.trained.name = '{path}'",
    f'adaptive.adaptive.num_draft_tokens = {_K}',
    'Fastest.costs = (1.0, 1.2, 1.4)',
    'Evaluation.max_new_tokens = 96',
    "Evaluation.methods = {'autoregressive': @autoregressive/Method(), "
    "'contrary': @contrary/adaptive()}",
  )
  return (
    '--gin_file=configs/runs/adaptive.gin',
    *tiny,
    *(f'--gin_bindings={binding}' for binding in bindings),
  )


@pytest.fixture(scope='module')
def outcomes(flags, commands, tmp_path_factory):
  """The outcomes of both commands, and the folders that they wrote."""
  folders = [tmp_path_factory.mktemp(name) for name in ('compared', 'costs')]
  calls = [
    ['evaluate', *flags, '--limit=1', f'--out={folders[0]}'],
    ['length_costs', *flags, f'--out={folders[1]}'],
  ]
  ended = commands.run_all(calls)
  assert [outcome.code for outcome in ended] == [0, 0], ended
  return ended, folders


def test_rounds_without_drafts_are_most_where_drafts_are_never_kept(outcomes):
  _, (folder, _) = outcomes
  rows = json.loads((folder / 'result.json').read_text())['rows']
  by_name = {row['method']: row for row in rows if row['category'] == 'overall'}
  assert by_name['contrary']['acceptance_by_position'][0] == 0
  assert by_name['contrary']['tokens_per_round'] == 1
  assert by_name['contrary']['drafter'] == 'adaptive'
  assert by_name['contrary']['num_draft_tokens'] == _K
  assert by_name['contrary']['plain_rounds'] > 0.5
  assert by_name['contrary']['verify_ms_by_width'].keys() == {'0', '1', '2'}
  # Its rounds differ from those whose parts are timed.
  assert by_name['contrary']['draft_ms'] is None
  assert by_name['contrary']['prefill_ms'] > 0
  assert by_name['autoregressive']['verify_ms'] > 0
  assert by_name['contrary']['predicted_speedup'] is None
  assert by_name['contrary']['cost_ratio'] is None
  assert by_name['contrary']['leviathan_speedup'] is None
  # It is None if other work on the machine hid the time of a round.
  predicted = by_name['autoregressive']['predicted_speedup']
  assert predicted is None or predicted > 0


def test_the_costs_of_all_lengths_are_printed_as_a_binding(outcomes):
  (_, measured), (_, folder) = outcomes
  costs = json.loads((folder / 'costs.json').read_text())['costs']
  assert list(costs) == ['contrary']
  assert len(costs['contrary']['ms']) == _K + 1
  assert min(costs['contrary']['ms']) > 0
  (binding,) = re.findall(r'policies.Fastest.costs = \((.*)\)', measured.out)
  expected = [
    ms / costs['contrary']['plain_ms'] for ms in costs['contrary']['ms']
  ]
  found = [float(cost) for cost in binding.split(',')]
  assert found == pytest.approx(expected, abs=1e-3)


def test_costs_of_no_adaptive_method_are_refused(
  tiny_evaluate, commands, tmp_path
):
  call = ['length_costs', *tiny_evaluate, f'--out={tmp_path / "out"}']
  (outcome,) = commands.run_all([call])
  assert outcome.code == 2
  assert 'is adaptive: give one made by adaptive.adaptive' in outcome.err
  assert not (tmp_path / 'out').exists()


def test_contrary_negates_the_logits_and_is_of_a_draft_model(checkpoint):
  target = specsample.load(checkpoint)
  drafter = drafters.DraftModel(
    model=target.model, num_draft_tokens=_K, layers=(0,)
  )
  own = drafter.init_params(jax.random.key(0), target.params)
  method = methods.Method(drafter, params=own)
  hidden = jax.random.normal(jax.random.key(1), (1, 3, target.model.dim))

  def logits(method):
    scale = method.params['norm']['scale']
    params = {'target': target.params, 'drafter': method.params}
    return drafter.logits(params, hidden * scale)

  testing_close = lambda x, y: abs(x - y).max() < 1e-5
  assert testing_close(logits(adaptive.contrary(method)), -logits(method))
  with pytest.raises(ValueError, match='the drafter is NoDraft'):
    adaptive.contrary(methods.Method(drafters.NoDraft()))


def test_the_most_drafts_and_the_widths_may_be_given():
  method = methods.Method(
    drafters.Chain(model=testing.HashModel(vocab_size=4), num_draft_tokens=2)
  )
  fixed = (policies.Fixed(1),)
  made = adaptive.adaptive(method, fixed, num_draft_tokens=3)
  assert made.drafter.num_draft_tokens == 3
  assert made.drafter.widths == (0, 1, 2, 3)
  assert adaptive.adaptive(method, fixed, widths=(1,)).drafter.widths == (1, 2)
  longer = methods.with_num_draft_tokens(made, 4).drafter
  assert longer.drafter.num_draft_tokens == 4
  assert longer.widths == (0, 1, 2, 3, 4)


def test_policies_stay_when_the_method_is_fitted_to_a_batch():
  of_size = lambda size: methods.Method(
    drafters.Ngram(num_draft_tokens=size), for_batch=of_size
  )
  made = adaptive.adaptive(of_size(1), (policies.Fixed(1),))
  fitted = methods.of_batch(made, 3).drafter
  assert fitted.policies == (policies.Fixed(1),)
  assert fitted.widths == (0, 1, 2, 3)


def test_settings_that_cannot_be_decoded_are_one_line(
  flags, commands, tmp_path
):
  bad = '--gin_bindings=Sampling.top_p = 1.5'
  call = ['length_costs', *flags, bad, f'--out={tmp_path / "out"}']
  (outcome,) = commands.run_all([call])
  assert outcome.code == 2
  (line,) = outcome.err.splitlines()
  assert 'top_p is 1.5' in line
  assert not (tmp_path / 'out').exists()
