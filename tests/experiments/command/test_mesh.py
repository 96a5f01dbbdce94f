"""The commands on a mesh of 8 devices: their results and their refusals."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from experiments.command import mesh
from specsample import sharding

_MESH = ('--gin_bindings=Mesh.data = 4', '--gin_bindings=Mesh.model = 2')
_NEW_TOKENS = 24
_REFUSED = {
  'Mesh.data = 3': 'a mesh of 3 x 1 needs 3 devices, but there are 8',
  'Mesh.model = 0': 'model is 0: give an integer of at least 1',
  'Mesh.data = 3\nMesh.sequence = 2': (
    'a mesh of 3 x 1 x 2 needs 6 devices, but there are 8: choose data, model, '
    'sequence so that'
  ),
  'Mesh.sequence = 8': 'sequence is 8 and explicit is True',
  'Mesh.data = 8\nMesh.num_slices = 3': 'num_slices is 3 and data is 8',
  "Mesh.rules = (('batch', 'data'),)": (
    "Mesh.rules holds ('batch', 'data'): give pairs such as ('batch', "
    "('data',))"
  ),
  "Mesh.rules = [('batch', ('data',))]": 'Mesh.rules is [',
  "Mesh.rules = (('batch', ('rows',)),)": "with mesh axes 'data', 'model'",
  "Mesh.rules = (('heads', ('model',)),)": (
    "Mesh.rules has 'heads', but no array has an axis of that name"
  ),
  'Evaluation.batch_size = 0': (
    'Evaluation.batch_size is 0: give an integer of at least 1'
  ),
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A folder with prompts of two categories."""
  folder = tmp_path_factory.mktemp('mesh')
  prompts = [
    {'prompt': 'What is ' + i * '2 + ' + '2?', 'category': f'{i > 2}'}
    for i in range(6)
  ]
  lines = [json.dumps(prompt) + '\n' for prompt in prompts]
  (folder / 'prompts.jsonl').write_text(''.join(lines))
  return folder


@pytest.fixture(scope='module')
def outcomes(commands, tiny_methods, tiny_evaluate, cpu_devices, folder):
  """An evaluation with and without a mesh, a generation, and refused flags."""
  evaluate = (
    *('evaluate', *tiny_evaluate, f'--prompts={folder / "prompts.jsonl"}'),
    f'--gin_bindings=Evaluation.max_new_tokens = {_NEW_TOKENS}',
    '--gin_bindings=Evaluation.repeats = 1',
    "--gin_bindings=Evaluation.methods = {'ngram': @ngram/Method()}",
    '--gin_bindings=Sampling.temperature = 1.0',
  )
  in_batches = (*_MESH, '--gin_bindings=Evaluation.batch_size = 4')
  generate = ('generate', *tiny_methods, f'--max_new_tokens={_NEW_TOKENS}')
  calls = {
    'alone': (*evaluate, f'--out={folder / "alone"}'),
    'batches': (*evaluate, *in_batches, f'--out={folder / "batches"}'),
    'generate': (*generate, *_MESH, '--prompt=Hello'),
  }
  for binding in _REFUSED:
    flag = f'--gin_bindings={binding}'
    calls[binding] = (*evaluate, flag, f'--out={folder / "refused"}')
  ended = commands.run_all(list(calls.values()), variables=cpu_devices(8))
  return dict(zip(calls, ended, strict=True))


def _generations(folder):
  lines = (folder / 'journal.jsonl').read_text().splitlines()
  records = [json.loads(line) for line in lines[1:]]
  return [
    record['value']['generations']
    for record in records
    if record['key'][0] == 'generation'
  ]


@pytest.mark.nightly
def test_batches_over_the_data_axis_have_the_tokens_of_one_device(
  outcomes, folder
):
  for name in ('alone', 'batches'):
    assert outcomes[name].code == 0, outcomes[name].err
  alone = _generations(folder / 'alone')
  batches = _generations(folder / 'batches')
  assert [len(batch) for batch in alone] == [1] * 6
  assert [len(batch) for batch in batches] == [4, 2]
  tokens = lambda batches: [row['tokens'] for batch in batches for row in batch]
  assert tokens(batches) == tokens(alone)
  # The tokens were sampled, each row from a stream of its own.
  assert len({tuple(row) for row in tokens(alone)}) == 6


@pytest.mark.nightly
def test_seconds_of_a_batch_are_shared_by_tokens(outcomes, folder):
  del outcomes
  batches = _generations(folder / 'batches')
  for batch in batches:
    costs = [row['seconds'] / len(row['tokens']) for row in batch]
    assert costs == pytest.approx([costs[0]] * len(batch))
  rows = json.loads((folder / 'batches' / 'result.json').read_text())['rows']
  assert [row['category'] for row in rows] == ['overall', 'False', 'True']
  seconds = sum(row['seconds'] for batch in batches for row in batch)
  overall, *decoded_together = rows
  ms = overall['ms_per_token'] * overall['tokens']
  assert ms == pytest.approx(1e3 * seconds)
  assert overall['percent_of_roofline'] > 0
  assert {row['batch_size'] for row in rows} == {4}
  for row in decoded_together:
    assert row['ms_per_token'] is row['percent_of_roofline'] is None
    assert row['tokens_per_round'] >= 1


@pytest.mark.nightly
def test_a_generation_on_a_mesh_is_that_of_one_device(outcomes, greedy):
  outcome = outcomes['generate']
  assert outcome.code == 0, outcome.err
  assert outcome.out == greedy('Hello', _NEW_TOKENS)[1] + '\n'


@pytest.mark.nightly
@pytest.mark.parametrize('binding', _REFUSED)
def test_a_mesh_that_cannot_be_is_one_line(outcomes, folder, binding):
  outcome = outcomes[binding]
  assert outcome.code == 2, outcome.err
  assert outcome.out == ''
  (line,) = outcome.err.splitlines()
  assert re.search(re.escape(_REFUSED[binding]), line), line
  assert not (folder / 'refused').exists()


@pytest.mark.nightly
def test_one_device_is_no_mesh():
  with mesh.Mesh().set():
    assert jax.sharding.get_mesh().empty


@pytest.mark.nightly
def test_no_rules_are_not_the_default_ones():
  assert mesh.Mesh(model=2, rules=()).rules == ()
  assert mesh.Mesh(model=2).rules == sharding.DEFAULT_RULES


@pytest.mark.nightly
def test_rules_hold_within_the_mesh_only():
  own = (('batch', ('data',)), ('vocab', ()))
  (device,) = jax.devices()[:1]
  entered = mesh.entered(sharding.make_mesh(devices=[device]), own)
  with entered:
    assert sharding.rules.value == own
    assert not jax.sharding.get_mesh().empty
  assert sharding.rules.value == sharding.DEFAULT_RULES
  assert jax.sharding.get_mesh().empty


@dataclasses.dataclass(frozen=True)
class _Device:
  """The attributes of a slice's device that `make_mesh` reads."""

  id: int
  slice_index: int
  process_index: int
  platform: str = 'cpu'
  device_kind: str = 'cpu'


@pytest.mark.nightly
def test_slices_divide_the_data_axis():
  # Two slices of two hosts with two devices each, in any order.
  devices = [_Device(i, i // 4, i // 2) for i in range(8)]
  shuffled = [devices[i] for i in (5, 0, 7, 2, 1, 4, 3, 6)]
  grid = sharding.make_mesh(4, 2, num_slices=2, devices=shuffled).devices
  slices = np.vectorize(lambda device: device.slice_index)(grid)
  assert grid.shape == (4, 2)
  assert slices.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
  assert {device.id for device in grid.flat} == set(range(8))
