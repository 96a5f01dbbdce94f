"""Packed rows: the same losses and gradients as one dialogue per row."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from specsample import drafters
from specsample import testing
from specsample.drafters import dflash_network
from specsample.models import attention
from specsample.models import gated_delta
from specsample.training import dflash
from specsample.training import draft
from specsample.training import eagle
from specsample.training import heads
from specsample.training import rows as rows_lib
from specsample.training import slots
from specsample.training import unrolled

_V, _T = 16, 24
_CLOSE = {'rtol': 1e-4, 'atol': 1e-5}
_TARGET = testing.tiny_llama(vocab_size=_V)
_D2T = np.asarray([9, 3, 4, 0, 12, 7, 5, 14])
_SOME = {'model': _TARGET, 'num_draft_tokens': 3, 'draft_vocab_size': _D2T.size}
_BLOCKS = _SOME | {'feature_layers': (-1, 0), 'num_layers': 2}
_EAGLE3 = drafters.Eagle3(feature_layers=(1, -1, 0), **_SOME)
_WINDOW = dataclasses.replace(_TARGET, sliding_window=4)
_OBJECTIVES = {
  'medusa-2': heads.HeadsObjective(
    drafter=drafters.Medusa(model=_TARGET, num_draft_tokens=3),
    target_weight=1.0,
  ),
  'hydra++': heads.HeadsObjective(
    drafter=drafters.Hydra(num_layers=2, prefix_attention=True, **_SOME),
    teacher_weight=1.0,
    slot_weights=slots.d_pace,
  ),
  'draft model': draft.DraftObjective(
    drafter=drafters.DraftModel(layers=(0,), **_SOME), teacher_weight=1.0
  ),
  'chain': draft.ChainObjective(
    drafter=drafters.Chain(model=_TARGET, num_draft_tokens=3), target=_TARGET
  ),
  'eagle': eagle.FeatureObjective(
    drafter=drafters.Eagle(**_SOME), num_steps=1, feature_weight=1.0
  ),
  'eagle-3': eagle.FeatureObjective(
    drafter=_EAGLE3, num_steps=4, token_weight=0.5, slot_weights=slots.d_pace
  ),
  'eagle-3 of a window': eagle.FeatureObjective(
    drafter=dataclasses.replace(_EAGLE3, layer_config=_WINDOW), num_steps=4
  ),
  'mtp of 2': eagle.FeatureObjective(
    drafter=drafters.MTP(num_modules=2, **_SOME), num_steps=4
  ),
  'dflash': dflash.DFlashObjective(
    drafter=drafters.DFlash(**_BLOCKS), num_blocks=3, teacher_weight=1.0
  ),
  'dflash of a window': dflash.DFlashObjective(
    drafter=drafters.DFlash(layer_config=_WINDOW, **_BLOCKS),
    num_blocks=3,
    slot_weights=slots.d_pace,
  ),
  'dflash 2': dflash.DFlash2Objective(
    drafter=drafters.DFlash2(selector_rank=8, selector_top_k=4, **_BLOCKS),
    num_blocks=3,
  ),
  'dspark': dflash.DSparkObjective(
    drafter=drafters.DSpark(rank=8, head='rnn', **_BLOCKS), num_blocks=3
  ),
}
_RNG = np.random.default_rng(0)
# Each ends with an answer, which another dialogue may follow at once.
_SIZES = (9, 6, 8, 7, 11)
_STARTS = np.asarray([[0, 9, 15, _T], [0, 7, _T, _T]])
_DIALOGUES = [_RNG.integers(_V, size=size) for size in _SIZES]
_FIRSTS = (4, 1, 3, 2, 4)
_MASKS = [
  np.arange(size) >= first for size, first in zip(_SIZES, _FIRSTS, strict=True)
]
_PLACES = np.asarray(
  [
    [*range(2, 9), *range(9, 15), *range(16, 23)],
    [*range(7), *range(9, 18), *[_T] * 4],
  ]
)


def _unpacked(of_each):
  found = np.zeros((len(of_each), max(_SIZES)), of_each[0].dtype)
  for row, x in zip(found, of_each, strict=True):
    row[: x.size] = x
  return found


def _packed(of_each):
  found = np.zeros((2, _T), of_each[0].dtype)
  places = [(0, 0), (0, 9), (0, 15), (1, 0), (1, 7)]
  for (row, start), x in zip(places, of_each, strict=True):
    found[row, start : start + x.size] = x
  return found


_UNPACKED = {'tokens': _unpacked(_DIALOGUES), 'mask': _unpacked(_MASKS)}
_PACKED = {
  'tokens': _packed(_DIALOGUES),
  'mask': _packed(_MASKS),
  'starts': _STARTS,
}


@functools.cache
def _params(name):
  objective = _OBJECTIVES[name]
  drafter, target = objective.drafter, objective.target
  params = target.init(jax.random.key(3))
  if name == 'chain':
    return {'target': params, 'drafter': drafter.model.init(jax.random.key(5))}
  d2t = None if drafter.draft_vocab_size is None else _D2T
  own = drafter.init_params(jax.random.key(1), params, d2t)
  noisy = testing.with_noise(own, jax.random.key(4))
  if d2t is not None:
    noisy |= {'vocabulary': own['vocabulary']}
  return {'target': params, 'drafter': noisy}


def _step(name):
  """Returns a function to the loss, the report and the gradient of a batch."""
  objective = _OBJECTIVES[name]
  of = jax.jit(jax.value_and_grad(objective, has_aux=True, allow_int=True))
  return lambda batch: of(_params(name), batch)


def _assert_alike(found, expected):
  jax.tree.map(
    lambda x, y: (
      x.dtype == jax.dtypes.float0 or np.testing.assert_allclose(x, y, **_CLOSE)
    ),
    found,
    expected,
  )


@pytest.mark.slow
@pytest.mark.parametrize('name', _OBJECTIVES)
def test_a_packed_batch_has_the_loss_and_gradient_of_its_dialogues(name):
  step = _step(name)
  expected = step(_UNPACKED)
  (loss, _), _ = found = step(_PACKED)
  np.testing.assert_allclose(loss, expected[0][0], rtol=1e-5)
  _assert_alike(found, expected)
  # Rows that were not told apart would have another loss.
  (leaky, _), _ = step({k: x for k, x in _PACKED.items() if k != 'starts'})
  assert abs(leaky - loss) > 1e-4 * abs(loss)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['hydra++', 'draft model', 'eagle-3'])
def test_places_leave_out_prompts_of_packed_rows(name):
  of = jax.jit(_OBJECTIVES[name])
  expected = of(_params(name), _UNPACKED | {'places': _unpacked_places()})
  found = of(_params(name), _PACKED | {'places': _PLACES})
  _assert_alike(found, expected)


def _unpacked_places():
  first = np.maximum(np.asarray(_FIRSTS) - 2, 0)
  return first[:, None] + np.arange(max(_SIZES))


def _across(self, count):
  return rows_lib.behind(self.mask, count)


def _of_one_dialogue(batch, of=rows_lib.of):
  return of({name: x for name, x in batch.items() if name != 'starts'})


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'where', 'leak'),
  [
    # Drafts across two dialogues are learned.
    ('eagle-3', (rows_lib.Rows, 'learned'), _across),
    ('hydra++', (rows_lib, 'of'), _of_one_dialogue),
    ('mtp of 2', (rows_lib, 'of'), _of_one_dialogue),
    # Each draft sees the dialogues before its own.
    (
      'eagle-3',
      (unrolled, '_known_mask'),
      lambda *args, of=unrolled._known_mask: of(
        *args[:2], 0 * args[2], *args[3:]
      ),
    ),
    (
      'dflash',
      (dflash_network, 'block_mask'),
      lambda *args, of=dflash_network.block_mask: of(*args[:-1], None),
    ),
    # The target does.
    ('eagle', (rows_lib, 'parents'), lambda batch: None),
    ('draft model', (rows_lib, 'parents'), lambda batch: None),
  ],
)
def test_a_planted_leak_changes_the_loss(name, where, leak, monkeypatch):
  # A new function each time, so that it is traced anew.
  of = lambda: jax.jit(lambda batch: _OBJECTIVES[name](_params(name), batch))
  loss, _ = of()(_PACKED)
  monkeypatch.setattr(*where, leak)
  leaky, _ = of()(_PACKED)
  assert abs(leaky - loss) > 1e-4 * abs(loss)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['window', 'latent', 'recurrent'])
def test_targets_read_each_dialogue_alone(kind):
  model = {
    'window': _WINDOW,
    'latent': dataclasses.replace(
      _TARGET,
      latent=attention.Latent(kv_rank=6, rope_dim=4, head_dim=4, value_dim=5),
    ),
    'recurrent': dataclasses.replace(
      _TARGET,
      delta=gated_delta.Delta(
        layers=(0,), num_key_heads=2, num_value_heads=4, key_dim=4, value_dim=3
      ),
    ),
  }[kind]
  params = model.init(jax.random.key(0))

  @jax.jit
  def read(tokens, parents):
    empty = model.init_cache(len(tokens), 0)
    return model.apply(params, tokens, empty, (), parents)[0].hidden

  found = read(_PACKED['tokens'], rows_lib.parents(_PACKED))
  expected = np.asarray(read(_UNPACKED['tokens'], None))
  hidden = [x[:size] for x, size in zip(expected, _SIZES, strict=True)]
  np.testing.assert_allclose(
    found[0, :23], np.concatenate(hidden[:3]), **_CLOSE
  )
  np.testing.assert_allclose(
    found[1, :18], np.concatenate(hidden[3:]), **_CLOSE
  )
