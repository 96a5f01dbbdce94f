"""Adaptive and judged methods as gin files name them."""

import json
import pathlib
import re
import textwrap

import gin
import jax
import numpy as np
import pytest

from experiments import methods
from experiments.methods import adaptive
import specsample
from specsample import drafters
from specsample import policies
from specsample import testing

_ROOT = pathlib.Path(__file__).parents[3]
_K = 2


@pytest.fixture(scope='module')
def draft(checkpoint, tmp_path_factory):
  """The folder of a tiny draft model."""
  path = tmp_path_factory.mktemp('drafter') / 'draft'
  target = specsample.load(checkpoint)
  drafter = drafters.DraftModel(
    model=target.model, num_draft_tokens=_K, layers=(1,)
  )
  own = drafter.init_params(jax.random.key(0), target.params)
  specsample.save_drafter(path, drafter, own, target=target, card={})
  return path


@pytest.mark.nightly
def test_rounds_without_drafts_are_most_where_drafts_are_never_accepted(
  draft, tiny, commands, tmp_path
):
  bindings = (
    f"draft/methods.trained.name = '{draft}'",
    f'adaptive.adaptive.num_draft_tokens = {_K}',
    'Fastest.costs = (1.0, 1.2, 1.4)',
    'Evaluation.max_new_tokens = 96',
    'Evaluation.repeats = 4',
    "Evaluation.methods = {'autoregressive': @autoregressive/Method(), "
    "'contrary': @contrary/adaptive()}",
  )
  outcome = commands.run(
    *('evaluate', '--gin_file=configs/runs/adaptive.gin', *tiny),
    *(f'--gin_bindings={binding}' for binding in bindings),
    *('--limit=1', f'--out={tmp_path}'),
  )
  assert outcome.code == 0, outcome
  found = json.loads((tmp_path / 'result.json').read_text())['rows']
  plain, contrary = (row for row in found if row['category'] == 'overall')
  assert contrary['acceptance_by_position'][0] == 0
  assert contrary['tokens_per_round'] == 1
  assert contrary['drafter'] == 'adaptive'
  assert contrary['num_draft_tokens'] == _K
  assert contrary['plain_rounds'] > 0.5
  assert contrary['verify_ms_by_width'].keys() == {'0', '1', '2'}
  assert contrary['prefill_ms'] > 0
  # Its rounds differ from those whose parts are timed.
  for name in ('draft_ms', 'predicted_speedup', 'cost_ratio'):
    assert contrary[name] is None
  assert contrary['leviathan_speedup'] is None
  assert plain['verify_ms'] > 0
  # It is None if other work on the machine hid the time of a round.
  assert plain['predicted_speedup'] is None or plain['predicted_speedup'] > 0


@pytest.mark.slow
def test_page_prints_the_costs_as_a_binding(
  draft, checkpoint, capsys, monkeypatch, tmp_path
):
  monkeypatch.setenv('SPECSAMPLE_CACHE', str(tmp_path))
  page = (_ROOT / 'docs' / 'draft_length.md').read_text('utf-8')
  blocks = re.findall(r'(?:^(?: {4}.*)?\n)+', page, re.MULTILINE)
  (example,) = (x for x in blocks if 'policies.Fastest.costs' in x)
  code = textwrap.dedent(example).strip()
  assert len(code.splitlines()) <= 10
  for name, path in (
    ('smollm2-135m-instruct/draft', draft),
    ('smollm2-135m-instruct', checkpoint),
  ):
    code = code.replace(f"'{name}'", f"'{path}'")
  exec(compile(code, 'docs/draft_length.md', 'exec'), {})
  (line,) = capsys.readouterr().out.splitlines()
  gin.parse_config(line)
  costs = gin.query_parameter('policies.Fastest.costs')
  gin.clear_config()
  assert len(costs) == 4 + 1 and min(costs) > 0


def test_contrary_negates_the_logits_of_a_draft_model(checkpoint):
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

  sums = logits(adaptive.contrary(method)) + logits(method)
  np.testing.assert_allclose(sums, 0, atol=1e-5)
  with pytest.raises(ValueError, match='the drafter is NoDraft'):
    adaptive.contrary(methods.Method(drafters.NoDraft()))


def test_most_drafts_and_widths_may_be_given():
  method = methods.Method(
    drafters.Chain(model=testing.HashModel(vocab_size=4), num_draft_tokens=2)
  )
  fixed = (policies.Fixed(1),)
  made = adaptive.adaptive(method, fixed, num_draft_tokens=3)
  assert made.drafter.num_draft_tokens == 3
  assert made.drafter.widths == (0, 1, 2, 3)
  assert adaptive.adaptive(method, fixed, widths=(1,)).drafter.widths == (1, 2)
  longer = methods.remake(made, 4).drafter
  assert longer.drafter.num_draft_tokens == 4
  assert longer.widths == (0, 1, 2, 3, 4)


def _of_size(_, size):
  return methods.Method(drafters.Ngram(num_draft_tokens=size), make=_of_size)


def test_policies_and_rules_stay_when_a_method_is_fitted_to_a_batch():
  made = adaptive.adaptive(_of_size(0, 1), (policies.Fixed(1),))
  fitted = methods.remake(made, batch_size=3).drafter
  assert fitted.policies == (policies.Fixed(1),)
  assert fitted.widths == (0, 1, 2, 3)
  judged = methods.judged(_of_size(0, 1), specsample.verify.coupled)
  for size in (3, 4):  # fitted twice as well
    judged = methods.remake(judged, batch_size=size)
    assert judged.drafter.num_draft_tokens == size
    assert judged.verify == specsample.verify.coupled
