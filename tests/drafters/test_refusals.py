"""Settings that drafters refuse; what all kinds do is in tests/contract/."""

import dataclasses

import jax
import pytest

from specsample import drafters
from specsample import policies
from specsample import testing
from specsample import tree
from specsample.models import gated_delta
from specsample.training import eagle
from tests.drafters import rounds

_TARGET = rounds.TARGET
_HASHES = testing.HashModel(vocab_size=rounds.V)
_SOME = {'model': _TARGET, 'num_draft_tokens': 3}
_CHAIN = drafters.Chain(model=_HASHES, num_draft_tokens=3)
_NGRAM = drafters.Ngram(num_draft_tokens=3)
_NGRAM_TREE = drafters.NgramTree(num_branches=2, depth=2)
_GIVEN = drafters.Given(num_draft_tokens=3)
_RECORDING = drafters.Recording(drafter=_CHAIN, model=_HASHES)
_SUFFIX = drafters.Suffix(num_draft_tokens=4, min_kept=0.0)
_EITHER = drafters.Either(remembered=_SUFFIX, trained=_CHAIN)
_ADAPTIVE = drafters.Adaptive(drafter=_CHAIN, policies=(policies.Fixed(1),))
_TIMED = (policies.Fastest(costs=(1.0, 1.1, 1.3, 1.5)),)
_SKIP = drafters.Skip(layers=(0, 2), **_SOME)
_DRAFT_MODEL = drafters.DraftModel(layers=(0, 2), **_SOME)
_MEDUSA = drafters.Medusa(**_SOME)
_HYDRA = drafters.Hydra(**_SOME)
_EAGLE = drafters.Eagle(**_SOME)
_EAGLE3 = drafters.Eagle3(feature_layers=(-1, 1, 0), **_SOME)
_MTP = drafters.MTP(**_SOME)
_P_EAGLE = drafters.PEagle(mask_token_id=5, feature_layers=(0, 1), **_SOME)
_PARD = drafters.PARD(mask_token_id=9, **_SOME)
_DSPARK = drafters.DSpark(feature_layers=(0, 2), rank=5, **_SOME)
_DFLASH2 = drafters.DFlash2(
  feature_layers=(0, 2),
  draft_vocab_size=7,
  conv_group_size=8,
  selector_rank=5,
  selector_top_k=3,
  **_SOME,
)
_LAYERS = dataclasses.replace(
  _TARGET, num_layers=4, num_shared=2, sliding_window=3, sliding_layers=(0, 2)
)
_ASSISTANT = drafters.Assistant(
  kv_layers=(2, 1),
  layer_config=_LAYERS,
  num_clusters=6,
  num_best_clusters=2,
  **_SOME,
)
_RECURRENT = dataclasses.replace(
  _TARGET,
  delta=gated_delta.Delta(
    layers=(2,), num_key_heads=1, num_value_heads=1, key_dim=4, value_dim=4
  ),
)
_TLI = drafters.TLI(model=_HASHES, vocab_size=6, num_draft_tokens=3)
_TREE = drafters.Tree(drafter=_CHAIN, topology=tree.k_ary((2, 1, 1)))
_DYNAMIC = drafters.DynamicTree(drafter=_HYDRA, num_draft_tokens=6, width=3)
_LATTICE = drafters.LatticeTree(
  drafter=_DSPARK, num_draft_tokens=6, candidates=4
)
_WIDE = dataclasses.replace(_TARGET, dim=24)
_of_target = lambda **changes: dataclasses.replace(_TARGET, **changes)
_of_layers = lambda **changes: dataclasses.replace(_LAYERS, **changes)
_NO_BRANCHES = 'which Ngram cannot do: make the tree with Assi'
_NO_WINDOW = r'kv_layers are \(2, 1\), but .* are \(0, 1\): name'


_REFUSED = {
  _CHAIN: [
    (
      {'model': testing.HashModel},
      'model is the class HashModel: give a model',
    ),
  ],
  _SKIP: [
    ({'model': None}, 'model is None: give a model'),
    ({'layers': 1}, 'layers are 1, but the target has layers 0 to 2'),
    ({'layers': ()}, 'layers 0 to 2'),
    ({'layers': (3,)}, 'layers 0 to 2'),
    ({'layers': (-1,)}, 'layers 0 to 2'),
  ],
  _DRAFT_MODEL: [
    ({'layers': ()}, r'layers are \(\), but the target has layers 0 to 2'),
    ({'layers': (0, 3)}, 'layers 0 to 2'),
    ({'layers': (-1,)}, 'layers 0 to 2'),
    ({'model': _HASHES}, 'shape of HashModel.*, which is not a Transformer'),
  ],
  _NGRAM: [
    ({'max_ngram': 2, 'min_ngram': 3}, 'min_ngram is 3 and max_ngram 2'),
    ({'max_ngram': 10**5}, 'max_ngram is 100000: give an integer from 1 to 64'),
    ({'max_ngram': 'a'}, "max_ngram is 'a': give an integer"),
  ],
  _NGRAM_TREE: [
    ({'num_branches': 0}, 'num_branches is 0: give an integer of at'),
    ({'depth': 0}, 'depth is 0: give an integer of at'),
  ],
  _GIVEN: [({'num_draft_tokens': 0}, 'num_draft_tokens is 0')],
  _MEDUSA: [({'model': None}, 'model is None: give a model')],
  _HYDRA: [
    ({'num_layers': 0}, 'num_layers is 0: give an integer'),
    (
      {'model': _HASHES, 'prefix_attention': True},
      'Hydra has layers with the shape of HashModel.*, which is not a '
      'Transformer',
    ),
    (
      {'layer_config': _TARGET},
      'layer_config and has_prefix_norm belong to the prefix layer: set',
    ),
  ],
  _EAGLE: [
    (
      {'layer_config': _WIDE},
      'layer_config has vectors of 24 numbers, but those of the target have '
      '16: give a layer_config',
    ),
    ({'model': _HASHES}, 'layers with the shape of HashModel'),
  ],
  _EAGLE3: [
    ({'model': _HASHES}, 'layers with the shape of HashModel'),
    ({'feature_layers': (0, 3)}, r'\(0, 3\), but the target has layers 0 to 2'),
    ({'feature_layers': (-2,)}, 'name at least one of them, or -1'),
    # One layer is too few for the paper's default layers.
    (
      {'feature_layers': (), 'model': _of_target(num_layers=1)},
      r'\(1, -1, -3\)',
    ),
  ],
  _P_EAGLE: [
    ({'model': _HASHES}, 'layers with the shape of HashModel'),
    ({'mask_token_id': 12}, 'mask_token_id is 12, .* tokens 0 to 11'),
    ({'mask_token_id': None}, 'mask_token_id is None'),
    ({'num_layers': 0}, 'num_layers is 0'),
    ({'own_embedding': 1}, 'own_embedding is 1: give True or False'),
  ],
  _MTP: [
    ({'model': _HASHES}, 'layers with the shape of HashModel'),
    ({'num_modules': 0}, 'num_modules is 0: give an integer'),
    (
      {'layer_config': 'llama'},
      'MTP has layers with the shape of llama, which is not a Transformer: '
      'choose',
    ),
  ],
  _PARD: [
    ({'mask_token_id': 12}, 'mask_token_id is 12, .* tokens 0 to 11: '),
    ({'mask_token_id': -1}, 'mask_token_id is -1, .* tokens 0 to 11: '),
    ({'mask_token_id': 2.5}, 'mask_token_id is 2.5, .* tokens 0 to 11: '),
    ({'num_draft_tokens': 0}, 'num_draft_tokens is 0'),
  ],
  _DSPARK: [
    ({'feature_layers': ()}, r'feature_layers are \(\), but the target has'),
    ({'feature_layers': (0, 3)}, r'are \(0, 3\), .* has layers 0 to 2'),
    ({'num_layers': 0}, 'num_layers is 0'),
    ({'causal_layers': (0, 2)}, r'causal_layers are \(0, 2\), .* 0 to 1'),
    ({'rank': 0}, 'rank is 0: give an integer of at least 1'),
    ({'head': 'lstm'}, "head is 'lstm': give one of 'vanilla', 'gated', 'rnn'"),
    (
      {'model': _HASHES},
      'layers with the shape of HashModel.*, which is not a Transformer',
    ),
    ({'layer_config': _WIDE}, 'layer_config has vectors of 24 numbers'),
    (
      {'model': _of_target(head_dim=3)},
      'DSpark has layers with a head_dim of 3, .* give a layer_config',
    ),
  ],
  _DFLASH2: [
    ({'conv_group_size': 3}, 'conv_group_size is 3: give a divisor of 16'),
    ({'conv_group_size': 0}, 'conv_group_size is 0: give an integer of at'),
    ({'conv_kernel_size': 0}, 'conv_kernel_size is 0: give an integer'),
    ({'selector_rank': 0}, 'selector_rank is 0: give an integer of at least 1'),
    ({'selector_top_k': 8}, 'selector_top_k is 8: give at most 7, the number'),
    ({'selector_top_k': 0}, 'selector_top_k is 0: give an integer of at'),
    ({'drafts_from_pending': True}, 'DFlash2 reads draft i at mask i: leave'),
    ({'output_multiplier': 0.0}, 'output_multiplier is 0.0: give a number'),
    ({'input_embedding_scale': -1.0}, 'input_embedding_scale is -1.0: give'),
    ({'final_logit_softcapping': 0.0}, 'softcapping is 0.0: .* above 0'),
    (
      {'model': _of_target(logit_softcap=2.0), 'final_logit_softcapping': 3.0},
      r"final_logit_softcapping is 3.0, but the target's .* 2.0",
    ),
  ],
  _ASSISTANT: [
    (
      {'layer_config': _of_layers(num_kv_heads=1)},
      'has 1 key-value heads of 8 numbers, but layer 2 of the target has 2 of',
    ),
    ({'num_clusters': 5}, 'num_clusters is 5, which does not divide the 12'),
    ({'num_clusters': -2}, 'num_clusters is -2: give an integer of at least 0'),
    # Nothing would ever be drafted.
    ({'num_best_clusters': 0}, 'best_clusters is 0: give an integer from 1'),
    ({'num_best_clusters': 7}, 'is 7: give an integer from 1 to 6'),
    ({'kv_layers': (2, 3)}, r'kv_layers are \(2, 3\), but .* are \(0, 1,'),
    ({'model': _of_target(num_shared=1)}, _NO_WINDOW),
    ({'model': _RECURRENT}, _NO_WINDOW),
    (
      {'kv_layers': (2,)},
      r'layers \(0, 1\) of layer_config have .* must be the first 1, one',
    ),
    (
      {'layer_config': _of_layers(num_shared=1)},
      r'layers \(0, 1, 2\) of layer_config .* must be the first 2, one',
    ),
    ({'layer_config': None}, 'layer_config is None: give a models.transformer'),
    ({'draft_vocab_size': 4}, 'draft_vocab_size is 4: give None, because'),
    ({'own_unembedding': False}, 'own_unembedding is False: give True, '),
    ({'model': _HASHES}, 'give a models.transformer'),
  ],
  _TLI: [
    ({'num_draft_tokens': 0}, 'num_draft_tokens is 0'),
    ({'room': 0.0}, 'room is 0.0'),
    ({'spare': -1}, 'spare is -1'),
  ],
  _SUFFIX: [
    ({'num_draft_tokens': 0}, 'num_draft_tokens is 0: give at least 1'),
    ({'max_match': 0}, 'max_match is 0: give an integer of at least 1'),
    ({'num_places': 1.5}, 'num_places is 1.5: give an integer'),
    ({'min_kept': -0.1}, 'min_kept is -0.1: give a number of at least 0'),
    ({'min_kept': 4.5}, 'min_kept is 4.5, but a draft has only 4 tokens'),
    (
      {'costs': (1.0, 2.0)},
      'costs has 2 numbers, but .* 4 draft tokens: give 5',
    ),
    ({'costs': (1.0, -1.0)}, 'each above 0'),
    ({'strength': 0.0}, 'strength is 0.0: give a number above 0'),
    ({'decay': 1.1}, 'decay is 1.1: give a number from 0 to 1'),
    ({'decay': float('nan')}, 'decay is nan: give a number from 0 to 1'),
  ],
  _EITHER: [
    ({'remembered': _NGRAM}, 'remembered is Ngram: give a Suffix'),
    (
      {'trained': _RECORDING},
      'trained is Recording, which cannot sit out a round',
    ),
    ({'prior_kept': -1.0}, 'prior_kept is -1.0: give a number of at least 0'),
    ({'decay': 2.0}, 'decay is 2.0: give a number from 0 to 1'),
  ],
  _ADAPTIVE: [
    ({'policies': ()}, r'policies is \(\): give a tuple'),
    (
      {'policies': (policies.Fixed,)},
      r'policies is \(<class .*: give a tuple of policies',
    ),
    (
      {'policies': policies.Fixed(1)},
      r'policies is Fixed\(.*: give a tuple of policies',
    ),
    ({'widths': (2, 1)}, 'increasing numbers of draft tokens, from 0 to 3'),
    ({'widths': (0, 4)}, r'widths are \(0, 4\)'),
    ({'widths': (2,), 'policies': _TIMED}, 'plain pass: begin with 0'),
    ({'widths': (), 'policies': _TIMED}, 'plain pass: begin with 0'),
    (
      {
        'policies': (policies.Budget(ladder=(0, 9), costs=(1.0, 2.0)),),
        'widths': None,
      },
      r'the ladder is \(0, 9\): give .* from 0 to 3',
    ),
    ({'drafter': object()}, 'drafter is <object .*: give a drafter'),
    ({'drafter': drafters.Chain}, 'drafter is the class Chain: give an inst'),
    (
      {'drafter': _RECORDING},
      'drafter is Recording, which cannot sit out a round',
    ),
    ({'drafter': _ADAPTIVE}, 'pass all policies to one Adaptive'),
  ],
  _TREE: [
    (
      {'topology': (0, 0, 1)},
      'topology is of type tuple: give one of specsample.tree',
    ),
    ({'drafter': _NGRAM}, _NO_BRANCHES),
    (
      {'topology': tree.k_ary((2, 2))},
      '2 levels deep, but the drafter drafts 3',
    ),
  ],
  _DYNAMIC: [
    ({'drafter': _NGRAM}, _NO_BRANCHES),
    (
      {'num_draft_tokens': 22},
      'width 3 finds only 21 candidates down to depth 3',
    ),
    ({'width': 0}, 'width is 0: give an integer'),
    ({'num_draft_tokens': 0}, 'give at least 1 token'),
  ],
  _LATTICE: [
    (
      {'candidates': 2, 'num_draft_tokens': 15},
      '2 candidates for each of 3 positions make only 14 nodes',
    ),
    ({'candidates': 0}, 'candidates is 0: give an integer of at least 1'),
    ({'num_draft_tokens': 0}, 'give at least 1 token'),
    (
      {'drafter': _NGRAM},
      'Ngram: give one that has a lattice, DFlash, DFlash2 or DSpark',
    ),
  ],
  _RECORDING: [
    ({'rejected_only': 1}, 'rejected_only is 1: give True or False'),
    ({'model': testing.HashModel}, 'model is the class HashModel: give a'),
    ({'drafter': _ASSISTANT}, 'Assistant, which reads the target'),
  ],
}


@pytest.mark.parametrize(
  ('drafter', 'changes', 'message'),
  [(drafter, *row) for drafter, rows in _REFUSED.items() for row in rows],
)
def test_setting_out_of_range_is_refused(drafter, changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(drafter, **changes)


@pytest.mark.parametrize(
  ('drafter', 'message'),
  [
    (_ASSISTANT, 'drafter is Assistant, but Feature'),
    (_P_EAGLE, 'drafter is PEagle, whose drafts are'),
  ],
)
def test_drafter_without_an_objective_is_refused(drafter, message):
  with pytest.raises(ValueError, match=message):
    eagle.FeatureObjective(drafter=drafter)


@pytest.mark.parametrize(
  ('init', 'message'),
  [
    (
      lambda key: dataclasses.replace(_P_EAGLE, own_embedding=True).init_params(
        key
      ),
      'own_embedding is for drafters that we',
    ),
    (_DSPARK.init_params, "give the target's parameters"),
  ],
)
def test_parameters_that_cannot_begin_are_refused(init, message):
  with pytest.raises(ValueError, match=message):
    init(jax.random.key(0))
