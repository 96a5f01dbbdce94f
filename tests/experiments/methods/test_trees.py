"""Trained drafters, trees, and other vocabularies, as gin files name them."""

import json
import pathlib
import re
import shutil
import textwrap

import gin
import jax
import numpy as np
import pytest
import tokenizers

from experiments import methods
import specsample
from specsample import drafters
from specsample import testing
from specsample import text
from specsample import tree
from specsample import verify
from specsample.types import DraftKind

_NEW_TOKENS = 96  # as in other files, so that they share compiled programs
_PROMPT = 'The rain in Spain'
_MODEL = testing.tiny_llama(vocab_size=8, num_layers=1)
_BINARY = tree.k_ary((2, 2))


def _heads(num_draft_tokens):
  return drafters.Medusa(model=_MODEL, num_draft_tokens=num_draft_tokens)


def test_drafter_is_loaded_as_deep_as_its_tree():
  loads = []

  def make(num_draft_tokens, batch_size):
    assert batch_size == 1
    loads.append(num_draft_tokens)
    return methods.Method(_heads(num_draft_tokens), params='weights')

  method = methods.Method(_heads(4), make=make)
  found = methods.tree(method, _BINARY, kind='without_replacement')
  assert found.drafter == drafters.Tree(
    drafter=_heads(2),
    topology=_BINARY,
    kind=DraftKind.WITHOUT_REPLACEMENT,
  )
  assert found.verify is verify.tree
  assert (found.params, loads) == ('weights', [2])
  found = methods.dynamic_tree(method, num_draft_tokens=6, width=3, depth=4)
  assert found.drafter == drafters.DynamicTree(
    drafter=_heads(4), num_draft_tokens=6, width=3
  )
  assert loads == [2]
  assert methods.dynamic_tree(method, 6).drafter.depth == 4


def test_best_tokens_of_dflash_are_a_chain(checkpoint, tmp_path):
  target = specsample.load(checkpoint)
  drafter = drafters.DFlash(
    model=target.model, num_draft_tokens=15, feature_layers=(0,)
  )
  own = drafter.init_params(jax.random.key(0), target.params)
  path = tmp_path / 'dflash'
  specsample.save_drafter(path, drafter, own, target=target, card={})
  gin.clear_config()
  gin.parse_config_file('configs/drafters.gin')
  gin.bind_parameter('dflash/methods.trained.name', str(path))
  gin.bind_parameter('dflash/methods.trained.target', target)
  with gin.config_scope('dflash_best'):
    found = methods.tree()
  gin.clear_config()
  assert found.drafter == drafters.Tree(
    drafter=specsample.load_drafter(path, target).drafter,
    topology=tree.chain(15),
    kind=DraftKind.POINT_MASS,
  )
  assert found.verify is verify.tree


def test_lattice_gets_a_tree():
  block = drafters.DFlash(model=_MODEL, num_draft_tokens=3, feature_layers=(0,))
  method = methods.Method(block, params='weights')
  found = methods.lattice_tree(method, num_draft_tokens=6, candidates=4)
  assert found.drafter == drafters.LatticeTree(
    drafter=block, num_draft_tokens=6, candidates=4
  )
  assert found.verify is verify.tree
  assert found.params == 'weights'


def test_best_tree_is_that_of_the_card(checkpoint, tmp_path):
  target = specsample.load(checkpoint)
  drafter = drafters.Medusa(model=target.model, num_draft_tokens=3)
  own = drafter.init_params(jax.random.key(0))
  kept = {'acceptance_by_position': [0.5, 0.2, 0.1]}
  save = lambda name, **card: specsample.save_drafter(
    tmp_path / name, drafter, own, target=target, card=card
  )
  save('silent', held_out=kept)
  # Second choices are worth more than a third level.
  kept |= {'acceptance_by_rank': [[0.5, 0.4], [0.4, 0.3], [0.01, 0.0]]}
  save('told', held_out=kept)
  found = methods.best_tree(str(tmp_path / 'told'), target, 6)
  assert found.drafter.topology == _BINARY
  assert found.drafter.drafter.num_draft_tokens == 2
  assert found.verify is verify.tree
  with pytest.raises(ValueError, match='silent has no acceptance_by_rank: '):
    methods.best_tree(str(tmp_path / 'silent'), target, 6)


def test_candidates_follow_the_best_one():
  found = methods.candidates(methods.Method(_heads(3)), 2)
  assert found.drafter == drafters.Tree(
    drafter=_heads(3), topology=tree.Topology((0, 0, 1, 1, 3, 3))
  )


@pytest.mark.parametrize(
  ('make', 'arguments', 'message'),
  [
    (methods.candidates, (9,), 'there are only 8 tokens: give fewer'),
    (methods.candidates, (0,), 'num_candidates is 0: give'),
    (methods.lattice_tree, (6,), 'Medusa: give one that has a lattice'),
    (
      methods.tree,
      (_BINARY, 'drawn', verify.tree),
      r"'drawn', but verify.tree .* \['point_m",
    ),
    (
      methods.tree,
      (_BINARY, 'point_mass', verify.k_seq),
      r"k_seq is exact for \['sampled'\]",
    ),
  ],
)
def test_what_makes_no_tree_is_refused(make, arguments, message):
  with pytest.raises(ValueError, match=message):
    make(methods.Method(_heads(2)), *arguments)


@pytest.fixture(scope='module')
def save(checkpoint):
  """A function that saves heads by their seed and returns the flags."""
  target = specsample.load(checkpoint)
  drafter = drafters.Medusa(model=target.model, num_draft_tokens=2)
  own = drafter.init_params(jax.random.key(0))

  def save(path, seed=1):
    noisy = testing.with_noise(own, jax.random.key(seed))
    specsample.save_drafter(path, drafter, noisy, target=target, card={})
    return [f"--gin_bindings=medusa/trained.name = '{path}'"]

  return save


_OF_TREE = [
  '--drafter=medusa_tree',
  '--gin_bindings=medusa_tree/tree.topology = @k_ary()',
  '--gin_bindings=k_ary.branching = (3, 2)',
]
# The positions that have an acceptance, or why a prompt is not decoded.
_DECODED = [
  (['--drafter=medusa'], 2),
  (['--drafter=medusa', '--num_draft_tokens=1'], 1),
  (
    ['--drafter=medusa', '--num_draft_tokens=3'],
    'num_draft_tokens is 3, but .* has heads for only 2: give a smaller',
  ),
  (_OF_TREE, 2),
  (
    [*_OF_TREE, '--num_draft_tokens=3'],
    'num_draft_tokens is 3, but the draft is a tree of 9 nodes',
  ),
  (
    [*_OF_TREE, '--gin_bindings=medusa_tree/tree.verify = @KSeq()'],
    "kind is 'point_mass', but verify.k_seq is exact for",
  ),
]


def test_prompt_is_decoded_with_a_trained_drafter(
  save, tiny, commands, greedy, tmp_path
):
  common = ['generate', *tiny, *save(tmp_path / 'medusa')]
  common += [f'--prompt={_PROMPT}', f'--max_new_tokens={_NEW_TOKENS}']
  outcomes = commands.run_all(
    [
      [*common, *flags, f'--out={tmp_path / str(i)}']
      for i, (flags, _) in enumerate(_DECODED)
    ]
  )
  for i, (_, expected) in enumerate(_DECODED):
    if isinstance(expected, str):
      assert outcomes[i].code == 2
      assert re.search(expected, outcomes[i].err)
      continue
    assert outcomes[i].code == 0, outcomes[i].err
    result = json.loads((tmp_path / str(i) / 'generate.json').read_text())
    assert result['tokens'] == greedy(_PROMPT, _NEW_TOKENS)[0]
    assert len(result['metrics']['acceptance_by_position']) == expected


def test_methods_are_compared_by_name(save, tiny, commands, tmp_path):
  path, out = tmp_path / 'medusa', tmp_path / 'out'
  call = [
    'evaluate',
    '--gin_file=configs/runs/evaluate.gin',
    *tiny,
    *save(path),
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


_ROOT = pathlib.Path(__file__).resolve().parents[3]


def _loaded(names, noise=0.0):
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(
      {name: i for i, name in enumerate(names)}, unk_token=names[0]
    )
  )
  model = testing.HashModel(vocab_size=len(names), noise=noise)
  return specsample.Loaded(
    model, {}, text.Tokenizer(backend=backend, named_tokens={})
  )


def _pair():
  """Returns a target and a draft model that share three tokens."""
  return _loaded('abcd'), _loaded('xdbay', noise=0.5)


@pytest.mark.slow
def test_method_drafts_for_its_target():
  target, draft = _pair()
  method = methods.tli(draft, target, num_draft_tokens=2)
  assert method.params['draft_ids'].tolist() == [3, 2, -1, 1]
  assert method.note == (
    'tli: intersection: 3 tokens are shared, of 5 in the draft model and 4 in '
    'the target'
  )
  testing.assert_greedy_equal(
    {'target': target.params, 'drafter': method.params},
    np.asarray([[0, 2, 3], [1, 0, 0]]),
    np.asarray([3, 1]),
    model=target.model,
    drafter=method.drafter,
    verify=method.verify,
    max_new_tokens=6,
  )
  longer = methods.remake(method, 4)
  assert longer.drafter.num_draft_tokens == 4
  assert jax.tree.all(
    jax.tree.map(np.array_equal, longer.params, method.params)
  )


@pytest.mark.slow
def test_page_drafts_shared_tokens_and_text(capsys):
  target, draft = _pair()
  names = {
    **{'jax': jax, 'specsample': specsample, 'target': target, 'draft': draft},
    'found': specsample.map_vocabulary(draft, target),
  }
  page = (_ROOT / 'docs' / 'cross_vocabulary.md').read_text('utf-8')
  blocks = re.findall(r'(?:^(?: {4}.*)?\n)+', page, re.MULTILINE)
  for call in ('drafters.TLI(', 'slem.generate('):
    (example,) = (block for block in blocks if call in block)
    exec(compile(textwrap.dedent(example), call, 'exec'), names)
    assert names['output'].lengths.tolist() == [64]
  tokens_per_round = float(capsys.readouterr().out.split()[0])
  assert tokens_per_round == 64 / names['stats'].rounds
