"""Drafters that are written for other engines, and read again."""

import dataclasses
import json

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import specsample
from specsample import drafters
from specsample import files
from specsample import testing
from specsample.loading import export
from specsample.models import packed
from specsample.models import tensors
from tests import test_mtp_of_qwen3_5
from tests.loading.published import as_engines_read
from tests.loading.published import by_hand
from tests.loading.published import test_mtp

_V, _D, _L, _K = 32, 16, 6, 3
_MODEL = testing.tiny_llama(vocab_size=_V, dim=_D, num_layers=_L)
_D2T = np.sort(np.random.default_rng(9).permutation(_V)[:12]).astype(np.int32)
_PROMPT = [3, 1, 4, 9, 2]
# Layers of other sizes than the target's, with norms of queries and keys.
_QWEN = dataclasses.replace(
  testing.tiny_llama(vocab_size=_V, dim=_D, num_layers=2),
  qk_norm=True,
  head_dim=6,
  norm_eps=1e-6,
  rope_theta=500.0,
)


def _rounded(tree):
  """Returns parameters that bfloat16 holds exactly, in float32."""
  to = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  return jax.tree.map(lambda x: to(x) if is_float(x) else x, tree)


_TARGET = specsample.Loaded(
  _MODEL, _rounded(_MODEL.init(jax.random.key(0))), None
)


def _made(drafter, target=_TARGET):
  """Returns a drafter's parameters with noise in all that training changes."""
  has_ids = drafter.draft_vocab_size is not None
  params = drafter.init_params(
    jax.random.key(1), target.params, _D2T if has_ids else None
  )
  rng = np.random.default_rng(2)
  noisy = lambda x, is_trained: (
    x + 0.2 * rng.normal(size=x.shape).astype('f4') if is_trained else x
  )
  return _rounded(jax.tree.map(noisy, params, drafter.is_trained()))


def _eagle3(**settings):
  given = {
    'model': _MODEL,
    'draft_vocab_size': 12,
    'feature_layers': (1, 2, 4),
  }
  return drafters.Eagle3(num_draft_tokens=_K, **(given | settings))


def _block(kind=drafters.DFlash, **settings):
  given = {
    'feature_layers': (1, 3),
    'mask_token_id': 31,
    'layer_config': _QWEN,
    'draft_vocab_size': 12,
  }
  return kind(model=_MODEL, num_draft_tokens=_K, **(given | settings))


_SPARK = {'rank': 4, 'drafts_from_pending': True}
_WINDOWS = dataclasses.replace(_QWEN, sliding_window=3, sliding_layers=(0,))
_ALL = {
  'eagle3': (_eagle3(), 'huggingface'),
  'eagle3 with a joint norm': (_eagle3(has_joint_norm=True), 'huggingface'),
  'eagle3 of all tokens': (_eagle3(draft_vocab_size=None), 'huggingface'),
  'eagle3 of speculators': (_eagle3(), 'speculators'),
  'eagle3 with all norms': (
    _eagle3(
      has_feature_norms=True,
      norm_before_residual=True,
      feeds_back_normed=True,
      layer_config=_QWEN,
    ),
    'speculators',
  ),
  'eagle3 with a window': (
    _eagle3(layer_config=dataclasses.replace(_QWEN, sliding_window=3)),
    'speculators',
  ),
  'dflash': (_block(), 'huggingface'),
  'dflash of all tokens': (_block(draft_vocab_size=None), 'huggingface'),
  'dflash with windows': (
    _block(layer_config=_WINDOWS, causal_layers=(0,)),
    'huggingface',
  ),
  'dflash, causal': (_block(causal_layers=(0, 1)), 'huggingface'),
  'dflash of speculators': (_block(draft_vocab_size=None), 'speculators'),
  'dflash of speculators, two ways': (
    _block(layer_config=_WINDOWS),
    'speculators',
  ),
  'dspark': (_block(drafters.DSpark, **_SPARK), 'huggingface'),
  'dspark, gated': (
    _block(drafters.DSpark, **_SPARK, head='gated', draft_vocab_size=None),
    'huggingface',
  ),
  'dspark, rnn': (
    _block(drafters.DSpark, **_SPARK, head='rnn'),
    'speculators',
  ),
  'dspark of masks alone': (_block(drafters.DSpark, rank=4), 'speculators'),
  'mtp': (
    drafters.MTP(
      model=_MODEL,
      num_draft_tokens=_K,
      layer_config=_QWEN,
      feeds_back_normed=True,
    ),
    'speculators',
  ),
}


# How an engine reads some of these.
_READ = dict.fromkeys(
  (
    *('eagle3', 'eagle3 with a joint norm', 'eagle3 of speculators'),
    'eagle3 with all norms',
  ),
  as_engines_read.eagle3,
) | dict.fromkeys(
  ('dflash', 'dflash of speculators', 'dspark', 'dspark of masks alone'),
  as_engines_read.block,
)


def _export(path, drafter, params, layout, target=_TARGET, **settings):
  settings = {'target_name': 'organisation/tiny'} | settings
  specsample.export_drafter(
    path, drafter, params, target=target, layout=layout, **settings
  )


def _by_name(params):
  leaves = jax.tree_util.tree_leaves_with_path(packed.plain(params))
  return {tensors.key(path): np.asarray(x) for path, x in leaves}


def _rounds(drafter, params):
  given = specsample.LoadedDrafter(drafter, params, {})
  return by_hand.two_rounds(given, _TARGET, _PROMPT, 1, 7)


@pytest.mark.parametrize('name', _ALL)
def test_a_drafter_is_read_as_it_was_written(tmp_path, name):
  drafter, layout = _ALL[name]
  params = _made(drafter)
  _export(tmp_path / 'out', drafter, params, layout)
  loaded = specsample.load_drafter(tmp_path / 'out', _TARGET)
  expected, found = _by_name(params), _by_name(loaded.params)
  if isinstance(drafter, drafters.DSpark) and drafter.draft_vocab_size:
    # Tokens that are never drafted have a row of zeros.
    wide = np.zeros((4, _V), 'f4')
    wide[:, _D2T] = expected['markov.before']
    expected['markov.before'] = wide
  assert found.keys() == expected.keys()
  for key, values in expected.items():
    np.testing.assert_array_equal(found[key], values, strict=True)
  assert loaded.drafter.num_draft_tokens == _K
  drawn = _rounds(drafter, packed.of_drafter(params))
  again = _rounds(loaded.drafter, loaded.params)
  for one, other in zip(drawn, again, strict=True):
    assert one.drafts == other.drafts
    np.testing.assert_array_equal(one.logits, other.logits)
    if name in _READ:
      logits = _READ[name](tmp_path / 'out', one, _TARGET)
      np.testing.assert_allclose(one.logits, logits, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('draft_vocab_size', [None, 12])
@pytest.mark.parametrize('shares_blocks', [False, True])
def test_medusa_heads_become_unembeddings(
  tmp_path, draft_vocab_size, shares_blocks
):
  drafter = drafters.Medusa(
    model=_MODEL,
    num_draft_tokens=_K,
    num_layers=2,
    draft_vocab_size=draft_vocab_size,
    shares_blocks=shares_blocks,
  )
  params = _made(drafter)
  _export(tmp_path / 'out', drafter, params, 'huggingface')
  loaded = specsample.load_drafter(tmp_path / 'out', _TARGET)
  assert loaded.drafter.shares_blocks is shares_blocks
  given, found = _by_name(params), _by_name(loaded.params)
  ids = np.arange(_V) if draft_vocab_size is None else _D2T
  columns = np.asarray(_TARGET.params['unembedding'])[:, ids]
  for i in range(_K):
    folded = given[f'heads.{i}.project.linear.kernel'] @ columns
    kernel = found[f'heads.{i}.unembed.kernel'][:, ids]
    np.testing.assert_allclose(kernel, folded, rtol=2**-8)
    for key in (x for x in given if x.startswith(f'heads.{i}.blocks')):
      np.testing.assert_array_equal(found[key], given[key], strict=True)
  for drawn in _rounds(drafter, packed.of_drafter(params)):
    logits = as_engines_read.medusa(tmp_path / 'out', drawn, _TARGET)
    np.testing.assert_allclose(drawn.logits, logits, atol=0.05)
  # Once they are unembeddings, nothing is rounded.
  if draft_vocab_size is None:
    _export(tmp_path / 'twice', loaded.drafter, loaded.params, 'huggingface')
    twice = specsample.load_drafter(tmp_path / 'twice', _TARGET)
    for key, values in _by_name(twice.params).items():
      np.testing.assert_array_equal(values, found[key], strict=True)


def _folder_of(form, folder):
  if form == 'llama':
    return test_mtp._write(folder, test_mtp._modules())
  if form == 'llama without modules':
    return test_mtp._write(folder, {}, 0)
  reference = test_mtp_of_qwen3_5._reference(form)
  return test_mtp_of_qwen3_5._write(folder, form, *reference)


@pytest.mark.slow
@pytest.mark.parametrize(
  'form', ['llama', 'llama without modules', 'dense', 'sparse', 'next']
)
def test_modules_take_their_place_beside_the_target(tmp_path, form):
  target = specsample.load(_folder_of(form, tmp_path / 'target'))
  if form == 'llama without modules':
    drafter = drafters.MTP(
      model=target.model, num_draft_tokens=2, num_modules=2
    )
    params = _made(drafter, target)
  else:
    trained = specsample.load_drafter(tmp_path / 'target', target)
    drafter = trained.drafter
    params = _rounded(
      jax.tree.map(lambda x: x * 1.25, packed.plain(trained.params))
    )
  _export(tmp_path / 'out', drafter, params, 'huggingface', target)
  again = specsample.load(tmp_path / 'out')
  for given, found in zip(
    jax.tree.leaves(target.params), jax.tree.leaves(again.params), strict=True
  ):
    np.testing.assert_array_equal(given, found, strict=True)
  loaded = specsample.load_drafter(tmp_path / 'out', again)
  assert loaded.drafter == drafter
  expected, found = _by_name(params), _by_name(loaded.params)
  assert found.keys() == expected.keys()
  for key, values in expected.items():
    np.testing.assert_array_equal(found[key], values, strict=True)
  index = json.loads(
    (tmp_path / 'out/model.safetensors.index.json').read_text()
  )
  for name, file in index['weight_map'].items():
    with safetensors.safe_open(tmp_path / 'out' / file, 'np') as opened:
      assert name in opened.keys()  # noqa: SIM118


def test_names_shapes_and_dtypes_are_those_of_the_layout(tmp_path):
  for name in ('eagle3', 'dspark'):
    drafter, layout = _ALL[name]
    _export(tmp_path / name, drafter, _made(drafter), layout)
  with safetensors.safe_open(
    tmp_path / 'eagle3/model.safetensors', 'np'
  ) as opened:
    assert opened.metadata() == {'format': 'pt'}
    found = {
      key: (
        opened.get_slice(key).get_dtype(),
        opened.get_slice(key).get_shape(),
      )
      for key in opened.keys()  # noqa: SIM118
    }
  heads, kv, mlp = 32, 16, 32
  assert found == {
    'd2t': ('I64', [12]),
    't2d': ('BOOL', [_V]),
    'fc.weight': ('BF16', [_D, 3 * _D]),
    'lm_head.weight': ('BF16', [12, _D]),
    'norm.weight': ('BF16', [_D]),
    'midlayer.hidden_norm.weight': ('BF16', [_D]),
    'midlayer.input_layernorm.weight': ('BF16', [_D]),
    'midlayer.post_attention_layernorm.weight': ('BF16', [_D]),
    'midlayer.mlp.down_proj.weight': ('BF16', [_D, mlp]),
    'midlayer.mlp.gate_proj.weight': ('BF16', [mlp, _D]),
    'midlayer.mlp.up_proj.weight': ('BF16', [mlp, _D]),
    'midlayer.self_attn.k_proj.weight': ('BF16', [kv, 2 * _D]),
    'midlayer.self_attn.o_proj.weight': ('BF16', [_D, heads]),
    'midlayer.self_attn.q_proj.weight': ('BF16', [heads, 2 * _D]),
    'midlayer.self_attn.v_proj.weight': ('BF16', [kv, 2 * _D]),
  }
  config = json.loads((tmp_path / 'eagle3/config.json').read_text())
  # vLLM counts what enters a layer, SGLang a layer's output.
  assert config['eagle_aux_hidden_state_layer_ids'] == [2, 3, 5]
  key = 'eagle_aux_hidden_state_layer_ids'
  assert config['eagle_config'][key] == [1, 2, 4]
  with safetensors.safe_open(
    tmp_path / 'dspark/model.safetensors', 'np'
  ) as opened:
    kind = opened.get_slice('confidence_head.proj.weight').get_dtype()
    assert kind == 'F32'
    shape = opened.get_slice('markov_head.markov_w1.weight').get_shape()
    assert shape == [_V, 4]


_LLAMA = dataclasses.replace(_QWEN, qk_norm=False)
_CAPPED = dataclasses.replace(_MODEL, logit_softcap=30.0)


@pytest.mark.parametrize(
  ('drafter', 'layout', 'message'),
  [
    (
      _eagle3(has_feature_norms=True),
      'huggingface',
      'has_feature_norms = True, which would be read as False: the huggingface '
      'layout of Eagle3 has no room for it: train without it, or choose anoth',
    ),
    (_eagle3(feeds_back_normed=True), 'huggingface', 'feeds_back_normed = Tr'),
    (_eagle3(layer_config=_QWEN), 'huggingface', 'qk_norm = True'),
    (
      _eagle3(layer_config=dataclasses.replace(_LLAMA, sliding_window=9)),
      'huggingface',
      'a window of 9 tokens',
    ),
    (
      _eagle3(layer_config=dataclasses.replace(_LLAMA, attention_bias=True)),
      'speculators',
      'attention_bias = True beside attention_out_bias = False',
    ),
    (
      _eagle3(layer_config=dataclasses.replace(_LLAMA, has_post_norms=True)),
      'speculators',
      'params has layer.*post.* of shape|has_post_norms = True',
    ),
    (
      _eagle3(layer_config=dataclasses.replace(_LLAMA, activation='gelu_tanh')),
      'speculators',
      "activation = 'gelu_tanh', which would be read as 'silu'",
    ),
    (_eagle3(feature_layers=(1, 5)), 'huggingface', r'with 5, the last layer'),
    (_eagle3(feature_layers=(1, 1)), 'speculators', 'with a layer twice'),
    (_eagle3(model=_CAPPED), 'huggingface', 'logit_softcap = 30.0'),
    (_block(mask_token_id=None), 'huggingface', 'mask_token_id = None'),
    (_block(has_feature_norms=True), 'speculators', 'params has feature_norms'),
    (_block(layer_config=_LLAMA), 'huggingface', 'qk_norm = False'),
    (
      _block(drafts_from_pending=True),
      'huggingface',
      'drafts_from_pending = True, which would be read as False',
    ),
    (
      _block(causal_layers=(0,)),
      'speculators',
      r'causal_layers = \(0,\), which would be read as \(\)',
    ),
    (
      _block(drafters.DSpark, rank=4, head='rnn'),
      'speculators',
      "head = 'rnn' with drafts_from_pending = False",
    ),
    (
      drafters.Medusa(model=_MODEL, num_draft_tokens=_K),
      'speculators',
      "Medusa is no speculators_model_type.*choose layout='huggingface'",
    ),
    (
      drafters.MTP(model=_MODEL, num_draft_tokens=_K, draft_vocab_size=12),
      'speculators',
      'draft_vocab_size = 12',
    ),
    (
      drafters.MTP(model=_MODEL, num_draft_tokens=_K, layer_config=_QWEN),
      'speculators',
      'feeds_back_normed = False, which would be read as True',
    ),
    (
      drafters.MTP(model=_MODEL, num_draft_tokens=_K),
      'huggingface',
      'in whose folder the modules are.*load the target from a folder',
    ),
    (
      drafters.Eagle(model=_MODEL, num_draft_tokens=_K),
      'huggingface',
      'Eagle has no published layout that can be written: export one of Medusa',
    ),
    (_eagle3(), 'gguf', "layout is 'gguf': give one of huggingface, specul"),
  ],
)
def test_what_has_no_room_is_named(tmp_path, drafter, layout, message):
  target = dataclasses.replace(_TARGET, model=drafter.model)
  with pytest.raises(ValueError, match=message):
    _export(tmp_path / 'out', drafter, _made(drafter, target), layout, target)
  assert not [*tmp_path.iterdir()]


def test_a_target_without_a_name_for_others_is_refused(tmp_path):
  drafter = _eagle3()
  target = dataclasses.replace(_TARGET, name='smollm2-135m-instruct')
  with pytest.raises(
    ValueError, match=r"names the target, but 'smollm2-.*give target_name='orga"
  ):
    _export(
      tmp_path / 'out',
      drafter,
      _made(drafter),
      'speculators',
      target,
      target_name=None,
    )
  assert not [*tmp_path.iterdir()]


def test_a_folder_that_exists_is_not_touched(tmp_path):
  drafter, out = _eagle3(), tmp_path / 'out'
  out.mkdir()
  with pytest.raises(
    ValueError, match='out exists: remove it, or name another'
  ):
    _export(out, drafter, _made(drafter), 'huggingface')
  assert not [*out.iterdir()]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
  def fail(path, content):
    raise OSError('no space left on device')

  monkeypatch.setattr(files, 'write_json', fail)
  drafter = _eagle3()
  with pytest.raises(OSError, match='no space left'):
    _export(tmp_path / 'out', drafter, _made(drafter), 'huggingface')
  assert not [*tmp_path.iterdir()]


def test_the_model_card_says_how_it_was_trained(tmp_path):
  drafter = _eagle3()
  card = {
    'training': {'command': 'python -m experiments.train', 'steps': 7},
    'held_out': {
      'what': 'held-out prompts',
      'tokens_per_round': 2.25,
      'acceptance_by_position': [0.75, 0.5],
    },
  }
  _export(tmp_path / 'out', drafter, _made(drafter), 'huggingface', card=card)
  text = (tmp_path / 'out/README.md').read_text()
  for part in (
    'base_model: organisation/tiny\n',
    '# Eagle3 for organisation/tiny\n',
    '"method": "eagle3", "num_speculative_tokens": 3',
    "outputs of the target's layers 1, 2, 4, counted from 0",
    'what enters layers 2, 3, 5',
    '2.250 tokens per round',
    'by position: 0.750, 0.500',
    '* command: `python -m experiments.train`',
  ):
    assert part in text


def test_the_folder_is_uploaded_to_a_new_repository(tmp_path, monkeypatch):
  calls = []

  def create(name, repo_type):
    calls.append(('create', name, repo_type))
    return f'https://hub/{name}'

  def send(repo_id, folder_path, repo_type):
    calls.append(('send', repo_id, folder_path, repo_type))

  monkeypatch.setattr(huggingface_hub, 'create_repo', create)
  monkeypatch.setattr(huggingface_hub, 'upload_folder', send)
  found = export.upload(tmp_path, 'owner/name')
  assert found == 'https://hub/owner/name'
  assert calls == [
    ('create', 'owner/name', 'model'),
    ('send', 'owner/name', str(tmp_path), 'model'),
  ]

  def refuse(name, repo_type):
    raise OSError('offline')

  monkeypatch.setattr(huggingface_hub, 'create_repo', refuse)
  with pytest.raises(
    ValueError, match=r'was written, but not uploaded.*\(offline\): log in with'
  ):
    export.upload(tmp_path, 'owner/name')


@pytest.mark.parametrize(
  ('path', 'name', 'target_name', 'message'),
  [
    ('out', 'name', 'owner/target', "'name' is no repository of the hub"),
    ('gs://b/out', 'owner/name', 'owner/target', 'only a local folder can be'),
    ('out', 'owner/name', '/models/target', 'others would look for it'),
    ('out', 'owner/name', None, 'the target None is not on the hub'),
  ],
)
def test_an_upload_that_helps_nobody_is_refused(
  path, name, target_name, message
):
  with pytest.raises(ValueError, match=message):
    export.check_upload(path, name, target_name)


def test_fewer_modules_than_the_target_has_are_refused(tmp_path):
  target = specsample.load(_folder_of('llama', tmp_path / 'target'))
  drafter = drafters.MTP(model=target.model, num_draft_tokens=2)
  with pytest.raises(ValueError, match="1 more of the target's 2 modules"):
    _export(
      tmp_path / 'out',
      drafter,
      _made(drafter, target),
      'huggingface',
      target,
    )
  assert not (tmp_path / 'out').exists()


def test_a_token_map_that_names_no_tokens_is_refused(tmp_path):
  drafter = drafters.Medusa(
    model=_MODEL, num_draft_tokens=_K, draft_vocab_size=12
  )
  out = tmp_path / 'out'
  _export(out, drafter, _made(drafter), 'huggingface')
  stored = safetensors.numpy.load_file(out / 'model.safetensors')
  stored['token_map'] = stored['token_map'] + _V
  safetensors.numpy.save_file(stored, out / 'model.safetensors')
  with pytest.raises(ValueError, match='tensor token_map: d2t holds id'):
    specsample.load_drafter(out, _TARGET)
