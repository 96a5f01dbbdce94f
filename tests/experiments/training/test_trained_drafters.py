"""Trained drafters as gin files name them, in the commands."""

import json
import re
import shutil

import jax
import pytest

import specsample
from specsample import testing

_NEW_TOKENS = 96
_PROMPT = 'The rain in Spain'


@pytest.fixture(scope='module')
def save(checkpoint):
  """A function that saves weights by their seed and returns the flags."""
  target = specsample.load(checkpoint)
  drafter = specsample.drafters.Medusa(model=target.model, num_draft_tokens=2)
  own = drafter.init_params(jax.random.key(0))

  def save(path, seed):
    noisy = testing.with_noise(own, jax.random.key(seed))
    specsample.save_drafter(path, drafter, noisy, target=target, card={})
    return [f"--gin_bindings=medusa/trained.name = '{path}'"]

  return save


def test_a_prompt_is_decoded_with_any_k(save, tiny, commands, greedy, tmp_path):
  common = ['generate', *tiny, *save(tmp_path / 'medusa', 1)]
  common += ['--drafter=medusa', f'--prompt={_PROMPT}']
  common += [f'--max_new_tokens={_NEW_TOKENS}']
  added = {2: [], 1: ['--num_draft_tokens=1'], 3: ['--num_draft_tokens=3']}
  calls = [
    [*common, *more, f'--out={tmp_path / str(k)}'] for k, more in added.items()
  ]
  outcomes = commands.run_all(calls)
  assert [outcome.code for outcome in outcomes] == [0, 0, 2], outcomes
  for k in (1, 2):
    result = json.loads((tmp_path / str(k) / 'generate.json').read_text())
    assert result['tokens'] == greedy(_PROMPT, _NEW_TOKENS)[0]
    assert len(result['metrics']['acceptance_by_position']) == k
  message = 'num_draft_tokens is 3, but .* has heads for only 2: give a smaller'
  assert re.search(message, outcomes[2].err)


def test_methods_are_compared_by_name(save, tiny, commands, tmp_path):
  path, out = tmp_path / 'medusa', tmp_path / 'out'
  call = [
    'evaluate',
    '--gin_file=configs/runs/evaluate.gin',
    *tiny,
    *save(path, 1),
    "--gin_bindings=Evaluation.methods = {'heads': @medusa/trained()}",
    f'--gin_bindings=Evaluation.max_new_tokens = {_NEW_TOKENS}',
    '--gin_bindings=medusa/trained.num_draft_tokens = 1',
    '--gin_bindings=Method.verify = @Block()',
    '--limit=1',
    f'--out={out}',
  ]
  outcomes = commands.run_all([call, call])
  assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
  row = json.loads((out / 'result.json').read_text())['rows'][0]
  assert (row['method'], row['drafter']) == ('heads', 'medusa')
  assert (row['verifier'], row['num_draft_tokens']) == ('block', 1)
  # Other weights under the same name are not those that were measured.
  shutil.rmtree(path)
  save(path, 2)
  (outcome,) = commands.run_all([call])
  assert outcome.code == 2
  assert (
    'belongs to a run that differs in drafter weights (heads = ' in outcome.err
  )
