"""The training command: what it leaves, and what may interrupt it."""

import dataclasses
import json
import pathlib
import re
import resource
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from experiments.command import environment
from experiments.training import training as training_lib
from experiments.training_data import chat
from experiments.training_data import data_folder
import specsample
from specsample import drafters
from specsample import files
from specsample import testing
from specsample.models import fingerprint
from specsample.training import draft
from tests.experiments.training import event_files

_SETTINGS = {
  'epochs': 12.5,
  'decay': 0.2,
  'batch_size': 4,
  'learning_rate': 0.01,
  'warmup_steps': 2,
  'target_first_step': 4,
  'held_out_every': 3,
  'report_every': 5,
  'evaluate_every': 25,
  'decoded_prompt_tokens': 8,
  'decoded_new_tokens': 32,
}
# There are 6 batches per epoch; the last 15 steps are the decay.
_NUM_STEPS = 75
_DECAY_START = 60
_KINDS = ('train', 'held out')
_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Class names that are not the capitalised name of the configuration.
_CLASSES = {
  'dflash2': 'DFlash2',
  'draft': 'DraftModel',
  'dspark': 'DSpark',
  'mtp': 'MTP',
}
_FOR_TWO_LAYERS = {
  'draft': ('DraftModel.layers = (1,)',),
  'dflash2': (
    'DFlash2.feature_layers = (0, 1)',
    'DFlash2.selector_rank = 8',
    'DFlash2.conv_group_size = 4',
  ),
  'dspark': ('DSpark.feature_layers = (0, 1)', 'DSpark.rank = 8'),
  'eagle3': ('Eagle3.feature_layers = (-1, 0, 1)',),
}


@pytest.fixture(scope='module')
def target(checkpoint):
  return specsample.load(checkpoint)


@pytest.fixture(scope='module')
def data(target, tmp_path_factory):
  """A folder of data."""
  folder = tmp_path_factory.mktemp('train') / 'data'
  _write_data(folder, target)
  return folder


def _write_data(folder, target, num_shards=3, seed=0):
  """Writes greedy answers of the target."""
  folder.mkdir()
  vocab_size = target.model.vocab_size
  settings = {'template': chat.Template.of(target.tokenizer).to_json()}
  folder = files.at(folder)
  with data_folder.opened(folder, target, settings) as manifest:
    for number in range(num_shards):
      rng = np.random.default_rng([seed, number])
      prompts = rng.integers(vocab_size, size=(12, 8))
      output = specsample.generate(
        {'target': target.params},
        prompts,
        np.full(12, 8),
        jax.random.key(0),
        model=target.model,
        drafter=specsample.drafters.NoDraft(),
        verify=specsample.verify.chain,
        sampling=specsample.Sampling(),
        max_new_tokens=32,
      )
      tokens = np.concatenate([prompts, output.tokens], axis=1)
      shard = [
        data_folder.Dialogue(row, ((8, 40),), 0.0, data_folder.Source(0), 0)
        for row in tokens.astype(np.int32)
      ]
      data_folder.add(folder, manifest, shard, {'seconds': 1.0})


@pytest.fixture(scope='module')
def flags(tiny, data):
  """A function that returns a configuration's flags."""

  def of(name, out, folders=(data,), **settings):
    size = _CLASSES.get(name, name.split('/')[0].capitalize())
    return (
      f'--recipe={name}',
      *tiny,
      *(
        f'--gin_bindings=Training.{key} = {value!r}'
        for key, value in (_SETTINGS | settings).items()
      ),
      f'--gin_bindings={size}.draft_vocab_size = '
      f'{None if name == "medusa/joint" else 48}',
      f'--gin_bindings={size}.num_draft_tokens = 2',
      *(f'--gin_bindings={more}' for more in _FOR_TWO_LAYERS.get(name, ())),
      *(f'--data={folder}' for folder in folders),
      f'--out={out}',
    )

  return of


@dataclasses.dataclass(frozen=True)
class Run:
  """A folder that the command wrote, and the command's outcome."""

  folder: pathlib.Path
  ended: object

  def metrics(self):
    """Returns the measurements without clock times, each with its kind."""
    lines = (self.folder / 'metrics.jsonl').read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
      for name in ('seconds', 'replayed_seconds'):
        record.pop(name, None)
    return records

  def of(self, kind):
    """Returns the measurements of a kind."""
    records = [x for x in self.metrics() if x['kind'] == kind]
    return [{k: v for k, v in x.items() if k != 'kind'} for x in records]

  def curve(self):
    """Returns the reports and the evaluations."""
    return [self.of(kind) for kind in _KINDS]

  def card(self):
    """Returns the drafter's card."""
    return json.loads((self.folder / 'drafter' / 'card.json').read_text())

  def weights(self):
    """Returns the drafter's weights as bytes."""
    return (self.folder / 'drafter' / 'drafter.safetensors').read_bytes()


@pytest.fixture(scope='module')
def hydra(commands, flags, tmp_path_factory):
  """An undisturbed run."""
  return _train(commands, flags, 'hydra', tmp_path_factory.mktemp('hydra'))


def _train(commands, flags, name, folder, **settings):
  ended = commands.run('train', *flags(name, folder / 'run', **settings))
  assert ended.code == 0, ended.err
  return Run(folder / 'run', ended)


def test_the_loss_falls_and_acceptance_rises(hydra):
  train = hydra.of('train')
  assert [x['step'] for x in train] == [*range(5, _NUM_STEPS + 1, 5)]
  assert train[-1]['loss'] < 0.5 * train[0]['loss']
  held_out = hydra.of('held out')
  assert [x['step'] for x in held_out] == [25, 50, 75]
  assert held_out[-1]['loss'] < held_out[0]['loss']
  assert held_out[-1]['tokens_per_round'] > 1.3
  assert hydra.ended.out.splitlines()[-1] == str(hydra.folder / 'drafter')


def test_decoding_counts_what_replaying_its_answers_counts(hydra):
  """The data are the target's own answers; only cached vectors are rounded."""
  for found in hydra.of('held out'):
    assert found['tokens'] == found['replayed_tokens']
    assert found['tokens_per_round'] == pytest.approx(
      found['replayed_tokens_per_round'], rel=0.01
    )


def test_curves_are_drawn(hydra):
  image = (hydra.folder / 'curves.png').read_bytes()
  assert image.startswith(b'\x89PNG')


def test_the_card_says_how_it_was_trained(hydra, target):
  card = hydra.card()
  best = max(hydra.of('held out'), key=lambda x: x['tokens_per_round'])
  assert card['fingerprint'] == fingerprint.compute(target.params)
  training, held_out = card['training'], card['held_out']
  assert training['steps'] == best['step']
  assert training['decay_start'] == _DECAY_START
  assert training['last_step'] == _NUM_STEPS
  for name in ('tokens_per_round', 'acceptance_by_position'):
    assert held_out[name] == best[name]
    assert held_out['replayed'][name] == best[f'replayed_{name}']
  seen = {
    x['step']: total
    for x, total in zip(
      hydra.of('train'),
      np.cumsum([x['answer_tokens'] for x in hydra.of('train')]).tolist(),
      strict=True,
    )
  }
  assert training['answer_tokens_seen'] == seen[best['step']]
  assert held_out['by_answer_tokens_seen'] == [
    [seen[x['step']], x['tokens_per_round']] for x in hydra.of('held out')
  ]
  by_rank = np.asarray(held_out['acceptance_by_rank'])
  assert by_rank.shape == (2, 4) and 0 < by_rank[0, 0] < by_rank[0].sum() <= 1
  assert card['data']['dialogues'] == 24
  assert card['data']['answer_tokens'] == 24 * 32
  (segment,) = training['segments']
  assert segment == hydra.of('segment')[0]
  assert segment['first_step'] == 0
  assert segment['code'] == environment.source()


@pytest.mark.nightly
@pytest.mark.parametrize(
  'name',
  [
    # Other tests train Medusa and Hydra. DFlash trains as DSpark does, and
    # EAGLE as EAGLE-3 does.
    *(
      'draft',
      'hydra/plus',
      'medusa/joint',
      'dflash2',
      'dspark',
      'eagle3',
      'mtp',
    ),
  ],
)
def test_configurations_train(commands, flags, name, tmp_path):
  settings = {'on_policy_share': 0.5} if name == 'draft' else {}
  run = _train(commands, flags, name, tmp_path, epochs=3, **settings)
  train = run.of('train')
  assert train[-1]['loss'] < train[0]['loss']
  is_block = name in ('dflash2', 'dspark')
  entry = 'tokens_by_nodes' if is_block else 'acceptance_by_rank'
  assert entry in run.card()['held_out']
  if name == 'medusa/joint':
    trained = specsample.load(run.folder / 'target')
    specsample.load_drafter(run.folder / 'drafter', trained)


def test_several_folders_are_one_run(commands, flags, data, target, tmp_path):
  more = tmp_path / 'more'
  _write_data(more, target, num_shards=4)
  settings = {'epochs': None, 'answer_tokens': 48 * 32}  # one epoch
  folders = [data, more]
  run = _train(commands, flags, 'medusa', tmp_path, folders=folders, **settings)
  card = run.card()
  assert card['data']['answer_tokens'] == (24 + 24) * 32
  found = [
    folder['held_out_answer_tokens'] for folder in card['data']['folders']
  ]
  assert found == [12 * 32, 24 * 32]
  assert card['held_out']['replayed']['answer_tokens'] == sum(found)
  assert card['training']['last_step'] == 15  # 12 batches, rounded up to fives


# There are more than 15 lines only in the decay.
@pytest.mark.nightly(but=('17',))
@pytest.mark.parametrize('num_lines', [6, 17])
def test_a_killed_run_gives_the_same_curve_and_weights(
  commands, flags, hydra, num_lines, tmp_path
):
  call = ['train', *flags('hydra', tmp_path / 'run', checkpoint_seconds=1e-3)]
  killed = Run(tmp_path / 'run', None)
  _kill_after(commands, call, killed.folder, num_lines)
  assert num_lines <= len(killed.metrics()) < len(hydra.metrics())
  ended = commands.run(*call)
  assert ended.code == 0, ended.err
  assert killed.curve() == hydra.curve()
  assert killed.weights() == hydra.weights()


@pytest.mark.nightly
def test_a_mesh_gives_the_same_curve(
  commands, flags, hydra, cpu_devices, tmp_path
):
  """Covers a kill too: another mesh goes on from the checkpoint."""
  call = flags('hydra', tmp_path / 'run', checkpoint_seconds=0.0)

  def start(data, model):
    mesh = (f'Mesh.data = {data}', f'Mesh.model = {model}')
    bindings = (f'--gin_bindings={x}' for x in mesh)
    return commands.start('train', *call, *bindings, variables=cpu_devices(8))

  process = start(2, 4)
  folder = tmp_path / 'run' / 'checkpoints'
  while not (folder.exists() and any(p.name == '10' for p in folder.iterdir())):
    assert process.poll() is None, process.stderr.read().decode()
    time.sleep(0.001)
  process.kill()
  process.communicate()
  ended = commands.finish(start(4, 2))
  assert ended.code == 0, ended.err
  run = Run(tmp_path / 'run', ended)
  assert len(run.of('segment')) == 2
  losses = lambda run, kind: [x['loss'] for x in run.of(kind)]
  for kind in _KINDS:
    np.testing.assert_allclose(
      losses(run, kind), losses(hydra, kind), rtol=0.02
    )


def test_a_mesh_that_divides_tokens_gives_the_same_curve(
  commands, flags, hydra, cpu_devices, tmp_path
):
  def call(out, sequence, **settings):
    mesh = (f'Mesh.data = {8 // sequence}', f'Mesh.sequence = {sequence}')
    settings = {'epochs': 3, 'max_length': 320} | settings
    return (
      *('train', *flags('hydra', tmp_path / out, **settings)),
      *(f'--gin_bindings={x}' for x in (*mesh, 'Mesh.explicit = False')),
    )

  ended, *refused = commands.run_all(
    [
      call('run', 4),
      call('of lengths', 4, max_length=254),
      call('of rows', 2, batch_size=6),
    ],
    cpu_devices(8),
  )
  assert ended.code == 0, ended.err
  run = Run(tmp_path / 'run', ended)
  found, expected = run.of('train')[:3], hydra.of('train')[:3]
  of = lambda reports: [x['loss'] for x in reports]
  np.testing.assert_allclose(of(found), of(expected), rtol=0.05)
  messages = (
    'Training.max_length is 254, but Mesh.sequence divides each row over 4 '
    'devices: give a multiple of 4',
    'Training.batch_size is 6, but with Mesh.sequence 4 devices have one row '
    'each at a time: give a multiple of 4',
  )
  for outcome, message in zip(refused, messages, strict=True):
    assert (outcome.code, message in outcome.err) == (2, True), outcome.err
  assert {x.name for x in tmp_path.iterdir()} == {'run'}


@pytest.mark.parametrize(
  ('settings', 'tolerance'),
  [
    ({'packed_length': 400}, 1e-4),
    # Parts differ in how many of their tokens are in the draft vocabulary.
    ({'accumulation_steps': 2}, 0.05),
  ],
)
def test_the_same_examples_have_the_same_curve(
  commands, flags, hydra, settings, tolerance, tmp_path
):
  run = _train(commands, flags, 'hydra', tmp_path, epochs=3, **settings)
  found, expected = run.of('train')[:3], hydra.of('train')[:3]
  assert [x['step'] for x in found] == [5, 10, 15]
  for name in ('answer_tokens', 'loss', 'gradient_norm', 'kept'):
    of = lambda reports, name=name: [x[name] for x in reports]
    np.testing.assert_allclose(of(found), of(expected), rtol=tolerance)


def test_two_processes_give_the_same_curve(
  commands, flags, hydra, data, cpu_devices, tmp_path
):
  """They compute the target's vectors too, and only the first one writes."""
  own = tmp_path / 'data'
  own.mkdir()
  for name in ('manifest.json', *(f'shard-0000{i}.npz' for i in range(3))):
    shutil.copy(data / name, own)
  call = (
    *('train', *flags('hydra', tmp_path / 'run', folders=(own,))),
    *('--gin_bindings=Mesh.data = 4', '--gin_bindings=Mesh.model = 2'),
  )
  first, second = commands.run_on_two_hosts(*call, variables=cpu_devices(4))
  assert (first.code, second.code) == (0, 0), (first.err, second.err)
  assert second.out == ''
  run = Run(tmp_path / 'run', first)
  of = lambda run: [(x['kind'], x.get('step')) for x in run.metrics()]
  assert of(run) == of(hydra)
  losses = lambda run, kind: [x['loss'] for x in run.of(kind)]
  for kind in _KINDS:
    np.testing.assert_allclose(
      losses(run, kind), losses(hydra, kind), rtol=0.02
    )


def test_tensorboard_gets_what_an_earlier_run_did_not_write(
  commands, flags, hydra, tmp_path
):
  out = shutil.copytree(hydra.folder, tmp_path / 'run')
  ended = commands.run('train', *flags('hydra', out), '--tensorboard')
  assert ended.code == 0, ended.err
  (path,) = (out / 'tensorboard').iterdir()
  found = event_files.scalars(path)
  for kind, tag in (('train', 'train/loss'), ('held out', 'held_out/loss')):
    wanted = [(x['step'], pytest.approx(x['loss'])) for x in hydra.of(kind)]
    assert [(s, value) for name, s, value in found if name == tag] == wanted


def test_a_finished_run_is_not_done_again(commands, flags, hydra):
  before = hydra.weights()
  ended = commands.run('train', *flags('hydra', hydra.folder))
  assert ended.code == 0
  assert ended.out == hydra.ended.out
  assert hydra.weights() == before


def test_the_drafter_of_another_run_is_not_taken_for_its_own(
  commands, flags, tmp_path
):
  drafter = tmp_path / 'run' / 'drafter'
  drafter.mkdir(parents=True)
  ended = commands.run('train', *flags('hydra', tmp_path / 'run'))
  assert ended.code == 2
  assert f'{drafter} exists, but this run is not at its last step' in ended.err
  assert list(drafter.iterdir()) == []


def test_a_drafter_that_is_not_whole_is_written_again(
  commands, flags, hydra, tmp_path
):
  """A kill leaves such a drafter in a bucket, where renaming is impossible."""
  out = shutil.copytree(hydra.folder, tmp_path / 'run')
  (out / 'drafter' / 'card.json').unlink()
  ended = commands.run('train', *flags('hydra', out))
  assert ended.code == 0, ended.err
  assert Run(out, ended).weights() == hydra.weights()
  assert Run(out, ended).card()['training']['steps'] > 0


def _kill_after(commands, call, folder, num_lines):
  """Starts a command and kills it when its metrics have that many lines."""
  process = commands.start(*call)
  deadline = time.monotonic() + 300
  path = folder / 'metrics.jsonl'
  count = lambda: path.read_text().count('\n') if path.exists() else 0
  while count() < num_lines:
    assert process.poll() is None, process.stderr.read().decode()
    assert time.monotonic() < deadline
    time.sleep(0.001)
  process.kill()
  process.communicate()


@pytest.fixture(scope='module')
def changed_code(tmp_path_factory):
  """A copy of the repository with a change in one code file."""
  copy = tmp_path_factory.mktemp('changed')
  ignored = shutil.ignore_patterns('__pycache__')
  for name in ('experiments', 'specsample'):
    shutil.copytree(_ROOT / name, copy / name, ignore=ignored)
  for name in ('configs', 'checkpoints'):
    (copy / name).symlink_to(_ROOT / name)
  with (copy / 'experiments' / 'trainer.py').open('a') as file:
    file.write('\n# A comment.\n')
  return copy


def test_a_run_goes_on_under_other_code(
  commands, flags, hydra, changed_code, tmp_path
):
  out = tmp_path / 'run'
  call = flags('hydra', out, checkpoint_seconds=1e-3)
  _kill_after(commands, ['train', *call], out, 7)
  run = Run(out, None)
  taken = run.of('train')[-1]['step']
  assert taken < _DECAY_START
  process = commands.start('train', *call, cwd=changed_code)
  ended = commands.finish(process)
  assert ended.code == 0, ended.err
  assert run.curve() == hydra.curve()
  assert run.weights() == hydra.weights()
  first, second = run.of('segment')
  assert first['code'] != second['code']
  assert first['first_step'] == 0 <= second['first_step'] <= taken
  assert run.card()['training']['segments'] == [first, second]


@pytest.mark.nightly
def test_a_finished_run_goes_on_from_before_its_decay(
  commands, flags, hydra, tmp_path
):
  whole = _train(commands, flags, 'hydra', tmp_path / 'whole', epochs=25)
  out = shutil.copytree(hydra.folder, tmp_path / 'extended')
  ended = commands.run('train', *flags('hydra', out, epochs=25))
  assert ended.code == 0, ended.err
  extended = Run(out, ended)
  assert extended.curve() == whole.curve()
  assert extended.weights() == whole.weights()
  last = extended.card()['training']
  assert [x['first_step'] for x in last['segments']] == [0, _DECAY_START]
  assert last['last_step'] == 150
  # No step at the full rate is left, so it ends as before.
  ended = commands.run('train', *flags('hydra', out, epochs=2))
  assert ended.code == 0, ended.err
  assert extended.card()['training']['last_step'] == 150


def test_a_run_begins_with_the_weights_of_another(
  commands, flags, hydra, tmp_path
):
  drafter = str(hydra.folder / 'drafter')
  settings = {'begin_with': drafter, 'learning_rate': 1e-9, 'epochs': 1}
  run = _train(commands, flags, 'hydra', tmp_path, **settings)
  best = max(hydra.of('held out'), key=lambda x: x['tokens_per_round'])
  first = run.of('held out')[0]
  assert first['loss'] == pytest.approx(best['loss'], rel=0.02)
  assert first['tokens_per_round'] == best['tokens_per_round']
  assert run.card()['training']['settings']['Training.begin_with'] == drafter


def test_the_first_of_the_best_weights_are_kept(commands, flags, tmp_path):
  settings = {'learning_rate': 1e-9, 'evaluate_every': 5, 'epochs': 2}
  run = _train(commands, flags, 'hydra', tmp_path, **settings)
  # No evaluation is better than the first.
  assert [x['step'] for x in run.of('held out')] == [5, 10, 15]
  training = run.card()['training']
  assert training['steps'] == 5
  assert training['answer_tokens_seen'] == run.of('train')[0]['answer_tokens']
  assert training['decay_start'] == 10


def test_ctrl_c_leaves_one_line(commands, flags, tmp_path):
  call = flags('hydra', tmp_path / 'run', epochs=1000)
  process = commands.start('train', *call)
  metrics = tmp_path / 'run' / 'metrics.jsonl'
  while not (metrics.exists() and '"train"' in metrics.read_text()):
    assert process.poll() is None
    time.sleep(0.01)
  process.send_signal(signal.SIGINT)
  ended = commands.finish(process)
  assert ended.code == 130
  assert ended.err.splitlines()[-1] == (
    'interrupted: run the same command again to continue'
  )


def test_a_loss_that_is_no_number_stops_the_run(commands, flags, tmp_path):
  out = tmp_path / 'run'
  settings = {'learning_rate': 1e38, 'warmup_steps': 0, 'report_every': 1}
  call = flags('medusa', out, **settings)
  ended = commands.run('train', *call)
  assert ended.code == 1
  *_, line = ended.err.splitlines()
  assert re.match(r'step [12] cannot be taken: the loss is ', line)
  assert 'none is kept' in line
  assert not (out / 'drafter').exists()


def test_a_gradient_that_is_no_number_is_named_by_its_step(
  commands, flags, hydra, data, tmp_path
):
  """Covers a run that resumes with vectors that a broken disk spoilt."""
  out = tmp_path / 'run'
  folder = tmp_path / 'data'
  settings = {'epochs': 2.5, 'report_every': 1, 'checkpoint_seconds': 0.0}
  call = flags('hydra', out, [folder], **settings)
  shutil.copytree(data, folder)
  path = folder / 'shard-00001-hidden.npy'
  vectors = np.load(path)
  dialogue = 40
  vectors[5 * dialogue + 20] = 0x7FC0  # NaN in bfloat16
  np.save(path, vectors)
  ended = commands.run('train', *call)
  assert ended.code == 1
  *_, line = ended.err.splitlines()
  found = re.match(r'step (\d+) cannot be taken: the loss is nan', line)
  step = int(found[1])
  kept = [p.name for p in (out / 'checkpoints').iterdir() if p.name.isdigit()]
  assert max(map(int, kept), default=0) == step - 1
  last = f'the one of step {step - 1} is kept' if step > 1 else 'none is kept'
  assert last in line
  if step > 1:
    assert Run(out, ended).of('train')[-1]['step'] == step - 1


def test_checkpoints_without_their_journal_are_refused(
  commands, flags, hydra, tmp_path
):
  out = tmp_path / 'run'
  shutil.copytree(hydra.folder, out, ignore=shutil.ignore_patterns('drafter'))
  checkpoints = sorted((out / 'checkpoints').iterdir(), key=lambda p: p.name)
  kept = [p.name for p in checkpoints if p.name.isdigit()]
  (out / 'journal.jsonl').unlink()
  ended = commands.run('train', *flags('hydra', out, learning_rate=1.0))
  assert ended.code == 2
  *_, line = ended.err.splitlines()
  assert f'the checkpoint of step {_NUM_STEPS} belongs to another run' in line
  assert kept == [
    p.name
    for p in sorted((out / 'checkpoints').iterdir(), key=lambda p: p.name)
    if p.name.isdigit()
  ]


@pytest.mark.nightly
def test_a_full_disk_leaves_the_last_checkpoint(commands, flags, tmp_path):
  """A file size limit, set after some checkpoints, stands for a full disk."""
  call = ['train', *flags('hydra', tmp_path / 'run', checkpoint_seconds=1e-3)]
  process = commands.start(*call)
  folder = tmp_path / 'run' / 'checkpoints'
  steps = lambda: [p.name for p in folder.iterdir() if p.name.isdigit()]
  while not (folder.exists() and steps()):
    assert process.poll() is None, process.stderr.read().decode()
    time.sleep(0.001)
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
  ended = commands.finish(process)
  assert ended.code == 2
  # Now and then orbax's threads complain afterwards, as the process ends.
  (line,) = [x for x in ended.err.splitlines() if 'cannot be written' in x]
  assert 'run the same command again to continue' in line
  assert steps()
  ended = commands.run(*call)
  assert ended.code == 0, ended.err


@pytest.fixture(scope='module')
def refusals(commands, flags, data, hydra, target, tmp_path_factory):
  """Outcomes of the command by case, given input that it cannot use."""
  parent = tmp_path_factory.mktemp('refused')
  calls = {}

  def case(name, configuration='hydra', out=None, more=(), **settings):
    folder = parent / name
    shutil.copytree(data, folder)
    out = out or parent / f'{name}-run'
    call = flags(configuration, out, [folder], **settings)
    calls[name] = ['train', *call, *more]
    return folder

  (case('empty') / 'shard-00001.npz').write_bytes(b'')
  shard = case('truncated') / 'shard-00002.npz'
  shard.write_bytes(shard.read_bytes()[:-100])
  manifest = case('another target') / 'manifest.json'
  content = json.loads(manifest.read_text())
  manifest.write_text(json.dumps(content | {'target': '0' * 16}))
  other = content | {'settings': {'template': {'before': [1], 'after': [2]}}}
  (case('another tokenizer') / 'manifest.json').write_text(json.dumps(other))
  shutil.rmtree(case('nothing'))
  few = case('one shard')
  for number in (1, 2):
    (few / f'shard-{number:05}.npz').unlink()
  kept = content | {'shards': content['shards'][:1]}
  (few / 'manifest.json').write_text(json.dumps(kept))
  case('settings', out=hydra.folder, learning_rate=0.02)
  case('objective', 'medusa', out=hydra.folder)
  other = case('other data', out=hydra.folder)
  shutil.rmtree(other)
  _write_data(other, target, seed=1)
  fewer = case('fewer data', out=hydra.folder)
  (fewer / 'shard-00002.npz').unlink()
  content = json.loads((fewer / 'manifest.json').read_text())
  kept = content | {'shards': content['shards'][:2]}
  (fewer / 'manifest.json').write_text(json.dumps(kept))
  case('two lengths', answer_tokens=1000)
  case('room', decoded_prompt_tokens=512)
  case('on policy', on_policy_share=0.5)
  case('negative', learning_rate=-1.0)
  case('seed', seed=2**32)
  case('vocabulary', more=['--gin_bindings=Hydra.draft_vocab_size = 1000000'])
  case('max_length', max_length=2)
  case('held out', held_out_every=0)
  case('twice', more=[f'--data={parent / "twice"}'])
  drafter = str(hydra.folder / 'drafter')
  case('begin with nothing', begin_with=str(parent / 'drafter'))
  case('begin with another', 'medusa', begin_with=drafter)
  more = ['--gin_bindings=Hydra.num_layers = 2']
  case('begin with others', begin_with=drafter, more=more)
  ended = commands.run_all(list(calls.values()))
  return dict(zip(calls, ended, strict=True))


@pytest.mark.parametrize(
  ('case', 'expected'),
  [
    ('empty', 'shard-00001.npz is damaged'),
    ('truncated', 'shard-00002.npz is damaged'),
    ('another target', 'was written by target 0000000000000000'),
    (
      'another tokenizer',
      'was written with another tokenizer or chat',
    ),
    ('nothing', 'manifest.json does not exist: make_data --out writes it'),
    ('one shard', 'run make_data again with more'),
    (
      'settings',
      'differs in settings (Training.learning_rate = 0.02 (before: 0.01)): ',
    ),
    (
      'objective',
      'drafter = Medusa (before: Hydra)',
    ),
    ('other data', 'a run that differs in data: give another'),
    ('fewer data', 'a run that differs in data: give another'),
    (
      'two lengths',
      'epochs is 12.5 and Training.answer_tokens is 1000: give one',
    ),
    ('room', 'decoded_new_tokens is 32, but the target takes 512 tokens'),
    ('on policy', 'Hydra is not a model that could write answers'),
    ('negative', 'Training.learning_rate is -1.0: give a number above 0'),
    ('seed', 'Training.seed is 4294967296: give an integer from 0 to'),
    ('vocabulary', 'draft_vocab_size is 1000000'),
    ('max_length', 'begins within max_length, 2 tokens'),
    ('held out', 'held_out_every is 0: give at least 2'),
    ('twice', 'twice: give each folder once'),
    (
      'begin with nothing',
      'is neither a folder nor a drafter that the library ships',
    ),
    (
      'begin with another',
      'is a Hydra, but this run trains a Medusa: name a drafter of that kind',
    ),
    (
      'begin with others',
      'blocks.1.linear.bias of shape (48,) is unknown): give both',
    ),
  ],
)
def test_what_cannot_be_used_is_refused(refusals, case, expected):
  outcome = refusals[case]
  assert outcome.code == 2
  assert outcome.out == ''
  (line,) = outcome.err.splitlines()
  assert expected in line


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (
      {'packed_length': 100},
      'packed_length is 100 and max_length is 256: a row must have room for '
      'the longest example, so give packed_length = 256 or more',
    ),
    (
      {'packed_length': 513},
      'packed_length is 513, but the target reads at most 512 tokens: give',
    ),
    (
      {'packed_length': 512, 'on_policy_share': 0.5},
      'packed_length is 512 and on_policy_share is 0.5: the draft model writes',
    ),
    (
      {'accumulation_steps': 3},
      'batch_size is 8 and accumulation_steps is 3: give a divisor',
    ),
  ],
)
def test_rows_that_do_not_fit_are_refused(settings, message):
  model = dataclasses.replace(testing.tiny_llama(), max_length=512)
  with pytest.raises(ValueError, match=message):
    training_lib.Training(
      target=specsample.Loaded(model, {}, None), objective=None, **settings
    )


def test_a_target_of_int8_does_not_learn():
  target = specsample.Loaded(None, {}, None, exact_fingerprint='0' * 16)
  with pytest.raises(ValueError, match=r'are int8.*weights = None'):
    training_lib.Training(
      target=target,
      objective=None,
      target_learning_rate=1e-5,
      cache_hidden=False,
    )


def test_a_drafter_that_cannot_be_saved_is_not_trained():
  model = testing.tiny_llama()
  objective = draft.ChainObjective(
    drafter=drafters.Chain(model=model, num_draft_tokens=2), target=model
  )
  target = specsample.Loaded(model, {}, None)
  with pytest.raises(ValueError, match='drafter is of type Chain: give one th'):
    training_lib.Training(target=target, objective=objective)
