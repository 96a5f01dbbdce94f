"""Trees as gin files name them."""

import json
import re

import gin
import jax
import pytest

from experiments import methods
import specsample
from specsample import testing
from specsample import tree
from specsample.types import DraftKind
from tests.loading.published import folders
from tests.loading.published import test_dflash

_NEW_TOKENS = 24
_PROMPT = 'The rain in Spain'


def _heads(num_draft_tokens):
  model = testing.tiny_llama(vocab_size=8, num_layers=1)
  return specsample.drafters.Medusa(
    model=model, num_draft_tokens=num_draft_tokens
  )


def test_a_drafter_is_loaded_as_deep_as_its_tree():
  loads = []

  def make(num_draft_tokens, batch_size):
    assert batch_size == 1
    loads.append(num_draft_tokens)
    return methods.Method(_heads(num_draft_tokens), params='weights')

  method = methods.Method(_heads(4), make=make)
  found = methods.tree(method, tree.k_ary((2, 2)), kind='without_replacement')
  assert found.drafter == specsample.drafters.Tree(
    drafter=_heads(2),
    topology=tree.k_ary((2, 2)),
    kind=DraftKind.WITHOUT_REPLACEMENT,
  )
  assert found.verify is specsample.verify.tree
  assert (found.params, loads) == ('weights', [2])
  found = methods.dynamic_tree(method, num_draft_tokens=6, width=3, depth=4)
  assert found.drafter == specsample.drafters.DynamicTree(
    drafter=_heads(4), num_draft_tokens=6, width=3
  )
  assert loads == [2]
  assert methods.dynamic_tree(method, 6).drafter.depth == 4


def test_the_best_tokens_of_dflash_are_a_chain(tmp_path):
  config = {
    key: value
    for key, value in test_dflash.DSPARK.items()
    if 'markov' not in key and 'confidence' not in key
  }
  folder = folders.save(tmp_path, test_dflash.dflash_tensors(), config)
  gin.clear_config()
  gin.parse_config_file('configs/drafters.gin')
  gin.bind_parameter('dflash/methods.trained.name', str(folder))
  gin.bind_parameter('dflash/methods.trained.target', test_dflash.TARGET)
  with gin.config_scope('dflash_best'):
    found = methods.tree()
  gin.clear_config()
  loaded = specsample.load_drafter(folder, test_dflash.TARGET, 15)
  assert found.drafter == specsample.drafters.Tree(
    drafter=loaded.drafter,
    topology=tree.chain(15),
    kind=DraftKind.POINT_MASS,
  )
  assert found.verify is specsample.verify.tree


def test_a_lattice_gets_a_tree():
  block = specsample.drafters.DFlash(
    model=testing.tiny_llama(vocab_size=8, num_layers=1),
    num_draft_tokens=3,
    feature_layers=(0,),
  )
  method = methods.Method(block, params='weights')
  found = methods.lattice_tree(method, num_draft_tokens=6, candidates=4)
  assert found.drafter == specsample.drafters.LatticeTree(
    drafter=block, num_draft_tokens=6, candidates=4
  )
  assert found.verify is specsample.verify.tree
  assert found.params == 'weights'
  with pytest.raises(ValueError, match='Medusa: give one that has a lattice'):
    methods.lattice_tree(methods.Method(_heads(3)), num_draft_tokens=6)


def test_the_best_tree_is_that_of_the_card(checkpoint, tmp_path):
  target = specsample.load(checkpoint)
  drafter = specsample.drafters.Medusa(model=target.model, num_draft_tokens=3)
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
  assert found.drafter.topology == tree.k_ary((2, 2))
  assert found.drafter.drafter.num_draft_tokens == 2
  assert found.verify is specsample.verify.tree
  with pytest.raises(ValueError, match='silent has no acceptance_by_rank: '):
    methods.best_tree(str(tmp_path / 'silent'), target, 6)


def test_candidates_follow_the_best_one():
  method = methods.Method(_heads(3))
  found = methods.candidates(method, 2)
  assert found.drafter == specsample.drafters.Tree(
    drafter=_heads(3), topology=tree.Topology((0, 0, 1, 1, 3, 3))
  )
  with pytest.raises(ValueError, match='there are only 8 tokens: give fewer'):
    methods.candidates(method, 9)
  with pytest.raises(ValueError, match='num_candidates is 0: give'):
    methods.candidates(method, 0)


@pytest.mark.parametrize(
  ('kind', 'verify', 'message'),
  [
    (
      'drawn',
      specsample.verify.tree,
      r"'drawn', but verify.tree .* \['point_m",
    ),
    (
      'point_mass',
      specsample.verify.k_seq,
      r"k_seq is exact for \['sampled'\]",
    ),
  ],
)
def test_a_kind_that_the_rule_does_not_take_is_refused(kind, verify, message):
  with pytest.raises(ValueError, match=message):
    methods.tree(methods.Method(_heads(2)), tree.k_ary((2, 2)), kind, verify)


def test_a_prompt_is_decoded_with_a_tree(
  checkpoint, tiny, commands, cpu_devices, greedy, tmp_path
):
  target = specsample.load(checkpoint)
  drafter = specsample.drafters.Medusa(model=target.model, num_draft_tokens=2)
  own = testing.with_noise(
    drafter.init_params(jax.random.key(0)), jax.random.key(1)
  )
  path = tmp_path / 'medusa'
  specsample.save_drafter(path, drafter, own, target=target, card={})
  common = ['generate', *tiny, '--drafter=medusa_tree', f'--prompt={_PROMPT}']
  common += [f'--max_new_tokens={_NEW_TOKENS}', f'--out={tmp_path / "out"}']
  common += [f"--gin_bindings=medusa/trained.name = '{path}'"]
  small = [
    '--gin_bindings=medusa_tree/tree.topology = @k_ary()',
    '--gin_bindings=k_ary.branching = (3, 2)',
  ]
  rule = '--gin_bindings=medusa_tree/tree.verify = @KSeq()'
  calls = [
    common,
    [*common, *small, '--num_draft_tokens=3'],
    [*common, *small, rule],
    [*common, *small],
  ]
  deep, sized, wrong, outcome = commands.run_all(
    calls, variables=cpu_devices(1)
  )
  assert [x.code for x in (deep, sized, wrong)] == [2, 2, 2]
  assert outcome.code == 0, outcome.err
  assert "kind is 'point_mass', but verify.k_seq is exact for" in wrong.err
  message = 'num_draft_tokens is 4, but .* has heads for only 2: give a smaller'
  assert re.search(message, deep.err)
  assert 'num_draft_tokens is 3, but the draft is a tree of 9 nodes' in (
    sized.err
  )
  result = json.loads((tmp_path / 'out' / 'generate.json').read_text())
  assert result['tokens'] == greedy(_PROMPT, _NEW_TOKENS)[0]
  assert len(result['metrics']['acceptance_by_position']) == 2
