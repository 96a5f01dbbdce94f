"""Methods that learn while they draft: their weights, and what a kill costs."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import conversations
from experiments.evaluation import decoding
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import learning
from experiments.evaluation import profiling
from experiments.evaluation import table as table_lib
import specsample
from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.training import draft
from specsample.training import heads
from specsample.training import online

_TEXTS = [f'Is {i} an even number?' for i in range(24)]
_PROMPTS = [
  prompts_lib.Prompt(str(i), '', text, i) for i, text in enumerate(_TEXTS)
]
_BATCHES = 6
_LEARNER = functools.partial(
  learning.learner,
  objective=functools.partial(
    draft.DraftObjective, token_weight=0.0, teacher_weight=1.0
  ),
  learning_rate=0.01,
  rounds=8,
  window=48,
)


@pytest.fixture(scope='module')
def evaluation(checkpoint):
  target = specsample.load(checkpoint)
  drafter = drafters.DraftModel(
    model=target.model, num_draft_tokens=2, layers=(1,)
  )
  own = drafter.init_params(jax.random.key(0), target.params)
  return evaluation_lib.Evaluation(
    target=target,
    methods={
      'autoregressive': methods.Method(drafters.NoDraft()),
      'fixed': methods.Method(drafter, params=own),
      'learning': methods.Method(drafter, params=own),
    },
    learners={'learning': _LEARNER},
    max_new_tokens=32,
    batch_size=4,
    least_width=32,
    repeats=0,
  )


@dataclasses.dataclass(frozen=True)
class Run:
  """The table of a finished run, its journal's records, and what it learned."""

  table: table_lib.Table
  steps: list[dict]
  weights: dict


def _part(evaluation, journal):
  return evaluation_lib.Part(
    evaluation=evaluation,
    tokens=[evaluation.encode('', prompt) for prompt in _PROMPTS],
    prompts=_PROMPTS,
    journal=journal,
    learners=learning.learners(evaluation),
  )


def _units(evaluation, journal):
  """Returns the units of a run, and its methods that learn."""
  part = _part(evaluation, journal)
  learns = learning.methods(part)
  turn = conversations.turn(part, 0)
  return decoding.units(part, turn, learns), learns


def _run(evaluation, out, kill_after=None):
  """Does what is missing; stops before the journal has unit `kill_after`."""
  out.mkdir(exist_ok=True)
  journal = journal_lib.Journal(out, {})
  for i in range(2):  # takes seconds to measure
    if (decoding.MEMORY, i) not in journal:
      journal.add((decoding.MEMORY, i), {'bytes_per_second': 1e9})
  work, learns = _units(evaluation, journal)
  for unit in work:
    if unit.key in journal:
      continue
    value = unit.run()
    if unit.key == kill_after:
      journal.close()
      return None
    journal.add(unit.key, value)
  learns['learning'].saving().run()
  records = journal.of('generation', 'learning')
  journal.close()
  return Run(
    table_lib.Table.of(_part(evaluation, journal)),
    [{x: one[x] for x in ('step', 'updates', 'undone')} for one in records],
    safetensors.load_file(
      out / 'learned' / 'learning' / 'drafter' / 'drafter.safetensors'
    ),
  )


@pytest.fixture(scope='module')
def whole(evaluation, tmp_path_factory):
  return _run(evaluation, tmp_path_factory.mktemp('whole'))


def _tokens(run, method):
  return [one.tokens for one in run.table.generations[method]]


@pytest.mark.slow
def test_acceptance_rises_and_no_output_changes(evaluation, whole):
  assert _tokens(whole, 'learning') == _tokens(whole, 'autoregressive')
  windows = {(row.method, row.batches): row for row in whole.table.windows}
  assert len(windows) == 2 * (1 + _BATCHES)
  last = {name: windows[name, '6 to 6'] for name in ('fixed', 'learning')}
  assert last['learning'].acceptance > last['fixed'].acceptance
  ratio = last['learning'].acceptance / last['fixed'].acceptance
  assert last['learning'].acceptance_over_fixed == pytest.approx(ratio)
  everything = windows['learning', '1 to 6']
  low, high = everything.acceptance_over_fixed_ci95
  assert low < everything.acceptance_over_fixed < high
  assert everything.tokens == len(_PROMPTS) * evaluation.max_new_tokens
  assert everything.updates == sum(x['updates'] for x in whole.steps)
  assert everything.undone == windows['fixed', '1 to 6'].updates == 0
  before = jax.tree.leaves(evaluation.methods['learning'].params)
  for matrix in (x for x in whole.weights.values() if x.ndim > 1):
    assert not any(np.array_equal(matrix, np.asarray(x, 'f')) for x in before)


@pytest.mark.slow
def test_kill_loses_nothing_that_was_learned(evaluation, whole, tmp_path):
  # Without its journal a run begins anew, whatever it had learned.
  _run(evaluation, tmp_path, ('generation', 'learning', 2))
  (tmp_path / 'journal.jsonl').unlink()
  for call in (0, 2):  # each time after the checkpoint, before the journal
    _run(evaluation, tmp_path, ('generation', 'learning', call))
  resumed = _run(evaluation, tmp_path)
  assert resumed.steps == whole.steps
  for method in evaluation.methods:
    assert _tokens(resumed, method) == _tokens(whole, method)
  assert resumed.table.windows == whole.table.windows
  assert resumed.weights.keys() == whole.weights.keys()
  for name, expected in whole.weights.items():
    np.testing.assert_array_equal(resumed.weights[name], expected)
  journal = journal_lib.Journal(tmp_path, {})
  shutil.rmtree(tmp_path / 'learned' / 'learning' / 'checkpoints')
  with pytest.raises(ValueError, match='is damaged, or belongs to another run'):
    _units(evaluation, journal)


@pytest.mark.slow
def test_nothing_is_compiled_while_it_is_timed(
  evaluation, tmp_path, num_compiled
):
  evaluation = dataclasses.replace(evaluation, max_new_tokens=70)
  journal = journal_lib.Journal(tmp_path, {})
  work, _ = _units(evaluation, journal)
  first = next(x for x in work if x.key == ('generation', 'learning', 0))
  count = lambda: [*num_compiled(), online._learn._cache_size()]
  before = count()
  first.warm_up()
  warm = count()
  assert all(x < y for x, y in zip(before[:3], warm[:3], strict=True))
  assert before[-1] < warm[-1]
  first.run()
  assert count() == warm


@pytest.mark.slow
def test_updates_that_come_to_no_number_are_undone(evaluation, tmp_path):
  diverging = functools.partial(_LEARNER, learning_rate=1e30)
  two = {name: evaluation.methods[name] for name in ('fixed', 'learning')}
  diverging = dataclasses.replace(
    evaluation, methods=two, learners={'learning': diverging}
  )
  run = _run(diverging, tmp_path)
  assert all(one['undone'] == one['updates'] > 0 for one in run.steps)
  stats = lambda name: [one.stats for one in run.table.generations[name]]
  assert stats('learning') == stats('fixed')  # it drafts as it did before


def _learns(drafter, rule=verify.chain):
  return {'methods': {'learning': methods.Method(drafter, rule)}}


def _by(**settings):
  return {'learners': {'learning': functools.partial(_LEARNER, **settings)}}


_MODEL = testing.tiny_llama()
_CHAIN = drafters.Chain(model=_MODEL, num_draft_tokens=2)
_MEDUSA = drafters.Medusa(model=_MODEL, num_draft_tokens=2)
_NGRAM = drafters.Ngram(num_draft_tokens=2)
_DRAWN = specsample.Sampling(temperature=1.0)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (_learns(_NGRAM), 'drafter that learns is of type Ngram'),
    (_learns(_CHAIN), 'is of type Chain: give one that specsample.save'),
    (_learns(_MEDUSA), 'DraftObjective trains a DraftModel'),
    (_learns(_CHAIN, verify.Certified()), "'learning', but its rule is Certif"),
    ({'methods': {'x': methods.Method(_CHAIN)}}, 'no method has this name'),
    ({'num_seeds': 2, 'sampling': _DRAWN}, 'num_seeds is 2: give 1'),
    (_by(rounds=0), 'rounds is 0: give an integer of at least 1'),
    (_by(learning_rate=-1.0), r'learner\.learning_rate is -1\.0'),
  ],
)
def test_what_cannot_learn_is_refused(evaluation, settings, message):
  changed = dataclasses.replace(evaluation, **settings)
  with pytest.raises(ValueError, match=message):
    learning.learners(changed)


def test_what_learns_is_not_profiled(evaluation):
  with pytest.raises(ValueError, match='learning, cannot be profiled'):
    profiling.check('profile', _part(evaluation, None))


def test_drafter_learns_by_its_own_objective(evaluation):
  drafter = drafters.Medusa(model=evaluation.target.model, num_draft_tokens=2)
  objective = functools.partial(heads.HeadsObjective, teacher_weight=0.5)
  found = learning.learner(drafter, objective=objective)
  assert found.objective == objective(drafter=drafter)
  assert found.drafter.drafter == drafter


def test_command_learns_as_its_configuration_says(
  evaluation, tiny, commands, tmp_path
):
  method = evaluation.methods['fixed']
  specsample.save_drafter(
    tmp_path / 'draft',
    method.drafter,
    method.params,
    target=evaluation.target,
    card={},
  )
  (tmp_path / 'prompts.txt').write_text('\n'.join(_TEXTS[:4]))
  outcome = commands.run(
    'evaluate',
    '--gin_file=configs/runs/online.gin',
    *tiny,
    f"--gin_bindings=draft/methods.trained.name = '{tmp_path / 'draft'}'",
    '--gin_bindings=Evaluation.max_new_tokens = 16',
    '--gin_bindings=Evaluation.batch_size = 2',
    '--gin_bindings=Evaluation.least_width = 32',
    f'--prompts={tmp_path / "prompts.txt"}',
    f'--out={tmp_path / "out"}',
  )
  assert outcome.code == 0, outcome.err
  result = json.loads((tmp_path / 'out' / 'result.json').read_text())
  names = [row['method'] for row in result['windows']]
  assert names == 3 * ['fixed'] + 3 * ['learning']
  assert 'learning: every output equals autoregressive' in outcome.out
  assert 'acceptance' in outcome.out.partition('in the whole run')[2]
  folder = tmp_path / 'out' / 'learned' / 'learning' / 'drafter'
  found = specsample.load_drafter(folder, target=evaluation.target)
  assert found.card['updates'] == result['windows'][3]['updates'] > 0
