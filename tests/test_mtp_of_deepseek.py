"""DeepSeek-V3's own module for multi-token prediction, against transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

import specsample
from specsample import testing
from specsample.models import int8
from specsample.models import packed
from tests.models import fp8_by_hand

_V, _D, _L, _K = 96, 32, 2, 3
_CONFIG = transformers.DeepseekV3Config(
  vocab_size=_V,
  hidden_size=_D,
  # One layer more than the target has; the module is made of it.
  num_hidden_layers=_L + 1,
  num_attention_heads=4,
  num_key_value_heads=4,
  intermediate_size=48,
  moe_intermediate_size=20,
  q_lora_rank=20,
  kv_lora_rank=16,
  qk_rope_head_dim=8,
  qk_nope_head_dim=10,
  v_head_dim=6,
  n_routed_experts=8,
  n_group=4,
  topk_group=2,
  num_experts_per_tok=2,
  n_shared_experts=2,
  first_k_dense_replace=1,
  max_position_embeddings=128,
  initializer_range=0.3,
  num_nextn_predict_layers=0,
  rope_parameters={
    'rope_type': 'yarn',
    'factor': 4.0,
    'original_max_position_embeddings': 16,
    'rope_theta': 1_000.0,
    'mscale_all_dim': 0.7,
  },
)
_PREFIX = f'model.layers.{_L}.'
_OWN_SHAPES = {
  'enorm.weight': (_D,),
  'hnorm.weight': (_D,),
  'eh_proj.weight': (_D, 2 * _D),
  'shared_head.norm.weight': (_D,),
}


@pytest.fixture(scope='module', name='network')
def fixture_network():
  torch.manual_seed(0)
  network = transformers.DeepseekV3ForCausalLM(_CONFIG).eval()
  with torch.no_grad():
    # With zeros, routing would be the same without the bias.
    for layer in network.model.layers[1:]:
      bias = layer.mlp.gate.e_score_correction_bias
      bias.copy_(3 + 0.1 * torch.randn(bias.shape))
  return network


@pytest.fixture(scope='module', name='own')
def fixture_own():
  """The tensors that a module has besides its layer."""
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(0.3, 0.2, shape).astype('f4')
    for name, shape in _OWN_SHAPES.items()
  }


@pytest.fixture(scope='module', name='folder')
def fixture_folder(tmp_path_factory, network, own):
  """The network as a target of two layers, followed by a module."""
  folder = tmp_path_factory.mktemp('deepseek')
  network.save_pretrained(folder)
  weights = folder / 'model.safetensors'
  stored = safetensors.numpy.load_file(weights)
  stored |= {_PREFIX + name: values for name, values in own.items()}
  stored[_PREFIX + 'embed_tokens.weight'] = stored['model.embed_tokens.weight']
  stored[_PREFIX + 'shared_head.head.weight'] = stored['lm_head.weight']
  safetensors.numpy.save_file(stored, weights)
  config = json.loads((folder / 'config.json').read_text())
  config |= {'num_hidden_layers': _L, 'num_nextn_predict_layers': 1}
  (folder / 'config.json').write_text(json.dumps(config))
  return folder


def _normed(x, scale):
  return torch.nn.functional.rms_norm(x, (_D,), torch.tensor(scale), eps=1e-6)


def _expected(network, own, hidden, text, length):
  """Returns the logits [K, V] of K drafts after text [:length].

  `text` includes the drafts. The target's features are used up to the token
  before the pending one, and the module's own outputs after that.
  """
  embedded = network.model.embed_tokens(torch.tensor(text))
  features, found = torch.tensor(np.array(hidden))[: length - 1], []
  for _ in range(_K):
    size = len(features)
    joined = torch.cat(
      [
        _normed(embedded[1 : size + 1], own['enorm.weight']),
        _normed(features, own['hnorm.weight']),
      ],
      dim=-1,
    )
    x = (joined @ torch.tensor(own['eh_proj.weight']).T)[None]
    mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
    outputs = network.model.layers[_L](
      x,
      attention_mask=mask,
      position_embeddings=network.model.rotary_emb(x, torch.arange(size)[None]),
    )[0]
    last = outputs[-1:]
    normed = _normed(last, own['shared_head.norm.weight'])
    found.append(network.lm_head(normed)[0])
    features = torch.cat([features, last])
  return torch.stack(found).numpy()


@pytest.mark.slow
@torch.no_grad()
def test_drafts_are_those_of_transformers(folder, network, own):
  target = specsample.load(folder)
  assert target.model.num_layers == _L and target.model.latent is not None
  loaded = specsample.load_drafter(folder, target, num_draft_tokens=_K)
  drafter = loaded.drafter
  params = {'target': target.params, 'drafter': loaded.params}
  rng = np.random.default_rng(1)
  tokens = rng.integers(_V, size=(2, 24)).astype(np.int32)
  lengths = np.asarray([5, 19])

  @jax.jit
  def propose(params, tokens, lengths):
    empty = target.model.init_cache(*tokens.shape)
    output, _ = target.model.apply(params['target'], tokens, empty)
    state = drafter.init(params, *tokens.shape)
    state = drafter.observe(params, tokens, lengths - 1, output, None, state)
    warp = lambda logits, drafted: jax.nn.softmax(logits)
    draw = lambda probs, position: probs.argmax(-1)
    draft, _ = drafter.propose(params, draw, warp, tokens, lengths, state)
    return output.hidden, draft

  hidden, draft = propose(params, tokens, lengths)
  for row, length in enumerate(lengths):
    text = np.concatenate([tokens[row, :length], draft.tokens[row]])
    logits = _expected(network, own, hidden[row], text, length)
    expected = torch.tensor(logits).softmax(-1).numpy()
    np.testing.assert_allclose(draft.probs[row], expected, atol=1e-4)
    np.testing.assert_array_equal(draft.tokens[row], expected.argmax(-1))


def _assert_greedy_equal(target, drafter, own, verify=specsample.verify.chain):
  testing.assert_greedy_equal(
    {'target': target.params, 'drafter': own},
    np.arange(8).reshape(2, 4),
    np.asarray([4, 1]),
    model=target.model,
    drafter=drafter,
    verify=verify,
    max_new_tokens=12,
  )


@pytest.mark.nightly(but=('Eagle',))
@pytest.mark.parametrize('kind', ['Eagle', 'Eagle3'])
def test_a_drafter_with_keys_and_values_reads_it_too(folder, kind):
  target = specsample.load(folder)
  layers = {'feature_layers': (-1, 0, 1)} if kind == 'Eagle3' else {}
  drafter = getattr(specsample.drafters, kind)(
    model=target.model, num_draft_tokens=2, **layers
  )
  own = drafter.init_params(jax.random.key(0), target.params)
  _assert_greedy_equal(target, drafter, own)


@pytest.mark.nightly(only=('int8',))
@pytest.mark.parametrize('form', ['chain', 'tree', 'int8'])
def test_output_is_the_target_s(folder, form):
  target = specsample.load(folder)
  loaded = specsample.load_drafter(folder, target, num_draft_tokens=_K)
  drafter, own, verify = loaded.drafter, loaded.params, specsample.verify.chain
  if form == 'tree':
    topology = specsample.tree.k_ary((2, 2, 1))
    drafter = specsample.drafters.Tree(drafter=drafter, topology=topology)
    verify = specsample.verify.tree
  if form == 'int8':
    own = int8.weights(own)
  _assert_greedy_equal(target, drafter, own, verify)


@pytest.mark.parametrize('is_saved', [False, True])
def test_the_router_is_not_rounded(folder, network, tmp_path, is_saved):
  target = specsample.load(folder, 'bfloat16')
  loaded = specsample.load_drafter(folder, target)
  if is_saved:
    own = tmp_path / 'own'
    specsample.save_drafter(
      own, loaded.drafter, loaded.params, target=target, card={}
    )
    loaded = specsample.load_drafter(own, target)
  layer = loaded.params['layers'][0]['layer']
  assert layer['mlp']['expert_up']['kernel'].dtype == 'bfloat16'
  bias = network.model.layers[_L].mlp.gate.e_score_correction_bias
  np.testing.assert_array_equal(layer['mlp']['router_bias'], bias.numpy())


@pytest.fixture(scope='module', name='folders_of_8_bits')
def fixture_folders_of_8_bits(tmp_path_factory, folder):
  """DeepSeek-V3 as it is published, and decoded to 32 bits."""
  root = tmp_path_factory.mktemp('published')
  fp8_by_hand.write(folder, root / 'fp8', (6, 5), plain=root / 'plain')
  return root / 'fp8', root / 'plain'


@pytest.mark.parametrize(
  ('dtype', 'weights'),
  [('float32', None), ('bfloat16', None), ('bfloat16', 'int8')],
)
def test_8_bits_are_what_they_mean(folders_of_8_bits, dtype, weights):
  found, expected = (
    (target, specsample.load_drafter(path, target))
    for path in folders_of_8_bits
    for target in [specsample.load(path, dtype, weights)]
  )
  assert found[0].model == expected[0].model
  assert found[0].fingerprint == expected[0].fingerprint
  for ours, theirs in zip(found, expected, strict=True):
    assert jax.tree.structure(ours.params) == jax.tree.structure(theirs.params)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_modules_of_another_family_are_refused(folder, tmp_path):
  config = transformers.LlamaConfig(
    vocab_size=_V, hidden_size=_D, num_hidden_layers=_L, intermediate_size=8
  )
  transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
  stored = json.loads((tmp_path / 'config.json').read_text())
  stored |= {'num_nextn_predict_layers': 1}
  (tmp_path / 'config.json').write_text(json.dumps(stored))
  with pytest.raises(ValueError, match="as model_type 'llama' has them"):
    specsample.load_drafter(tmp_path, specsample.load(folder))


def test_a_module_without_an_expert_is_refused(folder, tmp_path):
  weights = safetensors.numpy.load_file(folder / 'model.safetensors')
  del weights[_PREFIX + 'mlp.experts.3.up_proj.weight']
  safetensors.numpy.save_file(weights, tmp_path / 'model.safetensors')
  config = (folder / 'config.json').read_text()
  (tmp_path / 'config.json').write_text(config)
  target = specsample.load(folder)
  missing = r'1 tensors \(model\.layers\.2\.mlp\.experts\.\*\.up_proj'
  with pytest.raises(ValueError, match=missing):
    specsample.load_drafter(tmp_path, target)


def test_an_exported_module_is_read_as_it_was(folder, tmp_path):
  target = specsample.load(folder)
  given = specsample.load_drafter(folder, target)
  params = jax.tree.map(
    lambda x: (x * 1.25).astype(jnp.bfloat16).astype(x.dtype),
    packed.plain(given.params),
  )
  specsample.export_drafter(
    *(tmp_path / 'out', given.drafter, params),
    target=target,
    layout='huggingface',
  )
  again = specsample.load(tmp_path / 'out')
  found = specsample.load_drafter(tmp_path / 'out', again)
  assert found.drafter == given.drafter
  of_module = params, packed.plain(found.params)
  for one, other in ((target.params, again.params), of_module):
    jax.tree.map(np.testing.assert_array_equal, one, other)
