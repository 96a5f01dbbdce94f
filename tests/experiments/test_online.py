"""A server that learns: its results, and what a kill costs it."""

import ast
import dataclasses
import functools
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from experiments import methods
from experiments.command import environment
from experiments.decoding import prompts as prompts_lib
from experiments.online_learning import server
import specsample
from specsample import drafters
from specsample.training import draft
from specsample.training import heads
from tests.experiments import interrupted

_PROMPTS = 24  # of the split that is served, half of the file
_BATCHES = 6  # of 4
_SETTINGS = {
  'batch_size': 4,
  'max_new_tokens': 32,
  'learning_rate': 0.01,
  'rounds': 8,
  'window': 48,
  'windows': 3,
}


@pytest.fixture(scope='module')
def flags(tiny, checkpoint, tmp_path_factory):
  """A function that returns the command's flags, with a draft model."""
  folder = tmp_path_factory.mktemp('online')
  target = specsample.load(checkpoint)
  drafter = drafters.DraftModel(
    model=target.model, num_draft_tokens=2, layers=(1,)
  )
  own = drafter.init_params(jax.random.key(0), target.params)
  specsample.save_drafter(
    folder / 'draft', drafter, own, target=target, card={}
  )
  lines = [f'Is {i} an even number?\n' for i in range(2 * _PROMPTS)]
  (folder / 'prompts.txt').write_text(''.join(lines))

  def of(out, **settings):
    return (
      'online',
      *tiny,
      f"--gin_bindings=draft/methods.trained.name = '{folder / 'draft'}'",
      *(
        f'--gin_bindings=Serving.{name} = {value!r}'
        for name, value in (_SETTINGS | settings).items()
      ),
      f'--prompts={folder / "prompts.txt"}',
      f'--out={out}',
    )

  return of


@dataclasses.dataclass(frozen=True)
class Run:
  """The outcome of a run, and the files that it left."""

  outcome: object
  out: pathlib.Path
  journal: list
  weights: dict
  result: dict

  @classmethod
  def of(cls, outcome, out):
    return cls(
      outcome,
      out,
      _journal(out),
      safetensors.load_file(out / 'drafter' / 'drafter.safetensors'),
      json.loads((out / 'online.json').read_text()),
    )

  def records(self, arm):
    return [value for key, value in self.journal if key[0] == arm]


def _journal(out):
  """Returns key and value of each record, without times and compilations."""
  lines = (out / 'journal.jsonl').read_text().splitlines()[1:]
  records = [json.loads(line) for line in lines]
  for record in records:
    del record['value']['seconds'], record['value']['compiled']
  return [(record['key'], record['value']) for record in records]


@pytest.fixture(scope='module')
def whole(flags, commands, tmp_path_factory):
  """A run that is not interrupted."""
  out = tmp_path_factory.mktemp('whole') / 'out'
  outcome = commands.run(*flags(out))
  assert outcome.code == 0, outcome.err
  return Run.of(outcome, out)


@pytest.fixture(scope='module')
def killed(flags, commands, tmp_path_factory):
  """The number of records at a kill before a checkpoint; the resumed run."""
  out = tmp_path_factory.mktemp('killed') / 'out'
  process = commands.start(*flags(out))
  try:
    interrupted.wait(out, b'"learning"', 2, process)
  finally:
    process.kill()  # SIGKILL
    process.communicate()
  kept = len(_journal(out))
  # As if killed between the journal's record and the last checkpoint.
  steps = sorted(int(path.name) for path in (out / 'checkpoints').iterdir())
  shutil.rmtree(out / 'checkpoints' / str(steps[-1]))
  outcome = commands.run(*flags(out))
  assert outcome.code == 0, outcome.err
  return kept, Run.of(outcome, out)


def test_a_run_is_held_to_the_code_and_not_to_the_commit(whole):
  header = json.loads((whole.out / 'journal.jsonl').read_text().splitlines()[0])
  assert header['code'] == environment.source()
  assert 'git_commit' not in header


def test_batches_with_which_a_process_began_are_not_timed(whole, killed):
  def compiled(run):
    batches = json.loads((run.out / 'online.json').read_text())['batches']
    return {
      i
      for records in batches.values()
      for i, record in enumerate(records)
      if record['compiled']
    }

  _, run = killed
  assert compiled(whole) == {0}
  assert compiled(run) > {0}
  for one in (whole, run):
    count = len(one.records('learning')) - len(compiled(one))
    expected = f'{count} batches that compiled nothing: ' if count else 'tokens'
    assert expected in one.outcome.out


def test_acceptance_rises_and_no_output_changes(whole):
  windows = whole.result['windows']
  assert len(windows) == _SETTINGS['windows']
  assert sum(window['prompts'] for window in windows) == _PROMPTS
  total = sum(window['tokens'] for window in windows)
  assert total == _PROMPTS * _SETTINGS['max_new_tokens']
  last = windows[-1]
  assert last['rise'] > 0
  acceptance = last['acceptance']
  assert acceptance['learning'] > acceptance['control']
  low, high = last['rise_ci95']
  assert low < last['rise'] < high
  assert whole.result['outputs_equal']
  digests = lambda arm: [record['digest'] for record in whole.records(arm)]
  assert digests('learning') == digests('control')
  assert 'with updates and without: the same tokens' in whole.outcome.out


def test_windows_are_the_journals_counts(whole):
  count = lambda arm, name, batches: sum(
    sum(record[name]) for record in whole.records(arm)[batches]
  )
  for i, window in enumerate(whole.result['windows']):
    batches = slice(2 * i, 2 * i + 2)
    for arm, share in window['acceptance'].items():
      accepted = count(arm, 'accepted', batches)
      assert share == accepted / count(arm, 'proposed', batches)
    assert window['first_token'] == count('control', 'tokens', slice(2 * i))


def test_a_kill_loses_nothing_that_was_learned(whole, killed):
  kept, run = killed
  assert 4 <= kept < 2 * _BATCHES
  assert run.journal == whole.journal
  assert run.weights.keys() == whole.weights.keys()
  for name, expected in whole.weights.items():
    np.testing.assert_array_equal(run.weights[name], expected)
  assert run.result['windows'] == whole.result['windows']


def test_it_leaves_a_figure_and_a_drafter(whole, checkpoint):
  data = (whole.out / 'online.png').read_bytes()
  assert data[:16] == b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR'
  assert data.endswith(b'IEND\xaeB`\x82')
  target = specsample.load(checkpoint)
  found = specsample.load_drafter(whole.out / 'drafter', target=target)
  assert found.card['tokens_served'] == _PROMPTS * _SETTINGS['max_new_tokens']


def test_the_drafter_of_another_run_is_refused_and_stays(
  flags, commands, whole, tmp_path
):
  out = tmp_path / 'out'
  shutil.copytree(whole.out / 'drafter', out / 'drafter')
  outcome = commands.run(*flags(out))
  assert outcome.code == 2
  (line,) = outcome.err.splitlines()
  assert f'{out / "drafter"} exists, but this run has served 0 of 6' in line
  assert 'delete it or move it away' in line
  assert not (out / 'online.json').exists()
  weights = safetensors.load_file(out / 'drafter' / 'drafter.safetensors')
  assert weights.keys() == whole.weights.keys()


def test_a_kill_behind_the_last_batch_leaves_the_drafter_to_write(
  flags, commands, whole, tmp_path
):
  out = tmp_path / 'out'
  shutil.copytree(whole.out, out)
  shutil.rmtree(out / 'drafter')
  outcome = commands.run(*flags(out))
  assert outcome.code == 0, outcome.err
  run = Run.of(outcome, out)
  assert run.journal == whole.journal
  for name, expected in whole.weights.items():
    np.testing.assert_array_equal(run.weights[name], expected)


def test_checkpoints_without_their_journal_are_one_line(
  flags, commands, whole, tmp_path
):
  out = tmp_path / 'out'
  shutil.copytree(whole.out, out)
  for path in (out / 'journal.jsonl', out / 'online.json'):
    path.unlink()
  shutil.rmtree(out / 'drafter')
  outcome = commands.run(*flags(out))
  assert outcome.code == 2
  (line,) = outcome.err.splitlines()[-1:]
  assert 'delete the folders checkpoints and drafter too' in line


def test_updates_that_come_to_no_number_are_undone(
  flags, commands, whole, tmp_path
):
  out = tmp_path / 'out'
  outcome = commands.run(*flags(out, learning_rate=1e30))
  assert outcome.code == 0, outcome.err
  run = Run.of(outcome, out)
  undone = sum(record['undone'] for record in run.records('learning'))
  taken = sum(len(record['updates']) for record in run.records('learning'))
  assert undone == taken > _BATCHES
  assert outcome.err.count('gave NaN or infinity (loss ') == undone
  assert f'{taken} updates, {undone} gave NaN or infinity' in outcome.out
  assert run.result['outputs_equal']
  # It drafts as it did before.
  for window in run.result['windows']:
    assert window['rise'] == 0
  assert run.records('control') == whole.records('control')


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (
      {'windows': 7},
      "24 prompts of the split 'reported', 6 batches of 4, but Serving",
    ),
    ({'rounds': 0}, 'rounds is 0: give an integer of at least 1'),
    ({'seed': 2**32}, 'Serving.seed is 4294967296: give an integer from 0 to'),
    ({'learning_rate': -1.0}, 'Serving.learning_rate is -1.0: give more than'),
    ({'batch_size': 0}, 'Serving.batch_size is 0: give an integer of'),
    ({'split': 'test'}, "split is 'test': give 'tuning' or 'reported'"),
  ],
)
def test_bad_settings_are_one_line(
  flags, commands, tmp_path, settings, message
):
  outcome = commands.run(*flags(tmp_path / 'out', **settings))
  assert outcome.code == 2
  (line,) = outcome.err.splitlines()
  assert message in line
  assert not (tmp_path / 'out').exists()


def _serving(target, drafter, objective, **settings):
  return server.Serving(
    target=target,
    method=methods.Method(drafter),
    objective=objective,
    **settings,
  )


def test_settings_are_chosen_on_other_prompts_than_are_reported(checkpoint):
  target = specsample.load(checkpoint)
  drafter = drafters.Medusa(model=target.model, num_draft_tokens=2)
  texts = [
    prompts_lib.Prompt(id='', category='', text=f'Is {i} even?', line=i + 1)
    for i in range(10)
  ]
  served = {}
  for split in server.SPLITS:
    serving = _serving(
      *(target, drafter, heads.HeadsObjective),
      **{'split': split, 'batch_size': 1, 'windows': 1},
    )
    batches = serving.batches('prompts.txt', texts)
    served[split] = sorted(int(batch.numbers[0]) for batch in batches)
  assert served == {'tuning': [0, 2, 4, 6, 8], 'reported': [1, 3, 5, 7, 9]}


def test_a_drafter_learns_by_its_own_objective(checkpoint):
  target = specsample.load(checkpoint)
  drafter = drafters.Medusa(model=target.model, num_draft_tokens=2)
  objective = functools.partial(heads.HeadsObjective, teacher_weight=0.5)
  learner = _serving(target, drafter, objective).learner
  assert learner.objective == objective(drafter=drafter)
  assert learner.drafter.drafter == drafter


def test_drafters_that_cannot_learn_or_be_saved_are_refused(checkpoint):
  target = specsample.load(checkpoint)
  with pytest.raises(ValueError, match='Ngram, which is not trained'):
    _serving(target, drafters.Ngram(num_draft_tokens=2), draft.DraftObjective)
  chain = drafters.Chain(model=target.model, num_draft_tokens=2)
  objective = functools.partial(draft.ChainObjective, target=target.model)
  with pytest.raises(ValueError, match='drafter is of type Chain: give one th'):
    _serving(target, chain, objective)


def test_the_examples_serve_enough_prompts():
  path = pathlib.Path(server.__file__).parents[1] / 'online.py'
  source = path.read_text('utf-8')
  text = ast.get_docstring(ast.parse(source)).replace('\\\n', '')
  calls = re.findall(r'^  python -m experiments\.online(.*)$', text, re.M)
  assert calls and all('--prompts=' in call for call in calls)
  default = {x.name: x.default for x in dataclasses.fields(server.Serving)}
  least = 2 * default['batch_size'] * default['windows']
  limits = [int(x) for x in re.findall(r'--limit=(\d+)', text)]
  assert limits and min(limits) >= least
