"""The training command: what it leaves, and what may interrupt it."""

import dataclasses
import json
import pathlib
import re
import resource
import shutil

import jax
import numpy as np
import pytest

from experiments.command import environment
from experiments.training import begin
from experiments.training import training as training_lib
from experiments.training_data import chat
from experiments.training_data import data_folder
import specsample
from specsample import drafters
from specsample import files
from specsample import testing
from specsample.models import fingerprint
from specsample.training import draft
from specsample.training import heads
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

  def num_lines(self):
    """Returns how many measurements there are so far."""
    path = self.folder / 'metrics.jsonl'
    return path.read_text().count('\n') if path.exists() else 0

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
def train(commands, flags):
  """A function that trains in a folder and returns the run."""

  def run(name, folder, *more, **settings):
    call = flags(name, folder, **settings)
    ended = commands.complete('train', *call, *more)
    return Run(folder, ended)

  return run


@pytest.fixture(scope='module')
def hydra(train, tmp_path_factory):
  """An undisturbed run."""
  return train('hydra', tmp_path_factory.mktemp('hydra') / 'run')


def test_the_loss_falls_and_acceptance_rises(hydra):
  train = hydra.of('train')
  assert [x['step'] for x in train] == [*range(5, _NUM_STEPS + 1, 5)]
  assert train[-1]['loss'] < 0.5 * train[0]['loss']
  held_out = hydra.of('held out')
  assert [x['step'] for x in held_out] == [25, 50, 75]
  assert held_out[-1]['loss'] < held_out[0]['loss']
  assert held_out[-1]['tokens_per_round'] > 1.3
  assert hydra.ended.out.splitlines()[-1] == str(hydra.folder / 'drafter')
  assert (hydra.folder / 'curves.png').read_bytes().startswith(b'\x89PNG')


def test_decoding_counts_what_replaying_its_answers_counts(hydra):
  """The data are the target's own answers; only cached vectors are rounded."""
  for found in hydra.of('held out'):
    assert found['tokens'] == found['replayed_tokens']
    assert found['tokens_per_round'] == pytest.approx(
      found['replayed_tokens_per_round'], rel=0.01
    )


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
  totals = np.cumsum([x['answer_tokens'] for x in hydra.of('train')]).tolist()
  seen = dict(zip([x['step'] for x in hydra.of('train')], totals, strict=True))
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
  # Other tests train Medusa and Hydra. DFlash trains as DSpark does, and EAGLE
  # as EAGLE-3 does.
  ['draft', 'hydra/plus', 'medusa/joint', 'dflash2', 'dspark', 'eagle3', 'mtp'],
)
def test_configurations_train(train, name, tmp_path):
  settings = {'on_policy_share': 0.5} if name == 'draft' else {}
  run = train(name, tmp_path / 'run', epochs=3, **settings)
  first, *_, last = run.of('train')
  assert last['loss'] < first['loss']
  is_block = name in ('dflash2', 'dspark')
  entry = 'tokens_by_nodes' if is_block else 'acceptance_by_rank'
  assert entry in run.card()['held_out']
  if name == 'medusa/joint':
    trained = specsample.load(run.folder / 'target')
    specsample.load_drafter(run.folder / 'drafter', trained)


def test_several_folders_are_one_run(train, data, target, tmp_path):
  more = tmp_path / 'more'
  _write_data(more, target, num_shards=4)
  length = {'epochs': None, 'answer_tokens': 48 * 32}  # one epoch
  run = train('medusa', tmp_path / 'run', folders=[data, more], **length)
  card = run.card()
  assert card['data']['answer_tokens'] == (24 + 24) * 32
  found = [x['held_out_answer_tokens'] for x in card['data']['folders']]
  assert found == [12 * 32, 24 * 32]
  assert card['held_out']['replayed']['answer_tokens'] == sum(found)
  assert card['training']['last_step'] == 15  # 12 batches, rounded up to fives


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


@pytest.mark.slow
def test_a_run_that_is_killed_twice_ends_as_an_undisturbed_one(
  commands, flags, train, hydra, changed_code, tmp_path
):
  """It goes on under other code, and then from within its decay."""
  run, often = Run(tmp_path / 'run', None), {'checkpoint_seconds': 1e-3}
  call = ('train', *flags('hydra', run.folder, **often))
  commands.kill_once(lambda: run.num_lines() >= 7, *call)
  taken = run.of('train')[-1]['step']
  assert taken < _DECAY_START
  # Two segments, and more than the 14 lines of the steps before the decay.
  commands.kill_once(lambda: run.num_lines() >= 17, *call, cwd=changed_code)
  assert run.of('train')[-1]['step'] > _DECAY_START
  assert len(run.metrics()) < 2 + sum(map(len, hydra.curve()))
  train('hydra', run.folder, '--tensorboard', **often)
  assert run.curve() == hydra.curve()
  assert run.weights() == hydra.weights()
  first, second, third = run.of('segment')
  assert first['code'] == third['code'] != second['code']
  assert first['first_step'] == 0 <= second['first_step'] <= taken
  assert second['first_step'] < third['first_step'] < _NUM_STEPS
  assert run.card()['training']['segments'] == [first, second, third]
  # TensorBoard shows the measurements of the killed runs too.
  (path,) = (run.folder / 'tensorboard').iterdir()
  found = event_files.scalars(path)
  for kind, tag in (('train', 'train/loss'), ('held out', 'held_out/loss')):
    wanted = [(x['step'], pytest.approx(x['loss'])) for x in hydra.of(kind)]
    assert [(s, value) for name, s, value in found if name == tag] == wanted


def test_accumulated_gradients_give_the_same_curve(train, hydra, tmp_path):
  run = train('hydra', tmp_path / 'run', epochs=3, accumulation_steps=2)
  found, expected = run.of('train')[:3], hydra.of('train')[:3]
  assert [x['step'] for x in found] == [5, 10, 15]
  for name in ('answer_tokens', 'loss', 'gradient_norm', 'kept'):
    of = lambda reports, name=name: [x[name] for x in reports]
    # Parts differ in how many of their tokens are in the draft vocabulary.
    np.testing.assert_allclose(of(found), of(expected), rtol=0.05)


@pytest.mark.slow
def test_two_processes_go_on_on_a_mesh_and_give_the_same_curve(
  commands, flags, hydra, data, cpu_devices, tmp_path
):
  """They compute the target's vectors too, and only the first one writes."""
  run = Run(tmp_path / 'run', None)
  call = flags('hydra', run.folder, checkpoint_seconds=0.0)
  commands.kill_once(lambda: run.num_lines() >= 3, 'train', *call)
  without_vectors = shutil.ignore_patterns('*.npy')
  own = shutil.copytree(data, tmp_path / 'data', ignore=without_vectors)
  call = (
    *('train', *flags('hydra', run.folder, folders=(own,))),
    *('--gin_bindings=Mesh.data = 2', '--gin_bindings=Mesh.model = 2'),
  )
  first, second = commands.run_on_two_hosts(*call, variables=cpu_devices(2))
  assert (first.code, second.code) == (0, 0), (first.err, second.err)
  assert second.out == ''
  assert [x['first_step'] > 0 for x in run.of('segment')] == [False, True]
  for found, expected in zip(run.curve(), hydra.curve(), strict=True):
    of = lambda name, reports: [x[name] for x in reports]
    assert of('step', found) == of('step', expected)
    losses = of('loss', found), of('loss', expected)
    np.testing.assert_allclose(*losses, rtol=0.02)


def test_only_what_a_finished_run_lacks_is_done_again(train, hydra, tmp_path):
  """A kill leaves a part of a drafter in a bucket, which cannot rename."""
  out = shutil.copytree(hydra.folder, tmp_path / 'run')
  card = out / 'drafter' / 'card.json'
  card.unlink()
  assert train('hydra', out).weights() == hydra.weights()
  assert json.loads(card.read_text())['training']['steps'] > 0
  before = hydra.weights()
  again = train('hydra', hydra.folder)
  assert again.ended.out == hydra.ended.out
  assert hydra.weights() == before


@pytest.mark.nightly
def test_a_finished_run_goes_on_from_before_its_decay(train, hydra, tmp_path):
  whole = train('hydra', tmp_path / 'whole', epochs=25)
  out = shutil.copytree(hydra.folder, tmp_path / 'extended')
  extended = train('hydra', out, epochs=25)
  assert extended.curve() == whole.curve()
  assert extended.weights() == whole.weights()
  last = extended.card()['training']
  assert [x['first_step'] for x in last['segments']] == [0, _DECAY_START]
  assert last['last_step'] == 150
  # No step at the full rate is left, so it ends as before.
  assert train('hydra', out, epochs=2).card()['training']['last_step'] == 150


def test_a_run_begins_with_weights_and_keeps_the_first_of_the_best(
  train, hydra, tmp_path
):
  drafter = str(hydra.folder / 'drafter')
  settings = {'learning_rate': 1e-9, 'evaluate_every': 5, 'epochs': 2}
  run = train('hydra', tmp_path / 'run', begin_with=drafter, **settings)
  best = max(hydra.of('held out'), key=lambda x: x['tokens_per_round'])
  first = run.of('held out')[0]
  assert first['loss'] == pytest.approx(best['loss'], rel=0.02)
  assert first['tokens_per_round'] == best['tokens_per_round']
  training = run.card()['training']
  assert training['settings']['Training.begin_with'] == drafter
  # No evaluation is better than the first.
  assert [x['step'] for x in run.of('held out')] == [5, 10, 15]
  assert training['steps'] == 5
  assert training['answer_tokens_seen'] == run.of('train')[0]['answer_tokens']
  assert training['decay_start'] == 10


def test_a_gradient_that_is_no_number_is_named_by_its_step(
  commands, flags, hydra, data, tmp_path
):
  """Covers a run that resumes with vectors that a broken disk spoilt."""
  out = tmp_path / 'run'
  folder = shutil.copytree(data, tmp_path / 'data')
  path = folder / 'shard-00001-hidden.npy'
  vectors = np.load(path)
  dialogue = 40
  vectors[5 * dialogue + 20] = 0x7FC0  # NaN in bfloat16
  np.save(path, vectors)
  settings = {'epochs': 2.5, 'report_every': 1, 'checkpoint_seconds': 0.0}
  call = flags('hydra', out, [folder], **settings)
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
  assert not (out / 'drafter').exists()


@pytest.mark.nightly
def test_a_full_disk_leaves_the_last_checkpoint(commands, flags, tmp_path):
  """A file size limit, set after some checkpoints, stands for a full disk."""
  call = ['train', *flags('hydra', tmp_path / 'run', checkpoint_seconds=1e-3)]
  process = commands.start(*call)
  folder = tmp_path / 'run' / 'checkpoints'
  steps = lambda: [p.name for p in folder.iterdir() if p.name.isdigit()]
  commands.wait(lambda: folder.exists() and steps(), process)
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
  ended = commands.finish(process)
  assert ended.code == 2
  # Now and then orbax's threads complain afterwards, as the process ends.
  (line,) = [x for x in ended.err.splitlines() if 'cannot be written' in x]
  assert 'run the same command again to continue' in line
  assert steps()
  commands.complete(*call)


# What is given, and words of the line that refuses it.
_REFUSED = {
  'truncated': 'shard-00002.npz is damaged',
  'fewer data': 'a run that differs in data: give another',
  'settings': (
    'differs in settings (Training.learning_rate = 0.02 (before: 0.01)): '
  ),
  'no journal': f'checkpoint of step {_NUM_STEPS} belongs to another run',
  'drafter': 'drafter exists, but this run is not at its last step',
  'vocabulary': 'draft_vocab_size is 1000000',
  'max_length': 'begins within max_length, 2 tokens',
}


@pytest.fixture(scope='module')
def refusals(commands, flags, data, hydra, tmp_path_factory):
  """A folder of runs that cannot go on, and the command's outcomes by case."""
  parent = tmp_path_factory.mktemp('refused')
  truncated = shutil.copytree(data, parent / 'truncated')
  shard = truncated / 'shard-00002.npz'
  shard.write_bytes(shard.read_bytes()[:-100])
  fewer = shutil.copytree(data, parent / 'fewer')
  content = json.loads((fewer / 'manifest.json').read_text())
  kept = content | {'shards': content['shards'][:2]}
  (fewer / 'manifest.json').write_text(json.dumps(kept))
  begun = shutil.copytree(hydra.folder, parent / 'without journal')
  shutil.rmtree(begun / 'drafter')
  (begun / 'journal.jsonl').unlink()
  other = parent / 'other'
  (other / 'drafter').mkdir(parents=True)
  large = '--gin_bindings=Hydra.draft_vocab_size = 1000000'
  new = parent / 'new'
  calls = {
    'truncated': flags('hydra', new, [truncated]),
    'fewer data': flags('hydra', hydra.folder, [fewer]),
    'settings': flags('hydra', hydra.folder, learning_rate=0.02),
    'no journal': flags('hydra', begun, learning_rate=1.0),
    'drafter': flags('hydra', other),
    'vocabulary': (*flags('hydra', new), large),
    'max_length': flags('hydra', new, max_length=2),
  }
  ended = commands.run_all([('train', *call) for call in calls.values()])
  return parent, dict(zip(calls, ended, strict=True))


@pytest.mark.parametrize('case', _REFUSED)
def test_what_cannot_be_used_is_refused(refusals, case):
  refusals[1][case].check_refused(_REFUSED[case])


def test_refused_run_changes_no_checkpoint_and_no_drafter(refusals, hydra):
  folder, _ = refusals
  steps = lambda run: {path.name for path in run.glob('checkpoints/[0-9]*')}
  assert steps(folder / 'without journal') == steps(hydra.folder)
  assert list((folder / 'other' / 'drafter').iterdir()) == []
  assert not (folder / 'new').exists()


_MODEL = dataclasses.replace(testing.tiny_llama(), max_length=512)
_INT8 = specsample.Loaded(_MODEL, {}, None, exact_fingerprint='0' * 16)
_CHAIN = draft.ChainObjective(
  drafter=drafters.Chain(model=_MODEL, num_draft_tokens=2), target=_MODEL
)


@pytest.mark.parametrize(
  ('settings', 'words'),
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
    (
      {'answer_tokens': 1000},
      'epochs is 4.0 and Training.answer_tokens is 1000: give one',
    ),
    (
      {'learning_rate': -1.0},
      'Training.learning_rate is -1.0: give a number above 0',
    ),
    ({'seed': 2**32}, 'Training.seed is 4294967296: give an integer from 0 to'),
    (
      {'target': _INT8, 'target_learning_rate': 1e-5, 'cache_hidden': False},
      'are int8 and cannot be trained: load it with weights = None',
    ),
    ({'objective': _CHAIN}, 'drafter is of type Chain: give one th'),
    (
      {'on_policy_share': 0.5},
      'Hydra is not a model that could write answers',
    ),
  ],
)
def test_settings_that_do_not_fit_are_refused(settings, words):
  with pytest.raises(ValueError, match=re.escape(words)):
    _training(**settings)


def _training(**settings):
  hydra = drafters.Hydra(model=_MODEL, num_draft_tokens=2)
  defaults = {
    'target': specsample.Loaded(_MODEL, {}, None),
    'objective': heads.HeadsObjective(drafter=hydra),
  }
  return training_lib.Training(**defaults | settings)


def test_folder_of_data_that_is_given_twice_is_refused():
  with pytest.raises(ValueError, match='a twice: give each folder once'):
    begin.load(['a', 'b', 'a'], None)


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    (
      {'max_length': 254},
      'max_length is 254, but Mesh.sequence divides each row over 4 devices: '
      'give a multiple of 4',
    ),
    (
      {'batch_size': 6},
      'batch_size is 6, but with Mesh.sequence 4 devices have one row each at '
      'a time: give a multiple of 4',
    ),
  ],
)
def test_rows_that_a_mesh_cannot_divide_are_refused(
  monkeypatch, settings, words
):
  for name in ('token_parts', 'batch_parts'):
    monkeypatch.setattr(training_lib.sharding, name, lambda: 4)
  with pytest.raises(ValueError, match=words):
    _training(**settings)
