"""Trained drafters load as they were saved, or an error says why not."""

import dataclasses
import functools
import hashlib
import json
import os
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import specsample
from specsample import drafters
from specsample import testing
from specsample.loading import card as card_lib
from specsample.models import fingerprint
from specsample.models import int8
from specsample.models import matrices
from specsample.models import packed

_MODEL = testing.tiny_llama(vocab_size=8)
_TARGET = specsample.Loaded(_MODEL, _MODEL.init(jax.random.key(0)), None)
_D2T = np.asarray([6, 1, 4, 3, 0])
_K = 3
_DRAFTERS = {
  'medusa': drafters.Medusa(
    model=_MODEL, num_draft_tokens=_K, num_layers=2, draft_vocab_size=5
  ),
  'hydra': drafters.Hydra(model=_MODEL, num_draft_tokens=_K),
  'hydra++': drafters.Hydra(
    model=_MODEL,
    num_draft_tokens=_K,
    num_layers=2,
    draft_vocab_size=5,
    prefix_attention=True,
  ),
  'draft_model': drafters.DraftModel(
    model=_MODEL, num_draft_tokens=_K, layers=(1,), draft_vocab_size=5
  ),
  'dspark': drafters.DSpark(
    model=_MODEL,
    num_draft_tokens=_K,
    feature_layers=(0, 1),
    draft_vocab_size=5,
    rank=4,
  ),
  'dflash2': drafters.DFlash2(
    model=_MODEL,
    num_draft_tokens=_K,
    feature_layers=(0, 1),
    draft_vocab_size=5,
    conv_group_size=4,
    conv_kernel_size=3,
    selector_rank=4,
    selector_top_k=2,
    final_logit_softcapping=20.0,
  ),
  'eagle3': drafters.Eagle3(
    model=_MODEL,
    num_draft_tokens=_K,
    feature_layers=(-1, 0, 1),
    draft_vocab_size=5,
  ),
}
_CARD = {'target': 'tiny', 'tokens': 12, 'held_out': {'acceptance': [0.5, 0.1]}}
_each = pytest.mark.parametrize('name', _DRAFTERS)


@pytest.fixture(scope='module')
def trained():
  """Parameters by drafter, which bfloat16 doesn't represent exactly."""
  found = {}
  for name, drafter in _DRAFTERS.items():
    d2t = _D2T if drafter.draft_vocab_size else None
    own = drafter.init_params(jax.random.key(1), _TARGET.params, d2t)
    noisy = testing.with_noise(own, jax.random.key(2))
    if d2t is not None:
      noisy['vocabulary'] = own['vocabulary']
    found[name] = noisy
  return found


@pytest.fixture(scope='module')
def saved(trained, tmp_path_factory):
  """A folder with one folder per saved drafter."""
  folder = tmp_path_factory.mktemp('saved')
  for name, drafter in _DRAFTERS.items():
    specsample.save_drafter(
      folder / name, drafter, trained[name], target=_TARGET, card=_CARD
    )
  return folder


def _rounded(params):
  """Rounds as saving and loading do."""
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params
  )
  if 'vocabulary' in params:
    rounded['vocabulary'] = params['vocabulary']
  return packed.plain(packed.of_drafter(rounded))


def _assert_equal(found, expected):
  found, expected = packed.plain(found), packed.plain(expected)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
  assert dtypes(found) == dtypes(expected)


@_each
def test_what_is_saved_is_loaded(saved, trained, name):
  loaded = specsample.load_drafter(saved / name, _TARGET)
  assert loaded.drafter == _DRAFTERS[name]
  _assert_equal(loaded.params, _rounded(trained[name]))
  assert loaded.card | _CARD == loaded.card
  assert loaded.card['fingerprint'] == fingerprint.compute(_TARGET.params)


@_each
def test_nothing_is_committed_to_a_device(saved, name):
  # Committed arrays would have every program compiled once more.
  loaded = specsample.load_drafter(saved / name, _TARGET)
  assert not any(leaf.committed for leaf in jax.tree.leaves(loaded.params))


@pytest.mark.parametrize('name', ['medusa', 'draft_model'])
def test_it_drafts_what_it_drafted(saved, trained, name):
  loaded = specsample.load_drafter(saved / name, _TARGET)

  def generate(drafter, params):
    return specsample.generate(
      {'target': _TARGET.params, 'drafter': params},
      np.asarray([[1, 2, 3], [4, 0, 0]]),
      np.asarray([3, 1]),
      jax.random.key(3),
      model=_MODEL,
      drafter=drafter,
      verify=specsample.verify.chain,
      sampling=specsample.Sampling(temperature=1.0),
      max_new_tokens=24,
    )

  before = generate(_DRAFTERS[name], _rounded(trained[name]))
  after = generate(loaded.drafter, loaded.params)
  _assert_equal(after, before)
  assert int(np.asarray(after.accepted).sum()) > 0


@functools.partial(jax.jit, static_argnames='drafter')
def _draft_probs(own, *, drafter):
  """Returns the laws that tokens 3 are drafted from, after tokens 1, 2, 3."""
  params = {'target': _TARGET.params, 'drafter': own}
  tokens = jnp.asarray([[1, 2, 3] + [0] * _K])
  output, _ = _MODEL.apply(
    _TARGET.params,
    tokens[:, :2],
    _MODEL.init_cache(1, 8),
    drafter.feature_layers,
  )
  state = drafter.init(params, 1, 8)
  state = drafter.observe(
    params, tokens[:, :2], jnp.asarray([2]), output, None, state
  )
  draft, _ = drafter.propose(
    params,
    lambda probs, position: jnp.full_like(position, 3),
    lambda logits, drafted: jax.nn.softmax(logits),
    tokens,
    jnp.asarray([3]),
    state,
  )
  return draft.probs


@pytest.mark.parametrize('name', ['hydra++', 'dspark', 'eagle3'])
def test_it_drafts_as_its_matrices_of_int8_say(saved, name):
  exact = specsample.load_drafter(saved / name, _TARGET)
  found = specsample.load_drafter(saved / name, _TARGET, weights='int8')
  assert found.drafter == exact.drafter and found.card == exact.card
  assert int8.names(found.params)
  is_int8 = lambda x: isinstance(x, int8.Int8)
  rounded = jax.tree.map(
    lambda x: matrices.dense(x, jnp.float32) if is_int8(x) else x,
    found.params,
    is_leaf=is_int8,
  )
  probs, of_rounded, of_exact = (
    _draft_probs(own, drafter=found.drafter)
    for own in (found.params, rounded, exact.params)
  )
  np.testing.assert_allclose(probs, of_rounded, atol=1e-5)
  assert 0 < np.abs(probs - of_exact).max() < 0.02


@_each
def test_parameters_take_the_targets_dtype(saved, trained, name):
  half = lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x
  model = dataclasses.replace(_MODEL, dtype='bfloat16')
  target = specsample.Loaded(model, jax.tree.map(half, _TARGET.params), None)
  loaded = specsample.load_drafter(saved / name, target)
  assert loaded.drafter.model == model
  _assert_equal(loaded.params, jax.tree.map(half, trained[name]))


@_each
def test_the_formats_own_package_reads_it(saved, trained, name):
  path = saved / name / 'drafter.safetensors'
  found = safetensors.numpy.load_file(path)
  expected = dict(trained[name])
  own = expected.pop('vocabulary', None)
  leaves, _ = jax.tree_util.tree_flatten_with_path(expected)
  values = {
    '.'.join(str(key.key) for key in keys): np.asarray(leaf).astype(
      ml_dtypes.bfloat16
    )
    for keys, leaf in leaves
  }
  if own is not None:
    values['vocabulary.d2t'] = _D2T.astype(np.int32)
  assert found.keys() == values.keys()
  for key, value in values.items():
    assert found[key].dtype == value.dtype
    np.testing.assert_array_equal(found[key], value)


@pytest.mark.parametrize('name', ['medusa', 'hydra', 'hydra++'])
def test_fewer_heads_are_the_first_ones(saved, trained, name):
  loaded = specsample.load_drafter(saved / name, _TARGET, 2)
  assert loaded.drafter.num_draft_tokens == 2
  expected = _rounded(trained[name])
  expected['heads'] = {i: expected['heads'][i] for i in (0, 1)}
  _assert_equal(loaded.params, expected)
  with pytest.raises(
    ValueError, match=r'is 4, but .* has heads for only 3: give'
  ):
    specsample.load_drafter(saved / name, _TARGET, 4)
  with pytest.raises(
    ValueError, match='num_draft_tokens is 0: give at least 1'
  ):
    specsample.load_drafter(saved / name, _TARGET, 0)


def test_a_draft_model_drafts_any_number(saved, trained):
  loaded = specsample.load_drafter(saved / 'draft_model', _TARGET, 7)
  assert loaded.drafter.num_draft_tokens == 7
  _assert_equal(loaded.params, _rounded(trained['draft_model']))


def test_a_drafter_that_was_loaded_is_saved_again(saved, tmp_path):
  loaded = specsample.load_drafter(saved / 'medusa', _TARGET, 1)
  digits = fingerprint.compute(_TARGET.params)
  specsample.save_drafter(
    tmp_path / 'one',
    loaded.drafter,
    loaded.params,
    target=digits,
    card=loaded.card,
  )
  again = specsample.load_drafter(tmp_path / 'one', _TARGET)
  _assert_equal(again.params, loaded.params)
  assert again.drafter == loaded.drafter
  settings = loaded.card['settings'] | {'num_draft_tokens': 1}
  new = {'settings': settings, 'sha256': again.card['sha256']}
  assert again.card == loaded.card | new


def test_shipped_drafters_have_names(saved, tmp_path, monkeypatch):
  monkeypatch.setattr(card_lib, '_SHELVES', (tmp_path / 'no', tmp_path))
  shutil.copytree(saved / 'medusa', tmp_path / 'tiny-llama' / 'medusa')
  loaded = specsample.load_drafter('tiny-llama/medusa', _TARGET)
  assert loaded.drafter == _DRAFTERS['medusa']
  message = (
    r"'tiny-llama' is neither a folder .* one of \['tiny-llama/medusa'\]$"
  )
  with pytest.raises(ValueError, match=message):
    specsample.load_drafter('tiny-llama', _TARGET)


def test_a_drafter_of_another_target_is_refused(saved):
  other = _MODEL.init(jax.random.key(9))
  target = specsample.Loaded(_MODEL, other, None)
  own = fingerprint.compute(_TARGET.params)
  message = (
    rf'medusa was trained for tiny \({own}\), but this target is '
    f'{fingerprint.compute(other)}: .* train a drafter for this target'
  )
  with pytest.raises(ValueError, match=message):
    specsample.load_drafter(saved / 'medusa', target)


def _edit_card(folder, **changes):
  path = folder / 'card.json'
  card = json.loads(path.read_text())
  path.write_text(json.dumps(card | changes))


def _edit_settings(folder, **changes):
  card = json.loads((folder / 'card.json').read_text())
  _edit_card(folder, settings=card['settings'] | changes)


def _edit_arrays(folder, edit, is_noted=False):
  """Edits the weights, and their hash in the card if `is_noted`."""
  path = folder / 'drafter.safetensors'
  arrays = safetensors.numpy.load_file(path)
  edit(arrays)
  safetensors.numpy.save_file(arrays, path)
  if is_noted:
    digits = hashlib.sha256(path.read_bytes()).hexdigest()
    _edit_card(folder, sha256=digits)


def _flip(path):
  data = bytearray(path.read_bytes())
  data[-1] ^= 1
  path.write_bytes(data)


def _cut(path, size):
  path.write_bytes(path.read_bytes()[:size])


def _as_pickle(folder, name):
  (folder / name).rename(folder / 'medusa_lm_head.pt')


_KERNEL = 'heads.0.project.linear.kernel'
_DAMAGES = {
  'truncated': (
    lambda folder: _cut(folder / 'drafter.safetensors', 3000),
    r'not a complete safetensors file \(tensor .* ends at byte',
  ),
  'damaged card': (
    lambda folder: _cut(folder / 'card.json', 100),
    r'card\.json cannot be read .* make it again',
  ),
  'no card': (
    lambda folder: os.remove(folder / 'card.json'),
    r'card\.json is missing: give a folder that save_drafter finished',
  ),
  'no weights': (
    lambda folder: os.remove(folder / 'drafter.safetensors'),
    r'drafter\.safetensors is missing: give a folder',
  ),
  'a pickle for the weights': (
    lambda folder: _as_pickle(folder, 'drafter.safetensors'),
    r'medusa_lm_head\.pt may be a pickle, which can run any code',
  ),
  'no weights of torch alone': (
    lambda folder: (
      _as_pickle(folder, 'drafter.safetensors'),
      os.remove(folder / 'card.json'),
    ),
    r'medusa_lm_head\.pt does not hold named tensors as torch.save writes them',
  ),
  'other weights of the same shapes': (
    lambda folder: _flip(folder / 'drafter.safetensors'),
    r'does not hold the weights that card\.json was written for',
  ),
  'another format': (
    lambda folder: _edit_card(folder, format=2),
    'has format 2, but this version of the library reads format 1',
  ),
  'no fingerprint': (
    lambda folder: _edit_card(folder, fingerprint=None),
    'fingerprint is None, expected str: the file is damaged',
  ),
  'unknown kind': (
    lambda folder: _edit_card(folder, kind='lookahead'),
    r"lookahead .* does not describe any of \['assistant', .*, 'peagle'\]",
  ),
  'unknown setting': (
    lambda folder: _edit_settings(folder, num_trees=2),
    r"unexpected keyword argument 'num_trees'\): save the drafter again",
  ),
  'bad setting': (
    lambda folder: _edit_settings(folder, draft_vocab_size='5'),
    r"card\.json: medusa with .*'5'.* save the drafter again",
  ),
  'more heads in the card': (
    lambda folder: _edit_settings(folder, num_draft_tokens=4),
    r'5 tensors differ \(heads\.3\.blocks\.0\.linear\.bias is missing, .*, '
    'given num_draft_tokens = 4 .* save both again',
  ),
  'fewer heads in the card': (
    lambda folder: _edit_settings(folder, num_draft_tokens=2),
    r'5 tensors differ \(heads\.2\..*, expected no such tensor.*, given '
    'num_draft_tokens = 2',
  ),
  'missing and unknown': (
    lambda folder: _edit_arrays(
      folder, lambda arrays: arrays.update(more=arrays.pop(_KERNEL))
    ),
    rf'{_KERNEL} is missing, .*; more is .*, expected no such tensor\)',
  ),
  'of another shape': (
    lambda folder: _edit_arrays(
      folder, lambda arrays: arrays.update({_KERNEL: arrays[_KERNEL][:8]})
    ),
    rf'{_KERNEL} is BF16 \(8, 16\), expected BF16 \(16, 16\)',
  ),
  'of another dtype': (
    lambda folder: _edit_arrays(
      folder,
      lambda arrays: arrays.update({_KERNEL: np.zeros((16, 16), np.int64)}),
    ),
    rf'{_KERNEL} is I64 \(16, 16\), expected BF16 \(16, 16\)',
  ),
  'd2t outside': (
    lambda folder: _edit_arrays(
      folder,
      lambda arrays: arrays['vocabulary.d2t'].__setitem__(1, 8),
      is_noted=True,
    ),
    r'drafter\.safetensors: d2t holds id 8, outside the vocabulary of 8',
  ),
}


@pytest.mark.parametrize('damage', _DAMAGES)
def test_what_is_damaged_is_refused(saved, tmp_path, damage):
  act, message = _DAMAGES[damage]
  folder = tmp_path / 'medusa'
  shutil.copytree(saved / 'medusa', folder)
  act(folder)
  with pytest.raises(ValueError, match=message) as caught:
    specsample.load_drafter(folder, _TARGET)
  assert '\n' not in str(caught.value)


def test_a_pickle_is_refused_by_its_name(tmp_path):
  path = tmp_path / 'medusa_lm_head.pt'
  path.write_text('cos\nabort\n(tR.')
  with pytest.raises(ValueError, match='may be a pickle'):
    specsample.load_drafter(path, _TARGET)


def test_nothing_is_left_of_what_cannot_be_saved(trained, saved, tmp_path):
  medusa = _DRAFTERS['medusa']
  save = lambda path, drafter, params, card: specsample.save_drafter(
    path, drafter, params, target=_TARGET, card=card
  )
  path, params = tmp_path / 'medusa', trained['medusa']
  with pytest.raises(
    ValueError, match=r'the card cannot be written as JSON .* finite'
  ):
    save(path, medusa, params, {'loss': float('nan')})
  with pytest.raises(
    ValueError, match=r'card cannot be written as JSON \(.*ndarray'
  ):
    save(path, medusa, params, {'loss': np.ones(2)})
  with pytest.raises(
    ValueError, match=r'is not a kind of drafter that can be saved'
  ):
    save(path, drafters.Ngram(num_draft_tokens=2), params, {})
  with pytest.raises(
    ValueError, match=r'params are not those of this Medusa .*heads\.2.*give'
  ):
    save(path, dataclasses.replace(medusa, num_draft_tokens=2), params, {})
  assert not os.listdir(tmp_path)
  before = (saved / 'medusa' / 'card.json').read_bytes()
  with pytest.raises(ValueError, match='medusa exists: remove it, or name'):
    save(saved / 'medusa', medusa, params, {})
  assert (saved / 'medusa' / 'card.json').read_bytes() == before
