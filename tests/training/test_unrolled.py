"""Unrolled drafts against a plain computation with full masks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters
from specsample import testing
from specsample.models import attention
from specsample.training import rows as rows_lib
from specsample.training import unrolled

_V, _T, _A = 16, 12, 9
_TARGET = testing.tiny_llama(vocab_size=_V)
_D2T = np.asarray([9, 3, 4, 0, 12, 7, 5, 14])
_SOME = {'model': _TARGET, 'num_draft_tokens': 3, 'draft_vocab_size': _D2T.size}
_LATENT = dataclasses.replace(
  _TARGET,
  latent=attention.Latent(kv_rank=6, rope_dim=4, head_dim=4, value_dim=5),
)
_of_window = lambda size: dataclasses.replace(_TARGET, sliding_window=size)
_EAGLE3 = functools.partial(drafters.Eagle3, feature_layers=(1, -1, 0), **_SOME)
_DRAFTERS = {
  'eagle3': _EAGLE3(),
  'mtp': drafters.MTP(**_SOME),
  'mtp of 2': drafters.MTP(num_modules=2, **_SOME),
  'latent': drafters.MTP(layer_config=_LATENT, **_SOME),
  'sinks': _EAGLE3(layer_config=dataclasses.replace(_TARGET, has_sinks=True)),
  'window of 3': _EAGLE3(layer_config=_of_window(3)),
  'window of 1': _EAGLE3(layer_config=_of_window(1)),
}
_STEPS = 4
_RNG = np.random.default_rng(1)
_FIRST = _RNG.integers(0, _T - _A + 2, size=(4, 1))
_BATCH = {
  'tokens': _RNG.integers(_V, size=(4, _T)),
  'mask': np.arange(_T) - _FIRST >= 2,
  'places': _FIRST + np.arange(_A),
}


@functools.cache
def _params(name):
  drafter = _DRAFTERS[name]
  target = jax.tree.map(lambda x: 2 * x, _TARGET.init(jax.random.key(3)))
  own = drafter.init_params(jax.random.key(1), target, _D2T)
  noisy = testing.with_noise(own, jax.random.key(4))
  kept = {'vocabulary': own['vocabulary']}
  return {'target': target, 'drafter': noisy | kept}


def _plain_outputs(drafter, params, batch, features, num_steps):
  num_rows, size = batch['tokens'].shape
  pick = functools.partial(rows_lib.crop, batch)
  embedded = drafter.model.embed(params['target'], batch['tokens'])
  after = lambda count: jnp.pad(embedded, ((0, 0), (0, count), (0, 0)))[
    :, count:
  ]
  rows = lambda x: x.reshape(-1, x.shape[-1])
  empty = drafter.empty_cache(num_rows, 0, features.dtype)
  keys, values = empty.keys[0], empty.values[0]
  roots = jnp.broadcast_to(jnp.arange(size), (num_rows, size))
  end = min(drafter.num_modules, num_steps) - 1
  found = []
  for i in range(num_steps):
    now = max(0, i - end)
    near = lambda back: drafter.window is None or back < drafter.window
    ahead = jnp.arange(size) - roots[..., None]
    first = ahead <= 0
    if drafter.window is not None:
      first &= now - ahead < drafter.window
    own = jnp.broadcast_to(
      jnp.eye(roots.shape[1], dtype=bool), (*roots.shape, roots.shape[1])
    )
    mask = [first, *(own & near(now - j) for j in range(1, now + 1))]
    new = after(i + 1)
    output, *added = drafter.modules(params)[min(i, end)](
      rows(pick(new) if now else new),
      rows(features),
      drafter.shape.rope(roots + now, drafter.window),
      jnp.concatenate(mask, axis=2),
      keys,
      values,
    )
    features = output.reshape(features.shape)
    if i >= end:
      keys, values = jax.tree.map(
        lambda *x: jnp.concatenate(x, axis=2), (keys, values), tuple(added)
      )
    if i == end:
      features, roots = pick(features), pick(roots)
    found.append(features if i >= end else pick(features))
  return found


@pytest.mark.slow
@pytest.mark.nightly(but=('eagle3', 'window of 3'))
@pytest.mark.parametrize('name', _DRAFTERS)
def test_outputs_are_those_of_masks_of_all_against_all(name):
  drafter, params = _DRAFTERS[name], _params(name)
  features = _RNG.normal(size=(4, _T, _TARGET.dim)).astype(np.float32)
  weights = _RNG.normal(size=(_STEPS, 4, _A, _TARGET.dim)).astype(np.float32)
  # Nothing is drafted past the end of the text.
  weights *= (_BATCH['places'] < _T)[..., None]

  def of(outputs):
    def value(own, features):
      found = outputs(
        drafter,
        params | {'drafter': own},
        _BATCH,
        features,
        _STEPS,
      )
      weighted = weights * jnp.stack(found)
      return jnp.sum(weighted), weighted

    return jax.jit(
      jax.value_and_grad(value, (0, 1), has_aux=True, allow_int=True)
    )(params['drafter'], features)

  jax.tree.map(
    lambda x, y: (
      x.dtype == jax.dtypes.float0
      or np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
    ),
    of(unrolled.outputs),
    of(_plain_outputs),
  )
