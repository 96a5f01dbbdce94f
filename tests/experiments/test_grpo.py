"""`python -m experiments.grpo`: what it learns, and what a kill costs it."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from tests.experiments import interrupted

_SETTINGS = {
  'steps': 12,
  'largest': 3,
  'train': 4,
  'held_out': 2,
  'prompts': 4,
  'answers': 4,
  'max_new_tokens': 8,
  'temperature': 1.0,
  'learning_rate': 5e-3,
  'evaluate_every': 8,
  'checkpoint_seconds': 0.0,
}


@pytest.fixture(scope='module')
def flags(tiny):
  """A function that returns the command's flags."""

  def of(out, *bindings, gin_file='configs/runs/grpo.gin', **settings):
    own = [
      f'Reinforcement.{name} = {value!r}'
      for name, value in (_SETTINGS | settings).items()
    ]
    own += [
      'Arm.num_rows = 8',
      'Arm.fewest_rows = None',
      'Arm.history_every = 64',
      # Drafts whatever may be kept, without timing this machine.
      'own/remembering.suffix.target = None',
      'Suffix.min_kept = 0.0',
      *bindings,
    ]
    return (
      *('grpo', f'--gin_file={gin_file}', *tiny, f'--out={out}'),
      *(f'--gin_bindings={binding}' for binding in own),
    )

  return of


@dataclasses.dataclass(frozen=True)
class Run:
  """The outcome of a run, and the files that it left."""

  outcome: object
  out: pathlib.Path
  journal: list
  weights: list
  result: dict

  @classmethod
  def of(cls, outcome, out):
    assert outcome.code == 0, outcome.err
    policy = specsample.load(out / 'policy')
    return cls(
      outcome,
      out,
      _journal(out),
      [np.asarray(leaf) for leaf in jax.tree.leaves(policy.params)],
      json.loads((out / 'grpo.json').read_text()),
    )


def _journal(out):
  """Returns key and value of each record, without times and processes."""
  # Without the header, and without a last line that a kill left incomplete.
  lines = (out / 'journal.jsonl').read_text().split('\n')[1:-1]
  records = [json.loads(line) for line in lines]
  for record in records:
    value = record['value']
    for name in ('update_seconds', 'begins'):
      value.pop(name, None)
    for arm in (value, *value.get('arms', {}).values()):
      arm.pop('tail_seconds', None)
      arm.pop('seconds', None)
  return [(record['key'], record['value']) for record in records]


@pytest.fixture(scope='module')
def whole(flags, commands, tmp_path_factory):
  """A run that is not interrupted."""
  out = tmp_path_factory.mktemp('whole') / 'out'
  return Run.of(commands.run(*flags(out)), out)


@pytest.fixture(scope='module')
def killed(flags, commands, tmp_path_factory):
  """The number of steps at a kill before a checkpoint; the resumed run."""
  out = tmp_path_factory.mktemp('killed') / 'out'
  process = commands.start(*flags(out))
  try:
    interrupted.wait(out, b'"step"', 3, process)
  finally:
    process.kill()  # SIGKILL
    process.communicate()
  kept = len(_journal(out))
  # As if killed between the journal's record and the last checkpoint.
  names = (path.name for path in (out / 'checkpoints').iterdir())
  last = max(int(name) for name in names if name.isdigit())
  shutil.rmtree(out / 'checkpoints' / str(last))
  return kept, Run.of(commands.run(*flags(out)), out)


def test_the_reward_rises(whole):
  rewards = [row['reward'] for row in whole.result['rows']]
  assert len(rewards) == _SETTINGS['steps']
  assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1
  first, *_, last = whole.result['windows']
  assert (first['steps'], last['steps']) == ([1, 2], [11, 12])
  assert last['reward'] == pytest.approx(np.mean(rewards[-2:]))
  after = [record['steps'] for record in whole.result['held_out']]
  assert after == [0, 8, 12]


def test_drafts_change_no_token_and_no_reward(whole):
  history, plain = whole.result['arms']
  assert history['tokens_per_round'] > 1 == plain['tokens_per_round']
  assert history['reward'] == plain['reward']
  assert history['same_tokens'] == _SETTINGS['steps']
  assert history['reward_difference'] == 0
  # An epoch is one step, the first one of the process.
  assert history['timed_steps'] == _SETTINGS['steps'] - 1
  low, high = history['speedup_ci95']
  assert low < history['speedup'] < high
  assert plain['speedup'] is None
  for key, value in whole.journal:
    if key[0] == 'step':
      one, other = value['arms'].values()
      for name in ('reward', 'tokens', 'digest'):
        assert one[name] == other[name]
  expected = 'history and without drafts: the same tokens in 12 of 12 steps\n'
  assert expected in whole.outcome.out


def test_the_second_update_is_clipped_and_moves_the_loss(whole):
  # At the weights that drew the answers the loss is 0.
  for key, value in whole.journal:
    if key[0] == 'step':
      first, second = value['updates']
      assert first['loss'] == pytest.approx(0, abs=1e-5)
      assert first['clipped'] == 0
      learned = value['arms']['history']['reward'] > 0
      assert (second['loss'] < -1e-3) == learned
  assert max(row['clipped'] for row in whole.result['rows']) > 0


def test_a_kill_loses_nothing(whole, killed):
  kept, run = killed
  assert 3 <= kept < _SETTINGS['steps'] + 3
  assert run.journal == whole.journal
  for found, expected in zip(run.weights, whole.weights, strict=True):
    np.testing.assert_array_equal(found, expected)


def test_the_policy_is_what_was_learned(whole, checkpoint):
  before = jax.tree.leaves(specsample.load(checkpoint).params)
  moved = [
    np.abs(np.asarray(leaf) - np.asarray(old)).max()
    for leaf, old in zip(whole.weights, before, strict=True)
  ]
  assert min(moved) > 1e-3
  data = (whole.out / 'grpo.png').read_bytes()
  assert data[:8] == b'\x89PNG\r\n\x1a\n'


def test_a_drafter_learns_while_the_policy_moves(
  flags, commands, checkpoint, tmp_path
):
  target = specsample.load(checkpoint)
  drafter = drafters.MTP(model=target.model, num_draft_tokens=2)
  own = drafter.init_params(jax.random.key(0), target.params)
  specsample.save_drafter(
    tmp_path / 'mtp', drafter, own, target=target, card={}
  )
  outcome = commands.run(
    *flags(
      tmp_path / 'out',
      f"mtp/methods.trained.name = '{tmp_path / 'mtp'}'",
      gin_file='configs/runs/grpo_mtp.gin',
      steps=8,
      drafter_learning_rate=0.01,
    )
  )
  assert outcome.code == 0, outcome.err
  result = json.loads((tmp_path / 'out' / 'grpo.json').read_text())
  losses = [row['drafter_loss'] for row in result['rows']]
  assert np.mean(losses[-2:]) < 0.9 * np.mean(losses[:2])
  learning, shipped, _ = result['arms']
  assert learning['tokens_per_round'] > shipped['tokens_per_round']
  assert learning['same_tokens'] == shipped['same_tokens'] == 8


def test_rollouts_are_measured_and_nothing_is_learned(
  flags, commands, tmp_path
):
  settings = {'gin_file': 'configs/runs/rollouts.gin', 'updates': 0, 'steps': 3}
  outcome = commands.run(
    *flags(
      tmp_path,
      'plain/Arm.num_rows = 16',
      'auto/Arm.num_rows = 16',
      **settings,
    )
  )
  assert outcome.code == 0, outcome.err
  arms = json.loads((tmp_path / 'grpo.json').read_text())['arms']
  assert [arm['num_rows'] for arm in arms] == [4, 4, 16, 16]
  plain = [arm['plain'] for arm in arms]
  of = 'without drafts, {} rows'.format
  assert plain == [of(4), None, of(16), None]
  assert arms[0]['has_history']
  for arm in (arms[0], arms[2]):
    assert arm['same_tokens'] == 3
    assert arm['timed_steps'] == 2
    assert arm['speedup'] > 0
  names = {path.name for path in tmp_path.iterdir()}
  assert 'policy' not in names
  assert not list((tmp_path / 'checkpoints').iterdir())


def test_a_loss_that_is_no_number_ends_the_run(flags, commands, tmp_path):
  outcome = commands.run(*flags(tmp_path / 'out', learning_rate=1e30))
  assert outcome.code == 1
  line = outcome.err.splitlines()[-1]
  found = re.match(r'step (\d) cannot be taken: the loss is nan', line)
  assert found is not None
  assert f'the one of step {int(found[1]) - 1} is kept' in line
  assert not (tmp_path / 'out' / 'policy').exists()


def test_the_policy_of_another_run_is_refused_and_stays(
  flags, commands, whole, tmp_path
):
  out = tmp_path / 'out'
  shutil.copytree(whole.out / 'policy', out / 'policy')
  outcome = commands.run(*flags(out))
  assert outcome.code == 2
  (line,) = outcome.err.splitlines()
  assert 'exists, but this run has taken 0 of 12 steps' in line
  specsample.load(out / 'policy')


_TYPICAL = 'judged.verify = @Typical()'


@pytest.mark.parametrize(
  ('bindings', 'settings', 'message'),
  [
    ([], {'steps': 0}, 'Reinforcement.steps is 0: give an integer of at least'),
    ([], {'answers': 1}, 'answers is 1: give an integer of at least 2'),
    ([], {'temperature': 0.0}, 'temperature is 0.0: give more than 0'),
    ([], {'seed': 2**32}, 'Reinforcement.seed is 4294967296: give an integer'),
    ([], {'prompts': 3}, 'train is 4, no multiple of the 3 prompts of a step'),
    ([], {'train': 8}, '8 sums to train on and 2 held out are 10, but there'),
    ([], {'max_new_tokens': 512}, 'is 512, but the longest question leaves ro'),
    (['Reinforcement.arms = {}'], {}, 'arms is empty: name at least one'),
    ([_TYPICAL], {}, 'verifies with typical, which draws answers from another'),
  ],
)
def test_bad_settings_are_one_line(
  flags, commands, tmp_path, bindings, settings, message
):
  outcome = commands.run(*flags(tmp_path / 'out', *bindings, **settings))
  assert outcome.code == 2
  (line,) = outcome.err.splitlines()
  assert message in line
  assert not (tmp_path / 'out').exists()
